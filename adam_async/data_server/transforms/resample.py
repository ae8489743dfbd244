"""Pure: one resampling of images at moved positions, for any number of steps.

Positions are whole numbers of 1/65536 pixel, rounded to 1/256 for the weights of the four pixels around them.
Integer arithmetic makes the result equal on every machine. A position on a pixel gives exactly that pixel, so
flips and whole shifts leave pixels unchanged.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ONE = 1 << 16
"""Number of position units per pixel."""

_WEIGHT_BITS = 14
_PIXELS_AT_ONCE = 1 << 17


@dataclass(frozen=True, slots=True, eq=False)
class Spline:
    """Weights of a coarse grid of control points at each row or column of an image.

    A uniform cubic B-spline over `cells` cells, with `cells + 3` control points.
    """

    at: NDArray[np.int64]
    """Shape (length,): the first of the four control points with a weight."""
    weights: NDArray[np.int64]
    """Weights of shape (length, 4), in units of 1/16384."""

    @classmethod
    def of(cls, length: int, cells: int) -> "Spline":
        """Divide rows or columns into cells; a pixel's position is its centre."""
        at, weights = np.zeros(length, np.int64), np.zeros((length, 4), np.int64)
        for place in range(length):
            cell, rest = divmod((2 * place + 1) * cells, 2 * length)
            u = rest / (2 * length)
            parts = ((1 - u) ** 3, 3 * u**3 - 6 * u**2 + 4, 3 * (u + u**2 - u**3) + 1, u**3)
            at[place] = cell
            weights[place] = [round(part / 6 * (1 << _WEIGHT_BITS)) for part in parts]
        return cls(at, weights)


def resample(
    images: NDArray[np.uint8],
    maps: NDArray[np.int64],
    controls: NDArray[np.int64],
    down: Spline,
    across: Spline,
    repeat: bool,
    out: NDArray[np.uint8],
) -> None:
    """Fill each pixel of `out` with the value of `images` at the pixel's mapped position.

    Args:
        images: Shape (n, C, H, W).
        maps: Shape (n, 6): for column c and row r of `out`, the source's column ``m[0] * c + m[1] * r +
            m[2]`` and row ``m[3] * c + m[4] * r + m[5]``, in units of 1/65536 pixel.
        controls: Shape (n, 2, G, G): displacements of columns and rows at grid points, in the same units; G =
            0: none.
        down: Weights of the grid at the rows of `out`.
        across: Weights of the grid at the columns of `out`.
        repeat: Whether pixels beyond the image repeat the nearest pixel, instead of 0.
        out: Shape (n, C, H', W').
    """
    rows, columns = out.shape[2:]
    at_once = max(1, _PIXELS_AT_ONCE // (rows * columns))
    for start in range(0, len(images), at_once):
        part = slice(start, start + at_once)
        x, y = _positions(maps[part], rows, columns)
        if controls.shape[3]:
            field = _field(controls[part], down, across)
            x, y = x + field[:, 0], y + field[:, 1]
        out[part] = _mixed(images[part], (x + 128) >> 8, (y + 128) >> 8, repeat)


def _positions(
    maps: NDArray[np.int64], rows: int, columns: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    m = maps[:, :, np.newaxis, np.newaxis]
    c, r = np.arange(columns), np.arange(rows)[:, np.newaxis]
    return m[:, 0] * c + m[:, 1] * r + m[:, 2], m[:, 3] * c + m[:, 4] * r + m[:, 5]


def _field(controls: NDArray[np.int64], down: Spline, across: Spline) -> NDArray[np.int64]:
    """Return the displacement of each pixel: (n, 2, H', W'). First along the rows, then along the columns."""
    near = np.arange(4)
    points = controls[:, :, :, across.at[:, np.newaxis] + near]
    lines = np.einsum("ck,nagck->nagc", across.weights, points) >> _WEIGHT_BITS
    points = lines[:, :, down.at[:, np.newaxis] + near]
    field: NDArray[np.int64] = np.einsum("rk,narkc->narc", down.weights, points) >> _WEIGHT_BITS
    return field


def _mixed(
    images: NDArray[np.uint8], x: NDArray[np.int64], y: NDArray[np.int64], repeat: bool
) -> NDArray[np.uint8]:
    left, top = x >> 8, y >> 8
    to_right, to_bottom = (x & 255)[:, np.newaxis], (y & 255)[:, np.newaxis]
    above = (256 - to_right) * _values(images, top, left, repeat)
    above += to_right * _values(images, top, left + 1, repeat)
    below = (256 - to_right) * _values(images, top + 1, left, repeat)
    below += to_right * _values(images, top + 1, left + 1, repeat)
    mixed = (256 - to_bottom) * above + to_bottom * below
    return ((mixed + 32768) >> 16).astype(np.uint8)


def _values(
    images: NDArray[np.uint8], row: NDArray[np.int64], column: NDArray[np.int64], repeat: bool
) -> NDArray[np.int64]:
    """Return the pixels at whole positions (n, H', W'), of all channels: (n, C, H', W')."""
    n, channels, rows, columns = images.shape
    near_row, near_column = np.clip(row, 0, rows - 1), np.clip(column, 0, columns - 1)
    image = np.arange(n)[:, np.newaxis, np.newaxis, np.newaxis]
    channel = np.arange(channels)[:, np.newaxis, np.newaxis]
    found = images[image, channel, near_row[:, np.newaxis], near_column[:, np.newaxis]].astype(np.int64)
    if not repeat:
        found *= ((near_row == row) & (near_column == column))[:, np.newaxis]
    return found
