"""Pure: compiled twins of what takes most time, equal to NumPy's to the last bit.

All are whole numbers, which no compiler rounds another way. What each does is said beside its twin:
`philox_words` in adam_async/dice.py, `resample` in adam_async/data_server/transforms/resample.py,
`numpy_noisy` in adam_async/data_server/transforms/stage.py. They call nothing of other files, because numba
would not see that those have changed.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.model.fast.memory import exact

Longs = NDArray[np.int64]
Words = NDArray[np.uint64]
Pixels = NDArray[np.uint8]


def _upper_word(a: Any, b: Any) -> Any:
    """The upper word of a product of 128 bits."""
    half, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    a_low, a_high, b_low, b_high = a & half, a >> shift, b & half, b >> shift
    middle = a_high * b_low + ((a_low * b_low) >> shift)
    other = a_low * b_high + (middle & half)
    return a_high * b_high + (middle >> shift) + (other >> shift)


_upper = exact(_upper_word)


def _philox(keys: Words, blocks: Words, out: Words) -> None:
    factor0, factor1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
    step0, step1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
    for i in range(blocks.shape[0]):
        for j in range(blocks.shape[1]):
            low, high = keys[j, 0], keys[j, 1]
            c0, c1, c2, c3 = blocks[i, j] + np.uint64(1), np.uint64(0), np.uint64(0), np.uint64(0)
            for _ in range(10):
                high0, low0 = _upper(c0, factor0), c0 * factor0
                high1, low1 = _upper(c2, factor1), c2 * factor1
                c0, c1, c2, c3 = high1 ^ c1 ^ low, low1, high0 ^ c3 ^ high, low0
                low, high = low + step0, high + step1
            out[i, j, 0], out[i, j, 1], out[i, j, 2], out[i, j, 3] = c0, c1, c2, c3


def _pixel(image: Pixels, channel: int, row: int, column: int, repeat: bool) -> Any:
    """A pixel, or what is seen in its place beyond the image."""
    rows, columns = image.shape[1], image.shape[2]
    if repeat:
        row, column = min(max(row, 0), rows - 1), min(max(column, 0), columns - 1)
    elif row < 0 or row >= rows or column < 0 or column >= columns:
        return np.int64(0)
    return np.int64(image[channel, row, column])


_value = exact(_pixel)


def _resample(
    images: Pixels,
    maps: Longs,
    controls: Longs,
    row_at: Longs,
    row_weights: Longs,
    column_at: Longs,
    column_weights: Longs,
    repeat: bool,
    out: Pixels,
) -> None:
    channels, rows, columns = images.shape[1], images.shape[2], images.shape[3]
    grid = controls.shape[3]
    line = np.empty((2, grid), np.int64)
    for i in range(out.shape[0]):
        image = images[i]
        for r in range(out.shape[2]):
            for g in range(grid):
                for axis in range(2):
                    total = np.int64(0)
                    for k in range(4):
                        total += row_weights[r, k] * controls[i, axis, row_at[r] + k, g]
                    line[axis, g] = total >> 14
            for c in range(out.shape[3]):
                x = maps[i, 0] * c + maps[i, 1] * r + maps[i, 2]
                y = maps[i, 3] * c + maps[i, 4] * r + maps[i, 5]
                if grid > 0:
                    right, down = np.int64(0), np.int64(0)
                    for k in range(4):
                        right += column_weights[c, k] * line[0, column_at[c] + k]
                        down += column_weights[c, k] * line[1, column_at[c] + k]
                    x, y = x + (right >> 14), y + (down >> 14)
                x, y = (x + 128) >> 8, (y + 128) >> 8
                left, top, to_right, to_bottom = x >> 8, y >> 8, x & 255, y & 255
                inside = left >= 0 and top >= 0 and left < columns - 1 and top < rows - 1
                for channel in range(channels):
                    if inside:
                        a, b = np.int64(image[channel, top, left]), np.int64(image[channel, top, left + 1])
                        d = np.int64(image[channel, top + 1, left])
                        e = np.int64(image[channel, top + 1, left + 1])
                    else:
                        a = _value(image, channel, top, left, repeat)
                        b = _value(image, channel, top, left + 1, repeat)
                        d = _value(image, channel, top + 1, left, repeat)
                        e = _value(image, channel, top + 1, left + 1, repeat)
                    above = (256 - to_right) * a + to_right * b
                    below = (256 - to_right) * d + to_right * e
                    mixed = (256 - to_bottom) * above + to_bottom * below
                    out[i, channel, r, c] = (mixed + 32768) >> 16


def _noisy(images: Pixels, words: Words, factor: int, out: Pixels) -> None:
    size = images.shape[1]
    for i in range(images.shape[0]):
        for at in range(size):
            word = words[i, at // 2] >> np.uint64(32 * (at % 2))
            total = np.int64(-510)
            for byte in range(4):
                total += np.int64((word >> np.uint64(8 * byte)) & np.uint64(255))
            value: Any = np.int64(images[i, at]) + ((total * factor + 32768) >> 16)
            out[i, at] = min(max(value, 0), 255)


philox: Callable[[Words, Words, Words], None] = exact(_philox)
resample: Callable[..., None] = exact(_resample)
noisy: Callable[[Pixels, Words, int, Pixels], None] = exact(_noisy)
