"""Modules of PyTorch by the command line, in processes that may be killed."""

import asyncio
import json
import os
import re
import signal
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")

from safetensors.torch import load_file

from adam_async import Dataset, Disk, load_dataset
from tests.adam_async.torch.modules import normalised
from tests.processes.commands import ROOT, RUN_S, Command, run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

STEP = ("--step", "tests.adam_async.torch.modules:normalised_step", "--step-path", str(ROOT))
TRAIN = ("train", "--data", "digits", "--processes", "--replicas", "2", "--rate", "0.05")


async def digits() -> Dataset:
    async with Disk() as disk:
        return await load_dataset("digits", disk)


@pytest.mark.parametrize("consistency", ["asp", "bsp"])
def test_a_killed_worker_is_replaced_and_the_saved_model_loads(tmp_path: Path, consistency: str) -> None:
    words = (*TRAIN, *STEP, "--consistency", consistency, "--epochs", "12", "--out", str(tmp_path))
    with Command(*words) as command:
        command.wait_for("epoch 1/12")
        os.kill(command.child("worker-1"), signal.SIGKILL)
        command.wait_for("worker-1 died: killed by signal 9; starting it again")
        command.ends(0, seconds=RUN_S)

    epochs = re.findall(r"epoch \d+/12: .* (\S+) images in", command.output)
    assert epochs == ["1,437"] * 12, command.output
    accuracy = float(re.search(r"test accuracy (\d+\.\d+)% after 12 epochs", command.output)[1])
    assert accuracy > 90

    module = normalised()
    module.load_state_dict(load_file(tmp_path / "model.safetensors"))
    module.eval()
    data = asyncio.run(digits())
    scores = module(torch.from_numpy(data.test_images) / 255)
    right = (scores.argmax(1).numpy() == data.test_labels).mean()
    assert 100 * right == pytest.approx(accuracy, abs=0.3)


def test_a_data_set_is_imported_by_its_path() -> None:
    output = run(
        "train",
        "--data",
        "tests.adam_async.torch.modules:random_images",
        "--epochs",
        "1",
        "--processes",
        *STEP,
    )
    assert re.search(r"epoch 1/1: .* 54 images in", output), output


@pytest.mark.slow
def test_a_module_trains_through_a_drill(tmp_path: Path) -> None:
    file = tmp_path / "drill.json"
    words = ("--workload", "train", "--epochs", "30", "--count", "1", "--every", "2", "--faults", "kill")
    run("drill", *words, *STEP, "--json", str(file))
    report = json.loads(file.read_text())
    claims = {claim["name"]: claim["holds"] for claim in report["claims"]}
    assert False not in claims.values(), report["claims"]
    assert claims["each push applied once"]
    (pair,) = report["observations"]["pairs"]
    assert pair["faults"] == 1
    assert min(pair["accuracy_without"], pair["accuracy_with"]) > 0.85


def test_a_record_of_a_module_is_replayed_with_its_step(tmp_path: Path) -> None:
    record, here, there = tmp_path / "run.record", tmp_path / "here", tmp_path / "there"
    train = (*TRAIN, *STEP, "--epochs", "1", "--threads", "1", "--record", str(record), "--out", str(here))
    output = run(*train)
    output = run("train", "--replay", str(record), code=2)
    assert "the record trains step tests.adam_async.torch.modules:normalised_step: if you trust" in output
    output = run("train", "--replay", str(record), *STEP, "--out", str(there))
    assert "all weights are those of the run, to the last bit" in output
    first, second = (load_file(folder / "model.safetensors") for folder in (here, there))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
