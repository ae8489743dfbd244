"""Pure: `adam_async.model.vectors.Vectors` with compiled kernels, of the same bits as `NumpyVectors`.

Both kernels read each value from memory once. A sum of scaled vectors is computed in tiles that stay in the
first cache, so that the search for values that are not finite costs no second pass over memory. A dot product
has `LANES` sums side by side, each with the sum of its errors, which vector instructions add to.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from adam_async.model.fast.memory import CACHE, compile_kept, exact, floats, kept_name, largest, size_of
from adam_async.model.vectors import Term, rounded

TILE = 2048
"""Number of values of a tile of a sum."""

LANES = 32
"""Number of sums of a dot product side by side."""

ROWS = 8
"""Number of values that a lane takes at a time: its sums stay in registers for all of them."""


@exact
def combine(like, n, out, terms, coefficients):
    """Write a sum of scaled vectors to an address; returns the largest absolute value, see `largest`.

    Args:
        like: Any number of the vectors' type.
        n: Number of values.
        out: Address of the sum.
        terms: int64 (terms): addresses of the vectors; at least one.
        coefficients: float64 (terms).
    """
    size, count = size_of(like), len(terms)
    found = floats(out, n, like).dtype.type(0)
    for start in range(0, n, TILE):
        m, behind = min(TILE, n - start), start * size
        o, x = floats(out + behind, m, like), floats(terms[0] + behind, m, like)
        number = o.dtype.type
        a = number(coefficients[0])
        if count == 1:
            for i in range(m):
                o[i] = x[i] * a
        else:
            y, b = floats(terms[1] + behind, m, like), number(coefficients[1])
            for i in range(m):
                o[i] = x[i] * a + y[i] * b
        for k in range(2, count):
            z, c = floats(terms[k] + behind, m, like), number(coefficients[k])
            for i in range(m):
                o[i] = o[i] + z[i] * c
        tile = largest(out + behind, m, like)
        # Not `max`: a NaN must stay, and compares false.
        if not (tile <= found or found != found):
            found = tile
    return found


@exact
def dot(like, n, first, second, work):
    """Return sum, sum of its errors, and sum of absolute values of the products of two vectors.

    Args:
        like: Any number of the vectors' type.
        n: Number of values.
        first: Address of a vector.
        second: Address of the other one.
        work: float64 (3 * LANES): scratch memory.
    """
    size = size_of(like)
    work[:] = 0.0
    sums, errors, sizes = work[:LANES], work[LANES : 2 * LANES], work[2 * LANES :]
    whole = n // (LANES * ROWS) * (LANES * ROWS)
    for start in range(0, whole, LANES * ROWS):
        x = floats(first + start * size, LANES * ROWS, like)
        y = floats(second + start * size, LANES * ROWS, like)
        for lane in range(LANES):
            total, error, magnitude = sums[lane], errors[lane], sizes[lane]
            for row in range(ROWS):
                product = np.float64(x[row * LANES + lane]) * np.float64(y[row * LANES + lane])
                new = total + product
                back = new - total
                error += (total - (new - back)) + (product - back)
                total = new
                magnitude += abs(product)
            sums[lane], errors[lane], sizes[lane] = total, error, magnitude
    x, y = floats(first + whole * size, n - whole, like), floats(second + whole * size, n - whole, like)
    for i in range(n - whole):
        lane = i % LANES
        product = np.float64(x[i]) * np.float64(y[i])
        new = sums[lane] + product
        back = new - sums[lane]
        errors[lane] += (sums[lane] - (new - back)) + (product - back)
        sums[lane] = new
        sizes[lane] += abs(product)
    high, low, magnitude = 0.0, 0.0, 0.0
    for lane in range(LANES):
        new = high + sums[lane]
        back = new - high
        low += (high - (new - back)) + (sums[lane] - back)
        high = new
        low += errors[lane]
        magnitude += sizes[lane]
    return high, low, magnitude


class CompiledVectors:
    """`Vectors` with compiled kernels. The constructor compiles them, or reads them from disk.

    Args:
        dtype: float32 or float64.
    """

    def __init__(self, dtype: "np.dtype[Any]") -> None:
        like = types.float32 if dtype == np.float32 else types.float64
        whole, number = types.Array(types.int64, 1, "C"), types.Array(types.float64, 1, "C")
        name = _kernel_name(dtype)

        def compile_both() -> None:
            """Compile the kernels, or read them."""
            combine.compile((like, types.int64, types.int64, whole, number))
            dot.compile((like, types.int64, types.int64, types.int64, number))

        # Kernels on disk are only read, which needs no lock.
        with nullcontext() if CACHE.has(name) else CACHE.turn():
            compile_kept(compile_both)
        CACHE.note(name)
        self._dtype = dtype
        self._like = dtype.type(0)
        self._work = np.empty(3 * LANES)

    def combine(self, out: NDArray[Any], terms: Sequence[Term]) -> bool:
        """See `Vectors.combine`."""
        if not terms or not len(out):
            out[:] = 0
            return True
        addresses = np.array([self._address(vector, len(out)) for _, vector in terms], np.int64)
        coefficients = np.array([coefficient for coefficient, _ in terms], np.float64)
        found = combine(self._like, len(out), self._address(out, len(out)), addresses, coefficients)
        return bool(np.isfinite(found))

    def dot(self, first: NDArray[Any], second: NDArray[Any]) -> float | None:
        """See `Vectors.dot`."""
        n = len(first)
        addresses = self._address(first, n), self._address(second, n)
        high, low, size = dot(self._like, n, *addresses, self._work)
        return rounded(high, low, size, -(-n // LANES) + 2 * LANES)

    def _address(self, vector: NDArray[Any], size: int) -> int:
        # The kernel trusts an address, from which it reads aligned values without gaps.
        flags = vector.flags
        assert vector.shape == (size,)
        assert vector.dtype == self._dtype
        assert flags.c_contiguous
        assert flags.aligned
        return int(vector.__array_interface__["data"][0])


def _kernel_name(dtype: "np.dtype[Any]") -> str:
    return kept_name(dot.__name__, dtype)


def is_missing(dtype: "np.dtype[Any]") -> bool:
    """Return whether the disk can keep the kernels and lacks them, so that another process can compile."""
    return CACHE.is_kept and not CACHE.has(_kernel_name(dtype))
