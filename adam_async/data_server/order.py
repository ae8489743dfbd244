"""Pure: the order of an epoch, cut into image groups and shares.

The order is a function of (seed, epoch) and nothing else: every server, restart and replay sees the same.
Group `number` holds the images at positions `number * images_per_group` onwards; the last group of an epoch
may be short. A share is a contiguous range of group numbers; shares differ by one group at most.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adam_async.dice import Dice

PURPOSE = "epoch-order"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochOrder:
    """One epoch's order of the training images."""

    epoch: int
    images_per_group: int
    indices: NDArray[np.int64]
    """Shape (images,): a permutation of the image numbers."""

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


def epoch_order(dice: Dice, *, epoch: int, num_images: int, images_per_group: int) -> EpochOrder:
    """Shuffle the images of one epoch.

    Raises:
        ValueError: `num_images` or `images_per_group` is not positive.
    """
    if num_images < 1 or images_per_group < 1:
        raise ValueError(
            f"num_images and images_per_group must be positive, not {num_images} and {images_per_group}"
        )
    indices = dice.permutation(PURPOSE, keys=(epoch,), n=num_images)
    return EpochOrder(
        epoch=epoch, images_per_group=images_per_group, indices=np.ascontiguousarray(indices, dtype=np.int64)
    )


def count_groups(num_images: int, images_per_group: int) -> int:
    """Return the number of groups that `num_images` images make, a short last one included."""
    return -(-num_images // images_per_group)
