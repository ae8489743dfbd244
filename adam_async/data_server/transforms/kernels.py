"""Pure: compiled versions of the most expensive loops, whose results equal NumPy's to the last bit.

All kernels compute with whole numbers, or add and multiply float64 in a fixed order, so that every compiler
gives the same results. The NumPy versions have the documentation: `philox_words` in
adam_async/model/keyed_random.py, `resample` in adam_async/data_server/transforms/resample.py, the others in
adam_async/data_server/transforms/pipeline.py. The kernels call no function of another file, because numba
would not notice changes there.

Loops over pixels are short and write to one array, so that compilers vectorise them. Resampling loops index
by unsigned numbers, for which numba does not check for negative indices. The last two of them cut each
operation to 32 bits, because numba would widen it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.model.fast.memory import exact

Longs = NDArray[np.int64]
Words = NDArray[np.uint64]
Halves = NDArray[np.uint32]
Floats = NDArray[np.float64]
Pixels = NDArray[np.uint8]

_LANES = 32
"""Number of columns processed at once: a multiple of every processor's vector length."""


def _upper_word(a: Any, b: Any) -> Any:
    """Return the upper word of a 128-bit product."""
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


def _displaced(words: Words, pixels: float, linear: Floats, out: Longs) -> None:
    points = out.shape[2]
    count = points * points
    for i in range(out.shape[0]):
        a, b, d, e = linear[i, 0], linear[i, 1], linear[i, 2], linear[i, 3]
        for at in range(count):
            x, y = words[i, np.uint64(at)], words[i, np.uint64(count + at)]
            across = (np.float64(x >> np.uint64(11)) * 2.0**-53 * 2.0 - 1.0) * pixels
            down = (np.float64(y >> np.uint64(11)) * 2.0**-53 * 2.0 - 1.0) * pixels
            row, column = at // points, at % points
            moved = min(max((a * across + b * down) * 65536.0, -(2.0**40)), 2.0**40)
            out[i, 0, row, column] = np.int64(np.floor(moved + 0.5))
            moved = min(max((d * across + e * down) * 65536.0, -(2.0**40)), 2.0**40)
            out[i, 1, row, column] = np.int64(np.floor(moved + 0.5))


def _read_across(controls: Longs, i: int, axis: int, at: Longs, weights: Longs, lines: Longs) -> None:
    """Read each row of an image's grid at every column."""
    for c in range(at.shape[0]):
        g = np.uint64(at[c])
        w0, w1, w2, w3 = weights[c, 0], weights[c, 1], weights[c, 2], weights[c, 3]
        for row in range(controls.shape[2]):
            total = w0 * controls[i, axis, row, g] + w1 * controls[i, axis, row, g + np.uint64(1)]
            total += w2 * controls[i, axis, row, g + np.uint64(2)]
            total += w3 * controls[i, axis, row, g + np.uint64(3)]
            lines[row, c] = total >> 14


_across = exact(_read_across)


def _source_of(
    step: int,
    down: int,
    start: int,
    lines: Longs,
    at: Longs,
    weights: Longs,
    columns: int,
    low: int,
    high: int,
    out: Halves,
) -> None:
    """Compute the source position of each pixel along one axis; 0 is one pixel before the image.

    The positions are in units of 1/256 pixel, clipped to `low` and `high`, beyond which pixels are equal. The
    lines of a field are longer than a row; the next row overwrites the values after a row.
    """
    for r in range(at.shape[0]):
        first, place = np.uint64(r * columns), start + down * r + 128
        if lines.shape[0] == 0:
            for c in range(columns):
                out[first + np.uint64(c)] = min(max((place + step * c) >> 8, low), high) + 256
            continue
        g = np.uint64(at[r])
        w0, w1, w2, w3 = weights[r, 0], weights[r, 1], weights[r, 2], weights[r, 3]
        for c in range(lines.shape[1]):
            total = w0 * lines[g, c] + w1 * lines[g + np.uint64(1), c]
            total += w2 * lines[g + np.uint64(2), c] + w3 * lines[g + np.uint64(3), c]
            moved = (place + step * c + (total >> 14)) >> 8
            out[first + np.uint64(c)] = min(max(moved, low), high) + 256


_sources = exact(_source_of)


def _join_fours(images: Pixels, i: int, channel: int, padded: Pixels, fours: Halves) -> None:
    """Join each pixel, its right neighbour and the two below in one word, with a black border."""
    rows, columns = images.shape[2], images.shape[3]
    wide, one = np.uint64(columns + 2), np.uint64(1)
    for r in range(rows):
        first = np.uint64(r + 1) * wide + one
        for c in range(columns):
            padded[first + np.uint64(c)] = images[i, channel, r, c]
    for at in range(fours.shape[0]):
        p = np.uint64(at)
        upper = np.uint32(padded[p]) | np.uint32(np.uint32(padded[p + one]) << np.uint32(8))
        lower = np.uint32(padded[p + wide]) | np.uint32(np.uint32(padded[p + wide + one]) << np.uint32(8))
        fours[p] = np.uint32(upper | np.uint32(lower << np.uint32(16)))


_fours = exact(_join_fours)


def _mix_fours(
    fours: Halves, near: Halves, xs: Halves, ys: Halves, wide: int, i: int, channel: int, out: Pixels
) -> None:
    """Mix the four pixels around each position: both rows at once, in the two halves of a word."""
    byte, two = np.uint32(0xFF), np.uint32(0x00FF00FF)
    whole, across, half = np.uint32(256), np.uint32(wide), np.uint32(1 << 15)
    for p in range(out.shape[2]):
        row, column = np.uint32(ys[p] >> np.uint32(8)), np.uint32(xs[p] >> np.uint32(8))
        near[p] = np.uint32(np.uint32(row * across) + column)
    for p in range(out.shape[2]):  # a separate loop: vectorised look-ups are slow
        near[p] = fours[np.uint64(near[p])]
    for p in range(out.shape[2]):
        left = np.uint32(near[p] & two)
        right = np.uint32(np.uint32(near[p] >> np.uint32(8)) & two)
        x, y = np.uint32(xs[p] & byte), np.uint32(ys[p] & byte)
        rows = np.uint32(np.uint32(np.uint32(whole - x) * left) + np.uint32(x * right))
        above, below = np.uint32(rows & np.uint32(0xFFFF)), np.uint32(rows >> np.uint32(16))
        mixed = np.uint32(np.uint32(np.uint32(whole - y) * above) + np.uint32(y * below))
        out[i, channel, p] = np.uint8(np.uint32(np.uint32(mixed + half) >> np.uint32(16)))


_mix = exact(_mix_fours)


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
    new_columns = out.shape[3]
    flat = out.reshape(out.shape[0], channels, out.shape[2] * new_columns)
    lines = np.zeros((controls.shape[3], (new_columns + _LANES - 1) // _LANES * _LANES), np.int64)
    xs = np.empty(flat.shape[2] + _LANES, np.uint32)
    ys, near = np.empty_like(xs), np.empty_like(xs)
    wide = columns + 2
    padded = np.zeros((rows + 3) * wide + 1, np.uint8)
    fours = np.empty((rows + 2) * wide, np.uint32)
    # A pixel beyond the last is black; at the last pixel itself, no pixel beyond has a weight.
    border = 0 if repeat else 256
    right, bottom = (columns - 1) * 256 + border, (rows - 1) * 256 + border
    for i in range(out.shape[0]):
        _across(controls, i, 0, column_at, column_weights, lines)
        a, b, start = maps[i, 0], maps[i, 1], maps[i, 2]
        _sources(a, b, start, lines, row_at, row_weights, new_columns, -border, right, xs)
        _across(controls, i, 1, column_at, column_weights, lines)
        a, b, start = maps[i, 3], maps[i, 4], maps[i, 5]
        _sources(a, b, start, lines, row_at, row_weights, new_columns, -border, bottom, ys)
        for channel in range(channels):
            _fours(images, i, channel, padded, fours)
            _mix(fours, near, xs, ys, wide, i, channel, flat)


def _levelled(images: Pixels, gains: Longs, offsets: Longs, out: Pixels) -> None:
    for i in range(images.shape[0]):
        for channel in range(images.shape[1]):
            gain, offset = gains[i, channel], offsets[i, channel] + 32768
            for p in range(images.shape[2]):
                level: Any = (np.int64(images[i, channel, p]) * gain + offset) >> 16
                out[i, channel, p] = min(max(level, 0), 255)


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
displaced: Callable[[Words, float, Floats, Longs], None] = exact(_displaced)
resample: Callable[..., None] = exact(_resample)
levelled: Callable[[Pixels, Longs, Longs, Pixels], None] = exact(_levelled)
noisy: Callable[[Pixels, Words, int, Pixels], None] = exact(_noisy)
