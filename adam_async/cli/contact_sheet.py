"""Pure: a contact sheet, images of a data set side by side, a row for each class.

With a recipe a row shows one image: as it is, then what it becomes in one epoch after the other. A run of
the same seed trains on those pixels, because a variant depends on seed, epoch and image only. Without a
recipe a row shows the first images of its class.

Letters: C channels, H rows, W columns.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.dataset import Dataset
from adam_async.data_server.transforms.recipe import Recipe
from adam_async.errors import ConfigError
from adam_async.model.keyed_random import Dice

TILE = 32
"""Pixels that a tile has at least, down and across."""
GAP = 2
BACKGROUND = 128
"""Grey, so that the edges of black images and of white ones show."""

MOST_PIXELS = 1 << 26

Image = NDArray[np.uint8]
"""Shape (C, H, W)."""


def sheet_rows(
    dataset: Dataset, recipe: Recipe | None, *, seed: int, epoch: int, samples: int, classes: int
) -> list[list[Image]]:
    """Choose what a contact sheet shows.

    Args:
        dataset: Whose training images.
        recipe: What is done to them, or None.
        seed: That of the run.
        epoch: The first one whose variants are shown.
        samples: Variants of an image, or without a recipe images of a class beside its first.
        classes: Most rows; the lowest class numbers that have training images are taken.
    """
    of_class = [
        np.flatnonzero(dataset.train_labels == number)[: samples + 1]
        for number in np.unique(dataset.train_labels)[:classes]
    ]
    if recipe is None:
        return [list(dataset.train_images[numbers]) for numbers in of_class]
    first = np.array([numbers[0] for numbers in of_class], np.int64)
    originals = dataset.train_images[first]
    dice = Dice(seed)
    variants = (recipe.apply(originals, first, dice=dice, epoch=epoch + later) for later in range(samples))
    return [list(row) for row in zip(originals, *variants, strict=True)]


def contact_sheet(rows: Sequence[Sequence[Image]]) -> NDArray[np.uint8]:
    """Lay images out in rows, enlarged by whole pixels to tiles of one size, with thin gaps.

    Args:
        rows: Images of one shape. Of three and more channels the first three are red, green and blue; of
            two the first is shown in grey.

    Returns:
        Pixels of shape (H, W), grey, or (H, W, 3).

    Raises:
        ConfigError: The sheet would be too large.
    """
    channels, height, width = rows[0][0].shape
    scale = -(-TILE // min(height, width))
    down, across = height * scale + GAP, width * scale + GAP
    size = (len(rows) * down + GAP, max(map(len, rows)) * across + GAP)
    if size[0] * size[1] > MOST_PIXELS:
        raise ConfigError(
            f"a contact sheet of {len(rows)} rows of images of {height} x {width} is {size[0]} x {size[1]} "
            f"pixels large, and may have {MOST_PIXELS}; lower --samples or --classes"
        )
    colours = 3 if channels >= 3 else 1
    sheet = np.full((*size, colours), BACKGROUND, np.uint8)
    for i, row in enumerate(rows):
        for j, image in enumerate(row):
            tile = image[:colours].transpose(1, 2, 0).repeat(scale, axis=0).repeat(scale, axis=1)
            top, left = GAP + i * down, GAP + j * across
            sheet[top : top + height * scale, left : left + width * scale] = tile
    return sheet if colours == 3 else sheet[:, :, 0]
