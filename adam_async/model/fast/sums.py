"""Pure: `adam_async.model.vectors.Vectors` with compiled kernels, bit for bit as in `NumpyVectors`.

Both kernels read each value from memory once. A sum of scaled vectors goes tile by tile through the
first-level cache, so the search for non-finite values needs no second pass over memory. A dot product has
`LANES` sums side by side, each with the sum of its errors, which vector instructions add to.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from adam_async.model.fast.memory import CACHE, compile_kept, exact, kept_name, largest
from adam_async.model.fast.vectors import HOST, I32, POINTER, Vectors, emit_loop, whole
from adam_async.model.vectors import UNIT, Term, rounded

TILE = 2048
"""Number of values in a tile of a sum."""

SUMS = 4 if HOST.number >= 32 else 2
"""Number of sum vectors of a dot product; each has vectors of errors and sizes, also in registers."""

AHEAD = 4096
"""Distance at which a dot product fetches values ahead, in bytes: processors do not fetch across pages."""

WIDTH = HOST.width // 8
"""Number of float64 values in a vector register."""

LANES = SUMS * WIDTH
"""Number of sums that a dot product adds side by side."""


@intrinsic
def _dot_rounds(typing: Any, like: Any, first: Any, second: Any, rounds: Any, work: Any) -> Any:
    """Add the products of ``rounds * LANES`` values to sums, errors and sizes, which it writes to `work`."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit_dot(builder, context.get_value_type(like), arguments[1:])
        return context.get_dummy_value()

    return types.void(like, *([types.int64] * 4)), emit


def emit_dot(builder: Any, element: Any, arguments: list[Any]) -> None:
    """Emit `_dot_rounds`; `arguments` are its arguments from `first` on."""
    sources = [builder.inttoptr(each, POINTER) for each in arguments[:2]]
    rounds, to = arguments[2], builder.inttoptr(arguments[3], POINTER)
    narrow = Vectors(builder, element, registers=HOST, lanes=WIDTH)
    wide = Vectors(builder, ir.DoubleType(), registers=HOST)
    kind = f"llvm.fabs.v{WIDTH}f64"
    size_of_each = builder.module.declare_intrinsic(kind, (), ir.FunctionType(wide.type, [wide.type]))

    fetch = builder.module.declare_intrinsic(
        "llvm.prefetch.p0", (), ir.FunctionType(ir.VoidType(), [POINTER, I32, I32, I32])
    )
    to_read = [
        ir.Constant(I32, word) for word in (0, 0, 1)
    ]  # data of one use: other data stays in the caches

    def load(source: Any, at: Any) -> Any:
        builder.call(fetch, [narrow.at(source, builder.add(at, whole(AHEAD // narrow.bytes))), *to_read])
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
            # The sum's rounding error, computed exactly; see `vectors.py`.
            left = builder.fadd(builder.fsub(total, builder.fsub(new, back)), builder.fsub(product, back))
            absolute = builder.call(size_of_each, [product])
            found += [new, builder.fadd(error, left), builder.fadd(size, absolute)]
        return found

    last = emit_loop(wide, whole(0), rounds, [wide.zero] * (3 * SUMS), step)
    for number in range(SUMS):
        for row, values in enumerate(last[3 * number : 3 * number + 3]):
            wide.store(values, wide.at(to, whole(row * LANES + number * WIDTH)))


@exact
def combine(out, x, a, y, b, terms, adds):
    """Write the sum of one or two scaled arrays; return the largest absolute value, see `largest`.

    Args:
        out: Array for the sum, of the same size and type as the others.
        a: float64, first rounded to the arrays' type.
        terms: 1 for ``x a``, 2 for ``x a + y b``.
        adds: Whether the sum begins with the values in `out`.
    """
    n, number = len(out), out.dtype.type
    first, second, found = number(a), number(b), number(0)
    for start in range(0, n, TILE):
        # Views, because an index that begins at 0 needs no check for negative values.
        o, p, q = out[start : start + TILE], x[start : start + TILE], y[start : start + TILE]
        if adds:
            for i in range(len(o)):
                o[i] = o[i] + p[i] * first
            if terms == 2:
                for i in range(len(o)):
                    o[i] = o[i] + q[i] * second
        elif terms == 2:
            for i in range(len(o)):
                o[i] = p[i] * first + q[i] * second
        else:
            for i in range(len(o)):
                o[i] = p[i] * first
        tile = largest(o.ctypes.data, len(o), found)
        # Not `max`: a NaN must stay, and compares false.
        if not (tile <= found or found != found):
            found = tile
    return found


@exact
def dot(first, second, work):
    """Return three sums over the products of two vectors: the sum, the sum of its errors, and the sum of
    absolute values.

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
        number = types.Array(types.float64, 1, "C")
        vector, name = types.Array(like, 1, "C"), _kernel_name(dtype)

        def compile_both() -> None:
            """Compile the kernels, or read them."""
            scalar = types.float64
            combine.compile((vector, vector, scalar, vector, scalar, types.int64, types.boolean))
            dot.compile((vector, vector, number))

        # Kernels on disk are only read, so they need no lock.
        with nullcontext() if CACHE.has(name) else CACHE.turn():
            compile_kept(compile_both)
        CACHE.note(name)
        self._dtype = dtype
        self._work = np.empty(3 * LANES)

    def combine(self, out: NDArray[Any], terms: Sequence[Term]) -> bool:
        """See `Vectors.combine`."""
        if not terms or not len(out):
            out[:] = 0
            return True
        found = 0.0
        for at in range(0, len(terms), 2):
            (a, x), (b, y) = terms[at], terms[min(at + 1, len(terms) - 1)]
            assert out.shape == x.shape == y.shape
            assert out.dtype == x.dtype == y.dtype == self._dtype
            found = combine(out, x, a, y, b, min(len(terms) - at, 2), at > 0)
        return bool(np.isfinite(found))

    def dot(self, first: NDArray[Any], second: NDArray[Any]) -> float | None:
        """See `Vectors.dot`."""
        assert first.shape == second.shape
        assert first.dtype == second.dtype == self._dtype
        high, low, size = dot(first, second, self._work)
        # Each error is at most `depth` units of `size`, and so is each error of the errors' sum. 4 covers
        # both, and the rounding of this bound.
        depth = -(-len(first) // LANES) + 2 * LANES
        return rounded(high, low, size, 4 * (depth * UNIT) ** 2 * size)


def _kernel_name(dtype: "np.dtype[Any]") -> str:
    return kept_name(dot.__name__, dtype)


def is_missing(dtype: "np.dtype[Any]") -> bool:
    """Return whether the disk can keep the kernels but lacks them, so that another process can compile."""
    return CACHE.is_kept and not CACHE.has(_kernel_name(dtype))
