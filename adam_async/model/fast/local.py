"""Pure: kernels of the locally connected layer: every output pixel is a small dense layer.

Each pixel reads the runs of the input that a convolution reads there, by the same table. Weights are
(filters, pixels, k), so the rows of two filters are ``pixels * k`` values apart.
"""

from adam_async.model.fast.memory import floats, kernel, longs, size_of
from adam_async.model.fast.products import columns_panel, rows_per_panel, table_panel
from adam_async.model.fast.tiles import DOT_ROWS, dots


@kernel
def local_forward(t, like, hyper):
    """Compute the output. Fields: filters rows columns k b, output weights bias, steps source runs line.

    `line` is the distance from the runs of one output row to the runs of the next, in values; `steps` is the
    address of a table with the numbers 0 to k - 1.
    """
    filters, rows, columns, k, b = t[1], t[2], t[3], t[4], t[5]
    output, weights, bias, steps, source, runs, line = t[6], t[7], t[8], t[9], t[10], t[11], t[12]
    size, pixels = size_of(like), rows * columns
    # The panel with tables needs a table for each factor; the weights are in order, so `steps` is 0 to k - 1.
    biases = floats(bias, filters * pixels, like)
    at_once = rows_per_panel(filters)
    for pixel in range(pixels):
        start = source + (pixel // columns * line + pixel % columns * b) * size
        for first in range(0, filters, at_once):
            count, at = min(at_once, filters - first), first * pixels + pixel
            to, a = output + at * b * size, weights + at * k * size
            table_panel(like, count, b, to, pixels * b, a, pixels * k, steps, start, runs, k)
            # No ending of a product: an ending has one bias per row, and here every pixel has its own.
            for row in range(count):
                results = floats(to + row * pixels * b * size, b, like)
                value = biases[at + row * pixels]
                for i in range(b):
                    results[i] += value


@kernel
def local_back(t, like, hyper):
    """Clear the target and add each pixel's error gradients to its runs.

    Fields: filters rows columns k b, error weights target runs line, values block. `values` is the number of
    the target's values, `block` is memory for ``k * b`` values.
    """
    filters, rows, columns, k, b = t[1], t[2], t[3], t[4], t[5]
    error, weights, target, line, block = t[6], t[7], t[8], t[10], t[12]
    size, pixels, runs = size_of(like), rows * columns, longs(t[9], k)
    # Runs of neighbouring pixels may overlap, so each pixel adds to its runs.
    floats(target, t[11], like)[:] = like * 0
    at_once = rows_per_panel(k)
    for pixel in range(pixels):
        start = target + (pixel // columns * line + pixel % columns * b) * size
        errors, a = error + pixel * b * size, weights + pixel * k * size
        # A tile writes rows at equal distances, but runs start anywhere: the products go through a block.
        for first in range(0, k, at_once):
            count, to = min(at_once, k - first), block + first * b * size
            columns_panel(like, count, b, to, b, a + first * size, pixels * k, errors, pixels * b, filters, 0)
        for row in range(k):
            sums, part = floats(start + runs[row] * size, b, like), floats(block + row * b * size, b, like)
            for i in range(b):
                sums[i] += part[i]


@kernel
def local_delta(t, like, hyper):
    """Compute the gradient of the weights.

    Fields: filters rows columns k b, c error filter_lines source runs line, block. `filter_lines` and
    `runs` have whole blocks of `DOT_ROWS` entries: the last is repeated, and results of copies are dropped.
    """
    filters, rows, columns, k, b = t[1], t[2], t[3], t[4], t[5]
    c, error, lines, source, runs, line, block = t[6], t[7], t[8], t[9], t[10], t[11], t[12]
    size, pixels = size_of(like), rows * columns
    found = floats(block, DOT_ROWS * DOT_ROWS, like)
    for pixel in range(pixels):
        start = source + (pixel // columns * line + pixel % columns * b) * size
        errors = error + pixel * b * size
        for first in range(0, filters, DOT_ROWS):
            for column in range(0, k, DOT_ROWS):
                a_part, b_part = lines + 8 * first, runs + 8 * column
                dots(like, block, errors, a_part, 0, start, b_part, 0, 1, b)
                # As in `products.correlate`, the last block reaches beyond c.
                for i in range(min(DOT_ROWS, filters - first)):
                    at = ((first + i) * pixels + pixel) * k + column
                    results = floats(c + at * size, DOT_ROWS, like)
                    for j in range(min(DOT_ROWS, k - column)):
                        results[j] = found[i * DOT_ROWS + j]
