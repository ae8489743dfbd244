"""Pure: kernels that multiply: dense layers and convolutions, forward, back and to gradients.

Every kernel takes a row of a tape; its fields, from 1 on, are listed in its docstring. Names of strides:
`c_row` leads from one row of c to the next, `a_step` along the sum. Addresses are bytes, all else counts
values.
"""

from adam_async.model.fast.memory import floats, kernel, longs, size_of
from adam_async.model.fast.tiles import (
    DOT_ROWS,
    REST_IS_ONE_VALUE,
    TILE_ROWS,
    WHOLE_VECTORS_ALONE,
    columns_one,
    columns_pair,
    columns_rest,
    dots,
    rows_one,
    rows_pair,
    rows_rest,
    table_one,
    table_pair,
    table_rest,
)
from adam_async.model.fast.vectors import VECTOR_BYTES

DEPTH = 512
"""Products per sum before the next tile: the part of a that a tile reads stays in the first cache."""

ONE_TILE_DEPTH = 4096
"""The same where a row of results is one tile, which reads each part of a once: longer runs of memory are
read faster."""

PAGED_DEPTH, PAGE_BYTES = 128, 4096
"""The same, where a is read by columns and its rows are longer than a page: each product reads another page,
and lines that lie a whole number of pages apart drive one another out of the cache."""

LINE = 64
"""Bytes that come into the cache at once."""

PLAIN, BIAS, BIAS_RELU, WHERE_POSITIVE = range(4)
"""What is done to a row of results while it is in the cache: nothing; a bias is added; and what is negative
becomes 0; it becomes 0 where another array, laid out like the results, is not positive."""


@kernel
def rows_per_panel(rows):
    """Rows of equally high panels; but 9 and 7 instead of 8 and 8, whose loop needs too many addresses."""
    panels = (rows + TILE_ROWS - 1) // TILE_ROWS
    height = (rows + panels - 1) // panels
    return 9 if height == 8 and rows > 8 else height


@kernel
def panel(like, rows, n, c, c_row, a, a_row, b, b_step, depth, add):
    """Fill up to `TILE_ROWS` rows of c, each `n` values; rows of a are contiguous, `a_row` apart."""
    size = size_of(like)
    lanes = VECTOR_BYTES // size
    i = 0
    while i + 2 * lanes <= n:
        rows_pair(like, rows, c + i * size, c_row, a, a_row, 0, b + i * size, b_step, depth, add, 0)
        i += 2 * lanes
    if WHOLE_VECTORS_ALONE and i + lanes <= n:
        rows_one(like, rows, c + i * size, c_row, a, a_row, 0, b + i * size, b_step, depth, add, 0)
        i += lanes
    while i < n:
        rows_rest(like, rows, c + i * size, c_row, a, a_row, 0, b + i * size, b_step, depth, add, n - i)
        i += 1 if REST_IS_ONE_VALUE else lanes


@kernel
def columns_panel(like, rows, n, c, c_row, a, a_step, b, b_step, depth, add):
    """The same, where a's columns are contiguous, `a_step` apart."""
    size = size_of(like)
    lanes = VECTOR_BYTES // size
    i = 0
    while i + 2 * lanes <= n:
        columns_pair(like, rows, c + i * size, c_row, a, a_step, 0, b + i * size, b_step, depth, add, 0)
        i += 2 * lanes
    if WHOLE_VECTORS_ALONE and i + lanes <= n:
        columns_one(like, rows, c + i * size, c_row, a, a_step, 0, b + i * size, b_step, depth, add, 0)
        i += lanes
    while i < n:
        columns_rest(like, rows, c + i * size, c_row, a, a_step, 0, b + i * size, b_step, depth, add, n - i)
        i += 1 if REST_IS_ONE_VALUE else lanes


@kernel
def table_panel(like, rows, n, c, c_row, a, a_row, a_table, b, b_table, depth):
    """The same, where tables tell the places of a row's factors and of b's rows."""
    size = size_of(like)
    lanes = VECTOR_BYTES // size
    i = 0
    while i + 2 * lanes <= n:
        table_pair(like, rows, c + i * size, c_row, a, a_row, a_table, b + i * size, b_table, depth, 0, 0)
        i += 2 * lanes
    if WHOLE_VECTORS_ALONE and i + lanes <= n:
        table_one(like, rows, c + i * size, c_row, a, a_row, a_table, b + i * size, b_table, depth, 0, 0)
        i += lanes
    while i < n:
        table_rest(like, rows, c + i * size, c_row, a, a_row, a_table, b + i * size, b_table, depth, 0, n - i)
        i += 1 if REST_IS_ONE_VALUE else lanes


@kernel
def _finish(like, first, rows, n, c, c_row, ending, extra):
    """Do the rest to rows `first` to `first + rows`; c and an array of its shape start at row `first`."""
    size, zero = size_of(like), like * 0
    for row in range(rows):
        results = floats(c + row * c_row * size, n, like)
        if ending == WHERE_POSITIVE:
            guide = floats(extra + row * c_row * size, n, like)
            for i in range(n):
                result, beside = results[i], guide[i]  # both, so that there is nothing to jump over
                results[i] = result if beside > zero else zero
        else:
            bias = floats(extra + (first + row) * size, 1, like)[0]
            if ending == BIAS:
                for i in range(n):
                    results[i] += bias
            else:
                for i in range(n):
                    value = results[i] + bias
                    results[i] = zero if value <= zero else value  # a NaN stays one


@kernel
def multiply(t, like, hyper):
    """c (m, n) = a b, and its ending; of a, either rows or columns are contiguous.

    Fields: m n k, c, a by_columns, b, ending extra.
    """
    m, n, k, c, a, by_columns, b, ending, extra = t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], t[9]
    size = size_of(like)
    at_once = rows_per_panel(m)
    most = DEPTH
    if by_columns and m * size > PAGE_BYTES:
        most = PAGED_DEPTH
    elif not by_columns and n * size <= 2 * VECTOR_BYTES:
        most = ONE_TILE_DEPTH
    for done in range(0, k, most):
        depth, from_b = min(most, k - done), b + done * n * size
        for first in range(0, m, at_once):
            rows, to = min(at_once, m - first), c + first * n * size
            if by_columns:
                columns_panel(like, rows, n, to, n, a + (done * m + first) * size, m, from_b, n, depth, done)
            else:
                panel(like, rows, n, to, n, a + (first * k + done) * size, k, from_b, n, depth, done)
            if ending != PLAIN and done + depth == k:
                beside = extra + first * n * size if ending == WHERE_POSITIVE else extra
                _finish(like, first, rows, n, to, n, ending, beside)


@kernel
def multiply_one(t, like, hyper):
    """The same for one image, a row of a being contiguous. Fields: m k, c, a, b, ending extra."""
    m, k, c, a, b, ending, extra = t[1], t[2], t[3], t[4], t[5], t[6], t[7]
    size = size_of(like)
    results, x = floats(c, m, like), floats(b, k, like)
    for row in range(0, m - m % 4, 4):
        w0, w1 = floats(a + row * k * size, k, like), floats(a + (row + 1) * k * size, k, like)
        w2, w3 = floats(a + (row + 2) * k * size, k, like), floats(a + (row + 3) * k * size, k, like)
        s0 = s1 = s2 = s3 = like * 0
        for i in range(k):
            s0 += w0[i] * x[i]
            s1 += w1[i] * x[i]
            s2 += w2[i] * x[i]
            s3 += w3[i] * x[i]
        results[row], results[row + 1], results[row + 2], results[row + 3] = s0, s1, s2, s3
    for row in range(m - m % 4, m):
        w0, s0 = floats(a + row * k * size, k, like), like * 0
        for i in range(k):
            s0 += w0[i] * x[i]
        results[row] = s0
    if ending != PLAIN:
        _finish(like, 0, m, 1, c, 1, ending, extra)


@kernel
def multiply_back_one(t, like, hyper):
    """c = aT b for one image. Fields: m (rows of a) k (values of a row), c, a, b, ending extra."""
    m, k, c, a, b, ending, extra = t[1], t[2], t[3], t[4], t[5], t[6], t[7]
    size, zero = size_of(like), like * 0
    results, errors = floats(c, k, like), floats(b, m, like)
    results[:] = zero
    for row in range(0, m - m % 4, 4):
        e0, e1, e2, e3 = errors[row], errors[row + 1], errors[row + 2], errors[row + 3]
        w0, w1 = floats(a + row * k * size, k, like), floats(a + (row + 1) * k * size, k, like)
        w2, w3 = floats(a + (row + 2) * k * size, k, like), floats(a + (row + 3) * k * size, k, like)
        for i in range(k):
            results[i] += e0 * w0[i] + e1 * w1[i] + e2 * w2[i] + e3 * w3[i]
    for row in range(m - m % 4, m):
        e0, w0 = errors[row], floats(a + row * k * size, k, like)
        for i in range(k):
            results[i] += e0 * w0[i]
    if ending == WHERE_POSITIVE:
        _finish(like, 0, 1, k, c, k, ending, extra)


@kernel
def convolve(t, like, hyper):
    """One line of output pixels of all images after the other, without columns.

    `ranges` is 0, or the address of a first and a last entry of the tables for each line: those that read
    more than a border of zeros.

    Fields: m lines n k, c c_row c_line, a a_row a_table, b b_table b_line, ending extra, ranges.
    """
    m, lines, n, k, c, c_row, c_line = t[1], t[2], t[3], t[4], t[5], t[6], t[7]
    a, a_row, a_table, b, b_table, b_line = t[8], t[9], t[10], t[11], t[12], t[13]
    ending, extra, ranges = t[14], t[15], t[16]
    size = size_of(like)
    at_once = rows_per_panel(m)
    for line in range(lines):
        start, stop = 0, k
        if ranges:
            ends = longs(ranges + 16 * line, 2)
            start, stop = ends[0], ends[1]
        for first in range(0, m, at_once):
            rows, to = min(at_once, m - first), c + (first * c_row + line * c_line) * size
            a_from, b_from = a + first * a_row * size, b + line * b_line * size
            a_part, b_part = a_table + 8 * start, b_table + 8 * start
            table_panel(like, rows, n, to, c_row, a_from, a_row, a_part, b_from, b_part, stop - start)
            if ending != PLAIN:
                _finish(like, first, rows, n, to, c_row, ending, extra)


@kernel
def correlate(t, like, hyper):
    """The gradient of a convolution's weights, c (m, k): sums over all pixels of all images.

    Fields: m k c, a a_table a_line, b b_table b_line, lines length, block. Tables are filled up to whole
    blocks of `DOT_ROWS` with repetitions, whose results are dropped; `block` holds one block of results.
    """
    m, k, c, a, a_table, a_line = t[1], t[2], t[3], t[4], t[5], t[6]
    b, b_table, b_line, lines, length, block = t[7], t[8], t[9], t[10], t[11], t[12]
    size = size_of(like)
    for row in range(0, m, DOT_ROWS):
        for column in range(0, k, DOT_ROWS):
            b_part = b_table + 8 * column
            dots(like, block, a, a_table + 8 * row, a_line, b, b_part, b_line, lines, length)
            for i in range(min(DOT_ROWS, m - row)):
                results = floats(c + ((row + i) * k + column) * size, DOT_ROWS, like)
                found = floats(block + i * DOT_ROWS * size, DOT_ROWS, like)
                for j in range(min(DOT_ROWS, k - column)):
                    results[j] = found[j]


@kernel
def apart(values, like):
    """How far rows of so many values lie apart, so that rows below one another are not in one another's way.

    A cache has few places for lines that lie a whole number of pages apart.
    """
    return values + LINE // size_of(like) if values * size_of(like) % (PAGE_BYTES // 4) == 0 else values


@kernel
def transpose(to, source, rows, columns, like):
    """Write an array (rows, columns) as (columns, rows), each row `apart` from the next."""
    size, step = size_of(like), apart(rows, like)
    for column in range(columns):
        turned = floats(to + column * step * size, rows, like)
        values = floats(source + column * size, rows * columns, like)
        for row in range(rows):
            turned[row] = values[row * columns]


@kernel
def outer(t, like, hyper):
    """The gradient of a dense layer's weights, c (m, n) = errors (m, k) x (n, k)T.

    Fields: m n k, c, errors, x, turned. `turned` is memory for x batch first, whose rows are `apart`.
    """
    m, n, k, c, errors, x, turned = t[1], t[2], t[3], t[4], t[5], t[6], t[7]
    size = size_of(like)
    if k == 1:
        e, values = floats(errors, m, like), floats(x, n, like)
        for row in range(m):
            results, error = floats(c + row * n * size, n, like), e[row]
            for i in range(n):
                results[i] = error * values[i]
        return
    transpose(turned, x, n, k, like)
    at_once, step = rows_per_panel(m), apart(n, like)
    for first in range(0, m, at_once):
        rows, to = min(at_once, m - first), c + first * n * size
        for done in range(0, k, DEPTH):
            e_from, x_from = errors + (first * k + done) * size, turned + done * step * size
            panel(like, rows, n, to, n, e_from, k, x_from, step, min(DEPTH, k - done), done)


@kernel
def row_sums(t, like, hyper):
    """The gradient of a bias. Fields: rows length, c, a."""
    rows, length, c, a = t[1], t[2], t[3], t[4]
    results, size = floats(c, rows, like), size_of(like)
    for row in range(rows):
        values, total = floats(a + row * length * size, length, like), like * 0
        for i in range(length):
            total += values[i]
        results[row] = total
