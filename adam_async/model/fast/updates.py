"""Pure: kernels of in-place gradient descent; they read and write each weight once.

`hyper` is (rate, momentum, weight decay, 1 with Nesterov's momentum, else 0). A gradient is checked value
by value before its tensor changes. A dense layer's weight gradient usually needs no such check: no value
exceeds the number of images times the largest error times the largest input. Only if this bound is not a
number, or near the end of the number range, the kernel forms the whole gradient and checks it.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from adam_async.model.fast.memory import exact, floats, kernel, largest, longs, size_of
from adam_async.model.fast.products import LINE, apart, outer, panel, transpose
from adam_async.model.fast.tiles import TILE_ROWS

COLUMNS = 2048
"""Maximum number of columns in a block of rows, whose gradient stays in the second-level cache until it is
applied. Weights are read and written in runs of this length."""

AHEAD = 128
"""Number of weights per row that are prefetched before their part of the gradient is computed."""

INFINITE = float("inf")


@intrinsic
def _prefetch(typing: Any, address: Any) -> Any:
    """Prefetch the line at an address into the second cache, to write it."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        """Emit LLVM's prefetch instruction."""
        pointer, number = ir.PointerType(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch.p0", (), kind)
        to_write, second_cache, data = (ir.Constant(number, value) for value in (1, 2, 1))
        builder.call(function, [builder.inttoptr(arguments[0], pointer), to_write, second_cache, data])
        return context.get_dummy_value()

    return types.void(types.int64), emit


@kernel
def _descend(values, gradient, buffer, n, like, hyper):
    """Apply a gradient to `n` values. `buffer` is the address of the momentum, or 0."""
    # A loop per case: without momentum or decay a loop reads and computes less.
    p, g, rate, decay = floats(values, n, like), floats(gradient, n, like), hyper[0], hyper[2]
    if buffer:
        kept, momentum = floats(buffer, n, like), hyper[1]
        if hyper[3] != 0:
            for i in range(n):
                step = g[i] + decay * p[i]
                kept[i] = momentum * kept[i] + step
                p[i] -= rate * (step + momentum * kept[i])
            return
        for i in range(n):
            step = momentum * kept[i] + (g[i] + decay * p[i])
            kept[i] = step
            p[i] -= rate * step
    elif decay != 0:
        for i in range(n):
            p[i] -= rate * (g[i] + decay * p[i])
    else:
        for i in range(n):
            p[i] -= rate * g[i]


@exact
def descend(t, like, hyper):
    """Check a gradient and apply it. Fields: n, values gradient buffer refused.

    `refused` is the address of an integer, set to 1 if the gradient is not finite.
    """
    # A NaN compares false as well.
    if largest(t[3], t[1], like) < INFINITE:
        _descend(t[2], t[3], t[4], t[1], like, hyper)
    else:
        longs(t[5], 1)[0] = 1


@exact
def _bounded(errors, error_count, x, x_count, images, like):
    # In float64, so the bound of float32 factors cannot overflow; the limit has room for rounding.
    bound = float(largest(errors, error_count, like)) * float(largest(x, x_count, like)) * images
    return bound < (1e38 if size_of(like) == 4 else 1e307)


@kernel
def _panel_beside(like, rows, width, block, errors, k, x, n, weights):
    """Fill a block of the gradient, while its weights are loaded into the cache."""
    size, block_row, x_row = size_of(like), apart(width, like), apart(n, like)
    # Prefetching goes part by part: while one part is computed, its weights arrive.
    for i in range(0, width, AHEAD):
        for row in range(rows):
            for line in range(0, min(AHEAD, width - i) * size, LINE):
                _prefetch(weights + (row * n + i) * size + line)
        columns, x_from = min(AHEAD, width - i), x + i * size
        panel(like, rows, columns, block + i * size, block_row, errors, k, x_from, x_row, k, 0)


@kernel
def _descend_outer(t, like, hyper):
    m, n, k, values, errors, turned, buffer, block = t[1], t[2], t[3], t[4], t[5], t[7], t[8], t[9]
    size, x = size_of(like), t[6]
    # With one image the gradient is a product of two vectors, which needs no tiles.
    if k == 1:
        e = floats(errors, m, like)
        plain = buffer == 0 and hyper[2] == 0
        x_values, gradient = floats(x, n, like), floats(block, n, like)
        for row in range(m):
            error = e[row]
            if not plain:
                for i in range(n):
                    gradient[i] = error * x_values[i]
                behind = row * n * size
                _descend(values + behind, block, buffer + behind if buffer else 0, n, like, hyper)
            # Without momentum and decay, a row with an error of 0 does not change, so it is not read at all.
            elif error != 0:
                p, factor = floats(values + row * n * size, n, like), hyper[0] * error
                for i in range(n):
                    p[i] -= factor * x_values[i]
        return
    # Panels read vectors along n, so x is turned once for all rows.
    transpose(turned, x, n, k, like)
    for first in range(0, m, TILE_ROWS):
        rows = min(TILE_ROWS, m - first)
        # Apply a block of the gradient at once, because the next block takes its memory.
        for start in range(0, n, COLUMNS):
            width = min(COLUMNS, n - start)
            to = values + (first * n + start) * size
            _panel_beside(
                like, rows, width, block, errors + first * k * size, k, turned + start * size, n, to
            )
            for row in range(rows):
                behind = ((first + row) * n + start) * size
                _descend(
                    values + behind,
                    block + row * apart(width, like) * size,
                    buffer + behind if buffer else 0,
                    width,
                    like,
                    hyper,
                )


@exact
def descend_outer(t, like, hyper):
    """Check and apply the gradient of a dense layer's weights (m, n) = errors (m, k) x (n, k)T.

    Fields: m n k, values errors x turned, buffer block refused, whole. `block` is memory for n values, and
    for TILE_ROWS rows of COLUMNS values; `turned` is memory for x, batch first. Rows of both arrays are
    `apart` from each other. `whole` is the address of an `outer`'s fields, for a gradient that the bound does
    not prove finite.
    """
    m, n, k = t[1], t[2], t[3]
    if _bounded(t[5], m * k, t[6], n * k, k, like):
        _descend_outer(t, like, hyper)
        return
    # Rare, so the whole gradient may take time and memory.
    fields = longs(t[11], t.size)
    outer(fields, like, hyper)
    if largest(fields[4], m * n, like) < INFINITE:
        _descend(t[4], fields[4], t[8], m * n, like, hyper)
    else:
        longs(t[10], 1)[0] = 1
