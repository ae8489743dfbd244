"""Pure: kernels that move pixels: padding, and pooling with its way back. The batch is the last axis."""

from adam_async.model.fast.memory import floats, kernel, size_of
from adam_async.model.fast.tiles import VECTOR_BYTES, best_of, hand_out, hand_out_adding


@kernel
def pack(t, like, hyper):
    """Lay images out so that a strided convolution reads runs: with a border, columns sorted by phase.

    A packed array is (c, rows, stride, width, b): column x of an image is phase ``(x + left) % stride``,
    place ``(x + left) // stride``. The border is cleared each time, because groups of another size lay
    their rows over the same memory. Fields: c h w b, packed source, rows width stride, top left.
    """
    c, h, w, b, packed, source = t[1], t[2], t[3], t[4], t[5], t[6]
    rows, width, stride, top, left = t[7], t[8], t[9], t[10], t[11]
    zero = like * 0
    to, values = floats(packed, c * rows * stride * width * b, like), floats(source, c * h * w * b, like)
    line = stride * width * b
    for channel in range(c):
        for row in range(rows):
            start, y = (channel * rows + row) * line, row - top
            if y < 0 or y >= h:
                to[start : start + line] = zero
                continue
            image = (channel * h + y) * w * b
            if stride == 1:
                middle, end = start + left * b, start + (left + w) * b
                for i in range(start, middle):
                    to[i] = zero
                for i in range(w * b):
                    to[middle + i] = values[image + i]
                for i in range(end, start + line):
                    to[i] = zero
                continue
            to[start : start + line] = zero
            for x in range(w):
                at = start + ((x + left) % stride * width + (x + left) // stride) * b
                for i in range(b):
                    to[at + i] = values[image + x * b + i]


@kernel
def unpack(t, like, hyper):
    """Read the images out of a packed array, without its border. Fields as of `pack`; source is filled."""
    c, h, w, b, packed, source = t[1], t[2], t[3], t[4], t[5], t[6]
    rows, width, stride, top, left = t[7], t[8], t[9], t[10], t[11]
    found, values = floats(packed, c * rows * stride * width * b, like), floats(source, c * h * w * b, like)
    for channel in range(c):
        for y in range(h):
            start = (channel * rows + y + top) * stride * width * b
            image = (channel * h + y) * w * b
            if stride == 1:
                for i in range(w * b):
                    values[image + i] = found[start + left * b + i]
                continue
            for x in range(w):
                at = start + ((x + left) % stride * width + (x + left) // stride) * b
                for i in range(b):
                    values[image + x * b + i] = found[at + i]


@kernel
def max_pool(t, like, hyper):
    """Maxima over squares, and which place won: column by column, from the top. NaN wins over all.

    `table` is the address of where the places of a square lie. Fields: c h w b, rows columns kernel stride,
    output input winners, table.
    """
    c, h, w, b, rows, columns, kernel, stride = t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8]
    size = size_of(like)
    lanes = VECTOR_BYTES // size
    for channel in range(c):
        for row in range(rows):
            for column in range(columns):
                to = ((channel * rows + row) * columns + column) * b
                corner = ((channel * h + row * stride) * w + column * stride) * b
                for i in range(0, b, lanes):
                    best, winner = t[9] + (to + i) * size, t[11] + (to + i) * size
                    source = t[10] + (corner + i) * size
                    best_of(like, best, winner, source, t[12], kernel * kernel, b - i)


@kernel
def max_pool_back(t, like, hyper):
    """Hand each error gradient to the place that won; with `positive`, only where the maximum is positive.

    Fields: c h w b, rows columns kernel stride, error input_error winners, positive output, table.
    """
    c, h, w, b, rows, columns, kernel, stride = t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8]
    size = size_of(like)
    lanes = VECTOR_BYTES // size
    if not (kernel == stride and rows * kernel == h and columns * kernel == w):
        floats(t[10], c * h * w * b, like)[:] = like * 0
    for channel in range(c):
        for row in range(rows):
            for column in range(columns):
                at = ((channel * rows + row) * columns + column) * b
                corner = ((channel * h + row * stride) * w + column * stride) * b
                for i in range(0, b, lanes):
                    behind, target = (at + i) * size, t[10] + (corner + i) * size
                    errors, winner, output = t[9] + behind, t[11] + behind, t[13] + behind
                    if kernel <= stride:
                        hand_out(like, errors, winner, output, t[12], target, t[14], kernel * kernel, b - i)
                    else:
                        hand_out_adding(
                            like, errors, winner, output, 0, target, t[14], kernel * kernel, b - i
                        )
