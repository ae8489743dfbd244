"""Pure: groups gathered ahead of need, many at a time, and handed out many at a time.

Gathering one small group costs more in calls, and in waits for the interpreter's lock, than in copied
bytes; so does sending it as tensors of its own. So neighbouring groups of the epoch's order are gathered
together, as a *block*, and neighbours that are taken together are one slice of it. A block is let go when
all its groups are taken, and lives on for as long as somebody reads one of them.

Where images are transformed, a block takes time: `prepare` then says which blocks are to be made, and whoever
has a thread makes them and puts them here.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.dataset import Dataset
from adam_async.data_server.order import EpochOrder

Pictures = tuple[NDArray[np.uint8], NDArray[Any]]
"""Images (n, C, H, W) and labels (n,)."""

Transform = Callable[[NDArray[np.uint8], NDArray[np.int64]], NDArray[np.uint8]]
"""Makes of images, and their numbers in the data set, those that are trained on. From any thread."""

BLOCK_BYTES = 1 << 16
"""Images of a block at most, unless one group alone has more: five groups of 16 digits."""


@dataclass(slots=True, eq=False)
class Block:
    """Neighbouring groups, gathered together."""

    images: NDArray[np.uint8]
    labels: NDArray[Any]
    left: dict[int, int]
    """Groups that were not taken yet by all who take them, and by how many not."""


class Stock:
    """Groups of one epoch, ready to be handed out.

    Args:
        dataset: Where the images are.
        order: Which of them belong to which group.
        takers: How often each group is taken.
        transform: What becomes of the images; None: nothing.
    """

    def __init__(
        self, dataset: Dataset, order: EpochOrder, *, takers: int = 1, transform: Transform | None = None
    ) -> None:
        self._dataset = dataset
        self._order = order
        self._takers = takers
        self._transform = transform
        self._making: set[int] = set()
        group_bytes = order.images_per_group * prod(dataset.image_shape)
        self._block_groups = max(BLOCK_BYTES // group_bytes, 1)
        self._blocks: dict[int, Block | None] = {}
        """By number; None once its groups were taken."""

    def prepare(self, numbers: Iterable[int]) -> list[int]:
        """Gather the blocks of these groups, unless they are there or were there before.

        Returns those that somebody has to `make` and `put` here first; each is named once.
        """
        missing = [
            block
            for block in dict.fromkeys([number // self._block_groups for number in numbers])
            if block not in self._blocks and block not in self._making
        ]
        if self._transform is None:
            for block in missing:
                self._blocks[block] = self.make(block)
            return []
        self._making.update(missing)
        return missing

    def make(self, block: int) -> Block:
        """Gather and transform a block. From any thread."""
        size, first = self._order.images_per_group, block * self._block_groups
        stop = min(first + self._block_groups, self._order.num_groups)
        images, labels = self._cut_out(self._order.indices[first * size : stop * size])
        return Block(images, labels, dict.fromkeys(range(first, stop), self._takers))

    def put(self, number: int, block: Block) -> None:
        """A block that `prepare` named is made."""
        self._making.discard(number)
        self._blocks[number] = block

    def has(self, numbers: Iterable[int]) -> bool:
        """Whether no block of these groups is still to be made."""
        return all(number // self._block_groups in self._blocks for number in numbers)

    def count(self, number: int) -> int:
        """Images of a group. Raises IndexError if the epoch has no such group."""
        return len(self._order.group(number))

    def take(self, numbers: Sequence[int]) -> Pictures:
        """Take groups out, at least one, of blocks that are here; those that all have taken are gathered once
        more.

        Returns their images and labels, one group after the other: a slice where they are neighbours, else a
        copy.

        Raises:
            IndexError: The epoch has no such group.
        """
        if self._transform is None:
            self.prepare(numbers)
        pieces = [self._piece(first, last) for first, last in self._runs(numbers)]
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate([images for images, _ in pieces]), np.concatenate(
            [marks for _, marks in pieces]
        )

    def _runs(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """First and last of each run of neighbours within a block."""
        runs: list[tuple[int, int]] = []
        for number in numbers:
            if runs and number == runs[-1][1] + 1 and number % self._block_groups:
                runs[-1] = (runs[-1][0], number)
            else:
                runs.append((number, number))
        return runs

    def _piece(self, first: int, last: int) -> Pictures:
        size = self._order.images_per_group
        number = first // self._block_groups
        block = self._blocks[number]
        wanted = range(first, last + 1)
        if block is None or not all(group in block.left for group in wanted):
            chosen = np.concatenate([self._order.group(group) for group in wanted])
            return self._cut_out(chosen)
        for group in wanted:
            block.left[group] -= 1
            if not block.left[group]:
                del block.left[group]
        if not block.left:
            self._blocks[number] = None
        at, end = ((place - number * self._block_groups) * size for place in (first, last + 1))
        return block.images[at:end], block.labels[at:end]

    def _cut_out(self, chosen: NDArray[np.int64]) -> Pictures:
        """These images and their labels, as they are trained on."""
        images = self._dataset.train_images.take(chosen, axis=0)
        if self._transform is not None:
            images = self._transform(images, chosen)
        return images, self._dataset.train_labels.take(chosen, axis=0)

    def __repr__(self) -> str:
        left = sum(len(block.left) for block in self._blocks.values() if block is not None)
        return f"<Stock of epoch {self._order.epoch}, {left} groups>"
