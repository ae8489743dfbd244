"""The command `predict`: the classes of images by a saved model."""

import json
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import msgspec
import numpy as np

from adam_async.checkpoint.trained_model import SOFTMAX, Model, Predictions
from adam_async.cli.contact_sheet import Image, contact_sheet
from adam_async.cli.files import check_target, write_file
from adam_async.cli.option_checks import check_prediction
from adam_async.cli.options import PredictOptions
from adam_async.cli.terminal import Terminal
from adam_async.data_server.damage import Damage
from adam_async.data_server.sources.unlabelled import Piece, Unlabelled
from adam_async.errors import ConfigError, ModelError, counted
from adam_async.runtime.disk import Disk
from dataflow import ComputePool

MOST_PICTURES = 100
"""Maximum number of images on a contact sheet."""

ACROSS = 10
"""Number of pictures in a row of a contact sheet."""


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
    """Print the likeliest classes of each image, and draw the contact sheet if `--png` names its file.

    Raises:
        ConfigError: The file is no model, an option is wrong, or an array does not fit the model.
        DataError: An image is missing or damaged.
    """
    check_prediction(images, options)
    rows: list[ImageReport] = []
    pictures: list[Image] = []
    captions: list[list[str]] = []
    async with Disk() as disk, ComputePool(threads=1, name="predict") as pool:
        if options.png is not None:
            await check_target(options.png, "--png", disk)
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
                if options.png is not None:
                    for number in range(min(len(found), MOST_PICTURES - len(pictures))):
                        pictures.append(_pixels(piece, number))
                        ((name, share),) = found.best(number, 1)
                        captions.append([name, f"{share:.1%}"])
        if options.png is not None and pictures:
            starts = range(0, len(pictures), ACROSS)
            sheet = [pictures[n : n + ACROSS] for n in starts]
            lines = [captions[n : n + ACROSS] for n in starts]
            data = await disk.run(contact_sheet, sheet, lines)
            await write_file(options.png, "--png", [data], disk)
    for sentence in damage.sentences():
        terminal.notice(f"left out: {sentence}")
    if source.passed_over:
        terminal.notice(f"skipped {counted(source.passed_over, 'file')} without the name of an image")
    for sentence in source.changes():
        terminal.notice(sentence)
    _print(model, rows, options, terminal)
    if options.png is not None and not options.json:
        terminal.print(f"contact sheet of {len(pictures):,} of {len(rows):,} images: {options.png}")
    return 0


def _image_shape(model: Model) -> tuple[int, int, int]:
    """Return the shape of a model's images. Raises ConfigError: the model takes none, or names no classes."""
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


def _pixels(piece: Piece, number: int) -> Image:
    image = piece.images[number]
    return np.asarray(image if image.dtype == np.uint8 else (image * 255).round(), np.uint8)


def _print(model: Model, rows: list[ImageReport], options: PredictOptions, terminal: Terminal) -> None:
    if options.json:
        text = json.dumps({"model": model.network.spec.name, "images": msgspec.to_builtins(rows)}, indent=2)
        for line in text.splitlines():
            terminal.print(line)
        return
    table = [("image", "class", "probability", "then")]
    for row in rows:
        (first, *others) = row.best
        then = ", ".join(f"{each.name} {each.probability:.1%}" for each in others)
        table.append((row.file, row.name, f"{first.probability:.1%}", then))
    wide = [max(len(line[column]) for line in table) for column in range(3)]
    for file, name, share, then in table:
        terminal.print(f"{file:<{wide[0]}}  {name:<{wide[1]}}  {share:>{wide[2]}}  {then}".rstrip())
