"""The command `export`: a saved model as an ONNX file, or as weights for PyTorch.

Only functions of this file import PyTorch, because other commands must run without it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from adam_async.checkpoint.trained_model import Model
from adam_async.cli.files import announce_existing, check_target, write_file
from adam_async.cli.option_checks import check_export
from adam_async.cli.options import ExportOptions
from adam_async.cli.terminal import Terminal
from adam_async.errors import ConfigError, install_command
from adam_async.runtime.disk import Disk
from dataflow import ComputePool

NO_TELEMETRY = "ORT_DISABLE_TELEMETRY"
"""Environment variable that keeps onnxruntime from reporting its use to Microsoft."""


async def run_export(path: Path, options: ExportOptions, terminal: Terminal) -> int:
    """Write the files that the options name, and print how to use them.

    Raises:
        ConfigError: The file is no model, an option is wrong, a package is missing, or a layer has no equal
            in PyTorch.
        ModelError: The scores of onnxruntime differ from the network's.
    """
    targets = {"--onnx": options.onnx, "--torch": options.torch}
    async with Disk() as disk, ComputePool(threads=1, name="export") as pool:
        await disk.run(check_export, path, options)
        for option, file in targets.items():
            if file is not None:
                await check_target(file, option, disk)
        model = await disk.run(Model.load, path)
        if options.onnx is not None:
            data, lines = await pool.run(_onnx, model)
            await announce_existing(options.onnx, disk, terminal)
            await write_file(options.onnx, "--onnx", [data], disk)
            _print(options.onnx, lines, terminal)
        if options.torch is not None:
            data, lines = await pool.run(_state, model, options.torch)
            await announce_existing(options.torch, disk, terminal)
            await write_file(options.torch, "--torch", [data], disk)
            _print(options.torch, lines, terminal)
    return 0


def _onnx(model: Model) -> tuple[bytes, list[str]]:
    """Return the ONNX file, and lines that describe it."""
    # Before the first import of onnxruntime, which reads the variable once.
    os.environ.setdefault(NO_TELEMETRY, "1")
    with _needs_torch():
        from adam_async.torch.onnx import IMAGES, OPSET, SCORES, check_onnx, make_onnx
    data = make_onnx(model)
    difference = check_onnx(data, model)
    outputs = model.network.layers[-1].input_shapes[0]
    images, scores = (", ".join(map(str, ("N", *shape))) for shape in (model.input_shape, outputs))
    if difference is None:
        checked = f"not checked, because onnxruntime is not installed: {install_command('onnx')}"
    else:
        checked = f"checked by onnxruntime: scores differ from the network's by at most {difference:.1e}"
    return data, [
        f"ONNX opset {OPSET}; {IMAGES} [{images}], float32 from 0 to 1; {SCORES} [{scores}]",
        checked,
    ]


def _state(model: Model, file: Path) -> tuple[bytes, list[str]]:
    """Return the weights by the names of the module's ``state_dict``, and lines that describe the module."""
    with _needs_torch():
        from safetensors.torch import save

        from adam_async.torch.convert import to_module
    module = to_module(model)
    state = module.state_dict()
    load = f"module.load_state_dict(safetensors.torch.load_file({str(file)!r}))"
    return bytes(save(state)), [f"{len(state)} tensors; load: {load}; module:", *str(module).splitlines()]


@contextmanager
def _needs_torch() -> Iterator[None]:
    """Raise `ConfigError` with the remedy if PyTorch is missing."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"export needs PyTorch: for --onnx {install_command('onnx')}, for --torch "
            f"{install_command('torch')} ({error.__cause__ or error})"
        ) from None


def _print(file: Path, lines: list[str], terminal: Terminal) -> None:
    first, *others = lines
    terminal.print(f"{file}: {first}")
    for line in others:
        terminal.print(line)
