"""Decoded images of one data server: in memory while the cache has room, else in a file or decoded again.

Each epoch takes every image once, in a new order, so the least recently used images are needed again soonest.
With room for a share c of the images, a cache that evicts the least recently used finds c + (1 - c) ln(1 - c)
of the images (3 % with room for a quarter), and one that evicts nothing finds c. The images decoded first
therefore stay, and none is ever evicted.

The memory is one array of slots, so images that are all in memory are gathered in one call.
"""

import logging
from collections.abc import Callable
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.dataset import StoredImages
from adam_async.data_server.sources.file_ranges import Scratch
from adam_async.run.counts import CacheCounts
from adam_async.runtime.clock import Clock

logger = logging.getLogger(__name__)

SHARE_OF_BLOCKS = 4
"""Divisor of the cache size that gives the minimum memory for blocks and answers."""

MakeScratch = Callable[[Path], Scratch]


class CachedImages:
    """Images of a data set, which stay in memory after decoding. For one thread at a time.

    Args:
        size_bytes: Memory for images; a size below one image means none.
        spill: Folder of the scratch file for images that do not fit; None: they are decoded again.
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
        """Gather images by their numbers, shape (n, C, H, W). Blocks unless all images are in memory.

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
