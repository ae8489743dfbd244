"""Pure: random images, for runs that need data and no download.

Each class has a picture of a few soft blobs. An image is its class's picture, moved a little, brighter or
darker, with noise. A small network learns to classify such images. Seed, shape and number of classes
determine the images; image number i does not depend on the number of images.
"""

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.dataset import MAX_CHANNELS, Dataset, make_dataset
from adam_async.errors import DataError
from adam_async.model.keyed_random import Dice

NAME = "synthetic"

IMAGES, SHAPE, CLASSES = 2_000, (1, 28, 28), 10
"""Number of training images, shape and number of classes of plain ``synthetic``."""

BLOBS = 4

TEST_SHARE = 5
"""Number of training images for each test image."""

MIN_SIDE = 4
"""Minimum side length of a synthetic image, in pixels."""

MAX_CLASSES = 1_000
"""Maximum number of classes of synthetic images."""

MAX_BYTES = 4 << 30
"""Maximum size of all synthetic images, in bytes."""

BRIGHTNESS = (120.0, 220.0)
"""Range of an image's brightest pixel before noise."""

NOISE = 50.0
"""Upper end of the uniform noise, from zero."""

AT_ONCE_BYTES = 1 << 22
"""Number of pixels drawn at once; the random words of a pixel take eight bytes."""


def synthetic(
    images: int = IMAGES, shape: tuple[int, int, int] = SHAPE, classes: int = CLASSES, seed: int = 0
) -> Dataset:
    """Draw a data set with equally frequent classes.

    Args:
        images: Number of training images; a fifth as many are test images, at least one per class.
        shape: (C, H, W) of each image.
        classes: Number of classes.
        seed: Seed; another seed draws other classes and images.

    Raises:
        DataError: A number is out of range, or the images would take more than 4 GiB.
    """
    channels, rows, columns = shape
    if not 1 <= channels <= MAX_CHANNELS or min(rows, columns) < MIN_SIDE:
        raise DataError(
            f"synthetic images cannot have the shape {shape}; take (channels, rows, columns) with 1 to "
            f"{MAX_CHANNELS} channels and sides of at least {MIN_SIDE}"
        )
    if not 2 <= classes <= MAX_CLASSES:
        raise DataError(f"synthetic images have 2 to {MAX_CLASSES} classes, not {classes}")
    if images < classes:
        raise DataError(f"{images} synthetic images are too few: at least one for each of {classes} classes")
    tests = max(-(-images // TEST_SHARE), classes)
    if (images + tests) * prod(shape) > MAX_BYTES:
        raise DataError(
            f"{images + tests} synthetic images of {shape} take more than {MAX_BYTES >> 30} GiB; take fewer"
        )
    dice = Dice(seed)
    pictures = np.stack([_picture(dice, label, shape) for label in range(classes)])
    train, test = (_draw(dice, pictures, part, count) for part, count in (("train", images), ("test", tests)))
    return make_dataset(
        name=NAME,
        source=f"{images} synthetic images of {shape} in {classes} classes, drawn with seed {seed}",
        train=train,
        test=test,
        origins=("train images", "train labels", "test images", "test labels"),
    )


def parse_synthetic(source: str) -> int | None:
    """Return the number of training images of ``synthetic`` or ``synthetic:N``; None for other sources.

    Raises:
        DataError: The text after the colon is not a number of images.
    """
    name, colon, count = source.partition(":")
    if name != NAME:
        return None
    if not colon:
        return IMAGES
    if not (count.isascii() and count.isdecimal() and len(count) <= 12):
        raise DataError(f"{source} does not say how many images; write {NAME}:N, such as {NAME}:{IMAGES}")
    return int(count)


def _picture(dice: Dice, label: int, shape: tuple[int, int, int]) -> NDArray[np.float32]:
    """Draw the picture of a class: (C, H, W), the brightest pixel 1."""
    channels, rows, columns = shape
    places = dice.uniform("synthetic class", keys=(label,), count=BLOBS * (2 + channels), dtype=np.float64)
    y, x, *strengths = places.reshape(2 + channels, BLOBS)
    row = np.arange(rows)[:, np.newaxis, np.newaxis] / rows
    column = np.arange(columns)[:, np.newaxis] / columns
    # Blobs keep away from the borders, so all stay inside when the picture moves.
    distance = (row - (0.15 + 0.7 * y)) ** 2 + (column - (0.15 + 0.7 * x)) ** 2
    blobs = np.exp(-distance / (2 * 0.09**2))
    picture = np.stack([(blobs * (0.4 + 0.6 * strength)).sum(axis=2) for strength in strengths])
    scaled: NDArray[np.float32] = (picture / picture.max()).astype(np.float32)
    return scaled


def _draw(
    dice: Dice, pictures: NDArray[np.float32], part: str, count: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Draw `count` images with labels, for one part of the data set."""
    classes, *shape = pictures.shape
    labels = np.arange(count) % classes
    images = np.empty((count, *shape), np.uint8)
    step = max(AT_ONCE_BYTES // prod(shape), 1)
    for first in range(0, count, step):
        last = min(first + step, count)
        images[first:last] = _some(dice, pictures, part, labels[first:last], first)
    return images, labels


def _some(
    dice: Dice, pictures: NDArray[np.float32], part: str, labels: NDArray[Any], first: int
) -> NDArray[np.uint8]:
    """Draw the images from number `first` on, one for each label."""
    _, channels, rows, columns = pictures.shape
    count = len(labels)
    pixels = channels * rows * columns
    down, right, light = dice.uniform("synthetic " + part, start=3 * first, count=3 * count).reshape(-1, 3).T
    # A shift is at most a twelfth of a side.
    shifts_y, shifts_x = (
        np.rint((2 * where - 1) * (side // 12)).astype(np.int64)
        for where, side in ((down, rows), (right, columns))
    )
    from_rows = (np.arange(rows) - shifts_y[:, np.newaxis]) % rows
    from_columns = (np.arange(columns) - shifts_x[:, np.newaxis]) % columns
    moved = pictures[
        labels[:, np.newaxis, np.newaxis, np.newaxis],
        np.arange(channels)[:, np.newaxis, np.newaxis],
        from_rows[:, np.newaxis, :, np.newaxis],
        from_columns[:, np.newaxis, np.newaxis, :],
    ]
    darkest, brightest = BRIGHTNESS
    light = darkest + (brightest - darkest) * light
    noise = dice.uniform("synthetic noise " + part, start=first * pixels, count=count * pixels)
    drawn: NDArray[np.float32] = moved * light[:, np.newaxis, np.newaxis, np.newaxis]
    drawn += NOISE * noise.reshape(moved.shape)
    return np.minimum(drawn, 255).astype(np.uint8)
