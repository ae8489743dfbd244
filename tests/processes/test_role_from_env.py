"""Processes of a batch job take their roles from the variables of its engine."""

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.processes.commands import ADAM_TOML, PATIENCE_S, Command, address_of, children_of, run, watched
from tests.processes.ssh_hosts import free_port

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    file = tmp_path / "adam.toml"
    file.write_text(ADAM_TOML)
    return file


def test_ranks_with_several_roles_train_and_restart_a_lost_worker(layout: Path) -> None:
    port = free_port("127.0.0.1")
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port - 1)}
    words = ("role", "--from-env", "--config", str(layout))
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(Command(*words, environment={**shared, "RANK": str(rank)})) for rank in (0, 1)
        ]
        for node in ("controller", "ps-1", "worker-0"):
            ranks[0].wait_for(f"{node} listens on tcp://127.0.0.1:")
        for node in ("ps-0", "data-0", "worker-1"):
            ranks[1].wait_for(f"{node} listens on tcp://127.0.0.1:")
        with watched([pid for rank in ranks for pid in children_of(rank.pid)]) as all_end:
            run("train", "--config", str(layout), "--epochs", "2", "--controller", f"tcp://127.0.0.1:{port}")
            os.kill(ranks[1].child("worker-1"), signal.SIGKILL)
            ranks[1].wait_for("worker-1 died: killed by signal 9; starting it again")
            for rank in reversed(ranks):
                rank.signal(signal.SIGTERM)
                assert rank.finish() == 143, rank.output
            all_end(PATIENCE_S)


def test_a_rank_with_one_role_runs_it_itself(layout: Path) -> None:
    environment = {"POD_NAME": "adam-controller-0", "ADAM_CONTROLLER": "tcp://127.0.0.1:0"}
    with Command("role", "--from-env", "--config", str(layout), environment=environment) as controller:
        address = address_of(controller)
        assert children_of(controller.pid) == {}
        ours = {"ADAM_ROLE": "ps", "ADAM_NODE": "mine", "ADAM_CONTROLLER": address}
        with Command("role", "--from-env", "--config", str(layout), environment=ours) as server:
            assert server.wait_for("mine listens on tcp://127.0.0.1:")
            server.signal(signal.SIGTERM)
            assert server.finish() == 143


def test_a_data_server_allows_the_functions_of_the_transforms_of_its_own_file(layout: Path) -> None:
    layout.write_text(layout.read_text() + 'augment = true\ntransforms = "steps.toml"\n')
    (layout.parent / "steps.toml").write_text('[[transform]]\nkind = "package.module:function"\n')
    ours = {"ADAM_ROLE": "data", "ADAM_CONTROLLER": "tcp://127.0.0.1:1"}
    output = run("role", "--from-env", "--print", "--config", str(layout), environment=ours)
    assert "--allow-transform package.module:function" in output


def test_the_roles_of_a_rank_can_be_printed(layout: Path) -> None:
    environment = {"SLURM_PROCID": "1", "SLURM_NTASKS": "3", "SLURM_JOB_NODELIST": "n[07-09]"}
    output = run("role", "--from-env", "--print", "--config", str(layout), environment=environment)
    assert [line.split()[1] for line in output.splitlines()] == ["ps-0", "worker-0"]
    assert output.count("--controller tcp://n07:7070") == 2


def test_a_rank_with_several_roles_has_no_one_role_for_probes(layout: Path) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "7000"}
    words = ("role", "--from-env", "--config", str(layout), "--health", "tcp://127.0.0.1:0")
    output = run(*words, environment=environment, code=2)
    assert "--health is for one role, and this process has 6: leave it out" in output


@pytest.mark.parametrize(
    ("environment", "claim"),
    [
        ({}, "no variable names the role of this process: set one of ADAM_ROLE"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' must be a whole number within 0 and 1"),
        ({"ADAM_ROLE": "ps"}, "set ADAM_CONTROLLER=tcp://HOST:7070"),
    ],
)
def test_a_wrong_environment_is_one_line(environment: dict[str, str], claim: str) -> None:
    output = run("role", "--from-env", environment=environment, code=2)
    assert claim in output
    assert output.count("\n") == 1, output
