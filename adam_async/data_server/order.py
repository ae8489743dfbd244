"""Pure: the order of an epoch, cut into image groups.

The order is a function of the seed, the epoch, and what the epochs before it skipped: every server, restart
and replay sees the same. Images that the epoch before has skipped come first; they, and all others behind
them, are in the order of a permutation that depends on seed and epoch only. Group `number` holds the images
at positions `number * images_per_group` onwards; the last group of an epoch may be short.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adam_async.dice import Dice
from adam_async.shares import Ranges

PURPOSE = "epoch-order"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochOrder:
    """One epoch's order of the training images."""

    epoch: int
    images_per_group: int
    indices: NDArray[np.int64]
    """Shape (images,): a permutation of the image numbers."""
    carried: int = 0
    """So many images come first because the epoch before has skipped them."""

    @property
    def num_groups(self) -> int:
        """How many groups the epoch has."""
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
    """The orders of a run's epochs, each of which may depend on the one before.

    Args:
        dice: Of the run.
        num_images: Training images.
        images_per_group: Of a full group.

    Raises:
        ValueError: `num_images` or `images_per_group` is not positive.
    """

    def __init__(self, dice: Dice, *, num_images: int, images_per_group: int) -> None:
        if num_images < 1 or images_per_group < 1:
            raise ValueError(
                f"num_images and images_per_group must be positive, not {num_images} and {images_per_group}"
            )
        self._dice = dice
        self._num_images = num_images
        self._images_per_group = images_per_group
        self._last: EpochOrder | None = None

    def order(self, epoch: int, skipped: Sequence[Ranges] = ()) -> EpochOrder:
        """Shuffle the images of one epoch.

        Args:
            epoch: From 1.
            skipped: For each epoch of the run before it, ranges of its groups that were not trained. They are
                the same at every call for one run.
        """
        first = epoch
        while first > 1 and _of(skipped, first - 1) and (self._last is None or self._last.epoch != first):
            first -= 1
        order = self._last if self._last is not None and self._last.epoch == first else None
        if order is None:
            order = self._shuffle(first, None)
        for number in range(first + 1, epoch + 1):
            order = self._shuffle(number, self._images_in(order, _of(skipped, number - 1)))
        self._last = order
        return order

    def _images_in(self, order: EpochOrder, ranges: Ranges) -> NDArray[np.int64]:
        size = self._images_per_group
        return np.concatenate([order.indices[start * size : stop * size] for start, stop in ranges])

    def _shuffle(self, epoch: int, first: NDArray[np.int64] | None) -> EpochOrder:
        indices = self._dice.permutation(PURPOSE, keys=(epoch,), n=self._num_images)
        indices = np.ascontiguousarray(indices, dtype=np.int64)
        if first is not None:
            carried = np.zeros(self._num_images, np.bool_)
            carried[first] = True
            come_first = carried[indices]
            indices = np.concatenate([indices[come_first], indices[~come_first]])
        return EpochOrder(
            epoch=epoch,
            images_per_group=self._images_per_group,
            indices=indices,
            carried=0 if first is None else len(first),
        )


def _of(skipped: Sequence[Ranges], epoch: int) -> Ranges:
    return skipped[epoch - 1] if epoch <= len(skipped) else ()


def epoch_order(dice: Dice, *, epoch: int, num_images: int, images_per_group: int) -> EpochOrder:
    """Shuffle the images of one epoch before which nothing was skipped.

    Raises:
        ValueError: `num_images` or `images_per_group` is not positive.
    """
    return EpochOrders(dice, num_images=num_images, images_per_group=images_per_group).order(epoch)


def count_groups(num_images: int, images_per_group: int) -> int:
    """Return the number of groups that `num_images` images make, a short last one included."""
    return -(-num_images // images_per_group)
