"""Pure: sums of scaled vectors, and exactly rounded dot products, with NumPy.

`Vectors` is the interface; `adam_async.model.fast.sums` has compiled kernels with the same results.

A sum of scaled vectors rounds in a fixed order: first the coefficients to the vectors' type, then each
product, then each sum, from the first term to the last.

A dot product is the float64 sum of the products, each rounded; the sum is rounded once, as in `math.fsum`. So
its bits depend neither on the order of addition nor on the kernel. A kernel keeps its sums' errors, which
doubles the precision (Ogita, Rump and Oishi, "Accurate Sum and Dot Product", 2005). A bound on the error that
is left proves the rounding of nearly all results. The other dot products are computed in whole numbers.
"""

from collections.abc import Iterator, Sequence
from math import frexp, fsum, inf, isfinite, nan, sqrt
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

VECTORS = "vectors"
"""Word that names the vector kernels to the module that compiles kernels."""

BLOCK = 65_536
"""Number of values in a block, which stays in the cache from term to term."""

GROUP = 8192
"""Number of products that NumPy cuts together."""

UNIT = 2.0**-53
"""Largest relative error of a rounding in float64."""

LEAST = 1e-250
"""Sum of absolute products, or of their squares, below which the error bound could underflow."""

LEAST_EXPONENT = -1073
"""Least exponent of a float64 as `numpy.frexp` returns it."""

LOW_BITS = 27
"""Number of lower bits of a mantissa, which are summed apart from the upper 26 bits. Then float64 holds both
sums without error, for up to 2^26 numbers."""

WHOLE = 1 << 53 - LEAST_EXPONENT
"""The unit of whole numbers in which each float64 is one."""

Term = tuple[float, NDArray[Any]]
"""Coefficient and vector."""


class Vectors(Protocol):
    """Arithmetic on vectors of one type. Has scratch memory, so each writer needs its own object."""

    def combine(self, out: NDArray[Any], terms: Sequence[Term]) -> bool:
        """Write a sum of scaled vectors into `out`, which is not among them; zeros without terms.

        Returns whether all values are finite.
        """
        ...

    def dot(self, first: NDArray[Any], second: NDArray[Any]) -> float | None:
        """Return the exactly rounded dot product; None if `exact_sum` must compute it."""
        ...


class NumpyVectors:
    """`Vectors` by NumPy's loops.

    Args:
        dtype: float32 or float64.
    """

    def __init__(self, dtype: DTypeLike) -> None:
        self._number: Any = np.dtype(dtype).type
        self._scratch = np.empty(BLOCK, dtype)
        self._products, self._upper, self._ones = np.empty(GROUP), np.empty(GROUP), np.ones(GROUP)

    @np.errstate(over="ignore", invalid="ignore")
    def combine(self, out: NDArray[Any], terms: Sequence[Term]) -> bool:
        """See `Vectors.combine`."""
        if not terms:
            out[:] = 0
            return True
        scaled = [(self._number(coefficient), vector) for coefficient, vector in terms]
        finite = True
        for start in range(0, len(out), BLOCK):
            part = slice(start, start + BLOCK)
            block = out[part]
            product = self._scratch[: len(block)]
            for at, (coefficient, vector) in enumerate(scaled):
                if at == 0:
                    np.multiply(vector[part], coefficient, out=block)
                elif coefficient == 1:
                    np.add(block, vector[part], out=block)
                else:
                    np.add(block, np.multiply(vector[part], coefficient, out=product), out=block)
            # A finite sum of squares proves it fast. `vdot`, because `dot` warns of an overflow.
            finite = finite and (isfinite(np.vdot(block, block)) or bool(np.isfinite(block).all()))
        return finite

    @np.errstate(over="ignore", invalid="ignore")
    def dot(self, first: NDArray[Any], second: NDArray[Any]) -> float | None:
        """See `Vectors.dot`.

        A power of two above their sum cuts each product of a group in two parts. The upper parts have an
        exact sum in any order; the lower ones are tiny (Rump, Ogita, Oishi, "Accurate Floating-Point
        Summation", 2008).
        """
        parts, size, bound = [0.0], 0.0, 0.0
        for start in range(0, len(first), GROUP):
            part = slice(start, start + GROUP)
            n = len(first[part])
            p, upper, ones = self._products[:n], self._upper[:n], self._ones[:n]
            if first.dtype == np.float64:
                np.multiply(first[part], second[part], out=p)
            else:  # copies are faster than a product of another type
                p[:], upper[:] = first[part], second[part]
                np.multiply(p, upper, out=p)
            square = n * float(np.vdot(p, p))
            if not LEAST < square < inf:
                if square or p.any():
                    return None
                continue
            # Above the sum of the absolute products, which is at most the square root.
            cut = 2.0 ** (frexp(sqrt(square))[1] + 2)
            np.add(p, cut, out=upper)
            np.subtract(upper, cut, out=upper)
            np.subtract(p, upper, out=p)
            # Uses BLAS's fast product: the first sum is not rounded, and the second has a bounded error.
            parts += float(np.dot(upper, ones)), float(np.dot(p, ones))
            size += cut
            bound += 2 * (n * UNIT) ** 2 * cut
        high = fsum(parts)
        return rounded(high, fsum([*parts, -high]), size, 2 * bound + 4 * UNIT**2 * size)


def _two_sum(a: float, b: float) -> tuple[float, float]:
    """Return the rounded sum of two numbers, and its error."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def rounded(high: float, low: float, size: float, bound: float) -> float | None:
    """Round a sum of two parts to float64; None if its error could change the result.

    Args:
        high: The sum.
        low: Sum of the errors in `high`.
        size: Sum of the absolute values, or a bound on this sum; 0 if all values are 0.
        bound: Largest error of `high` and `low` together.
    """
    if size == 0:
        return 0.0
    total, rest = _two_sum(high, low)
    if not (LEAST < size < inf and isfinite(total)):
        return None
    is_sure = total + (rest + bound) == total and total + (rest - bound) == total
    return total if is_sure else None


def exact_sum(first: NDArray[Any], second: NDArray[Any]) -> Iterator[float]:
    """Compute a dot product in whole numbers, a block at a time; the last value is the result.

    The result is NaN if a product or the sum overflows.
    """
    total = 0
    for start in range(0, len(first), BLOCK):
        part = slice(start, start + BLOCK)
        with np.errstate(over="ignore", invalid="ignore"):
            products = np.multiply(first[part], second[part], dtype=np.float64)
        if not np.isfinite(products).all():
            yield nan
            return
        total += _whole(products)
        yield 0.0
    try:
        yield total / WHOLE  # Python rounds the quotient of whole numbers once
    except OverflowError:
        yield nan


def _whole(values: NDArray[Any]) -> int:
    """Return the exact sum of finite float64, times `WHOLE`."""
    mantissas, exponents = np.frexp(values)
    whole = np.ldexp(mantissas, 53).astype(np.int64)
    at, total = exponents - LEAST_EXPONENT, 0
    for bits, shift in ((whole >> LOW_BITS, LOW_BITS), (whole & (1 << LOW_BITS) - 1, 0)):
        sums = np.bincount(at, bits)
        total += sum([int(sums[each]) << int(each) + shift for each in np.flatnonzero(sums)])
    return total


def exact_parts(values: Sequence[float]) -> tuple[float, ...]:
    """Return numbers that have exactly the sum of some values: the rounded sum, the rounded rest, and so on.

    Each number has 53 further bits of the sum, so there are at most 41. Returns no numbers if a value or the
    sum is not finite.
    """
    several = np.array(values, np.float64)
    if not np.isfinite(several).all():
        return ()
    total = _whole(several)
    parts: list[float] = []
    while total or not parts:
        try:
            parts.append(total / WHOLE)
        except OverflowError:
            return ()
        above, below = parts[-1].as_integer_ratio()
        total -= above * (WHOLE // below)
    return tuple(parts)


def rounded_sum(parts: Sequence[Sequence[float]]) -> float:
    """Return the rounded sum of several results of `exact_parts`; NaN on overflow, or if one is empty."""
    if not all(parts):
        return nan
    try:
        return fsum([part for each in parts for part in each])
    except OverflowError:
        return nan
