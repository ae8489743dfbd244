"""Ranks with the variables of Slurm, without Slurm: the run ends in order, or names the lost rank."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.processes.commands import ADAM_TOML, PATIENCE_S, Command, children_of, run, watched
from tests.processes.ssh_hosts import free_port

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

TOKEN = "a token that nobody guesses"


class Ranks:
    """Ranks of a job on this machine, as a context manager."""

    def __init__(self, folder: Path, count: int, *words: str) -> None:
        (folder / "adam.toml").write_text(ADAM_TOML)
        shared = {
            "SLURM_NTASKS": str(count),
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_JOB_ID": str(free_port("127.0.0.1") + 1),
            "ADAM_TOKEN": TOKEN,
        }
        command = ("launch", "slurm", str(folder / "adam.toml"), *words, "--here")
        self._stack = ExitStack()
        self.ranks = [
            self._stack.enter_context(Command(*command, environment={**shared, "SLURM_PROCID": str(rank)}))
            for rank in range(count)
        ]

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[Command]:
        return iter(self.ranks)

    def processes(self) -> list[int]:
        """Return the ranks and their roles."""
        return [pid for rank in self.ranks for pid in (rank.pid, *children_of(rank.pid))]


def test_ranks_train_and_end_with_the_driver(tmp_path: Path) -> None:
    store = ("--store", str(tmp_path / "kept"))
    with Ranks(tmp_path, 3, "--epochs", "40", "--controllers", "3", *store) as ranks:
        first, *others = ranks
        first.wait_for("epoch 1/40")
        with watched(ranks.processes()) as all_end:
            assert first.finish(seconds=100) == 0, first.output
            assert [rank.finish(seconds=30) for rank in others] == [0, 0]
            all_end(PATIENCE_S)
    assert re.search(r"test accuracy 9\d\.\d+% after 40 epochs", first.output), first.output
    assert {path.name for path in (tmp_path / "kept").iterdir()} >= {"ps-0", "ps-1"}
    assert "Traceback" not in "".join(rank.output for rank in ranks)


def test_a_lost_rank_with_the_only_copy_of_shards_ends_the_run_and_is_named(tmp_path: Path) -> None:
    with Ranks(tmp_path, 3, "--epochs", "100000") as ranks:
        first, second, third = ranks
        first.wait_for("epoch 1/")
        with watched(ranks.processes()) as all_end:
            second.signal(signal.SIGKILL)
            assert first.finish(seconds=60) == 4, first.output
            assert third.finish(seconds=60) == 0, third.output
            all_end(PATIENCE_S)
    assert "ps-0 died: with it went the only copy of its shards in memory" in first.output


def test_the_loss_of_rank_0_ends_the_others_with_its_name(tmp_path: Path) -> None:
    options = ("--epochs", "100000", "--data-servers", "2")
    with Ranks(tmp_path, 2, *options) as ranks:
        first, second = ranks
        first.wait_for("epoch 1/")
        with watched(ranks.processes()) as all_end:
            first.signal(signal.SIGKILL)
            assert second.finish(seconds=90) == 4, second.output
            all_end(PATIENCE_S)
    assert "driver died: rank 0 is lost: its output has the reason" in second.output


def test_sigterm_to_all_ranks_stops_the_run_with_a_checkpoint_from_which_a_restart_continues(
    tmp_path: Path,
) -> None:
    words = ("--epochs", "100000", "--checkpoint", str(tmp_path / "kept"))
    with Ranks(tmp_path, 2, *words) as ranks:
        first, second = ranks
        first.wait_for("epoch 2/")
        with watched(ranks.processes()) as all_end:
            for pid in ranks.processes():  # as Slurm does
                os.kill(pid, signal.SIGTERM)
            assert [first.finish(seconds=60), second.finish(seconds=60)] == [143, 143], first.output
            all_end(PATIENCE_S)
    assert "SIGTERM: the run stops after the groups in flight, with a checkpoint" in first.output
    assert (tmp_path / "kept" / "latest").exists()


def test_a_machine_without_slurm_prints_the_script_and_names_what_is_missing() -> None:
    nowhere = {"PATH": "/nowhere"}
    output = run("launch", "slurm", "--nodes", "2", "--job-name", "mine", environment=nowhere)
    assert "#SBATCH --nodes=2\n" in output
    assert output.splitlines()[-1].endswith(" launch slurm --nodes 2 --job-name mine --here")
    output = run("launch", "slurm", "--submit", environment=nowhere, code=2)
    assert "sbatch is not on PATH: run this command on a login node" in output
    output = run("launch", "slurm", "--here", environment=nowhere, code=2)
    assert "--here is for a rank of a Slurm job" in output
