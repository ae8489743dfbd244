"""L-BFGS of one process, written out with NumPy: the two loops and the line search of Nocedal and Wright.

The coordinator's program computes the same steps from inner products; the tests compare the iterates.
"""

import math

import numpy as np


def minimise(function, start, *, history=10, tolerance=1e-7, iterations=50):
    """Return the points after each accepted step, from a function of the value and the gradient."""
    x = start.copy()
    value, gradient = function(x)
    first = np.sqrt(gradient @ gradient)
    pairs, points = [], []
    while len(points) < iterations and np.sqrt(gradient @ gradient) > tolerance * first:
        d = -two_loops(gradient, pairs)
        step = 1.0 if pairs else 1 / np.sqrt(gradient @ gradient)
        t = wolfe(lambda t: along(function, x, d, t), value, gradient @ d, step)  # noqa: B023 - called here
        if t is None:
            if not pairs:
                break
            pairs = []
            continue
        new = x + t * d
        value, new_gradient = function(new)
        s, y = new - x, new_gradient - gradient
        if s @ y > 1e-12 * np.sqrt((s @ s) * (y @ y)):
            pairs = [*pairs, (s, y)][-history:]
        x, gradient = new, new_gradient
        points.append(x.copy())
    return points


def two_loops(gradient, pairs):
    """Algorithm 7.4: the product of the inverse Hessian's approximation and the gradient."""
    q, alphas = gradient.copy(), []
    for s, y in reversed(pairs):
        alpha = (s @ q) / (s @ y)
        alphas.append(alpha)
        q = q - alpha * y
    if pairs:
        s, y = pairs[-1]
        q = (s @ y) / (y @ y) * q
    for (s, y), alpha in zip(pairs, reversed(alphas), strict=True):
        q = q + (alpha - (y @ q) / (s @ y)) * s
    return q


def along(function, x, d, t):
    value, gradient = function(x + t * d)
    return value, gradient @ d


def wolfe(phi, value, slope, step):
    """Algorithms 3.5 and 3.6, with c1 = 1e-4 and c2 = 0.9."""
    before, f_before, p_before = 0.0, value, slope
    for number in range(20):
        f, p = phi(step)
        if not math.isfinite(f) or f > value + 1e-4 * step * slope or (number and f >= f_before):
            return zoom(phi, value, slope, (before, f_before, p_before), (step, f, p))
        if abs(p) <= -0.9 * slope:
            return step
        if p >= 0:
            return zoom(phi, value, slope, (step, f, p), (before, f_before, p_before))
        before, f_before, p_before = step, f, p
        step = 2 * step
    return None


def zoom(phi, value, slope, low, high):
    for _ in range(20):
        step = cubic(low, high)
        f, p = phi(step)
        if not math.isfinite(f) or f > value + 1e-4 * step * slope or f >= low[1]:
            high = (step, f, p)
            continue
        if abs(p) <= -0.9 * slope:
            return step
        if p * (high[0] - low[0]) >= 0:
            high = low
        low = (step, f, p)
    return None


def cubic(low, high):
    """Equation 3.59, at least a tenth of the interval from both ends."""
    (a, fa, pa), (b, fb, pb) = low, high
    found = (a + b) / 2
    if math.isfinite(fb):
        d1 = pa + pb - 3 * (fa - fb) / (a - b)
        if d1 * d1 >= pa * pb:
            d2 = math.copysign(math.sqrt(d1 * d1 - pa * pb), b - a)
            found = b - (b - a) * (pb + d2 - d1) / (pb - pa + 2 * d2)
    share = min(max((found - a) / (b - a), 0.1), 0.9)
    return a + (b - a) * share
