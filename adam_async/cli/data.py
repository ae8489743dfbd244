"""Loading of data for a command, from ADAM_DATA_DIR and the user's cache, with the progress of downloads.

`data inspect` describes a source of images.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import isawaitable
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from adam_async.cli.files import read_file
from adam_async.cli.options import InspectOptions
from adam_async.cli.terminal import Terminal, print_json
from adam_async.data_server.dataset import Dataset, Policy
from adam_async.data_server.sources.datasets import load_dataset
from adam_async.data_server.sources.kinds import Kind, address_error, find_files, is_import_path
from adam_async.data_server.sources.objects import from_object
from adam_async.data_server.sources.published_sets import Downloader
from adam_async.data_server.transforms.steps import read_steps
from adam_async.driver.preparation import steps_for
from adam_async.errors import AdamError, ConfigError, DataError
from adam_async.run.image_size import Size, read_image_size
from adam_async.run.memory_sizes import CacheLimits, room_for_whole
from adam_async.run.user_code import import_named
from adam_async.runtime.disk import Disk
from adam_async.runtime.kernel_cache import user_cache
from adam_async.runtime.loop_thread import on_user_thread
from adam_async.runtime.machine import available_bytes

IMPORTED_S = 3600.0
"""Maximum time in seconds of a user's function that makes a data set; it may download the images."""


async def load_data(
    source: str,
    disk: Disk,
    environment: Mapping[str, str],
    *,
    damaged: Policy = "error",
    cache: CacheLimits | None = None,
    size: Size | None = None,
    available: Callable[[], int] = available_bytes,
) -> Dataset:
    """Load a data set as `load_dataset` does, with downloads in the user's cache.

    Stderr shows the progress of downloads.

    Args:
        environment: Names the folders of data and of the user's cache.
        available: Returns the memory in bytes that this process may use. `room_for_whole` computes from it
            the maximum size of a source that must be decoded as a whole.

    Raises:
        ConfigError: The source is an import path, and cannot be imported.
        DataError: The source is missing, more damaged than allowed, or too large to decode.
    """
    if is_import_path(source):
        return replace(await imported_dataset(source), cache=cache)
    if "://" in source:
        raise address_error(source)
    with Downloads(Terminal().err) as downloads:
        dataset = await load_dataset(
            source,
            disk,
            downloader=Downloader(on_bytes=downloads.on_bytes),
            data_dir=data_folder(environment),
            cache_dir=cache_folder(environment),
            damaged=damaged,
            cache=cache,
            room_bytes=room_for_whole(cache, available_bytes=available()),
            size=size,
        )
    return replace(dataset, cache=cache)


def check_data_named(source: str, origin: str, *, allowed: bool) -> None:
    """Check that the user allows importing the data set that a checkpoint or record names.

    Raises:
        ConfigError: The source is an import path that the user does not allow; the text has the options that
            allow it.
    """
    if is_import_path(source) and not allowed:
        raise ConfigError(
            f"{origin} names data whose module would be imported and run: {source}; if you trust it, give "
            f"--allow-functions, or --data {source}"
        )


async def imported_dataset(source: str, *, within_s: float = IMPORTED_S) -> Dataset:
    """Import a function of the user's, and return the data set that it makes.

    The user's code runs on a thread with a separate loop, so the command's loop stays free.

    Args:
        source: ``package.module:function``. The function returns a `Dataset`, an awaitable of one, or a
            source for `from_object`.
        within_s: Deadline of import, function and source together, in seconds.

    Raises:
        ConfigError: The function cannot be imported, or fails.
        DataError: The result is no data set.
        DeadlineExceeded: The function took longer than `within_s`.
    """
    return await on_user_thread(
        lambda: asyncio.run(_imported(source)), f"{source} to make the images", within_s=within_s
    )


async def _imported(source: str) -> Dataset:
    """Make the data set of `imported_dataset`."""
    make = import_named(source, "data")
    try:
        found = make()
        if isawaitable(found):
            found = await found
    except AdamError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise ConfigError(f"data {source} failed: {error!r}") from error
    return found if isinstance(found, Dataset) else await from_object(found, name=source)


class Downloads:
    """Shows downloads from their first bytes on: on a terminal a bar for each, otherwise one line for each.

    The end of the block removes the bars.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        # Each piece of a download redraws the bars, so no thread is needed.
        self._bars = Progress(
            TextColumn("downloading {task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
        )
        self._known: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bars.live.is_started:
            self._bars.stop()

    def on_bytes(self, url: str, done: int, total: int | None) -> None:
        """Show that `done` of the `total` bytes of a URL have arrived; `total` is None if unknown."""
        if url not in self._known:
            self._known[url] = self._bars.add_task(url, total=total)
            if self._console.is_terminal:
                self._bars.start()
            else:
                size = "" if total is None else f" ({total / 1e6:.1f} MB)"
                self._console.print(f"downloading {url}{size}")
        self._bars.update(self._known[url], completed=done, total=total)
        if self._console.is_terminal:
            self._bars.refresh()


def data_folder(environment: Mapping[str, str]) -> Path | None:
    """Return the folder of ADAM_DATA_DIR, or None."""
    folder = environment.get("ADAM_DATA_DIR")
    return Path(folder) if folder else None


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of downloaded data in the user's cache."""
    return user_cache(environment) / "mnist"


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
    """One class, and how many images it has."""

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
    """Describe a source, and the transforms of its images.

    Raises:
        ConfigError: A transform is wrong, or its file cannot be read.
        DataError: The source is missing, or too much of it is damaged.
    """
    async with Disk() as disk:
        text = None
        if options.transforms is not None:
            text = await read_file(options.transforms, "--transforms", disk)
        size = read_image_size(options.size, "--size")
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
    if options.json:
        print_json(found, terminal)
        return 0
    for line in lines(found, classes=options.classes):
        terminal.print(line)
    return 0


async def kind_of(source: str, data_dir: Path | None, disk: Disk) -> str:
    """Describe the kind of a loaded source, which has files of one kind only."""
    path = data_dir if source in ("auto", "mnist") else Path(source)
    if source == "digits" or path is None or not await disk.run(path.exists):
        return NAMED
    return FORMATS[(await disk.run(find_files, path)).kind]


def describe(dataset: Dataset, kind: str) -> SourceReport:
    """Describe a data set in numbers; `kind` is its source's kind."""
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
