"""Pure: kernels of products: dense layers and convolutions, forward, backward and gradients.

Every kernel takes a row of a tape; the kernel's docstring lists the fields, from 1 on. Names of strides:
`c_row` is the step from one row of c to the next, `a_step` the step along the sum. Addresses count bytes; all
other fields count values.
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
"""Maximum number of products per sum in a tile: the tile's part of a stays in the first-level cache."""

ONE_TILE_DEPTH = 4096
"""Replaces `DEPTH` if rows of results are one tile wide: the kernel then reads each part of a only once, and
longer runs are faster."""

PAGED_DEPTH, PAGE_BYTES = 128, 4096
"""Maximum number of products in one sum if the kernel reads `a` by columns longer than a page, and the page
size in bytes. Each product then reads another page, and lines that are whole pages apart evict one another
from the cache."""

LINE = 64
"""Bytes of a cache line."""

PLAIN, BIAS, BIAS_RELU, WHERE_POSITIVE = range(4)
"""Endings, applied to a row of results while it is in the cache: none; add a bias; add a bias, then set
negative results to 0; set results to 0 unless another array of the same layout is positive there."""


@kernel
def rows_per_panel(rows):
    """Return the number of rows per panel, at most `TILE_ROWS`; all panels but the last are equally high."""
    # A tile of 8 rows needs too many addresses: 16 rows are 9 and 7.
    panels = (rows + TILE_ROWS - 1) // TILE_ROWS
    height = (rows + panels - 1) // panels
    return 9 if height == 8 and rows > 8 else height


@kernel
def panel(like, rows, n, c, c_row, a, a_row, b, b_step, depth, add):
    """Fill up to `TILE_ROWS` rows of c, each with `n` values; rows of a are contiguous, `a_row` apart."""
    size = size_of(like)
    lanes = VECTOR_BYTES // size
    i = 0
    # Two vectors at a time: each value of a is read once for both.
    while i + 2 * lanes <= n:
        rows_pair(like, rows, c + i * size, c_row, a, a_row, 0, b + i * size, b_step, depth, add, 0)
        i += 2 * lanes
    # Only machines with slow masks take this step; elsewhere a masked tile is as fast.
    if WHOLE_VECTORS_ALONE and i + lanes <= n:
        rows_one(like, rows, c + i * size, c_row, a, a_row, 0, b + i * size, b_step, depth, add, 0)
        i += lanes
    while i < n:
        rows_rest(like, rows, c + i * size, c_row, a, a_row, 0, b + i * size, b_step, depth, add, n - i)
        i += 1 if REST_IS_ONE_VALUE else lanes


@kernel
def columns_panel(like, rows, n, c, c_row, a, a_step, b, b_step, depth, add):
    """Do the work of `panel` for contiguous columns of a, `a_step` apart."""
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
    """Do the work of `panel` with tables of a row's factors and of b's rows."""
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
    """Apply the ending to `rows` rows from `first` on; c, and an `extra` of c's shape, start there."""
    size, zero = size_of(like), like * 0
    for row in range(rows):
        results = floats(c + row * c_row * size, n, like)
        if ending == WHERE_POSITIVE:
            guide = floats(extra + row * c_row * size, n, like)
            for i in range(n):
                # Read both in any case, because a loop without a branch becomes vector code.
                result, beside = results[i], guide[i]
                results[i] = result if beside > zero else zero
        else:
            bias = floats(extra + (first + row) * size, 1, like)[0]
            if ending == BIAS:
                for i in range(n):
                    results[i] += bias
            else:
                for i in range(n):
                    value = results[i] + bias
                    # A NaN compares false and stays, so it reaches the check of the gradients.
                    results[i] = zero if value <= zero else value


@kernel
def multiply(t, like, hyper):
    """Compute c (m, n) = a b and its ending; a has contiguous rows, or with `by_columns` contiguous columns.

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
    # The depth is the outer loop: all panels of a read the same part of b in turn.
    for done in range(0, k, most):
        depth, from_b = min(most, k - done), b + done * n * size
        for first in range(0, m, at_once):
            rows, to = min(at_once, m - first), c + first * n * size
            # `done` is the last argument, add: only the first part of the depth replaces c.
            if by_columns:
                columns_panel(like, rows, n, to, n, a + (done * m + first) * size, m, from_b, n, depth, done)
            else:
                panel(like, rows, n, to, n, a + (first * k + done) * size, k, from_b, n, depth, done)
            # Sums are complete, and still in the cache, only after the last part of the depth.
            if ending != PLAIN and done + depth == k:
                beside = extra + first * n * size if ending == WHERE_POSITIVE else extra
                _finish(like, first, rows, n, to, n, ending, beside)


@kernel
def multiply_one(t, like, hyper):
    """Do the work of `multiply` for one image; rows of a are contiguous.

    Fields: m k, c, a, b, ending extra.
    """
    m, k, c, a, b, ending, extra = t[1], t[2], t[3], t[4], t[5], t[6], t[7]
    size = size_of(like)
    results, x = floats(c, m, like), floats(b, k, like)
    # Four rows at a time: they share each read of x, and their sums are independent.
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
    # With one image a row of results is one value.
    if ending != PLAIN:
        _finish(like, 0, m, 1, c, 1, ending, extra)


@kernel
def multiply_back_one(t, like, hyper):
    """Compute c = aT b for one image. Fields: m (rows of a) k (values of a row), c, a, b, ending extra."""
    m, k, c, a, b, ending, extra = t[1], t[2], t[3], t[4], t[5], t[6], t[7]
    size, zero = size_of(like), like * 0
    results, errors = floats(c, k, like), floats(b, m, like)
    results[:] = zero
    # Rows of a are read in the order of memory, four at a time, so the results are read and written
    # once for the four.
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
    # Backward adds no bias, so it has only this ending.
    if ending == WHERE_POSITIVE:
        _finish(like, 0, 1, k, c, k, ending, extra)


@kernel
def convolve(t, like, hyper):
    """Compute the output pixels of all images line by line, without columns.

    `ranges` is 0, or the address of a start and a stop for each line: the range of the table entries to use.
    Entries outside the range would read only a border of zeros.

    Fields: m lines n k, c c_row c_line, a a_row a_table, b b_table b_line, ending extra, ranges.
    """
    m, lines, n, k, c, c_row, c_line = t[1], t[2], t[3], t[4], t[5], t[6], t[7]
    a, a_row, a_table, b, b_table, b_line = t[8], t[9], t[10], t[11], t[12], t[13]
    ending, extra, ranges = t[14], t[15], t[16]
    size = size_of(like)
    at_once = rows_per_panel(m)
    for line in range(lines):
        start, stop = 0, k
        # Lines near the upper and lower edge have no input under some kernel positions.
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
    """Compute the gradient of a convolution's weights, c (m, k): sums over all pixels of all images.

    Fields: m k c, a a_table a_line, b b_table b_line, lines length, block. Tables have whole blocks of
    `DOT_ROWS` entries: copies of the last entry fill the last block, and their results are dropped. `block`
    has room for one block of results.
    """
    m, k, c, a, a_table, a_line = t[1], t[2], t[3], t[4], t[5], t[6]
    b, b_table, b_line, lines, length, block = t[7], t[8], t[9], t[10], t[11], t[12]
    size = size_of(like)
    for row in range(0, m, DOT_ROWS):
        for column in range(0, k, DOT_ROWS):
            b_part = b_table + 8 * column
            dots(like, block, a, a_table + 8 * row, a_line, b, b_part, b_line, lines, length)
            # The block has its own memory, because the last block reaches beyond c.
            for i in range(min(DOT_ROWS, m - row)):
                results = floats(c + ((row + i) * k + column) * size, DOT_ROWS, like)
                found = floats(block + i * DOT_ROWS * size, DOT_ROWS, like)
                for j in range(min(DOT_ROWS, k - column)):
                    results[j] = found[j]


@kernel
def apart(values, like):
    """Return the distance between rows of this many values, in values.

    A cache has few slots for lines that are multiples of a quarter page apart, so such rows are one cache
    line further apart.
    """
    return values + LINE // size_of(like) if values * size_of(like) % (PAGE_BYTES // 4) == 0 else values


@kernel
def transpose(to, source, rows, columns, like):
    """Write an array (rows, columns) as (columns, rows), with `apart` between rows."""
    size, step = size_of(like), apart(rows, like)
    for column in range(columns):
        turned = floats(to + column * step * size, rows, like)
        values = floats(source + column * size, rows * columns, like)
        for row in range(rows):
            turned[row] = values[row * columns]


@kernel
def outer(t, like, hyper):
    """Compute the gradient of a dense layer's weights, c (m, n) = errors (m, k) x (n, k)T.

    Fields: m n k, c, errors, x, turned. `turned` is memory for x, batch first, with `apart` between rows.
    """
    m, n, k, c, errors, x, turned = t[1], t[2], t[3], t[4], t[5], t[6], t[7]
    size = size_of(like)
    if k == 1:
        # One image: each result is one product, so x needs no batch-first copy.
        e, values = floats(errors, m, like), floats(x, n, like)
        for row in range(m):
            results, error = floats(c + row * n * size, n, like), e[row]
            for i in range(n):
                results[i] = error * values[i]
        return
    # A tile reads rows of its second factor along n, but x has the images of a feature side by side.
    transpose(turned, x, n, k, like)
    at_once, step = rows_per_panel(m), apart(n, like)
    for first in range(0, m, at_once):
        rows, to = min(at_once, m - first), c + first * n * size
        for done in range(0, k, DEPTH):
            e_from, x_from = errors + (first * k + done) * size, turned + done * step * size
            panel(like, rows, n, to, n, e_from, k, x_from, step, min(DEPTH, k - done), done)


@kernel
def row_sums(t, like, hyper):
    """Compute the gradient of a bias: the sum of each row. Fields: rows length, c, a."""
    rows, length, c, a = t[1], t[2], t[3], t[4]
    results, size = floats(c, rows, like), size_of(like)
    for row in range(rows):
        values, total = floats(a + row * length * size, length, like), like * 0
        for i in range(length):
            total += values[i]
        results[row] = total
