"""The commands that look and change nothing take a model by name or as a file, and refuse what is neither."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from adam_async.cli.inspect import run_doctor, run_evaluation
from adam_async.cli.options import TrainOptions
from adam_async.cli.terminal import Terminal
from adam_async.cli.train import run_training
from adam_async.model import Network, named_model
from adam_async.model.keyed_random import Dice
from tests.adam_async.cli.plan.test_command import SPEC

DIGITS = Network(named_model("digits")).initial_weights(Dice(1))


async def test_the_doctor_looks_at_a_model_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "little.toml").write_text(SPEC)
    code = await run_doctor(str(tmp_path / "little.toml"), 5, {"HOME": str(tmp_path)}, Terminal())

    told = capsys.readouterr().out
    assert code == 0
    assert "of little at 5 images per group" in told
    assert "fc1 to loss: " in told


async def test_a_model_of_a_folder_knows_its_classes_in_a_folder_with_fewer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, level in (("dark", 0), ("grey", 120), ("light", 250)):
        (tmp_path / "three" / name).mkdir(parents=True)
        for number in range(20):
            image = Image.new("L", (4, 4), level + number % 5)
            image.save(tmp_path / "three" / name / f"{number}.png")
    for name in ("grey", "light"):
        shutil.copytree(tmp_path / "three" / name, tmp_path / "two" / name)
    quick = TrainOptions(
        data=str(tmp_path / "three"), epochs=40, rate=0.1, images_per_group=2, kernels="numpy"
    )
    trained = replace(quick, out=tmp_path / "model", quiet=True)

    await run_training(trained, {"HOME": str(tmp_path)}, Terminal(quiet=True))
    capsys.readouterr()
    await run_evaluation(tmp_path / "model", str(tmp_path / "two"), "error", 1, {}, Terminal())

    _, _, grey, light = capsys.readouterr().out.splitlines()
    assert (grey.split()[0], light.split()[0]) == ("grey", "light")
    assert (grey.split()[-1], light.split()[-1]) == ("100.00%", "100.00%")
