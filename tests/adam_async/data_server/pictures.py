"""Helpers for tests of stored and cached images: images that are functions of their numbers."""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.dataset import Policy, StoredImages
from adam_async.errors import DataError

SHAPE = (1, 2, 3)
IMAGE_BYTES = 6


def picture(number: int) -> NDArray[np.uint8]:
    return (np.arange(IMAGE_BYTES) * 7 + number * 13).astype(np.uint8).reshape(SHAPE)


def pictures(numbers: Collection[int]) -> NDArray[np.uint8]:
    return np.stack([picture(number) for number in numbers])


def stored(
    images: int, *, classes: int = 2, damaged: Collection[int] = (), policy: Policy = "error"
) -> StoredImages:
    """Images of which some are damaged."""

    def read(number: int) -> NDArray[np.uint8]:
        if number in damaged:
            raise DataError(f"image {number} is damaged")
        return picture(number)

    labels = np.arange(images) % classes
    return StoredImages(read, image_shape=SHAPE, labels=labels, origin="shelf", policy=policy)
