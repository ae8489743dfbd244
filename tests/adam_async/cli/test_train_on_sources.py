"""`train` takes every kind of source that examples/make_sample_data.py writes, with transforms."""

import asyncio
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from adam_async.cli.options import TrainOptions
from adam_async.cli.terminal import Terminal
from adam_async.cli.train import run_training
from adam_async.data_server.sources.datasets import load_dataset
from adam_async.runtime.disk import Disk
from tests.adam_async.data_server.sources.small import FORMATS, example

pytestmark = pytest.mark.thorough

TRAINED, TESTED = 400, 100
WORDS = ("--augment", "--epochs", "1", "--threads", "1", "--kernels", "numpy", "--quiet")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of the digits, in every format."""
    folder = tmp_path_factory.mktemp("samples")

    async def digits() -> list[np.ndarray]:
        async with Disk() as disk:
            found = await load_dataset("digits", disk)
        return [found.train_images[:, 0], found.train_labels, found.test_images[:, 0], found.test_labels]

    images, labels, test_images, test_labels = asyncio.run(digits())
    example.write(folder, "train", images[:TRAINED], labels[:TRAINED])
    example.write(folder, "test", test_images[:TESTED], test_labels[:TESTED])
    return folder


@pytest.mark.parametrize("kind", FORMATS)
async def test_every_kind_of_source_is_trained_on(
    samples: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = TrainOptions(
        data=str(samples / kind), augment=True, epochs=1, threads=1, kernels="numpy", quiet=True
    )

    assert await run_training(options, {}, Terminal(quiet=True)) == 0

    assert re.match(r"test accuracy \d+\.00% after 1 epoch", capsys.readouterr().out)  # of 100 images


def test_child_processes_pass_over_damage_if_they_are_told_to(samples: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(samples / "folders", tmp_path / "folders"))
    (source / "train" / "0" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")

    def trained(*words: str) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, "-m", "adam_async", "train", "--data", str(source), *WORDS, *words)
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    refused, passed = trained(), trained("--processes", "--damaged", "skip")

    assert refused.returncode == 3
    assert "broken.png is a " in refused.stderr
    assert "leave it out with --damaged skip" in refused.stderr
    assert passed.returncode == 0, passed.stderr
    assert passed.stdout.startswith("test accuracy ")
