"""Pure: kernels of the losses."""

import math

from adam_async.model.fast.curves import exponential
from adam_async.model.fast.memory import exact, floats, kernel, longs, size_of


@exact
def softmax(t, like, hyper):
    """Compute the shares of the classes and each image's loss. Subtracts the largest score first.

    `targets` are the positions of the images' right scores among all scores; `factors` multiply the images'
    losses; an address of 0 stands for no factors. Fields: classes images, scores shares losses targets
    factors.
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
        # From scores and not from the share, because a share that rounds to 0 would give an infinite loss.
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
    # All classes first, as one loop over all memory; then one value per image.
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
    """Compute the differences, and for each image the mean of their squares over its features.

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
    # Features are the outer loop: each adds one run of memory to the losses of all images.
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
