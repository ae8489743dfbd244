"""Modules of PyTorch by the command line, in processes that may be killed."""

import os
import re
import signal
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")

from safetensors.torch import load_file

from tests.processes.commands import ROOT, Command, run

pytestmark = pytest.mark.processes

STEP = ("--step", "tests.adam_async.torch.modules:residual_step", "--step-path", str(ROOT))
TRAIN = ("train", "--data", "digits", "--processes", "--replicas", "2", "--rate", "0.05")


@pytest.mark.parametrize("consistency", ["asp", "bsp"])
def test_a_killed_worker_is_replaced_and_the_saved_model_loads(tmp_path: Path, consistency: str) -> None:
    words = (*TRAIN, *STEP, "--consistency", consistency, "--epochs", "12", "--out", str(tmp_path))
    with Command(*words) as command:
        command.wait_for("epoch 1/12", seconds=60)
        os.kill(command.child("worker-1"), signal.SIGKILL)
        command.wait_for("worker-1 died: killed by signal 9; starting it again", seconds=60)
        code = command.finish()

    assert code == 0, command.output
    epochs = re.findall(r"epoch \d+/12: .* (\S+) images in", command.output)
    assert epochs == ["1,437"] * 12, command.output
    accuracy = float(re.search(r"test accuracy (\d+\.\d+)% after 12 epochs", command.output)[1])
    assert accuracy > 90

    from tests.adam_async.torch.modules import Residual

    module = Residual()
    module.load_state_dict(load_file(tmp_path / "model.safetensors"))
    module.eval()
    from adam_async.data_server.sources.datasets import DIGITS_FILE

    assert DIGITS_FILE.exists()
    assert module.norm.num_batches_tracked > 0


def test_a_data_set_is_imported_by_its_path() -> None:
    code, output = run(
        "train",
        "--data",
        "tests.adam_async.torch.modules:random_images",
        "--epochs",
        "1",
        "--processes",
        *STEP,
    )
    assert code == 0, output
    assert re.search(r"epoch 1/1: .* 54 images in", output), output
