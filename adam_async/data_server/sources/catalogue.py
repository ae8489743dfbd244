"""Encoded images that stay in their files: their places, and the facts needed before serving begins.

Names and labels are read, and headers until the size of most images is settled, and whether there are
colours. From then on an image is read and decoded on demand. Test images are decoded at once, because the
event loop sends them.

Later damage is handled by `StoredImages`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.dataset import Dataset, make_dataset
from adam_async.data_server.lazy_images import StoredImages
from adam_async.data_server.sources import limits
from adam_async.data_server.sources.damage import Damage
from adam_async.data_server.sources.file_ranges import read_piece
from adam_async.data_server.sources.labels import number_classes
from adam_async.data_server.sources.pictures import Header, decode, read_header
from adam_async.data_server.sources.samples import (
    AT_A_TIME,
    LoadRequest,
    check_counts,
    describe_source,
    each,
    origins_of,
)
from adam_async.data_server.sources.splits import SPLITS, Split, resolve
from adam_async.errors import DataError
from adam_async.run.cache_size import CacheLimits
from adam_async.run.image_size import Size, choose_size
from adam_async.runtime.disk import Disk

HEADER_BYTES = 1 << 12
"""Size of the first read of an image, in bytes; an image with a longer header is read wholly."""

SURELY_FITS = 32
"""Divisor of the memory below which images without a given size are not examined one by one: decoded, they
fit."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One encoded image in a file."""

    origin: str
    """Name of the image in errors."""
    path: Path
    offset: int
    size: int
    label: str
    split: Split | int
    """Split of the image, or its rank, by which it is split."""

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


class Catalogue:
    """Collects the places of the images of a data set, and damage of its own."""

    def __init__(self, request: LoadRequest) -> None:
        self.request = replace(request, damage=Damage(request.damage.policy))
        self.entries: list[Entry] = []
        self.bytes = 0

    def add(self, entry: Entry) -> None:
        """Add an image.

        Raises:
            DataError: The image is too large and must not be skipped, or all images together are.
        """
        try:
            limits.check_file(entry.size, limits.MAX_IMAGE_BYTES, entry.origin)
        except DataError as error:
            self.request.damage.note(str(error))
            return
        self.bytes += entry.size
        limits.check_total(self.bytes, self.request.origin)
        self.entries.append(entry)


async def leave_stored(
    catalogue: Catalogue,
    cache: CacheLimits,
    *,
    numbers: Mapping[str, int] | None = None,
    class_names: tuple[str, ...] = (),
) -> Dataset | None:
    """Make a data set whose training images stay in their files.

    Args:
        numbers: Class number of each label; without it they follow from the labels.
        class_names: Names of the classes; without `numbers`, only for labels that are numbers.

    Returns:
        None if no size is given and all images fit, encoded and decoded: the caller loads them at once.

    Raises:
        DataError: An error of `assemble` that shows already.
    """
    request = catalogue.request
    damage, disk = request.damage, request.disk
    if not cache.asked and catalogue.bytes * SURELY_FITS <= cache.size_bytes:
        return None
    if numbers is None:
        numbers, names = number_classes(entry.label for entry in catalogue.entries)
        class_names = names or class_names
    shapes = _Shapes(len(catalogue.entries), any_size=request.size is not None)
    kept = await _look(catalogue.entries, shapes, damage, disk)
    if not shapes.seen:
        raise DataError(f"{request.origin} holds no image")
    chosen_size, channels = choose_size(shapes.sizes, request.size), shapes.channels
    size = chosen_size.size
    total = len(kept) * size[0] * size[1] * channels
    if not cache.asked and max(total, catalogue.bytes) <= cache.size_bytes:
        return None
    limits.check_total(total, request.origin)
    splits = resolve([entry.label for entry in kept], [entry.split for entry in kept])
    train, test = ([entry for entry, of in zip(kept, splits, strict=True) if of == split] for split in SPLITS)

    def decoded(entry: Entry) -> NDArray[np.uint8]:
        return decode(entry.read(), entry.origin, size=size, channels=channels)

    tests: list[tuple[NDArray[np.uint8], int]] = []
    await each(test, lambda entry: tests.append((decoded(entry), numbers[entry.label])), damage, disk)
    check_counts(len(train), len(tests), request)
    labels = np.array([numbers[entry.label] for entry in train], np.int64)
    stored = StoredImages(
        lambda number: decoded(train[number]),
        image_shape=(channels, size[1], size[0]),
        labels=labels,
        origin=request.origin,
        policy=damage.policy,
    )
    make = partial(
        make_dataset,
        name=request.name,
        source=describe_source(request, fitted=chosen_size.note, deep=shapes.deep),
        train=(stored, labels),
        test=(np.stack([image for image, _ in tests]), np.array([label for _, label in tests], np.int64)),
        origins=origins_of(request.origin),
        class_names=class_names,
        damaged=damage.sentences(),
    )
    return await disk.run(make)


class _Shapes:
    """Size of most images, and whether there are colours, from the headers read so far."""

    def __init__(self, images: int, *, any_size: bool) -> None:
        self._images = self._left = images
        self._any_size = any_size
        self.sizes: Counter[Size] = Counter()
        self._colours = False
        self.deep = 0

    def add(self, header: Header | None) -> None:
        """Count the header of the next image; None if it cannot be read."""
        self._left -= 1
        if header is not None:
            self.sizes[header.size] += 1
            self._colours = self._colours or not header.is_grey
            self.deep += header.is_deep

    @property
    def seen(self) -> int:
        return self.sizes.total()

    @property
    def settled(self) -> bool:
        """Whether the other images cannot change the result."""
        if not self._left:
            return True
        most = max(self.sizes.values(), default=0)
        return self._colours and (self._any_size or 2 * most > self._images)

    @property
    def channels(self) -> int:
        return 3 if self._colours else 1


async def _look(entries: list[Entry], shapes: _Shapes, damage: Damage, disk: Disk) -> list[Entry]:
    """Read headers until the result is settled. Returns the images without damaged headers."""
    kept: list[Entry] = []

    def look(entry: Entry) -> None:
        header = None
        try:
            header = _header(entry)
            kept.append(entry)
        finally:
            shapes.add(header)

    for first in range(0, len(entries), AT_A_TIME):
        if shapes.settled:
            return kept + entries[first:]
        await each(entries[first : first + AT_A_TIME], look, damage, disk)
    return kept


def _header(entry: Entry) -> Header:
    try:
        return read_header(entry.read(HEADER_BYTES), entry.origin)
    except DataError:
        return read_header(entry.read(), entry.origin)
