"""Pure: kernels of local response normalisation. Formulas are those of the NumPy layer.

A kernel processes an image in blocks of pixels, all channels of a block in sequence: values that neighbouring
channels share stay in the first cache. Powers in quarters up to 2, such as the usual 3/4, are products and
square roots, which vectors have; other powers call the C library.
"""

import math

from adam_async.model.fast.memory import floats, kernel, size_of

BLOCK = 512
"""Number of values of a channel in one block: pixels times images."""


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
    # One loop per factor, each without a branch inside, because such a loop is vector code.
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
            # The mirrored window: channels that have this one in their window. The sum is written to the
            # target, so it needs no array.
            _add_window(t[4], t[10], at, width, channel, channels, n, (window - 1) // 2, window, like)
            here = (channel * n + at) * size
            target, x = floats(t[4] + here, width, like), floats(t[6] + here, width, like)
            error, power = floats(t[5] + here, width, like), floats(t[9] + here, width, like)
            for i in range(width):
                target[i] = target[i] * x[i] * factor + error[i] * power[i]
