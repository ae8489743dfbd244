"""A loop of PyTorch under torchrun, with a controller and three parameter servers as processes."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")

from safetensors.numpy import load_file

from tests.processes.commands import ROOT, started_by_hand

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

PROGRAM = """
import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from adam_async import Sgd, sync
from adam_async.torch import RemoteOptimizer, parameter_arrays


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 3)).double()


def examples():
    dice = torch.Generator().manual_seed(2)
    x = torch.randn(192, 20, dtype=torch.float64, generator=dice)
    return TensorDataset(x, torch.argmax(x[:, :3], dim=1))


def main(where, consistency, folder):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    module, data = network(), examples()
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=False)
    loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=2)
    options = {} if consistency == "asp" else {"consistency": consistency, "replicas": world}
    rule = Sgd(rate=0.2, momentum=0.5)
    with (
        sync.ParameterStore.open(
            where, parameter_arrays(module), name=consistency, rule=rule, shard_bytes=4096, **options
        ) as store,
        RemoteOptimizer(module, store) as optimizer,
    ):
        for _ in range(4):
            for x, y in loader:
                loss = nn.functional.cross_entropy(module(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        counts = optimizer.state_dict()["adam_async"]
        optimizer.save(f"{folder}/{consistency}-{rank}.safetensors")
        print(f"rank {rank} of {world}: {counts['pushes']} pushes, loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
"""
EPOCHS, RANKS, BATCH = 4, 2, 16


def torchrun(program: Path, *words: str) -> str:
    """Run a program under torchrun, and return its output."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
    done = subprocess.run(
        [sys.executable, *launcher, str(program), *words],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def in_one_process(program: dict) -> dict[str, np.ndarray]:
    """Train as both ranks together, by the mean of their gradients."""
    module, (x, y) = program["network"](), program["examples"]().tensors
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.5)
    for _ in range(EPOCHS):
        for first in range(0, len(x), RANKS * BATCH):
            batch = slice(first, first + RANKS * BATCH)  # the sampler deals examples to the ranks in turn
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(x[batch]), y[batch]).backward()
            optimizer.step()
    return {name: tensor.numpy() for name, tensor in module.state_dict().items()}


def test_two_ranks_of_torchrun_train_one_store_on_three_servers(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    program: dict = {"__name__": "program"}
    exec(compile(PROGRAM, str(file), "exec"), program)
    with ExitStack() as stack:
        where, start = started_by_hand(stack)
        for number in range(3):
            start("ps", "--id", f"ps-{number}", "--controller")

        output = torchrun(file, where, "bsp", str(tmp_path))
        assert "rank 0 of 2: 24 pushes" in output
        assert "rank 1 of 2: 24 pushes" in output
        expected = in_one_process(program)
        for rank in range(RANKS):
            found = load_file(tmp_path / f"bsp-{rank}.safetensors")
            for name, array in expected.items():
                np.testing.assert_allclose(found[name], array, rtol=1e-9, atol=1e-9, err_msg=name)

        output = torchrun(file, where, "asp", str(tmp_path))
        assert output.count("24 pushes") == RANKS
        loaded = program["network"]()
        arrays = load_file(tmp_path / "asp-0.safetensors")
        loaded.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
        x, y = program["examples"]().tensors
        accuracy = (loaded(x).argmax(dim=1) == y).double().mean()
        assert accuracy > 0.9
