"""Pure: `adam_async.model.vectors.Vectors` with compiled kernels, of the same bits as `NumpyVectors`.

Both kernels read each value from memory once. A sum of scaled vectors is computed in tiles that stay in the
first cache, so that the search for values that are not finite costs no second pass over memory. A dot product
has `LANES` sums side by side, each with the sum of its errors, which vector instructions add to.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from adam_async.model.fast.memory import CACHE, compile_kept, exact, floats, kept_name, largest, size_of
from adam_async.model.fast.registers import HOST
from adam_async.model.fast.vectors import POINTER, Vectors, emit_loop, whole
from adam_async.model.vectors import Term, rounded

TILE = 2048
"""Number of values of a tile of a sum."""

SUMS = 4 if HOST.number >= 32 else 2
"""Number of vectors of sums of a dot product: each has a vector of errors and one of sizes, in registers."""

WIDTH = HOST.width // 8
"""Number of float64 of a vector register."""

LANES = SUMS * WIDTH
"""Number of sums of a dot product side by side."""


@intrinsic
def _dot_rounds(typing: Any, like: Any, first: Any, second: Any, rounds: Any, work: Any) -> Any:
    """Add the products of ``rounds * LANES`` values to sums, errors and sizes, which it writes to `work`."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit_dot(builder, context.get_value_type(like), arguments[1:])
        return context.get_dummy_value()

    return types.void(like, *([types.int64] * 4)), emit


def emit_dot(builder: Any, element: Any, arguments: list[Any]) -> None:
    """Emit `_dot_rounds`; `arguments` are those of `_dot_rounds`, from `first` on."""
    sources = [builder.inttoptr(each, POINTER) for each in arguments[:2]]
    rounds, to = arguments[2], builder.inttoptr(arguments[3], POINTER)
    narrow = Vectors(builder, element, registers=HOST, lanes=WIDTH)
    wide = Vectors(builder, ir.DoubleType(), registers=HOST)
    kind = f"llvm.fabs.v{WIDTH}f64"
    size_of_each = builder.module.declare_intrinsic(kind, (), ir.FunctionType(wide.type, [wide.type]))

    def load(source: Any, at: Any) -> Any:
        values = narrow.load(narrow.at(source, at))
        return values if narrow.bytes == 8 else builder.fpext(values, wide.type)

    def step(k: Any, kept: list[Any]) -> list[Any]:
        """Emit the additions of one round."""
        found = []
        for number in range(SUMS):
            total, error, size = kept[3 * number : 3 * number + 3]
            at = builder.add(builder.mul(k, whole(LANES)), whole(number * WIDTH))
            product = builder.fmul(*(load(source, at) for source in sources))
            new = builder.fadd(total, product)
            back = builder.fsub(new, total)
            # The error of the sum, without an error of its own; see `vectors.py`.
            left = builder.fadd(builder.fsub(total, builder.fsub(new, back)), builder.fsub(product, back))
            absolute = builder.call(size_of_each, [product])
            found += [new, builder.fadd(error, left), builder.fadd(size, absolute)]
        return found

    last = emit_loop(wide, whole(0), rounds, [wide.zero] * (3 * SUMS), step)
    for number in range(SUMS):
        for row, values in enumerate(last[3 * number : 3 * number + 3]):
            wide.store(values, wide.at(to, whole(row * LANES + number * WIDTH)))


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
def dot(first, second, work):
    """Return sum, sum of its errors, and sum of absolute values of the products of two vectors.

    Args:
        first: Array of any size.
        second: Array of the same size and type.
        work: float64 (3 * LANES): scratch memory.
    """
    n, like = len(first), first.dtype.type(0)
    rounds = n // LANES
    sums, errors, sizes = work[:LANES], work[LANES : 2 * LANES], work[2 * LANES :]
    _dot_rounds(like, first.ctypes.data, second.ctypes.data, rounds, work.ctypes.data)
    done = rounds * LANES
    for i in range(done, n):
        lane = i % LANES
        product = np.float64(first[i]) * np.float64(second[i])
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
        vector, name = types.Array(like, 1, "C"), _kernel_name(dtype)

        def compile_both() -> None:
            """Compile the kernels, or read them."""
            combine.compile((like, types.int64, types.int64, whole, number))
            dot.compile((vector, vector, number))

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
        assert first.shape == second.shape
        assert first.dtype == second.dtype == self._dtype
        high, low, size = dot(first, second, self._work)
        return rounded(high, low, size, -(-len(first) // LANES) + 2 * LANES)

    def _address(self, vector: NDArray[Any], size: int) -> int:
        # The kernel trusts an address, from which it reads aligned values without gaps.
        assert vector.shape == (size,)
        assert vector.dtype == self._dtype
        assert vector.flags.carray  # writable too, as all vectors of shards are
        return int(vector.ctypes.data)


def _kernel_name(dtype: "np.dtype[Any]") -> str:
    return kept_name(dot.__name__, dtype)


def is_missing(dtype: "np.dtype[Any]") -> bool:
    """Return whether the disk can keep the kernels and lacks them, so that another process can compile."""
    return CACHE.is_kept and not CACHE.has(_kernel_name(dtype))
