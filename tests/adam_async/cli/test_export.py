"""The command `export` writes a model for other libraries, and explains each file."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from adam_async.checkpoint.names import FILE_NAME
from adam_async.checkpoint.trained_model import dump_model
from adam_async.cli.commands import run_command
from adam_async.cli.option_checks import check_export
from adam_async.cli.options import ExportOptions
from adam_async.cli.predict import NO_TELEMETRY, run_export
from adam_async.cli.terminal import Terminal
from adam_async.errors import ConfigError
from adam_async.model import Network, mlp
from adam_async.run.step_model import StepModel
from adam_async.run.train_step import StepSpec
from tests.adam_async.steps import Softmax

SPEC = mlp((4, 3), input_shape=(1, 2, 2), name="quarters")
WEIGHTS = {"fc1.weight": np.eye(3, 4, dtype=np.float32) * 50, "fc1.bias": np.ones(3, np.float32)}
QUIET = Terminal()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / FILE_NAME
    path.write_bytes(dump_model(Network(SPEC), WEIGHTS, ("north", "east", "south")))
    return path


def need_torch() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")


async def test_weights_for_pytorch_have_the_values_of_the_model_and_a_text_of_their_module(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need_torch()
    file = tmp_path / "new" / "weights.safetensors"

    assert await run_export(model, ExportOptions(torch=file), QUIET) == 0

    found = load_file(file)
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in WEIGHTS.items()
    }
    head, *module = capsys.readouterr().out.splitlines()
    load = f"module.load_state_dict(safetensors.torch.load_file({str(file)!r}))"
    assert head == f"{file}: 2 tensors; load: {load}; module:"
    assert module[0] == "Sequential("
    assert "  (fc1): Linear(in_features=4, out_features=3, bias=True)" in module

    await run_export(model, ExportOptions(torch=file), QUIET)
    assert capsys.readouterr().err == f"{file} exists, and is replaced\n"


@pytest.mark.slow
def test_an_onnx_file_is_written_and_checked_by_the_runtime(model: Path, tmp_path: Path) -> None:
    need_torch()
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason="the extra onnx is not installed")
    file = tmp_path / "quarters.onnx"
    words = [sys.executable, "-m", "adam_async", "export", str(model), "--onnx", str(file)]
    # A process of its own, because the runtime reads its environment variable once.
    environment = {**os.environ, "HOME": str(tmp_path / "home")}
    environment.pop(NO_TELEMETRY, None)

    done = subprocess.run(words, capture_output=True, text=True, timeout=50, env=environment, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    head, checked = done.stdout.splitlines()
    assert head == (f"{file}: ONNX opset 18; images [N, 1, 2, 2], float32 from 0 to 1; scores [N, 3]")
    has_runtime = find_spec("onnxruntime") is not None
    assert checked.startswith("checked by onnxruntime: scores differ" if has_runtime else "not checked")
    assert file.stat().st_size > 0
    assert not list(tmp_path.rglob("onnxruntime.db"))  # nothing is stored for a report to Microsoft


def test_no_file_is_written_over_the_model_or_twice(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "x"

    for path in (model, model.parent):
        with pytest.raises(ConfigError, match=r"model\.safetensors is the model, or is named twice"):
            check_export(path, ExportOptions(torch=model))
    with pytest.raises(ConfigError, match="x is the model, or is named twice"):
        check_export(model, ExportOptions(torch=other, onnx=tmp_path / "." / "x"))


@pytest.mark.parametrize("target", ["onnx", "torch"])
async def test_a_missing_pytorch_is_an_error_with_the_extras(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    for name in [name for name in sys.modules if name.startswith("adam_async.torch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setenv(NO_TELEMETRY, "1")
    file = tmp_path / "x"

    with pytest.raises(ConfigError, match=r"needs PyTorch: for --onnx .*\[onnx\]"):
        await run_export(model, ExportOptions(**{target: file}), QUIET)

    assert not file.exists()


def write_step(path: Path) -> None:
    """Write the file that a run of a step writes."""
    step = StepModel(Softmax(), StepSpec(name="mine", shape=(1, 8, 8), classes=10))
    arrays = {p.name: np.zeros(p.shape, step.dtype) for p in step.parameters}
    path.write_bytes(dump_model(step, arrays))


def write_diverged(path: Path) -> None:
    weights = {**WEIGHTS, "fc1.bias": np.array([0, np.nan, 0], np.float32)}
    path.write_bytes(dump_model(Network(SPEC), weights))


@pytest.mark.parametrize(
    ("write", "claim"),
    [
        (
            write_step,
            "without a model's spec, such as a step's; use one that `train --out` wrote for a network",
        ),
        (lambda path: path.write_bytes(dump_model(Network(SPEC), WEIGHTS)[:-4]), "is truncated"),
    ],
)
def test_a_file_that_is_no_model_of_a_network_ends_with_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_handlers: None, write, claim: str
) -> None:
    path = tmp_path / "given.safetensors"
    write(path)

    assert run_command(["export", str(path), "--torch", str(tmp_path / "x")]) == 2

    assert claim in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_weights_that_are_not_finite_end_with_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_handlers: None
) -> None:
    need_torch()
    path = tmp_path / "given.safetensors"
    write_diverged(path)

    assert run_command(["export", str(path), "--torch", str(tmp_path / "x")]) == 2

    assert "1 of 3 values of 'fc1.bias' are not finite; the training diverged" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
