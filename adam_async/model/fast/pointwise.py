"""Pure: kernels that go value by value, and the softmax loss."""

import math

from adam_async.model.fast.memory import floats, kernel, longs


@kernel
def copy(t, like, hyper):
    """Fields: n to source."""
    n = t[1]
    to, values = floats(t[2], n, like), floats(t[3], n, like)
    for i in range(n):
        to[i] = values[i]


@kernel
def relu(t, like, hyper):
    """The larger of x and 0; a NaN stays one. Fields: n output input."""
    n, zero = t[1], like * 0
    if t[2] != t[3]:
        copy(t, like, hyper)
    # Of one array only: between two that might overlap a loop goes one value at a time.
    y = floats(t[2], n, like)
    for i in range(n):
        value = y[i]
        y[i] = zero if value <= zero else value


@kernel
def relu_back(t, like, hyper):
    """Pass where the output is positive. Fields: n input_error error output."""
    n, zero = t[1], like * 0
    if t[2] != t[3]:
        copy(t, like, hyper)
    to, y = floats(t[2], n, like), floats(t[4], n, like)
    for i in range(n):
        error, output = to[i], y[i]  # both are read in any case, so that there is nothing to jump over
        to[i] = error if output > zero else zero


@kernel
def add(t, like, hyper):
    """to = a + b. Fields: n to a b."""
    n = t[1]
    if t[2] != t[3]:
        copy(t, like, hyper)
    to, b = floats(t[2], n, like), floats(t[4], n, like)
    for i in range(n):
        to[i] += b[i]


@kernel
def softmax(t, like, hyper):
    """Shares of the classes and each image's loss. The largest score is subtracted first.

    `targets` says where among all scores each image's right one lies; `factors` multiply the images' losses,
    and 0 means that there are none. Fields: classes images, scores shares losses targets factors.
    """
    classes, images = t[1], t[2]
    scores, shares = floats(t[3], classes * images, like), floats(t[4], classes * images, like)
    losses, targets = floats(t[5], images, like), longs(t[6], images)
    factors = floats(t[7], images, like)
    for i in range(images):
        top = scores[i]
        for k in range(1, classes):
            value = scores[k * images + i]
            if value > top or value != value:
                top = value
        total = like * 0
        for k in range(classes):
            share = math.exp(scores[k * images + i] - top)
            shares[k * images + i] = share
            total += share
        for k in range(classes):
            shares[k * images + i] /= total
        losses[i] = math.log(total) - (scores[targets[i]] - top)
        if t[7] != 0:
            losses[i] *= factors[i]


@kernel
def softmax_back(t, like, hyper):
    """Shares minus one at the right class, times the image's factor, divided by the number of images.

    Fields: classes images, input_error shares targets factors.
    """
    classes, images = t[1], t[2]
    errors, shares = floats(t[3], classes * images, like), floats(t[4], classes * images, like)
    targets, factors = longs(t[5], images), floats(t[6], images, like)
    one = like * 0 + 1
    for i in range(classes * images):
        errors[i] = shares[i] / images
    for i in range(images):
        errors[targets[i]] -= one / images
    if t[6] != 0:
        for k in range(classes):
            for i in range(images):
                errors[k * images + i] *= factors[i]
