"""The command `data inspect`: a description and a contact sheet of a source of images."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.cli.contact_sheet import contact_sheet, sheet_rows
from adam_async.cli.data import data_folder, load_data
from adam_async.cli.files import check_target, read_file, write_file
from adam_async.cli.option_checks import check_inspection
from adam_async.cli.options import InspectOptions
from adam_async.cli.terminal import Terminal
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.sources.kinds import Kind, find_files
from adam_async.data_server.transforms.recipe import Recipe
from adam_async.data_server.transforms.steps import read_steps
from adam_async.driver.augmentation import steps_for
from adam_async.errors import DataError
from adam_async.run.image_size import read_image_size
from adam_async.run.user_code import functions_for
from adam_async.runtime.disk import Disk

NAMED = "known by name"
FORMATS: dict[Kind, str] = {
    "idx": "IDX files, as MNIST's",
    "folders": "folders of images, one for each class",
    ".npz": "NumPy archive (.npz)",
    ".npy": "NumPy arrays (.npy)",
    ".parquet": "Parquet",
    ".tar": "tar shards, as WebDataset's",
    ".csv": "CSV tables",
}
"""Descriptions of the kinds of sources."""

_AT_ONCE = 1024
"""Number of images counted at once; counting needs eight times their bytes."""


class ChannelValues(msgspec.Struct, frozen=True, kw_only=True):
    """The values of one channel."""

    min: int
    max: int
    mean: float
    std: float


class SplitReport(msgspec.Struct, frozen=True, kw_only=True):
    """The training images, or the test images."""

    images: int
    channels: list[ChannelValues]


class ClassReport(msgspec.Struct, frozen=True, kw_only=True):
    """One class, and its numbers of images."""

    number: int
    name: str
    train: int
    test: int


class SourceReport(msgspec.Struct, kw_only=True):
    """A source of images; docs/reference/data.md explains the fields."""

    kind: str
    name: str
    source: str
    shape: tuple[int, int, int]
    train: SplitReport
    test: SplitReport
    classes: list[ClassReport]
    damaged: list[str]
    transforms: tuple[dict[str, Any], ...] | None = None


async def run_inspection(
    source: str, options: InspectOptions, environment: Mapping[str, str], terminal: Terminal
) -> int:
    """Describe a source, and draw a contact sheet if `--png` names its file.

    Raises:
        ConfigError: An option or a transform is wrong, or a file cannot be read or written.
        DataError: The source is missing, or too much of it is damaged.
    """
    check_inspection(source, options)
    async with Disk() as disk:
        if options.png is not None:
            await check_target(options.png, "--png", disk)
        text = None
        if options.transforms is not None:
            text = await read_file(options.transforms, "--transforms", disk)
        size = read_image_size(options.size)
        try:
            dataset = await load_data(source, disk, environment, damaged=options.damaged, size=size)
        except DataError as error:
            for sentence in error.damaged:
                terminal.notice(f"damaged: {sentence}")
            raise
        kind = await kind_of(source, data_folder(environment), disk)
        found = await disk.run(describe, dataset, kind)
        if text is not None or options.augment:
            asked = read_steps(text, str(options.transforms)) if text is not None else None
            found.transforms = steps_for(asked, dataset.image_shape)
        if options.png is not None:
            data = await disk.run(_draw, dataset, found.transforms, options)
            await write_file(options.png, "--png", [data], disk)
    if options.json:
        for line in json.dumps(msgspec.to_builtins(found), indent=2).splitlines():
            terminal.print(line)
        return 0
    for line in lines(found, classes=options.classes):
        terminal.print(line)
    if options.png is not None:
        terminal.print(f"contact sheet: {options.png}")
    return 0


def _draw(dataset: Dataset, steps: Sequence[Mapping[str, Any]] | None, options: InspectOptions) -> bytes:
    recipe = None
    if steps is not None:
        recipe = Recipe.of(steps, dataset.image_shape, functions=functions_for(steps, {}))
    rows = sheet_rows(
        dataset,
        recipe,
        seed=options.seed,
        epoch=options.epoch,
        samples=options.samples,
        classes=options.classes,
    )
    return contact_sheet(rows)


async def kind_of(source: str, data_dir: Path | None, disk: Disk) -> str:
    """Describe the kind of a source that was loaded, and therefore has files of one kind only."""
    path = data_dir if source in ("auto", "mnist") else Path(source)
    if source == "digits" or path is None or not await disk.run(path.exists):
        return NAMED
    return FORMATS[(await disk.run(find_files, path)).kind]


def describe(dataset: Dataset, kind: str) -> SourceReport:
    """Describe a data set in numbers; `kind` is the kind of its source."""
    train = np.bincount(dataset.train_labels, minlength=dataset.num_classes).tolist()
    test = np.bincount(dataset.test_labels, minlength=dataset.num_classes).tolist()
    names = dataset.class_names or tuple(str(number) for number in range(dataset.num_classes))
    return SourceReport(
        kind=kind,
        name=dataset.name,
        source=dataset.source,
        shape=dataset.image_shape,
        train=SplitReport(images=sum(train), channels=channel_values(dataset.train_images[:])),
        test=SplitReport(images=sum(test), channels=channel_values(dataset.test_images)),
        classes=[
            ClassReport(number=number, name=name, train=of_train, test=of_test)
            for number, (name, of_train, of_test) in enumerate(zip(names, train, test, strict=True))
        ],
        damaged=list(dataset.damaged),
    )


def channel_values(images: NDArray[np.uint8]) -> list[ChannelValues]:
    """Return minimum, maximum, mean and standard deviation of each channel.

    Args:
        images: Shape (N, C, H, W); sums over them are exact.
    """
    return [_values(_histogram(images[:, channel])) for channel in range(images.shape[1])]


def _histogram(images: NDArray[np.uint8]) -> list[int]:
    """Count each value from 0 to 255 in images of shape (N, H, W)."""
    counts = np.zeros(256, np.int64)
    for start in range(0, len(images), _AT_ONCE):
        counts += np.bincount(images[start : start + _AT_ONCE].reshape(-1), minlength=256)
    return counts.tolist()


def _values(counts: list[int]) -> ChannelValues:
    present = [value for value, count in enumerate(counts) if count]
    number = sum(counts)
    total = sum(value * count for value, count in enumerate(counts))
    squares = sum(value * value * count for value, count in enumerate(counts))
    return ChannelValues(
        min=present[0],
        max=present[-1],
        mean=total / number,
        std=((number * squares - total * total) / number**2) ** 0.5,
    )


def lines(found: SourceReport, *, classes: int) -> Iterator[str]:
    """Yield the lines of a description.

    Args:
        found: Description of a source.
        classes: Maximum number of classes listed.
    """
    yield f"{found.name}: {found.source}"
    yield f"kind of source: {found.kind}"
    channels, rows, columns = found.shape
    yield f"images of {rows} x {columns} pixels, {channels} channel{'s' if channels > 1 else ''}"
    for part, split in (("train", found.train), ("test", found.test)):
        yield f"{part:<5} {split.images:>9,} images, {_ranges(split.channels)}"
    if found.transforms is not None:
        yield f"transforms: {', '.join(step['kind'] for step in found.transforms) or 'none'}"
    yield from _classes(found.classes, classes)
    if found.damaged:
        yield "damaged, and left out:"
        yield from (f"  {sentence}" for sentence in found.damaged)
    else:
        yield "damaged: nothing"


def _ranges(channels: Sequence[ChannelValues]) -> str:
    ranges = ", ".join(f"{each.min} to {each.max}" for each in channels)
    means = ", ".join(f"{each.mean:.2f}" for each in channels)
    deviations = ", ".join(f"{each.std:.2f}" for each in channels)
    return f"values {ranges}, mean {means}, deviation {deviations}"


def _classes(classes: Sequence[ClassReport], most: int) -> Iterator[str]:
    shown = classes[:most]
    wide = max(len("class"), *(len(str(each.name)) for each in shown))
    yield f"{'class':<{wide}} {'train':>9} {'test':>9}"
    for each in shown:
        yield f"{each.name:<{wide}} {each.train:>9,} {each.test:>9,}"
    if len(classes) > most:
        yield f"and {len(classes) - most:,} more classes (--classes)"
    for part, empty in (
        ("train", [each.name for each in classes if not each.train]),
        ("test", [each.name for each in classes if not each.test]),
    ):
        if empty:
            more = f" and {len(empty) - most:,} more" if len(empty) > most else ""
            yield f"no {part} image is of class {', '.join(empty[:most])}{more}"
