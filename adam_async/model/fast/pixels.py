"""Pure: kernels that move pixels: padding, and pooling, forward and backward. The batch is the last axis."""

from adam_async.model.fast.memory import floats, kernel, size_of
from adam_async.model.fast.squares import best_of, mean_of, route, route_adding, spread, spread_adding
from adam_async.model.fast.vectors import VECTOR_BYTES


@kernel
def _clear(to, count, like):
    values = floats(to, count, like)
    for i in range(count):
        values[i] = like * 0


@kernel
def _copy(to, source, count, like):
    values, found = floats(to, count, like), floats(source, count, like)
    for i in range(count):
        values[i] = found[i]


@kernel
def pack(t, like, hyper):
    """Arrange images so that a strided convolution reads runs: with a border, and columns sorted by phase.

    A packed array is (c, rows, stride, width, b): image column x is in phase ``(x + left) % stride`` at ``(x
    + left) // stride``. Fields: c h w b, packed source, rows width stride, top left.
    """
    c, h, w, b, packed, source = t[1], t[2], t[3], t[4], t[5], t[6]
    rows, width, stride, top, left = t[7], t[8], t[9], t[10], t[11]
    size, line = size_of(like), stride * width * b
    for channel in range(c):
        for row in range(rows):
            start, y = packed + (channel * rows + row) * line * size, row - top
            image = source + (channel * h + y) * w * b * size
            # The border is cleared each time, because groups of another size use the same memory.
            if y < 0 or y >= h:
                _clear(start, line, like)
            # With a stride of 1 there is one phase: an image's line is one run, between two borders.
            elif stride == 1:
                _clear(start, left * b, like)
                _copy(start + left * b * size, image, w * b, like)
                _clear(start + (left + w) * b * size, line - (left + w) * b, like)
            else:
                _clear(start, line, like)
                for x in range(w):
                    at = (x + left) % stride * width + (x + left) // stride
                    _copy(start + at * b * size, image + x * b * size, b, like)


@kernel
def unpack(t, like, hyper):
    """Copy the images from a packed array to the source, without the border. Fields: those of `pack`."""
    c, h, w, b, packed, source = t[1], t[2], t[3], t[4], t[5], t[6]
    rows, width, stride, top, left = t[7], t[8], t[9], t[10], t[11]
    size, line = size_of(like), stride * width * b
    for channel in range(c):
        for y in range(h):
            start = packed + (channel * rows + y + top) * line * size
            image = source + (channel * h + y) * w * b * size
            # One run per line, as in `pack`.
            if stride == 1:
                _copy(image, start + left * b * size, w * b, like)
                continue
            for x in range(w):
                at = (x + left) % stride * width + (x + left) // stride
                _copy(image + x * b * size, start + at * b * size, b, like)


@kernel
def max_pool(t, like, hyper):
    """Compute maxima over squares and their positions. NaN is the largest value.

    Positions count column by column, from the top. `table` is the address of a table with the offset of each
    position in a square. Fields: c h w b, rows columns kernel stride, output input winners, table.
    """
    c, h, w, b, rows, columns, kernel, stride = t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8]
    size = size_of(like)
    lanes = VECTOR_BYTES // size
    for channel in range(c):
        for row in range(rows):
            for column in range(columns):
                to = ((channel * rows + row) * columns + column) * b
                corner = ((channel * h + row * stride) * w + column * stride) * b
                # Images of a pixel are side by side: a vector has one pixel of several images.
                for i in range(0, b, lanes):
                    best, winner = t[9] + (to + i) * size, t[11] + (to + i) * size
                    source = t[10] + (corner + i) * size
                    best_of(like, best, winner, source, t[12], kernel * kernel, b - i)


@kernel
def max_pool_back(t, like, hyper):
    """Give each error gradient to its maximum's position; with `positive`, only if the maximum is positive.

    Fields: c h w b, rows columns kernel stride, error input_error winners, positive output, table.
    """
    c, h, w, b, rows, columns, kernel, stride = t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8]
    size = size_of(like)
    lanes = VECTOR_BYTES // size
    # Squares that tile the image write every value; other squares skip some values, or add.
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
                    # Squares without overlap write; others add, and `fuse` gives them no ReLU.
                    if kernel <= stride:
                        route(like, errors, winner, output, t[12], target, t[14], kernel * kernel, b - i)
                    else:
                        route_adding(like, errors, winner, output, 0, target, t[14], kernel * kernel, b - i)


@kernel
def average_pool(t, like, hyper):
    """Compute means over squares. Fields: c h w b, rows columns kernel stride, output input, table.

    `table` is the address of a table with the offset of each position in a square.
    """
    c, h, w, b, rows, columns, kernel, stride = t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8]
    size = size_of(like)
    # A product with the inverse, as in the NumPy layer, in place of a division per value.
    lanes, share = VECTOR_BYTES // size, 1 / (kernel * kernel)
    for channel in range(c):
        for row in range(rows):
            for column in range(columns):
                to = ((channel * rows + row) * columns + column) * b
                corner = ((channel * h + row * stride) * w + column * stride) * b
                for i in range(0, b, lanes):
                    target, source = t[9] + (to + i) * size, t[10] + (corner + i) * size
                    mean_of(like, target, source, t[11], kernel * kernel, share, b - i)


@kernel
def average_pool_back(t, like, hyper):
    """Give each position its part of the error gradient.

    Fields: those of `average_pool`, with error instead of output, and input_error instead of input.
    """
    c, h, w, b, rows, columns, kernel, stride = t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8]
    size = size_of(like)
    lanes, share = VECTOR_BYTES // size, 1 / (kernel * kernel)
    # Squares that tile the image write every value; other squares skip some values, or add.
    if not (kernel == stride and rows * kernel == h and columns * kernel == w):
        floats(t[10], c * h * w * b, like)[:] = like * 0
    for channel in range(c):
        for row in range(rows):
            for column in range(columns):
                at = ((channel * rows + row) * columns + column) * b
                corner = ((channel * h + row * stride) * w + column * stride) * b
                for i in range(0, b, lanes):
                    error, target = t[9] + (at + i) * size, t[10] + (corner + i) * size
                    # As in `max_pool_back`: values under several squares get the sum of their parts.
                    if kernel <= stride:
                        spread(like, error, target, t[11], kernel * kernel, share, b - i)
                    else:
                        spread_adding(like, error, target, t[11], kernel * kernel, share, b - i)
