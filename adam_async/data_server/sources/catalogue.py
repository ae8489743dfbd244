"""Encoded images that stay in their files: their places, and the facts needed before serving begins.

The loader reads names and labels, and then headers until the most frequent size and the number of channels
are certain. From then on an image is read and decoded on demand. Test images are decoded at once, because the
event loop sends them.

`StoredImages` handles later damage.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.class_names import number_classes
from adam_async.data_server.damage import Damage
from adam_async.data_server.dataset import Dataset, StoredImages, make_dataset
from adam_async.data_server.sources import limits
from adam_async.data_server.sources.pictures import Header, decode, read_header
from adam_async.data_server.sources.samples import (
    AT_A_TIME,
    LoadRequest,
    Samples,
    StoredSample,
    check_counts,
    describe_source,
    each,
    origins_of,
)
from adam_async.data_server.sources.splits import SPLITS, resolve
from adam_async.errors import DataError
from adam_async.run.cache_size import CacheLimits
from adam_async.run.image_size import Size, choose_size
from adam_async.runtime.disk import Disk

HEADER_BYTES = 1 << 12
"""Size of the first read of an image, in bytes; an image with a longer header is read wholly."""

SURELY_FITS = 32
"""Divisor of the automatic cache size. If the encoded size of all images is at most the quotient, the loader
assumes that the decoded images fit, and decodes all of them at once."""


def listed(request: LoadRequest) -> Samples[StoredSample]:
    """Return an empty collection for the positions of images, with its own damage and limits."""
    own = Damage(request.damage.policy)
    return Samples(replace(request, damage=own, room_bytes=limits.MAX_TOTAL_BYTES))


async def leave_stored(
    samples: Samples[StoredSample],
    cache: CacheLimits,
    *,
    numbers: Mapping[str, int] | None = None,
    class_names: tuple[str, ...] = (),
) -> Dataset | None:
    """Make a data set whose training images stay in their files.

    Args:
        numbers: Class number of each label; by default the labels determine them.
        class_names: Names of the classes; without `numbers`, only for labels that are numbers.

    Returns:
        None if the user gave no cache size and all images fit, encoded and decoded; the caller then loads
        them at once.

    Raises:
        DataError: See `assemble`; damage of training images beyond their headers raises later.
    """
    request = samples.request
    damage, disk = request.damage, request.disk
    if not cache.asked and samples.bytes * SURELY_FITS <= cache.size_bytes:
        return None
    if numbers is None:
        numbers, names = number_classes(sample.label for sample in samples.all)
        class_names = names or class_names
    known = samples.labelled(numbers)
    shapes = _Shapes(len(known), any_size=request.size is not None)
    kept = await _look(known, shapes, damage, disk)
    if not shapes.seen:
        raise DataError(f"{request.origin} holds no image", damaged=damage.sentences())
    chosen_size, channels = choose_size(shapes.sizes, request.size), shapes.channels
    size = chosen_size.size
    total = len(kept) * size[0] * size[1] * channels
    if not cache.asked and max(total, samples.bytes) <= cache.size_bytes:
        return None
    limits.check_total(total, request.origin)
    splits = resolve([sample.label for sample in kept], [sample.split for sample in kept])
    train, test = (
        [sample for sample, of in zip(kept, splits, strict=True) if of == split] for split in SPLITS
    )

    def decoded(sample: StoredSample) -> NDArray[np.uint8]:
        return decode(sample.read(), sample.origin, size=size, channels=channels)

    tests: list[tuple[NDArray[np.uint8], int]] = []
    await each(test, lambda sample: tests.append((decoded(sample), numbers[sample.label])), damage, disk)
    check_counts(len(train), len(tests), request)
    labels = np.array([numbers[sample.label] for sample in train], np.int64)
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
    """Most frequent size, and whether an image has colours, from the headers read so far."""

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
        """Number of headers that were counted and could be read."""
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
        """Channels of all images: 3 if one has colours, else 1."""
        return 3 if self._colours else 1


async def _look(
    samples: list[StoredSample], shapes: _Shapes, damage: Damage, disk: Disk
) -> list[StoredSample]:
    """Read headers until the result is certain. Returns the images without damaged headers."""
    kept: list[StoredSample] = []

    def look(sample: StoredSample) -> None:
        """Add the shape of one image, and keep the image if its header is whole."""
        header = None
        try:
            header = _header(sample)
            kept.append(sample)
        finally:
            shapes.add(header)

    for first in range(0, len(samples), AT_A_TIME):
        if shapes.settled:
            return kept + samples[first:]
        await each(samples[first : first + AT_A_TIME], look, damage, disk)
    return kept


def _header(sample: StoredSample) -> Header:
    try:
        return read_header(sample.read(HEADER_BYTES), sample.origin)
    except DataError:
        return read_header(sample.read(), sample.origin)
