"""Pure: the order of an epoch, cut into image groups.

The order depends only on the seed, the epoch, and the images that the epoch before skipped: every server,
restart and replay makes the same order. The skipped images depend on the order of the epoch before, and
therefore on all epochs before that one; one bit for each image represents the skipped images. Skipped images
come first, then all others, both in the order of a permutation that depends on seed and epoch only. Group
`number` holds the images at positions `number * images_per_group` onwards; the last group of an epoch may be
short.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adam_async.model.keyed_random import Dice
from adam_async.run.epoch_shares import Ranges

PURPOSE = "epoch-order"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochOrder:
    """One epoch's order of the training images."""

    epoch: int
    images_per_group: int
    indices: NDArray[np.int64]
    """Shape (images,): a permutation of the image numbers."""
    carried: int = 0
    """Number of images that come first because the epoch before has skipped them."""

    @property
    def carried_images(self) -> bytes:
        """The images that come first, because the epoch before has skipped them.

        One bit for each image of the order, by number, from the highest bit of a byte on; empty if all are 0.
        """
        return _bits(self.indices[: self.carried], len(self.indices))

    def images_in(self, ranges: Ranges) -> bytes:
        """Return the images of ranges of groups, in the form of `carried_images`."""
        size = self.images_per_group
        images = [self.indices[start * size : stop * size] for start, stop in ranges]
        return _bits(np.concatenate(images), len(self.indices)) if images else b""

    @property
    def num_groups(self) -> int:
        """Number of groups of the epoch."""
        return count_groups(len(self.indices), self.images_per_group)

    def group(self, number: int) -> NDArray[np.int64]:
        """Return the image numbers of group `number`; a view. Raises IndexError beyond the last group."""
        if not 0 <= number < self.num_groups:
            raise IndexError(f"epoch {self.epoch} has groups 0 to {self.num_groups - 1}, not {number}")
        start = number * self.images_per_group
        return self.indices[start : start + self.images_per_group]

    def __repr__(self) -> str:
        return f"<EpochOrder {self.epoch} {len(self.indices)} images {self.num_groups} groups>"


class EpochOrders:
    """The orders of a run's epochs, each of which may depend on the order before.

    Raises:
        ValueError: `num_images` or `images_per_group` is not positive.
    """

    def __init__(self, dice: Dice, *, num_images: int, images_per_group: int) -> None:
        if num_images < 1 or images_per_group < 1:
            raise ValueError(
                f"num_images and images_per_group must be positive, not {num_images} and {images_per_group}"
            )
        self._dice = dice
        self.num_images = num_images
        self._images_per_group = images_per_group
        self._last: EpochOrder | None = None

    @property
    def num_groups(self) -> int:
        return count_groups(self.num_images, self._images_per_group)

    def images_of(self, number: int) -> int:
        """Return the number of images of a group; 0 if no epoch has this group."""
        return max(min(self._images_per_group, self.num_images - number * self._images_per_group), 0)

    def order(
        self, epoch: int, skipped: Sequence[Ranges] = (), *, first: int = 1, carried: bytes = b""
    ) -> EpochOrder:
        """Shuffle the images of one epoch.

        Args:
            epoch: From 1.
            skipped: For each epoch from `first` to the one before `epoch`, ranges of its untrained groups.
                All calls for one run must have the same values.
            first: First epoch of `skipped`, at most `epoch`.
            carried: `EpochOrder.carried_images` of epoch `first`.
        """

        def of(number: int) -> Ranges:
            return skipped[number - first] if number - first < len(skipped) else ()

        begin, last = epoch, self._last
        while begin > first and of(begin - 1) and (last is None or last.epoch != begin):
            begin -= 1
        if last is not None and last.epoch == begin:
            order = last
        else:
            order = self._shuffle(begin, carried if begin == first else b"")
        for number in range(begin + 1, epoch + 1):
            order = self._shuffle(number, order.images_in(of(number - 1)))
        self._last = order
        return order

    def _shuffle(self, epoch: int, carried: bytes) -> EpochOrder:
        indices = self._dice.permutation(PURPOSE, keys=(epoch,), n=self.num_images)
        indices = np.ascontiguousarray(indices, dtype=np.int64)
        count = 0
        if carried:
            bits = np.unpackbits(np.frombuffer(carried, np.uint8), count=self.num_images)
            come_first = bits.astype(np.bool_)[indices]
            count = int(np.count_nonzero(come_first))
            indices = np.concatenate([indices[come_first], indices[~come_first]])
        return EpochOrder(
            epoch=epoch, images_per_group=self._images_per_group, indices=indices, carried=count
        )


def _bits(images: NDArray[np.int64], num_images: int) -> bytes:
    """Return one bit for each of `num_images` images, set for these images; empty without any."""
    if not len(images):
        return b""
    chosen = np.zeros(num_images, np.bool_)
    chosen[images] = True
    return np.packbits(chosen).tobytes()


def count_groups(num_images: int, images_per_group: int) -> int:
    """Return the number of groups of `num_images` images, including a short last group."""
    return -(-num_images // images_per_group)
