"""The programs of the pages about PyTorch run as they are printed."""

import re
import subprocess
import sys
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")

from safetensors.torch import load_file
from torch.utils.data import TensorDataset

from adam_async.data_server.dataset import Dataset
from adam_async.torch import TorchBatch, TorchStep
from tests.adam_async.store.servers import cluster

ROOT = Path(__file__).resolve().parents[3]

BEFORE = """
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
torch.manual_seed(1)


def Net():
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


loader = [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(5)]
criterion = torch.nn.functional.cross_entropy
"""
"""The names that a reader's program has before the lines of the page."""


def blocks_of(page: str, kind: str = "python") -> list[str]:
    """Return the programs of a page, in their order."""
    return re.findall(rf"```{kind}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def run(program: str, folder: Path, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=80,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "RANK": "0", **environment},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow  # two programs of PyTorch, each in a process of its own
@pytest.mark.timeout(180)
def test_both_columns_of_the_page_about_ddp_train_the_same_parameters(tmp_path: Path) -> None:
    theirs, here = blocks_of("docs/how-to/from-ddp.md")
    port = "tcp://127.0.0.1:7000"
    assert port in here
    run(BEFORE + theirs, tmp_path, MASTER_ADDR="127.0.0.1", MASTER_PORT="0", WORLD_SIZE="1")
    with cluster(1) as servers:
        run(BEFORE + here.replace(port, servers.address), tmp_path)
    expected, found = torch.load(tmp_path / "model.pt"), load_file(tmp_path / "model.safetensors")
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def test_the_pages_function_of_a_step_makes_that_of_the_example() -> None:
    example = run_path(str(ROOT / "examples" / "torch_step.py"))
    names: dict[str, Any] = {"TorchStep": TorchStep, "torch": torch, "network": example["network"]}
    exec(blocks_of("docs/how-to/train-a-torch-module.md")[0], names)
    for width in (4, 16):
        assert names["cnn"](width=width).arrays == example["cnn"](width=width).arrays
    assert names["cnn"]().arrays == example["cnn"]().arrays


def test_the_pages_forward_of_a_language_model_returns_scores_and_targets() -> None:
    names: dict[str, Any] = {}
    exec(blocks_of("docs/how-to/train-a-torch-module.md")[1], names)
    images = torch.randint(0, 256, (3, 1, 1, 9), dtype=torch.uint8)
    batch = TorchBatch(images, torch.zeros(3, dtype=torch.long), torch.float32, 1, 0)
    scores, targets = names["next_tokens"](torch.nn.Embedding(256, 256), batch)
    assert scores.shape == (3, 8, 256)
    assert torch.equal(targets, images[:, 0, 0, 1:].long())


async def test_the_pages_source_of_images_makes_a_data_set() -> None:
    import adam_async

    def mnist(folder: str, *, train: bool, transform: object) -> TensorDataset:
        return TensorDataset(torch.rand(20 if train else 5, 1, 8, 8), torch.arange(20 if train else 5) % 3)

    names: dict[str, Any] = {"MNIST": mnist, "ToTensor": object, "adam_async": adam_async}
    exec(blocks_of("docs/how-to/train-a-torch-module.md")[2], names)
    data = await names["images"]()
    assert isinstance(data, Dataset)
    assert data.train_images.shape == (20, 1, 8, 8)
    assert np.issubdtype(data.train_images.dtype, np.uint8)
    assert len(data.test_labels) == 5
