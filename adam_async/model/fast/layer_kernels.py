"""Pure: kernels of the losses, the locally connected layer, and local response normalisation.

Each pixel of a locally connected layer reads the same input runs as a convolution would, by the same table.
Weights are (filters, pixels, k), so two filters' rows are ``pixels * k`` values apart.

Response normalisation processes an image in blocks of pixels, all channels of a block in sequence: values
that neighbouring channels share stay in the first cache. Powers in quarters up to 2, such as the usual 3/4,
are products and square roots, which vector code has. Other powers call the C library.
"""

import math

from adam_async.model.fast.curves import exponential
from adam_async.model.fast.memory import exact, floats, kernel, longs, size_of
from adam_async.model.fast.products import columns_panel, rows_per_panel, table_panel
from adam_async.model.fast.tiles import DOT_ROWS, dots


@kernel
def local_forward(t, like, hyper):
    """Compute the output. Fields: filters rows columns k b, output weights bias, steps source runs line.

    `line` is the distance from one output row's runs to the next row's, in values; `steps` is the address of
    a table with the numbers 0 to k - 1.
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
            # Products have no ending here: an ending has one bias per row, but every pixel has its own.
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

    Fields: filters rows columns k b, c error filter_lines source runs line, block. `filter_lines` and `runs`
    have whole blocks of `DOT_ROWS` entries: copies of the last entry fill the last block, and their results
    are dropped.
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


@exact
def softmax(t, like, hyper):
    """Compute the shares of the classes and each image's loss. Subtracts the largest score first.

    `targets` are the positions of the right scores among all scores. `factors` multiply the images' losses;
    address 0 means no factors. Fields: classes images, scores shares losses targets factors.
    """
    classes, images = t[1], t[2]
    scores, shares = floats(t[3], classes * images, like), floats(t[4], classes * images, like)
    losses, targets = floats(t[5], images, like), longs(t[6], images)
    # A view at address 0 is harmless: it is read only if there are factors.
    factors = floats(t[7], images, like)
    for i in range(images):
        top = scores[i]
        for k in range(1, classes):
            value = scores[k * images + i]
            # A NaN becomes the largest score, so the loss is NaN too.
            if value > top or value != value:
                top = value
        total = like * 0
        for k in range(classes):
            share = exponential(scores[k * images + i] - top)
            shares[k * images + i] = share
            total += share
        for k in range(classes):
            shares[k * images + i] /= total
        # Use the scores, not the share: a share that rounds to 0 would give an infinite loss.
        losses[i] = math.log(total) - (scores[targets[i]] - top)
        if t[7] != 0:
            losses[i] *= factors[i]


@kernel
def softmax_back(t, like, hyper):
    """Compute (share - right) * factor of the image / images; `right` is 1 at the right class, else 0.

    Fields: classes images, input_error shares targets factors.
    """
    classes, images = t[1], t[2]
    errors, shares = floats(t[3], classes * images, like), floats(t[4], classes * images, like)
    targets, factors = longs(t[5], images), floats(t[6], images, like)
    one = like * 0 + 1
    # First all classes, as one loop over all memory; then one value per image.
    for i in range(classes * images):
        errors[i] = shares[i] / images
    for i in range(images):
        errors[targets[i]] -= one / images
    if t[6] != 0:
        for k in range(classes):
            for i in range(images):
                errors[k * images + i] *= factors[i]


@kernel
def squared_error(t, like, hyper):
    """Compute the differences and, for each image, the mean of their squares over its features.

    Fields: features images, input targets difference losses.
    """
    features, images = t[1], t[2]
    size, n = size_of(like), features * images
    difference, values, targets = floats(t[5], n, like), floats(t[3], n, like), floats(t[4], n, like)
    losses = floats(t[6], images, like)
    for i in range(n):
        difference[i] = values[i] - targets[i]
    for i in range(images):
        losses[i] = 0
    # Features are the outer loop: each adds one run of memory to all images' losses.
    for feature in range(features):
        row = floats(t[5] + feature * images * size, images, like)
        for i in range(images):
            losses[i] += row[i] * row[i]
    for i in range(images):
        losses[i] /= features


@kernel
def squared_error_back(t, like, hyper):
    """Compute twice the difference, divided by the number of values. Fields: n input_error difference."""
    n = t[1]
    errors, difference = floats(t[2], n, like), floats(t[3], n, like)
    share = errors.dtype.type(2 / n)
    for i in range(n):
        errors[i] = difference[i] * share


BLOCK = 512
"""Number of values of one channel in a block: pixels times images."""


@kernel
def _add_window(to, values, at, width, channel, channels, n, before, window, like):
    """Add up `window` channels over a block of pixels; the first is `before` channels before `channel`."""
    size = size_of(like)
    sums = floats(to + (channel * n + at) * size, width, like)
    for i in range(width):
        sums[i] = 0
    # Every window is added up anew: a running sum would take fewer additions, but rounds.
    for other in range(max(channel - before, 0), min(channel - before + window, channels)):
        terms = floats(values + (other * n + at) * size, width, like)
        for i in range(width):
            sums[i] += terms[i]


@kernel
def _inverse_power(to, values, width, beta, like):
    """Compute values ** -beta."""
    results, found = floats(to, width, like), floats(values, width, like)
    quarters = int(4 * beta)
    # Products and roots are vector code; `pow` is a call of the C library per value.
    if quarters != 4 * beta or quarters > 8:
        for i in range(width):
            results[i] = math.pow(found[i], -beta)
        return
    one = results.dtype.type(1)
    for i in range(width):
        results[i] = one
    # One loop per factor, none with a branch, because such a loop becomes vector code.
    for _ in range(quarters // 4):
        for i in range(width):
            results[i] *= found[i]
    if quarters % 4 >= 2:
        for i in range(width):
            results[i] *= math.sqrt(found[i])
    if quarters % 2 == 1:
        for i in range(width):
            results[i] *= math.sqrt(math.sqrt(found[i]))
    for i in range(width):
        results[i] = one / results[i]


@kernel
def response_norm(t, like, hyper):
    """Normalise. Fields: channels n size, output input scale power squares numbers.

    `n` is pixels times images; `numbers` are alpha / size, beta, k and -2 alpha beta / size.
    """
    channels, n, window = t[1], t[2], t[3]
    numbers, size = floats(t[9], 4, like), size_of(like)
    share, beta, k = numbers[0], numbers[1], numbers[2]
    for at in range(0, n, BLOCK):
        width = min(BLOCK, n - at)
        # A window has channels before and after its own, so the squares of all channels come first.
        for channel in range(channels):
            here = (channel * n + at) * size
            x, squares = floats(t[5] + here, width, like), floats(t[8] + here, width, like)
            for i in range(width):
                squares[i] = x[i] * x[i]
        for channel in range(channels):
            _add_window(t[6], t[8], at, width, channel, channels, n, window // 2, window, like)
            here = (channel * n + at) * size
            scale = floats(t[6] + here, width, like)
            for i in range(width):
                scale[i] = scale[i] * share + k
            # Scale and power stay until backward, which needs both.
            _inverse_power(t[7] + here, t[6] + here, width, beta, like)
            y, x, power = (
                floats(t[4] + here, width, like),
                floats(t[5] + here, width, like),
                floats(t[7] + here, width, like),
            )
            for i in range(width):
                y[i] = x[i] * power[i]


@kernel
def response_norm_back(t, like, hyper):
    """Compute input errors.

    Fields: channels n size, input_error error input output scale power terms numbers.
    """
    channels, n, window = t[1], t[2], t[3]
    numbers, size = floats(t[11], 4, like), size_of(like)
    factor = numbers[3]
    for at in range(0, n, BLOCK):
        width = min(BLOCK, n - at)
        for channel in range(channels):
            here = (channel * n + at) * size
            error, y = floats(t[5] + here, width, like), floats(t[7] + here, width, like)
            scale, terms = floats(t[8] + here, width, like), floats(t[10] + here, width, like)
            for i in range(width):
                terms[i] = error[i] * y[i] / scale[i]
        for channel in range(channels):
            # The mirrored window: the channels whose window contains this channel. The sum is written to the
            # target, so it needs no array.
            _add_window(t[4], t[10], at, width, channel, channels, n, (window - 1) // 2, window, like)
            here = (channel * n + at) * size
            target, x = floats(t[4] + here, width, like), floats(t[6] + here, width, like)
            error, power = floats(t[5] + here, width, like), floats(t[9] + here, width, like)
            for i in range(width):
                target[i] = target[i] * x[i] * factor + error[i] * power[i]
