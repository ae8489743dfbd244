"""Data sets from encoded images with labels.

The headers decide the number of channels and, unless the caller gives one, the size. Then each split's images
are decoded into one array. Or the training images stay in their files and are decoded on demand;
`StoredImages` handles their later damage. Decoding runs on the disk's thread, some hundred images at a time,
so a cancellation does not wait for all of them.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.class_names import number_classes
from adam_async.data_server.dataset import Damage, Dataset, StoredImages, make_dataset
from adam_async.data_server.sources import limits
from adam_async.data_server.sources.files import check_kind, read_piece
from adam_async.data_server.sources.pictures import Header, decode, read_header
from adam_async.data_server.sources.splits import SPLITS, Split, resolve
from adam_async.errors import DataError, counted, failing_as
from adam_async.run.image_size import ChosenSize, Size, choose_size
from adam_async.run.memory_sizes import CacheLimits
from adam_async.runtime.disk import Disk

T = TypeVar("T")

HEADER_BYTES = 1 << 12
"""Size of the first read of an image, in bytes; an image with a longer header is read whole."""

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
    """Memory for training images; images beyond it stay in their files. None: all are decoded."""
    room_bytes: int = limits.MAX_TOTAL_BYTES
    """Memory in bytes for all images that are decoded at once, and for each file that is read whole."""
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
    """Split of the image, or the rank that decides its split."""
    data: bytes

    @property
    def size(self) -> int:
        """Size in bytes."""
        return len(self.data)

    def read(self, size: int | None = None) -> bytes:
        """Return the image's bytes, or the first `size` of them."""
        return self.data[:size]


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
        """Return the image's bytes, or the first `size` of them. Blocks.

        Raises:
            DataError: The file has changed or cannot be read.
        """
        size = self.size if size is None else min(size, self.size)
        with failing_as(DataError, f"{self.origin} cannot be read"):
            data = read_piece(self.path, self.offset, size)
        if len(data) < size:
            raise DataError(
                f"{self.origin} has become shorter than {self.size} bytes: files must not change in use"
            )
        return data


AnySample = Sample | StoredSample


def stored_image(path: Path, label: str, split: Split | int) -> StoredSample:
    """Return an image that is a file. Blocks.

    Raises:
        DataError: The file is unreadable, or is no ordinary file of an image's size.
    """
    try:
        size = check_kind(path, limits.MAX_IMAGE_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a zero character in the path
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return StoredSample(str(path), label, split, path, 0, size)


class Samples:
    """Collects the images of a data set, up to the memory for them."""

    def __init__(self, request: LoadRequest) -> None:
        self.request = request
        self.all: list[AnySample] = []
        self.bytes = 0

    def add(self, sample: AnySample) -> None:
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
        # Images in files take no memory yet.
        room_bytes = self.request.room_bytes if isinstance(sample, Sample) else limits.MAX_TOTAL_BYTES
        limits.check_total(self.bytes, self.request.origin, room_bytes)
        self.all.append(sample)

    def labelled(self, numbers: Mapping[str, int]) -> list[AnySample]:
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
    samples: Samples,
    *,
    cache: CacheLimits | None = None,
    numbers: Mapping[str, int] | None = None,
    class_names: tuple[str, ...] = (),
) -> Dataset:
    """Join images with their labels; leave training images in their files if the cache is too small.

    Headers are read until the most frequent size and the number of channels are certain, or to the end if all
    images are decoded now. Test images are always decoded at once, because the event loop sends them.

    Args:
        cache: Size of the cache; a given size leaves images in their files. None decodes all images.
        numbers: Class number of each label; by default the labels decide.
        class_names: Class names; without `numbers`, only for labels that are numbers.

    Raises:
        DataError: No image is left to train or to test with, too many images are damaged, or one is and
            damage is not skipped. Damage of stored images beyond their headers raises later.
    """
    request = samples.request
    damage, disk = request.damage, request.disk
    if numbers is None:
        numbers, names = number_classes(sample.label for sample in samples.all)
        class_names = names or class_names
    known = samples.labelled(numbers)
    shapes = _Shapes(known, samples, cache)
    kept = await shapes.look(known)
    if not shapes.sizes:
        why = "".join(f": {sentence}" for sentence in damage.sentences()[:1])
        raise DataError(f"{request.origin} holds no image{why}", damaged=damage.sentences())
    shapes.check_room(len(kept))
    chosen_size, channels = shapes.chosen_size, shapes.channels
    size = chosen_size.size
    shape = channels, size[1], size[0]
    splits = resolve([sample.label for sample in kept], [sample.split for sample in kept])
    train, test = (
        [sample for sample, of in zip(kept, splits, strict=True) if of == split] for split in SPLITS
    )

    def decoded(sample: AnySample) -> NDArray[np.uint8]:
        return decode(sample.read(), sample.origin, size=size, channels=channels)

    trained: tuple[NDArray[np.uint8] | StoredImages, NDArray[np.int64]]
    if shapes.stay_stored:
        labels = np.array([numbers[sample.label] for sample in train], np.int64)
        stored = StoredImages(
            lambda number: decoded(train[number]),
            image_shape=shape,
            labels=labels,
            origin=request.origin,
            policy=damage.policy,
        )
        trained = stored, labels
    else:
        trained = await _decoded(train, decoded, shape, numbers, request)
    tests = await _decoded(test, decoded, shape, numbers, request)
    check_counts(len(trained[1]), len(tests[1]), request)
    make = partial(
        make_dataset,
        name=request.name,
        source=describe_source(request, fitted=chosen_size.note, deep=shapes.deep),
        train=trained,
        test=tests,
        origins=origins_of(request.origin),
        class_names=class_names,
        damaged=damage.sentences(),
    )
    return await disk.run(make)


class _Shapes:
    """Most frequent size, and whether an image has colours, from the headers read so far."""

    def __init__(self, known: Sequence[AnySample], samples: Samples, cache: CacheLimits | None) -> None:
        self._images = self._left = len(known)
        self._samples = samples
        self._asked = samples.request.size
        self._cache = cache
        self.sizes: Counter[Size] = Counter()
        self._colours = False
        self.deep = 0
        self.largest: tuple[int, str] = 0, ""
        """Number of pixels in the largest image, and this image's origin."""

    async def look(self, known: Sequence[AnySample]) -> list[AnySample]:
        """Read headers until the result is certain. Returns the images without damaged headers."""
        kept: list[AnySample] = []

        def look(sample: AnySample) -> None:
            """Add one image's shape, and keep the image if its header is whole."""
            header = None
            try:
                header = _header(sample)
                kept.append(sample)
            finally:
                self.add(header, sample.origin)

        request = self._samples.request
        for first in range(0, len(known), AT_A_TIME):
            if self.settled and self.stay_stored:
                return [*kept, *known[first:]]
            await each(known[first : first + AT_A_TIME], look, request.damage, request.disk)
        return kept

    @property
    def stay_stored(self) -> bool:
        """Whether the training images stay in their files."""
        if self._cache is None or not self.sizes:
            return False
        largest = max(self._images * self.image_bytes, self._samples.bytes)
        return self._cache.asked or largest > self._cache.size_bytes

    def add(self, header: Header | None, origin: str) -> None:
        """Count the next image's header; None if it is unreadable."""
        self._left -= 1
        if header is not None:
            self.sizes[header.size] += 1
            self._colours = self._colours or not header.is_grey
            self.deep += header.is_deep
            self.largest = max(self.largest, (header.pixels, origin), key=itemgetter(0))

    @property
    def settled(self) -> bool:
        """Whether the remaining images can change neither the size nor the channels."""
        most = max(self.sizes.values(), default=0)
        return not self._left or (self._colours and (self._asked is not None or 2 * most > self._images))

    @property
    def chosen_size(self) -> ChosenSize:
        return choose_size(self.sizes, self._asked)

    @property
    def channels(self) -> int:
        """Channels of all images: 3 if one has colours, else 1."""
        return 3 if self._colours else 1

    def check_room(self, images: int) -> None:
        """Check that the images have room, and while one is decoded also its pixels. Raises DataError."""
        request, is_stored = self._samples.request, self.stay_stored
        room_bytes = limits.MAX_TOTAL_BYTES if is_stored else request.room_bytes
        limits.check_total(images * self.image_bytes, request.origin, room_bytes)
        if not is_stored:
            pixels, origin = self.largest
            limits.check_total(BYTES_OF_PIXEL * pixels, origin, room_bytes)

    @property
    def image_bytes(self) -> int:
        """Size of a decoded image, in bytes."""
        return prod(self.chosen_size.size) * self.channels


def _header(sample: AnySample) -> Header:
    try:
        return read_header(sample.read(HEADER_BYTES), sample.origin)
    except DataError:
        return read_header(sample.read(), sample.origin)


def describe_source(request: LoadRequest, *, fitted: str = "", deep: int = 0) -> str:
    """Return the sentence on a data set's source, including changes to its images."""
    source, damage = request.source, request.damage
    if deep:
        source += f"; {counted(deep, 'image')} of 16 bits scaled to 8"
    if fitted:
        source += f"; {fitted}"
    if damage.count:
        source += f"; {damage.count} were damaged and left out"
    return source


def check_counts(train: int, test: int, request: LoadRequest) -> None:
    """Refuse a data set that is too damaged, or that lacks images for training or testing.

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
    """Return the names that errors use for a data set's four arrays."""
    train, test = f"{origin}, train set", f"{origin}, test set"
    return f"{train}, images", f"{train}, labels", f"{test}, images", f"{test}, labels"


async def _decoded(
    samples: Sequence[AnySample],
    decoded: Callable[[AnySample], NDArray[np.uint8]],
    shape: tuple[int, int, int],
    numbers: Mapping[str, int],
    request: LoadRequest,
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the undamaged images (N, C, H, W) and their class numbers."""
    images = np.empty((len(samples), *shape), np.uint8)
    labels: list[int] = []

    def read(sample: AnySample) -> None:
        images[len(labels)] = decoded(sample)
        labels.append(numbers[sample.label])

    await each(samples, read, request.damage, request.disk)
    return images[: len(labels)], np.array(labels, np.int64)


async def each(
    items: Sequence[T],
    function: Callable[[T], None],
    damage: Damage,
    disk: Disk,
    *,
    at_a_time: int = AT_A_TIME,
) -> None:
    """Call a function for each image on the disk's thread; an image that the function refuses is damaged.

    Raises:
        DataError: An image is damaged, and damage is not skipped.
    """

    def some(first: int) -> None:
        """Call the function for as many images as the disk's thread handles at a time."""
        for item in items[first : first + at_a_time]:
            try:
                function(item)
            except DataError as error:
                damage.note(str(error))

    for first in range(0, len(items), at_a_time):
        await disk.run(some, first)
