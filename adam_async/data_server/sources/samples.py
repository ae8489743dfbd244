"""Data sets from encoded images with labels.

All encoded images are in memory first. The headers decide the number of channels, and the size unless the
caller gives one; then the images of each split are decoded into one array. Decoding runs on the disk's
thread, some hundred images at a time, so a cancellation does not wait for all of them.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.class_names import number_classes
from adam_async.data_server.damage import Damage
from adam_async.data_server.dataset import Dataset, make_dataset
from adam_async.data_server.sources import limits
from adam_async.data_server.sources.file_ranges import read_piece
from adam_async.data_server.sources.pictures import Header, decode, read_header
from adam_async.data_server.sources.splits import SPLITS, Split, resolve
from adam_async.errors import DataError, counted
from adam_async.run.cache_size import CacheLimits
from adam_async.run.image_size import Size, choose_size
from adam_async.runtime.disk import Disk

T = TypeVar("T")
S = TypeVar("S", "Sample", "StoredSample")

BYTES_OF_PIXEL = 4
"""Maximum memory of one pixel during decoding, in bytes."""

AT_A_TIME = 256
"""Number of images that one job on the disk's thread decodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """A data set that is being loaded."""

    path: Path
    disk: Disk
    source: str
    """Sentence for the report."""
    damage: Damage
    cache: CacheLimits | None = None
    """Memory for training images; images that do not fit stay in their files. None: all are decoded."""
    room_bytes: int = limits.MAX_TOTAL_BYTES
    """Memory in bytes for all images, if they are decoded at once, and for each file that is read whole."""
    size: Size | None = None
    """Columns and rows of all encoded images; None lets the images decide."""

    @property
    def name(self) -> str:
        """Short name of the data set."""
        return self.path.stem or "data"

    @property
    def origin(self) -> str:
        """Name of the data set in errors."""
        return str(self.path)


@dataclass(frozen=True, slots=True)
class Sample:
    """One encoded image in memory."""

    origin: str
    """Name of the image in errors."""
    label: str
    split: Split | int
    """Split of the image, or the rank that determines its split."""
    data: bytes

    @property
    def size(self) -> int:
        """Size in bytes."""
        return len(self.data)

    def read(self) -> bytes:
        """Return the bytes of the image."""
        return self.data


@dataclass(frozen=True, slots=True)
class StoredSample:
    """One encoded image in a file."""

    origin: str
    label: str
    split: Split | int
    path: Path
    offset: int
    size: int

    def read(self, size: int | None = None) -> bytes:
        """Return the bytes of the image, or the first `size` of them. Blocks.

        Raises:
            DataError: The file has changed or cannot be read.
        """
        size = self.size if size is None else min(size, self.size)
        try:
            data = read_piece(self.path, self.offset, size)
        except OSError as error:
            raise DataError(f"{self.origin} cannot be read: {error.strerror or error}") from None
        if len(data) < size:
            raise DataError(
                f"{self.origin} has become shorter than {self.size} bytes: files must not change in use"
            )
        return data


class Samples(Generic[S]):
    """Collects the images of a data set, up to the memory for them."""

    def __init__(self, request: LoadRequest) -> None:
        self.request = request
        self.all: list[S] = []
        self.bytes = 0

    def add(self, sample: S) -> None:
        """Add an image.

        Raises:
            DataError: The image is too large and must not be skipped, or all images together are too large.
        """
        try:
            limits.check_file(sample.size, limits.MAX_IMAGE_BYTES, sample.origin)
        except DataError as error:
            self.request.damage.note(str(error))
            return
        self.bytes += sample.size
        limits.check_total(self.bytes, self.request.origin, self.request.room_bytes)
        self.all.append(sample)

    def labelled(self, numbers: Mapping[str, int]) -> list[S]:
        """Return the images whose labels have a class number; other labels are damage."""
        known = []
        for sample in self.all:
            if sample.label in numbers:
                known.append(sample)
                continue
            expected = "a name" if any(not label.isdigit() for label in numbers) else "a class number from 0"
            label = repr(sample.label[:80])
            self.request.damage.note(f"{sample.origin} has the label {label}, expected {expected}")
        return known


async def assemble(
    samples: Samples[Sample], *, numbers: Mapping[str, int] | None = None, class_names: tuple[str, ...] = ()
) -> Dataset:
    """Decode all images and join them with their labels.

    Args:
        numbers: Class number of each label; by default the labels determine them.
        class_names: Names of the classes; without `numbers`, only for labels that are numbers.

    Raises:
        DataError: No image is left to train or to test with, too many images are damaged, or one is and
            damage is not skipped.
    """
    request = samples.request
    damage, disk = request.damage, request.disk
    if numbers is None:
        numbers, names = number_classes(sample.label for sample in samples.all)
        class_names = names or class_names
    headers = await _headers(samples.labelled(numbers), damage, disk)
    if not headers:
        first = "".join(f": {sentence}" for sentence in damage.sentences()[:1])
        raise DataError(f"{request.origin} holds no image{first}", damaged=damage.sentences())
    sizes = Counter(header.size for _, header in headers)
    chosen_size = choose_size(sizes, request.size)
    size = chosen_size.size
    channels = 1 if all(header.is_grey for _, header in headers) else 3
    limits.check_total(len(headers) * size[0] * size[1] * channels, request.origin, request.room_bytes)
    sample, largest = max(headers, key=lambda found: found[1].pixels)
    limits.check_total(BYTES_OF_PIXEL * largest.pixels, sample.origin, request.room_bytes)
    arrays = []
    found = [sample for sample, _ in headers]
    splits = resolve([sample.label for sample in found], [sample.split for sample in found])
    for split in SPLITS:
        chosen = [sample for sample, of in zip(found, splits, strict=True) if of == split]
        images, kept = await _decoded(chosen, size, channels, damage, disk)
        arrays.append((images, np.array([numbers[sample.label] for sample in kept], np.int64)))
    check_counts(len(arrays[0][1]), len(arrays[1][1]), request)
    return make_dataset(
        name=request.name,
        source=describe_source(
            request, fitted=chosen_size.note, deep=sum(header.is_deep for _, header in headers)
        ),
        train=arrays[0],
        test=arrays[1],
        origins=origins_of(request.origin),
        class_names=class_names,
        damaged=damage.sentences(),
    )


def describe_source(request: LoadRequest, *, fitted: str = "", deep: int = 0) -> str:
    """Return the sentence on the source of a data set, with the changes to its images."""
    source, damage = request.source, request.damage
    if deep:
        source += f"; {counted(deep, 'image')} of 16 bits scaled to 8"
    if fitted:
        source += f"; {fitted}"
    if damage.count:
        source += f"; {damage.count} were damaged and left out"
    return source


def check_counts(train: int, test: int, request: LoadRequest) -> None:
    """Refuse a data set that is too damaged, or that lacks images to train or to test with.

    Raises:
        DataError: The data set is refused.
    """
    request.damage.check(train + test, request.origin)
    for split, images in zip(SPLITS, (train, test), strict=True):
        if not images:
            raise DataError(
                f"{request.origin}: none of its {counted(train + test, 'image')} is left for the {split} "
                "set; add images, or name the files or folders train and test"
            )


def origins_of(origin: str) -> tuple[str, str, str, str]:
    """Return the names of the four arrays of a data set in errors."""
    train, test = f"{origin}, train set", f"{origin}, test set"
    return f"{train}, images", f"{train}, labels", f"{test}, images", f"{test}, labels"


async def _headers(samples: list[Sample], damage: Damage, disk: Disk) -> list[tuple[Sample, Header]]:
    headers: list[tuple[Sample, Header]] = []

    def read(sample: Sample) -> None:
        headers.append((sample, read_header(sample.read(), sample.origin)))

    await each(samples, read, damage, disk)
    return headers


async def _decoded(
    samples: list[Sample], size: tuple[int, int], channels: int, damage: Damage, disk: Disk
) -> tuple[NDArray[np.uint8], list[Sample]]:
    """Return the undamaged images, shape (N, C, H, W), and their samples."""
    images = np.empty((len(samples), channels, size[1], size[0]), np.uint8)
    kept: list[Sample] = []

    def read(sample: Sample) -> None:
        images[len(kept)] = decode(sample.read(), sample.origin, size=size, channels=channels)
        kept.append(sample)

    await each(samples, read, damage, disk)
    return images[: len(kept)], kept


async def each(items: Sequence[T], function: Callable[[T], None], damage: Damage, disk: Disk) -> None:
    """Call a function for each image on the disk's thread; an image that the function refuses is damaged.

    Raises:
        DataError: An image is damaged, and damage is not skipped.
    """

    def some(first: int) -> None:
        """Call the function for the images of one turn of the disk's thread."""
        for item in items[first : first + AT_A_TIME]:
            try:
                function(item)
            except DataError as error:
                damage.note(str(error))

    for first in range(0, len(items), AT_A_TIME):
        await disk.run(some, first)
