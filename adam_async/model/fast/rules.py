"""Pure: the update rules as compiled kernels, for several gradients of several shards in one call.

Gradients come from memory, but values and state mostly from the cache, so reading the gradients determines
the time. SGD and momentum take four gradients at a time, each in one run that the processor prefetches, and
read and write each value once for all four. Nesterov's momentum takes one gradient at a time. The other rules
spend more time on arithmetic than on memory.

Each value gets the same operations in the same order as in `adam_async.model.rules`, gradient after gradient,
each rounded separately. So the results equal those of NumPy's loops to the last bit.
"""

from typing import Any

import numpy as np
from numba import types

from adam_async.model.fast.memory import exact, floats, largest, size_of

SGD, MOMENTUM, NESTEROV, ADAGRAD, ADAM = range(5)
"""Numbers of the rules in the kernel."""

PER_PUSH = 3
"""Count of numbers per push in the kernel's argument `rates`."""

TILE = 1 << 16
"""Number of values in a tile, which stays in the second-level cache while all gradients are applied to it."""


CHECKED = 1 << 12
"""Number of new values that are written beside the old ones, and then checked in the first-level cache."""


@exact
def _sgd_apart(like, n, values, into, gradient, rates):
    """Write the values after plain SGD into other memory; return whether they are finite."""
    size = size_of(like)
    for start in range(0, n, CHECKED):
        count, behind = min(CHECKED, n - start), start * size
        p, new = floats(values + behind, count, like), floats(into + behind, count, like)
        g = floats(gradient + behind, count, like)
        rate = p.dtype.type(rates[0])
        for i in range(count):
            new[i] = p[i] - g[i] * rate
        if not largest(into + behind, count, like) < np.inf:  # not `>=`: NaN fails each comparison
            return False
    return True


@exact
def _sgd(like, n, values, gradient, rates, decay):
    p, g = floats(values, n, like), floats(gradient, n, like)
    number = p.dtype.type
    # Rounded to the type of the arrays first, as NumPy does with a Python number.
    rate, shrink = number(rates[0]), number(decay)
    # Without decay nothing is added, as in `Rule.apply`, because `p * 0` of an infinite value is NaN.
    if decay != 0:
        for i in range(n):
            p[i] -= (p[i] * shrink + g[i]) * rate
    else:
        for i in range(n):
            p[i] -= g[i] * rate


@exact
def _sgd_four(like, n, values, first, second, third, fourth, rates, decay):
    p, a, b = floats(values, n, like), floats(first, n, like), floats(second, n, like)
    c, d = floats(third, n, like), floats(fourth, n, like)
    number = p.dtype.type
    rate_a, rate_b = number(rates[0]), number(rates[PER_PUSH])
    rate_c, rate_d = number(rates[2 * PER_PUSH]), number(rates[3 * PER_PUSH])
    shrink = number(decay)
    # The value stays in a register for all four; each step rounds as four separate calls do.
    if decay != 0:
        for i in range(n):
            value = p[i]
            value -= (value * shrink + a[i]) * rate_a
            value -= (value * shrink + b[i]) * rate_b
            value -= (value * shrink + c[i]) * rate_c
            value -= (value * shrink + d[i]) * rate_d
            p[i] = value
    else:
        for i in range(n):
            value = p[i]
            value -= a[i] * rate_a
            value -= b[i] * rate_b
            value -= c[i] * rate_c
            value -= d[i] * rate_d
            p[i] = value


@exact
def _momentum(like, n, values, buffer, gradient, rates, constants):
    p, kept, g = floats(values, n, like), floats(buffer, n, like), floats(gradient, n, like)
    number = p.dtype.type
    rate, shrink, momentum = number(rates[0]), number(constants[0]), number(constants[1])
    # Without decay nothing is added, as in `_sgd`.
    if constants[0] != 0:
        for i in range(n):
            # Parentheses as in the NumPy rule: decay and gradient are one sum before the momentum.
            step = kept[i] * momentum + (p[i] * shrink + g[i])
            kept[i] = step
            p[i] -= step * rate
    else:
        for i in range(n):
            step = kept[i] * momentum + g[i]
            kept[i] = step
            p[i] -= step * rate


@exact
def _momentum_four(like, n, values, buffer, first, second, third, fourth, rates, constants):
    p, kept = floats(values, n, like), floats(buffer, n, like)
    a, b, c = floats(first, n, like), floats(second, n, like), floats(third, n, like)
    d = floats(fourth, n, like)
    number = p.dtype.type
    rate_a, rate_b = number(rates[0]), number(rates[PER_PUSH])
    rate_c, rate_d = number(rates[2 * PER_PUSH]), number(rates[3 * PER_PUSH])
    shrink, momentum = number(constants[0]), number(constants[1])
    # Value and momentum stay in registers for all four.
    if constants[0] != 0:
        for i in range(n):
            value, step = p[i], kept[i]
            step = step * momentum + (value * shrink + a[i])
            value -= step * rate_a
            step = step * momentum + (value * shrink + b[i])
            value -= step * rate_b
            step = step * momentum + (value * shrink + c[i])
            value -= step * rate_c
            step = step * momentum + (value * shrink + d[i])
            value -= step * rate_d
            p[i], kept[i] = value, step
    else:
        for i in range(n):
            value, step = p[i], kept[i]
            step = step * momentum + a[i]
            value -= step * rate_a
            step = step * momentum + b[i]
            value -= step * rate_b
            step = step * momentum + c[i]
            value -= step * rate_c
            step = step * momentum + d[i]
            value -= step * rate_d
            p[i], kept[i] = value, step


@exact
def _nesterov(like, n, values, buffer, gradient, rates, constants):
    p, kept, g = floats(values, n, like), floats(buffer, n, like), floats(gradient, n, like)
    number = p.dtype.type
    rate, shrink, momentum = number(rates[0]), number(constants[0]), number(constants[1])
    decays = constants[0] != 0
    for i in range(n):
        step = p[i] * shrink + g[i] if decays else g[i]
        kept[i] = kept[i] * momentum + step
        p[i] -= (kept[i] * momentum + step) * rate


@exact
def _adagrad(like, n, values, squares, gradient, rates, constants):
    p, kept, g = floats(values, n, like), floats(squares, n, like), floats(gradient, n, like)
    number = p.dtype.type
    rate, shrink, epsilon = number(rates[0]), number(constants[0]), number(constants[1])
    decays = constants[0] != 0
    for i in range(n):
        step = p[i] * shrink + g[i] if decays else g[i]
        kept[i] += step * step
        # First the product with the rate, then the division: NumPy's order.
        p[i] -= step * rate / (np.sqrt(kept[i]) + epsilon)


@exact
def _adam(like, n, values, means, squares, gradient, rates, constants):
    p, g = floats(values, n, like), floats(gradient, n, like)
    mean, square = floats(means, n, like), floats(squares, n, like)
    number = p.dtype.type
    # These three depend on the step number: see `CompiledBatches._apply_adam`.
    rate, root, lost = number(rates[0]), number(rates[1]), number(rates[2])
    shrink, beta1, rest1 = number(constants[0]), number(constants[1]), number(constants[2])
    beta2, rest2, epsilon = number(constants[3]), number(constants[4]), number(constants[5])
    decays, loses = constants[0] != 0, rates[2] != 0
    for i in range(n):
        step = p[i] * shrink + g[i] if decays else g[i]
        # From the left, because NumPy rounds in this order: the square of the step first, then its part.
        square[i] = square[i] * beta2 + step * step * rest2
        mean[i] = mean[i] * beta1 + step * rest1
        # No clip as in `Adam.apply`: a server applies on one thread, where the clip changes no bit.
        value = p[i] - p[i] * lost if loses else p[i]
        p[i] = value - mean[i] * rate / (np.sqrt(square[i]) / root + epsilon)


@exact
def apply_rule(kind, like, shards, gradients, constants, rates):
    """Apply one gradient of each push to each shard, push after push.

    Args:
        kind: `SGD`, `MOMENTUM`, `NESTEROV`, `ADAGRAD`, or `ADAM` for both `Adam` and `AdamW`.
        like: Any number of the arrays' type.
        shards: int64 (shards, 5): number of values; addresses of the values and of up to two arrays of state;
            start of the shard's gradient in each push, in values. With plain SGD and one push, the first
            array of state, if there is one, gets the new values, and the old ones stay.
        gradients: int64 (pushes): addresses.
        constants: float64 (6): weight decay; then the momentum, or epsilon, or Adam's beta1, 1 - beta1,
            beta2, 1 - beta2 and epsilon.
        rates: float64 (PER_PUSH * pushes): for each push the rate, Adam's root, and the share of each value
            that is subtracted first, or 0.

    Returns whether the checked values are finite.
    """
    size, pushes = size_of(like), len(gradients)
    for shard in range(shards.shape[0]):
        row = shards[shard]
        length, values, first, second, at = row[0], row[1], row[2], row[3], row[4]
        # Tiles are outside and pushes inside: a tile is read from memory once for all pushes.
        for start in range(0, length, TILE):
            n, behind = min(TILE, length - start), start * size
            p, s, t, offset = values + behind, first + behind, second + behind, (at + start) * size
            push = 0
            while push < pushes:
                g, mine = gradients[push] + offset, rates[PER_PUSH * push :]
                # The last one to three pushes are applied one by one, with the same operations and bits.
                if kind <= MOMENTUM and push + 4 <= pushes:
                    h, k = gradients[push + 1] + offset, gradients[push + 2] + offset
                    m = gradients[push + 3] + offset
                    if kind == SGD:
                        _sgd_four(like, n, p, g, h, k, m, mine, constants[0])
                    else:
                        _momentum_four(like, n, p, s, g, h, k, m, mine, constants)
                    push += 4
                    continue
                if kind == SGD and first != 0:
                    if not _sgd_apart(like, n, p, s, g, mine):
                        return False
                elif kind == SGD:
                    _sgd(like, n, p, g, mine, constants[0])
                elif kind == MOMENTUM:
                    _momentum(like, n, p, s, g, mine, constants)
                elif kind == NESTEROV:
                    _nesterov(like, n, p, s, g, mine, constants)
                elif kind == ADAGRAD:
                    _adagrad(like, n, p, s, g, mine, constants)
                else:
                    _adam(like, n, p, s, t, g, mine, constants)
                push += 1
    return True


def rule_signature(dtype: "np.dtype[Any]") -> tuple[Any, ...]:
    """Return the signature of `apply_rule` for a type."""
    whole, number = types.Array(types.int64, 1, "C"), types.Array(types.float64, 1, "C")
    like = types.float32 if dtype == np.float32 else types.float64
    return types.int64, like, types.Array(types.int64, 2, "C"), whole, number, number
