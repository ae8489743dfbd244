"""Decoded images of one data server: in memory while the cache has room, else in a file or decoded again.

Each epoch takes every image once, in a new order, so the least recently used images are needed soonest. With
room for a share c of the images, a cache that evicts the least recently used image finds c + (1 - c) ln(1 -
c) of the images (3 % with room for a quarter). A cache that evicts nothing finds c. So the images decoded
first stay, and none is ever evicted.

The memory is one array of slots, so one call can gather images that are all in memory.

For a small group, the calls and the waits for the interpreter's lock cost more than copying its bytes; so
does sending it as separate tensors. So the cache gathers groups that are neighbours in the epoch's order
together, as a *block*. An answer with several such groups is one slice of the block. The cache drops a block
when all its groups are taken; the memory is freed with the last slice.

A block of transformed images, or of images that are not in memory, takes time. For such images `prepare` and
`want` return the blocks to make. The caller makes blocks on its thread and adds them with `put`. If memory is
short, the cache drops blocks without a waiting request, oldest first. A block depends only on the epoch and
its number, so it can be made again.
"""

import logging
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.dataset import Dataset, StoredImages
from adam_async.data_server.epoch import EpochOrder
from adam_async.data_server.sources.files import Scratch
from adam_async.run.counts import CacheCounts
from adam_async.runtime.clock import Clock

logger = logging.getLogger(__name__)

SHARE_OF_BLOCKS = 4
"""Divisor of the cache size that gives the minimum memory for blocks and answers."""

MakeScratch = Callable[[Path], Scratch]


class CachedImages:
    """Images of a data set, which stay in memory after decoding. For one thread at a time.

    Args:
        size_bytes: Memory for images; a size below one image means no memory.
        spill: Folder of the scratch file for images that do not fit; None: such images are decoded again.
    """

    dtype = np.dtype(np.uint8)

    def __init__(
        self,
        stored: StoredImages,
        *,
        size_bytes: int,
        spill: Path | None = None,
        clock: Clock,
        make_scratch: MakeScratch = Scratch,
    ) -> None:
        self._stored = stored
        self._clock = clock
        self.shape = stored.shape
        self._image_bytes = prod(self.shape[1:])
        slots = min(size_bytes // self._image_bytes, len(stored))
        self._slots = np.empty((slots, *self.shape[1:]), np.uint8)
        self._slot_of = np.full(len(stored), -1, np.int64)
        self._used = 0
        self._spill = spill
        self._make_scratch = make_scratch
        self._scratch: Scratch | None = None
        self._place_of: dict[int, int] = {}
        """Position of each image in the scratch file."""
        self._hits = self._misses = self._decoded = self._read_back = 0
        self._decode_s = 0.0

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def reserved_bytes(self) -> int:
        """Memory of all slots, in bytes."""
        return self._slots.nbytes

    @property
    def complete(self) -> bool:
        """Whether all images are in memory."""
        return self._used == len(self)

    def take(self, chosen: NDArray[np.int64], axis: int = 0) -> NDArray[np.uint8]:
        """Gather images by number, shape (n, C, H, W). Blocks unless all images are in memory.

        Raises:
            DataError: An image cannot be read; see `StoredImages.read`.
        """
        assert axis == 0, "images are along axis 0"
        slots = self._slot_of[chosen]
        missing = np.flatnonzero(slots < 0)
        self._hits += len(slots) - len(missing)
        if not len(missing):
            return self._slots.take(slots, axis=0)
        images = np.empty((len(chosen), *self.shape[1:]), np.uint8)
        here = slots >= 0
        images[here] = self._slots[slots[here]]
        for place in missing.tolist():
            self._fetch(int(chosen[place]), images[place])
        return images

    def _fetch(self, number: int, into: NDArray[np.uint8]) -> None:
        slot = int(self._slot_of[number])
        if slot >= 0:  # the call has the image twice
            self._hits += 1
            into[...] = self._slots[slot]
            return
        self._misses += 1
        if number in self._place_of and self._read_aside(number, into):
            return
        began = self._clock()
        into[...] = self._stored.read(number)
        self._decode_s += self._clock() - began
        self._decoded += 1
        if self._used < len(self._slots):
            self._slots[self._used] = into
            self._slot_of[number] = self._used
            self._used += 1
        elif self._spill is not None:
            self._write_aside(number, into)

    # --- the scratch file --------------------------------------------------------------------

    def _write_aside(self, number: int, image: NDArray[np.uint8]) -> None:
        assert self._spill is not None
        place = len(self._place_of)
        try:
            if self._scratch is None:
                self._scratch = self._make_scratch(self._spill)
            self._scratch.write(place * self._image_bytes, image)
        except OSError as error:
            self._stop_spilling(f"takes no more decoded images ({error.strerror or error})")
            return
        self._place_of[number] = place

    def _read_aside(self, number: int, into: NDArray[np.uint8]) -> bool:
        assert self._scratch is not None
        try:
            self._scratch.read(self._place_of[number] * self._image_bytes, into)
        except OSError as error:
            self._place_of.clear()
            self._stop_spilling(f"gives back no decoded image ({error.strerror or error})")
            return False
        self._read_back += 1
        return True

    def _stop_spilling(self, why: str) -> None:
        logger.warning("%s %s; images that are not in memory are decoded again from now on", self._spill, why)
        self._spill = None

    def close(self) -> None:
        """Delete the scratch file; no image may be taken afterwards."""
        if self._scratch is not None:
            self._scratch.close()

    def statistics(self) -> CacheCounts:
        """Return the number of images in memory and in the file, and how many requested images were found in
        each."""
        return CacheCounts(
            resident_images=self._used,
            resident_bytes=self._used * self._image_bytes,
            hits=self._hits,
            misses=self._misses,
            decoded=self._decoded,
            decode_s=round(self._decode_s, 6),
            spilled=len(self._place_of),
            spilled_bytes=len(self._place_of) * self._image_bytes,
            read_back=self._read_back,
            replaced=len(self._stored.replaced),
            replaced_why=self._stored.sentences(),
        )


Images = NDArray[np.uint8] | CachedImages | StoredImages
"""Images by number, in memory or not: with ``shape`` (N, C, H, W), ``dtype``, ``len`` and ``take``."""


Pictures = tuple[NDArray[np.uint8], NDArray[Any]]
"""Images (n, C, H, W) and labels (n,)."""

Pieces = tuple[tuple[NDArray[np.uint8], ...], NDArray[Any]]
"""Images of groups, in one or more arrays (n, C, H, W) in order, and the labels of all these images."""

Transform = Callable[[NDArray[np.uint8], NDArray[np.int64]], NDArray[np.uint8]]
"""Function from images and their numbers in the data set to transformed images. From any thread."""

BLOCK_BYTES = 1 << 16
"""Maximum size in bytes of the images in a block of several groups: about five groups of 16 images of
28x28."""

INSTANT_BLOCK_BYTES = 1 << 19
"""Maximum size in bytes of a block that is only gathered, as fast as a few images are transformed."""

JOINED_BYTES = 1 << 17
"""Size in bytes below which pieces of an answer are joined: a copy costs less than a separate tensor."""

FORGOTTEN_AFTER = 4
"""Age at which the cache drops a block if memory is short, as a multiple of the number of cached blocks. A
block's age is the number of blocks made after it. The worker of such a block is lost, or far too slow."""


class MemoryInUse:
    """Counts the bytes of the watched arrays until they are freed.

    An answer that waits in a link, or a group in training in the same process, is a slice of an array. The
    array exists as long as the slice does. Any thread may free an array; all other state belongs to one
    thread.
    """

    def __init__(self) -> None:
        self._watched: dict[int, tuple[weakref.ref[NDArray[Any]], int]] = {}
        self._gone: deque[int] = deque()
        self._bytes = 0

    def watch(self, array: NDArray[Any]) -> None:
        """Count the memory of an array until its last slice is freed. Watch an array once."""
        owner = array if array.base is None else array.base
        gone = self._gone
        reference = weakref.ref(owner, lambda reference: gone.append(id(reference)))
        self._watched[id(reference)] = reference, array.nbytes
        self._bytes += array.nbytes

    @property
    def bytes(self) -> int:
        """Size of the watched arrays that are not freed, in bytes."""
        while self._gone:
            _, size = self._watched.pop(self._gone.popleft())
            self._bytes -= size
        return self._bytes

    def __repr__(self) -> str:
        return f"<MemoryInUse of {len(self._watched)} arrays, {self._bytes} bytes>"


class GroupCache:
    """Groups of one epoch, ready for workers.

    Args:
        dataset: Data set with the labels, and with the images if `images` is None.
        transform: Transform of the images; None without one.
        instant: Whether the requesting call makes the blocks itself; None: only if images are in memory and
            need no transform.
        memory: Counts handed-out arrays until they are freed.
        limit_bytes: Memory for blocks and handed-out arrays, in bytes; None: no bound.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: EpochOrder,
        *,
        takers: int = 1,
        transform: Transform | None = None,
        images: Images | None = None,
        instant: bool | None = None,
        memory: MemoryInUse | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        self._images = dataset.train_images if images is None else images
        self._labels = dataset.train_labels
        self._order = order
        self._takers = takers
        self._transform = transform
        if instant is None:
            instant = transform is None and isinstance(self._images, np.ndarray)
        self.instant = instant
        """Whether the cache makes all blocks itself, so that the caller makes none."""
        self._memory = MemoryInUse() if memory is None else memory
        self._limit_bytes = limit_bytes
        self.evicted = 0
        """Number of blocks dropped before all their groups were taken."""
        group_bytes = order.images_per_group * prod(dataset.image_shape)
        self._block_groups = max((INSTANT_BLOCK_BYTES if instant else BLOCK_BYTES) // group_bytes, 1)
        self.block_bytes = self._block_groups * group_bytes
        """Size of a whole block's images, in bytes."""
        self._making: set[int] = set()
        self._ready: dict[int, tuple[Pictures, int]] = {}
        """Blocks by number, the oldest first, and the number of blocks made before each."""
        self._made = 0
        self._left: dict[int, int] = {}
        """Number of untaken groups in each block; a group counts once for each of its takers. A group taken
        more often than that only makes the cache drop its block early."""

    # --- making ------------------------------------------------------------------------------

    def prepare(self, numbers: Iterable[int]) -> list[int]:
        """Gather the blocks of these groups that neither exist nor were taken before, or return them.

        An instant cache gathers them while memory has room, and returns none. Otherwise the caller must
        `make` and `put` the returned blocks; each is returned once until it is forgotten.
        """
        missing = [
            block for block in self.blocks(numbers) if self._is_missing(block) and self._left_in(block)
        ]
        if not self.instant:
            self._making.update(missing)
            return missing
        for block in missing:
            if self.has_room():
                self.put(block, self.make(block))
        return []

    def want(self, numbers: Sequence[int]) -> list[int]:
        """Return the blocks to `make` and `put` before these groups can be taken."""
        missing = [block for block in self.blocks(numbers) if self._is_missing(block)]
        self._making.update(missing)
        return missing

    def forget(self, block: int) -> None:
        """Forget a named block that is not made after all."""
        self._making.discard(block)

    def make(self, block: int) -> Pictures:
        """Gather and transform a block. From any thread."""
        size, groups = self._order.images_per_group, self._groups_of(block)
        return self._cut_out(self._order.indices[groups.start * size : groups.stop * size])

    def put(self, block: int, pictures: Pictures) -> None:
        """Add a block that was named and then made."""
        self._making.discard(block)
        self._ready[block] = pictures, self._made
        self._watch(pictures[0])

    def has_room(self, making: int = 0) -> bool:
        """Return whether memory has room for another block made ahead, beside this many unfinished ones."""
        limit = self._limit_bytes
        return limit is None or self._memory.bytes + (making + 1) * self.block_bytes <= limit

    def evict(self, wanted: Collection[int] = ()) -> None:
        """Drop blocks, the oldest first, until memory suffices; wanted ones stay.

        If memory is within the limit but has no room for a further block, drops only blocks of age
        `FORGOTTEN_AFTER` or more.
        """
        limit = self._limit_bytes
        if limit is None:
            return
        old = self._made - FORGOTTEN_AFTER * max(len(self._ready), 1)
        for block in list(self._ready):
            if self._memory.bytes <= limit and (self._ready[block][1] > old or self.has_room()):
                return
            if block not in wanted:
                del self._ready[block]
                self.evicted += 1

    # --- taking ------------------------------------------------------------------------------

    def blocks(self, numbers: Iterable[int]) -> list[int]:
        """Return the blocks of these groups, each once."""
        return list(dict.fromkeys([number // self._block_groups for number in numbers]))

    def has(self, numbers: Iterable[int]) -> bool:
        """Return whether the blocks of these groups exist."""
        return all(number // self._block_groups in self._ready for number in numbers)

    def take(self, numbers: Sequence[int]) -> Pieces:
        """Take out at least one group; gather groups without a block now.

        Returns the groups' images and labels, in order; no group is in two arrays.

        Raises:
            IndexError: The epoch has no such group.
        """
        if self.instant:
            self.prepare(numbers)
            self.evict(self.blocks(numbers))
        pieces = [self._piece(first, last) for first, last in self._runs(numbers)]
        if len(pieces) == 1:
            return (pieces[0][0],), pieces[0][1]
        images = tuple(map(self._joined, _runs_of_small([images for images, _ in pieces])))
        return images, np.concatenate([labels for _, labels in pieces])

    def _joined(self, pieces: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
        if len(pieces) == 1:
            return pieces[0]
        images = np.concatenate(pieces)
        self._watch(images)
        return images

    def _runs(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Return the first and last group of each run of neighbours within a block."""
        runs: list[tuple[int, int]] = []
        for number in numbers:
            if runs and number == runs[-1][1] + 1 and number % self._block_groups:
                runs[-1] = (runs[-1][0], number)
            else:
                runs.append((number, number))
        return runs

    def _piece(self, first: int, last: int) -> Pictures:
        size = self._order.images_per_group
        self._order.group(last)  # raises IndexError
        number = first // self._block_groups
        block, left = self._ready.get(number), self._left_in(number)
        wanted = range(first, last + 1)
        self._left[number] = max(left - len(wanted), 0)
        if not self._left[number]:
            self._ready.pop(number, None)
        if block is None:
            pieces = self._cut_out(np.concatenate([self._order.group(group) for group in wanted]))
            self._watch(pieces[0])
            return pieces
        (images, labels), _ = block
        at, end = ((place - number * self._block_groups) * size for place in (first, last + 1))
        return images[at:end], labels[at:end]

    def _watch(self, images: NDArray[np.uint8]) -> None:
        self._made += 1
        self._memory.watch(images)

    def _is_missing(self, block: int) -> bool:
        return block not in self._ready and block not in self._making

    def _left_in(self, block: int) -> int:
        return self._left.get(block, len(self._groups_of(block)) * self._takers)

    def _groups_of(self, block: int) -> range:
        first = block * self._block_groups
        return range(first, min(first + self._block_groups, self._order.num_groups))

    def _cut_out(self, chosen: NDArray[np.int64]) -> Pictures:
        """Return images, transformed, and their labels."""
        images = self._images.take(chosen, axis=0)
        if self._transform is not None:
            images = self._transform(images, chosen)
        return images, self._labels.take(chosen, axis=0)

    def __repr__(self) -> str:
        left = sum(map(self._left_in, self._ready))
        return f"<GroupCache of epoch {self._order.epoch}, {left} groups>"


def _runs_of_small(pieces: Sequence[NDArray[np.uint8]]) -> list[list[NDArray[np.uint8]]]:
    """Return the runs of neighbouring pieces to join. A run of small pieces ends once it has
    `JOINED_BYTES`."""
    runs: list[list[NDArray[np.uint8]]] = []
    size = JOINED_BYTES
    for piece in pieces:
        if size >= JOINED_BYTES or piece.nbytes >= JOINED_BYTES:
            runs.append([])
            size = 0
        runs[-1].append(piece)
        size += piece.nbytes
    return runs
