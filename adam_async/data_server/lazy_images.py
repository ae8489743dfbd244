"""Training images that stay in their files, and are read and decoded on demand.

A damaged image ends the run with an error that has its name; with the policy ``skip`` the next readable image
of its class replaces it. The choice depends only on the files, so every server of a data set chooses the same
image.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.damage import MAX_SENTENCES, MAX_SHARE, Policy
from adam_async.errors import DataError

logger = logging.getLogger(__name__)

Read = Callable[[int], NDArray[np.uint8]]
"""Function that reads and decodes an image by its number, shape (C, H, W). From any thread; raises
DataError."""


class StoredImages:
    """Images by number, all of them outside memory.

    Args:
        policy: ``error`` or ``skip`` for an image that cannot be read.
    """

    dtype = np.dtype(np.uint8)

    def __init__(
        self,
        read: Read,
        *,
        image_shape: tuple[int, int, int],
        labels: NDArray[np.int64],
        origin: str,
        policy: Policy = "error",
    ) -> None:
        self._read = read
        self._labels = labels
        self._origin = origin
        self._policy = policy
        self.shape = (len(labels), *image_shape)
        self.replaced: dict[int, str] = {}
        self._instead: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._labels)

    @property
    def nbytes(self) -> int:
        """Size of all images once decoded, in bytes."""
        return int(np.prod(self.shape, dtype=np.int64))

    def read(self, number: int) -> NDArray[np.uint8]:
        """Read and decode one image, shape (C, H, W). Blocks. From any thread.

        Raises:
            DataError: The image cannot be read and no other image can replace it, or too many images cannot
                be read.
        """
        known = self._instead.get(number)
        if known is not None:
            return self._read(known)
        try:
            return self._read(number)
        except DataError as error:
            if self._policy == "error":
                raise
            return self._replace(number, error)

    def take(self, chosen: NDArray[np.int64], axis: int = 0) -> NDArray[np.uint8]:
        """Read and decode images by their numbers, shape (n, C, H, W). See `read`."""
        assert axis == 0, "images are along axis 0"
        images = np.empty((len(chosen), *self.shape[1:]), np.uint8)
        for place, number in enumerate(chosen.tolist()):
            images[place] = self.read(number)
        return images

    def __getitem__(self, chosen: Any) -> NDArray[np.uint8]:
        """Index images as NumPy does: by a number, a slice, or an array of numbers or of truth values."""
        numbers = np.arange(len(self))[chosen]
        return self.read(int(numbers)) if np.ndim(numbers) == 0 else self.take(numbers)

    def sentences(self) -> list[str]:
        """Return the damage of the replaced images, at most 100 sentences."""
        return list(self.replaced.values())[:MAX_SENTENCES]

    def _replace(self, number: int, error: DataError) -> NDArray[np.uint8]:
        """Read the next readable image of the same class, in the order of their numbers; after the last image
        the first one follows."""
        self._note(number, error)
        alike = np.flatnonzero(self._labels == self._labels[number])
        at = int(np.searchsorted(alike, number))
        for other in np.roll(alike, -at)[1:].tolist():
            try:
                image = self._read(other)
            except DataError as problem:
                self._note(other, problem)
                continue
            self._instead[number] = other
            return image
        raise DataError(
            f"{self._origin}: no image of class {self._labels[number]} can be read; the last: {error}"
        )

    def _note(self, number: int, error: DataError) -> None:
        if number not in self.replaced:
            logger.warning("%s; another image of its class replaces it", error)
        self.replaced[number] = str(error)
        if len(self.replaced) > MAX_SHARE * len(self):
            raise DataError(
                f"{self._origin}: {len(self.replaced)} of {len(self)} images are damaged, more than "
                f"{MAX_SHARE:.0%}; the first: {next(iter(self.replaced.values()))}"
            )

    def __repr__(self) -> str:
        return f"<StoredImages {self._origin} {self.shape}>"
