"""Loops with `RemoteOptimizer` go on after `kill -9` of a server or of another process, and lose no push."""

import re
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")

from adam_async import sync
from tests.processes.commands import ROOT, RUN_S, Command, started_by_hand

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

PROGRAM = """
import os
import sys
from pathlib import Path

import torch
from torch import nn

from adam_async import Sgd, sync
from adam_async.torch import RemoteOptimizer, parameter_arrays


def main(where, consistency, killed):
    rank, module = os.environ["RANK"], nn.Linear(64, 64, bias=False).double()
    nn.init.zeros_(module.weight)  # its gradient is 1 everywhere
    x = torch.ones(1, 64, dtype=torch.float64)
    options = {} if consistency == "asp" else {"consistency": consistency, "replicas": int(sys.argv[4])}
    steps, last = 0, None
    with (
        sync.ParameterStore.open(
            where,
            parameter_arrays(module),
            name="model",
            rule=Sgd(rate=1.0),
            copies=3,
            shard_bytes=8192,
            **options,
        ) as store,
        RemoteOptimizer(module, store) as optimizer,
    ):
        while steps != last:
            optimizer.zero_grad()
            module(x).sum().backward()
            optimizer.step()
            steps += 1
            print(f"rank {rank}: step {steps}", flush=True)
            if last is None and Path(killed).exists():
                last = steps + 20
    print(f"rank {rank} ends after {steps} steps", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4])
"""


def python(*words: str, rank: str = "") -> list[str]:
    names = [f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1", *([f"RANK={rank}"] if rank else [])]
    return ["env", *names, sys.executable, *words]


def steps_at_the_end(output: str) -> list[int]:
    return [int(steps) for steps in re.findall(r"ends after (\d+) steps", output)]


def pushes_in(where: str) -> set[int]:
    """Return the numbers of pushes in the values of the store, of which each subtracts 1."""
    with sync.ParameterStore.open(where, name="model") as store:
        weight = store.pull()["weight"]
    assert weight.shape == (64, 64)
    return set((-weight).ravel().tolist())


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.parametrize("consistency", ["asp", "bsp"])
def test_two_ranks_of_torchrun_finish_after_a_server_of_three_is_killed(
    program: Path, tmp_path: Path, consistency: str
) -> None:
    killed = tmp_path / "killed"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    with ExitStack() as stack:
        where, start = started_by_hand(stack)
        servers = [start("ps", "--id", f"ps-{number}", "--controller") for number in range(3)]
        words = python(*launcher, str(program), where, consistency, str(killed), "2")
        with Command.of(words, folder=tmp_path) as ranks:
            for rank in range(2):
                ranks.wait_for(f"rank {rank}: step ")
            servers[1].signal(signal.SIGKILL)
            servers[1].process.wait()
            killed.touch()
            ranks.ends(0, seconds=RUN_S)
        ends = steps_at_the_end(ranks.output)
        assert len(ends) == 2
        assert pushes_in(where) == {sum(ends) if consistency == "asp" else max(ends)}


@pytest.mark.parametrize("consistency", ["asp", "ssp:2"])
def test_the_other_processes_finish_after_one_of_three_is_killed(
    program: Path, tmp_path: Path, consistency: str
) -> None:
    killed = tmp_path / "killed"
    with ExitStack() as stack:
        where, start = started_by_hand(stack)
        for number in range(3):
            start("ps", "--id", f"ps-{number}", "--controller")
        words = (str(program), where, consistency, str(killed), "3")
        processes = [
            stack.enter_context(Command.of(python(*words, rank=str(rank)), folder=tmp_path))
            for rank in range(3)
        ]
        for rank, process in enumerate(processes):
            process.wait_for(f"rank {rank}: step 3")
        victim, *others = processes
        victim.signal(signal.SIGKILL)
        victim.finish()
        killed.touch()
        ends = []
        for process in others:
            assert process.finish(seconds=RUN_S) == 0, process.output
            ends += steps_at_the_end(process.output)
        assert len(ends) == 2
        # The last push of the victim may have reached some servers without an answer.
        answered = sum(ends) + int(re.findall(r"rank 0: step (\d+)\n", victim.output)[-1])
        assert pushes_in(where) <= {answered, answered + 1}
