"""Pure: kernels that move pixels: padding, and pooling with its way back. The batch is the last axis."""

from adam_async.model.fast.memory import floats, kernel, size_of


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
                to[start:middle] = zero
                for i in range(w * b):
                    to[middle + i] = values[image + i]
                to[end : start + line] = zero
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

    Fields: c h w b, rows columns kernel stride, output input winners.
    """
    c, h, w, b, rows, columns, kernel, stride = t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8]
    size, zero = size_of(like), like * 0
    for place in range(c * rows * columns):
        channel, row, column = place // (rows * columns), place // columns % rows, place % columns
        corner = ((channel * h + row * stride) * w + column * stride) * b
        best = floats(t[9] + place * b * size, b, like)
        winner = floats(t[11] + place * b * size, b, like)
        values = floats(t[10] + corner * size, b, like)
        for i in range(b):
            best[i] = values[i]
            winner[i] = zero
        for number in range(1, kernel * kernel):
            offset = (number % kernel * w + number // kernel) * b
            values = floats(t[10] + (corner + offset) * size, b, like)
            mark = like * 0 + number
            for i in range(b):
                value = values[i]
                wins = value > best[i] or value != value
                best[i] = value if wins else best[i]
                winner[i] = mark if wins else winner[i]


@kernel
def max_pool_back(t, like, hyper):
    """Hand each error gradient to the place that won; with `positive`, only where the maximum is positive.

    Fields: c h w b, rows columns kernel stride, error input_error winners, positive output.
    """
    c, h, w, b, rows, columns, kernel, stride = t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8]
    size, zero = size_of(like), like * 0
    apart = kernel <= stride
    if not (kernel == stride and rows * kernel == h and columns * kernel == w):
        floats(t[10], c * h * w * b, like)[:] = zero
    for place in range(c * rows * columns):
        channel, row, column = place // (rows * columns), place // columns % rows, place % columns
        corner = ((channel * h + row * stride) * w + column * stride) * b
        errors = floats(t[9] + place * b * size, b, like)
        winner = floats(t[11] + place * b * size, b, like)
        output = floats(t[13] + place * b * size, b, like)
        for number in range(kernel * kernel):
            offset = (number % kernel * w + number // kernel) * b
            target = floats(t[10] + (corner + offset) * size, b, like)
            mark = like * 0 + number
            if apart and t[12]:
                for i in range(b):
                    target[i] = errors[i] if winner[i] == mark and output[i] > zero else zero
            elif apart:
                for i in range(b):
                    target[i] = errors[i] if winner[i] == mark else zero
            else:
                for i in range(b):
                    target[i] += errors[i] if winner[i] == mark else zero
