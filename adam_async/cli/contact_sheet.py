"""Contact sheets: images in rows, each with optional lines of text under it, as a PNG file.

Drawing needs Pillow, of the extra ``data``. Letters: C channels, H rows, W columns.
"""

import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.dataset import Dataset
from adam_async.data_server.transforms.recipe import Recipe
from adam_async.errors import ConfigError
from adam_async.model.keyed_random import Dice

TILE = 32
"""Minimum size of an image on a sheet without captions, in pixels, down and across."""

CAPTIONED = 112
"""Minimum width of an image with a caption, in pixels: room for about sixteen letters."""

LINE = 14
"""Height of a line of a caption, in pixels."""

GAP = 2
"""Width of the gaps between tiles, in pixels."""

BLACK, BACKGROUND, WHITE = 0, 128, 255
"""Pixel values of the captions, the gaps and the letters. The gaps are grey, so the edges of black and of
white images are visible."""

MOST_PIXELS = 1 << 26
"""Maximum size of a sheet, in pixels."""

Image = NDArray[np.uint8]
"""Pixels of shape (C, H, W)."""


def sheet_rows(
    dataset: Dataset, recipe: Recipe | None, *, seed: int, epoch: int, samples: int, classes: int
) -> list[list[Image]]:
    """Choose the training images of a contact sheet, a row for each class.

    With a recipe, a row shows one image and its variants in consecutive epochs. A variant depends on seed,
    epoch and image only, so a run with this seed trains on the same pixels. Without a recipe, a row shows
    the first images of its class.

    Args:
        samples: Variants of an image, or without a recipe further images of its class.
        classes: Maximum number of rows, for the classes with the lowest numbers that have training images.
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


def contact_sheet(rows: Sequence[Sequence[Image]], captions: Sequence[Sequence[Sequence[str]]] = ()) -> bytes:
    """Draw images in rows, enlarged by whole pixels to tiles of one size, with thin gaps.

    Args:
        rows: Images of one shape. With three channels or more, the first three are red, green and blue; with
            one or two channels, the first one is grey.
        captions: Lines of text under each image, as many under each; empty for none. A letter that the
            built-in font lacks becomes a question mark; a line too long for its image is cut.

    Returns:
        A PNG file; the same images give the same pixels.

    Raises:
        ConfigError: The sheet would be too large.
    """
    from PIL import Image as Picture
    from PIL import ImageDraw, ImageFont

    channels, height, width = rows[0][0].shape
    scale = -(-CAPTIONED // width) if captions else -(-TILE // min(height, width))
    text = LINE * len(captions[0][0]) if captions else 0
    down, across = height * scale + text + GAP, width * scale + GAP
    size = (len(rows) * down + GAP, max(map(len, rows)) * across + GAP)
    if size[0] * size[1] > MOST_PIXELS:
        raise ConfigError(
            f"a contact sheet of {len(rows)} rows of images of {height} x {width} is {size[0]} x {size[1]} "
            f"pixels large, and may have {MOST_PIXELS}; lower --samples or --classes"
        )
    colours = channels >= 3
    sheet = Picture.new("RGB" if colours else "L", size[::-1], (BACKGROUND,) * 3 if colours else BACKGROUND)
    font = ImageFont.load_default_imagefont()
    for i, row in enumerate(rows):
        for j, pixels in enumerate(row):
            left, top = GAP + j * across, GAP + i * down
            values = pixels[:3].transpose(1, 2, 0) if colours else pixels[0]
            enlarged = values.repeat(scale, axis=0).repeat(scale, axis=1)
            sheet.paste(Picture.fromarray(enlarged), (left, top))
            if captions:
                strip = Picture.new("L", (width * scale, text), BLACK)
                for number, line in enumerate(captions[i][j]):
                    plain = line.encode("latin-1", "replace").decode("latin-1")
                    ImageDraw.Draw(strip).text((2, number * LINE + 1), plain, fill=WHITE, font=font)
                sheet.paste(strip, (left, top + height * scale))
    file = io.BytesIO()
    sheet.save(file, "PNG", optimize=True)
    return file.getvalue()
