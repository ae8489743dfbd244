"""The commands `predict` and `export`: classes of images by a saved model; the model for ONNX or PyTorch.

Only functions of this file import PyTorch, because other commands must run without it.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path

import msgspec

from adam_async.checkpoint.trained_model import SOFTMAX, Model, Predictions
from adam_async.cli.files import announce_existing, check_target, write_file
from adam_async.cli.options import ExportOptions, PredictOptions
from adam_async.cli.terminal import Terminal, print_json
from adam_async.data_server.dataset import Damage
from adam_async.data_server.sources.unlabelled import Piece, Unlabelled
from adam_async.errors import ConfigError, ModelError, counted, install_command
from adam_async.runtime.disk import Disk
from dataflow import ComputePool


class ClassShare(msgspec.Struct, frozen=True, kw_only=True, rename={"name": "class"}):
    """One class, and its probability."""

    name: str
    probability: float


class ImageReport(msgspec.Struct, frozen=True, kw_only=True, rename={"name": "class"}):
    """The classes of one image."""

    file: str
    name: str
    """Likeliest class."""
    number: int
    """Number of the likeliest class."""
    best: list[ClassShare]
    """Likeliest classes, in order."""


async def run_prediction(
    path: Path, images: Sequence[Path], options: PredictOptions, terminal: Terminal
) -> int:
    """Print the likeliest classes of each image.

    Raises:
        ConfigError: The file is not a model, or an array does not fit the model.
        DataError: An image is missing or damaged.
    """
    rows: list[ImageReport] = []
    async with Disk() as disk, ComputePool(threads=1, name="predict") as pool:
        model = await disk.run(Model.load, path)
        channels, height, width = _image_shape(model)
        damage = Damage(options.damaged)
        source = Unlabelled(images, (channels, height, width), disk, damage)
        async with aclosing(source.pieces()) as pieces:
            async for piece in pieces:
                try:
                    found = await pool.run(model.predict, piece.images)
                except ModelError as error:
                    raise ConfigError(f"{piece.names[0]}: {error}") from None
                rows += _rows(piece, found, options.top)
    for sentence in damage.sentences():
        terminal.notice(f"left out: {sentence}")
    if source.passed_over:
        terminal.notice(f"skipped {counted(source.passed_over, 'file')} without the name of an image")
    for sentence in source.changes():
        terminal.notice(sentence)
    _print(model, rows, options, terminal)
    return 0


def _image_shape(model: Model) -> tuple[int, int, int]:
    """Return the shape of a model's images. Raises ConfigError: no images, or no class names."""
    spec, shape = model.network.spec, model.input_shape
    cure = "adam-async export MODEL --onnx FILE writes it for programs that compute its outputs"
    if len(shape) != 3:
        raise ConfigError(
            f"model {spec.name!r} takes inputs of {list(shape)}, not images (channels, rows, columns): {cure}"
        )
    if spec.layers[-1].kind != SOFTMAX:
        raise ConfigError(
            f"model {spec.name!r} ends in {spec.layers[-1].kind}, not {SOFTMAX}, and names no classes: {cure}"
        )
    return shape[0], shape[1], shape[2]


def _rows(piece: Piece, found: Predictions, top: int) -> list[ImageReport]:
    return [
        ImageReport(
            file=name,
            name=found.names[number],
            number=int(found.numbers[number]),
            best=[ClassShare(name=label, probability=share) for label, share in found.best(number, top)],
        )
        for number, name in enumerate(piece.names)
    ]


def _print(model: Model, rows: list[ImageReport], options: PredictOptions, terminal: Terminal) -> None:
    if options.json:
        print_json({"model": model.network.spec.name, "images": rows}, terminal)
        return
    table = [("image", "class", "probability", "then")]
    for row in rows:
        (first, *others) = row.best
        then = ", ".join(f"{each.name} {each.probability:.1%}" for each in others)
        table.append((row.file, row.name, f"{first.probability:.1%}", then))
    wide = [max(len(line[column]) for line in table) for column in range(3)]
    for file, name, share, then in table:
        terminal.print(f"{file:<{wide[0]}}  {name:<{wide[1]}}  {share:>{wide[2]}}  {then}".rstrip())


NO_TELEMETRY = "ORT_DISABLE_TELEMETRY"
"""Environment variable that keeps onnxruntime from reporting its use to Microsoft."""


async def run_export(path: Path, options: ExportOptions, terminal: Terminal) -> int:
    """Write the files that the options name, and print how to use them.

    Raises:
        ConfigError: The file is not a model, a target is not writable, a package is missing, or PyTorch has
            no equal of a layer.
        ModelError: The scores of onnxruntime differ from the network's.
    """
    wanted = (("--onnx", options.onnx, _onnx), ("--torch", options.torch, _state))
    targets = [(option, file, make) for option, file, make in wanted if file is not None]
    async with Disk() as disk, ComputePool(threads=1, name="export") as pool:
        for option, file, _ in targets:
            await check_target(file, option, disk)
        model = await disk.run(Model.load, path)
        for option, file, make in targets:
            data, lines = await pool.run(make, model, file)
            await announce_existing(file, disk, terminal)
            await write_file(file, option, [data], disk)
            for line in (f"{file}: {lines[0]}", *lines[1:]):
                terminal.print(line)
    return 0


def _onnx(model: Model, _: Path) -> tuple[bytes, list[str]]:
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
