"""Pure: groups gathered ahead of need, many at a time.

Gathering one small group costs more in calls, and in waits for the interpreter's lock, than in copied bytes.
So neighbouring groups of the epoch's order are gathered together, as a *block*; a group is then a view of it.
A block is let go when its groups are taken, and lives on for as long as somebody reads one of them.
"""

from collections.abc import Iterable
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.dataset import Dataset
from adam_async.data_server.order import EpochOrder

Group = tuple[NDArray[np.uint8], NDArray[Any]]
"""Images (n, C, H, W) and labels (n,)."""

BLOCK_BYTES = 1 << 19
"""Images of a block at most, unless one group alone has more: half of a common second-level cache."""


class Stock:
    """Groups of one epoch, ready to be handed out.

    Args:
        dataset: Where the images are.
        order: Which of them belong to which group.
    """

    def __init__(self, dataset: Dataset, order: EpochOrder) -> None:
        self._dataset = dataset
        self._order = order
        group_bytes = order.images_per_group * prod(dataset.image_shape)
        self._block_groups = max(BLOCK_BYTES // group_bytes, 1)
        self._blocks: dict[int, dict[int, Group]] = {}

    def prepare(self, numbers: Iterable[int]) -> None:
        """Gather the blocks of these groups, unless they are there or were there before."""
        for block in dict.fromkeys([number // self._block_groups for number in numbers]):
            if block not in self._blocks:
                self._blocks[block] = self._gather(block)

    def take(self, number: int) -> Group:
        """Take a group out; one that was taken before is gathered once more.

        Raises:
            IndexError: The epoch has no such group.
        """
        self.prepare((number,))
        group = self._blocks[number // self._block_groups].pop(number, None)
        if group is not None:
            return group
        chosen = self._order.group(number)
        return self._dataset.train_images[chosen], self._dataset.train_labels[chosen]

    def _gather(self, block: int) -> dict[int, Group]:
        size, first = self._order.images_per_group, block * self._block_groups
        stop = min(first + self._block_groups, self._order.num_groups)
        chosen = self._order.indices[first * size : stop * size]
        images, labels = self._dataset.train_images[chosen], self._dataset.train_labels[chosen]
        return {
            number: (images[at : at + size], labels[at : at + size])
            for number, at in zip(range(first, stop), range(0, len(chosen), size), strict=True)
        }

    def __repr__(self) -> str:
        return f"<Stock of epoch {self._order.epoch}, {sum(map(len, self._blocks.values()))} groups>"
