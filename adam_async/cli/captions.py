"""Pure: pictures with lines of text under them, for a contact sheet. It needs Pillow, of the extra ``data``.

Letters: C channels, H rows, W columns.
"""

from collections.abc import Sequence

import numpy as np

from adam_async.cli.contact_sheet import Image

WIDTH = 112
"""Minimum width of a picture in pixels: some sixteen letters fit under it."""

LINE = 14
"""Height of a line of text, in pixels."""

BLACK, WHITE = 0, 255


def captioned(image: Image, lines: Sequence[str]) -> Image:
    """Enlarge an image by whole pixels to at least `WIDTH` columns, and write lines of text under it.

    A letter that the built-in font lacks becomes a question mark; a line that is too long is cut.

    Returns:
        Shape (C, H, W).
    """
    from PIL import Image as Picture
    from PIL import ImageDraw, ImageFont

    channels, _, columns = image.shape
    scale = -(-WIDTH // columns)
    large = image.repeat(scale, axis=1).repeat(scale, axis=2)
    strip = Picture.new("L", (large.shape[2], LINE * len(lines)), BLACK)
    draw, font = ImageDraw.Draw(strip), ImageFont.load_default_imagefont()
    for number, line in enumerate(lines):
        plain = line.encode("latin-1", "replace").decode("latin-1")
        draw.text((2, number * LINE + 1), plain, fill=WHITE, font=font)
    text = np.broadcast_to(np.asarray(strip, np.uint8), (channels, *strip.size[::-1]))
    return np.concatenate([large, text], axis=1)
