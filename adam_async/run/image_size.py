"""Pure: the choice of the one size that all images of a data set get."""

import re
from collections import Counter
from dataclasses import dataclass

from adam_async.errors import ConfigError, counted

Size = tuple[int, int]
"""Columns and rows."""

LARGE = 256
"""Maximum length of a side, in pixels, if the size follows from the images; larger images are scaled down."""

SIDE = 64
"""Longer side of scaled-down images, in pixels; 256 neurons on three colours then have 3 million weights."""

MOST_SIDE = 4096
"""Maximum length of a side that the option `size` may ask for, in pixels."""


@dataclass(frozen=True, slots=True)
class ChosenSize:
    """Size of all images, and a sentence about the images of other sizes."""

    size: Size
    note: str
    """Text about how images of other sizes change; empty if all images have this size."""


def read_image_size(text: str, name: str = "size") -> Size | None:
    """Return columns and rows of the option ``size``, ROWSxCOLUMNS such as ``48x64``; None if empty.

    Args:
        name: The option in the spelling of its source.

    Raises:
        ConfigError: The text is not a size.
    """
    if not text:
        return None
    found = re.fullmatch(r"(\d{1,4})x(\d{1,4})", text.strip().lower(), re.ASCII)
    rows, columns = (int(found[1]), int(found[2])) if found is not None else (0, 0)
    if not (1 <= rows <= MOST_SIDE and 1 <= columns <= MOST_SIDE):
        raise ConfigError(
            f"{name} must be ROWSxCOLUMNS such as 48x64, each within 1 and {MOST_SIDE}, not {text!r:.200}"
        )
    return columns, rows


def image_size_text(size: Size | None) -> str:
    """Return a size in the form of the option ``size``; empty for None."""
    return f"{size[1]}x{size[0]}" if size else ""


def most_frequent(sizes: Counter[Size]) -> Size:
    """Return the most frequent size; of equally frequent sizes, the widest."""
    return max(sizes, key=lambda size: (sizes[size], size))


def choose_size(sizes: Counter[Size], wanted: Size | None) -> ChosenSize:
    """Choose the size of all images.

    Choose the wanted size, otherwise the size of more than half of the images, otherwise the medians of their
    columns and rows. Without a wanted size, a size with a side above `LARGE` is scaled to `SIDE` on the
    longer side.

    Args:
        sizes: Number of images of each size; at least one image.
        wanted: Size from the option or the model; None if the images decide.
    """
    frequent = most_frequent(sizes)
    if wanted is not None:
        size = wanted
    elif 2 * sizes[frequent] > sizes.total():
        size = frequent
    else:
        size = (_median(sizes, 0), _median(sizes, 1))
    longer = max(size)
    if wanted is None and longer > LARGE:
        size = (max(1, round(size[0] * SIDE / longer)), max(1, round(size[1] * SIDE / longer)))
    fitted = sizes.total() - sizes[size]
    if not fitted:
        return ChosenSize(size, "")
    note = f"{counted(fitted, 'image')} of other sizes fitted to {size[1]}x{size[0]}"
    if wanted is None and longer > LARGE:
        others = " and other sizes" if len(sizes) > 1 else ""
        note = (
            f"images of {frequent[1]}x{frequent[0]}{others} were scaled and cut to {size[1]}x{size[0]} "
            "(rows x columns; --size chooses another)"
        )
    return ChosenSize(size, note)


def _median(sizes: Counter[Size], axis: int) -> int:
    """Return the median of one axis over all images."""
    left = sizes.total() // 2
    counts = Counter[int]()
    for size, count in sizes.items():
        counts[size[axis]] += count
    for value in sorted(counts):
        left -= counts[value]
        if left < 0:
            return value
    raise AssertionError("the counts add up to the total")
