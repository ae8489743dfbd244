"""Pure: the interpreter of tapes, one call for all steps of all layers on a tape.

A call from Python costs microseconds and needs the interpreter's lock before and after. If two compute
threads and an event loop share one interpreter, every call may wait for the lock. So a pass over a network is
a table with one row per kernel, and one call without the lock runs all rows. `adam_async.model.fast.tape`
makes the rows.

A row has its kernel's address, so the interpreter is small, and only a network's own kernels are compiled.
`run` runs one tape, `run_groups` the same tape for several groups: kernels load the next group's images and
targets and count steps. So a compute thread needs the interpreter's lock once for many groups.
"""

from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from adam_async.model.fast.curves import (
    add,
    clear,
    copy,
    multiply_values,
    relu,
    relu_back,
    sigmoid,
    sigmoid_back,
    tanh,
    tanh_back,
)
from adam_async.model.fast.layer_kernels import (
    local_back,
    local_delta,
    local_forward,
    response_norm,
    response_norm_back,
    softmax,
    softmax_back,
    squared_error,
    squared_error_back,
)
from adam_async.model.fast.memory import CACHE, compile_kept, floats, kept_name, kernel
from adam_async.model.fast.pixels import (
    average_pool,
    average_pool_back,
    max_pool,
    max_pool_back,
    pack,
    unpack,
)
from adam_async.model.fast.products import (
    convolve,
    correlate,
    multiply,
    multiply_back_one,
    multiply_one,
    outer,
    row_sums,
)
from adam_async.model.fast.updates import descend, descend_outer


def _pointer_to(kind: Any) -> Any:
    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], ir.PointerType())

        return types.CPointer(kind)(types.int64), emit

    return pointer


# Bytes and words: `memory` has pointers to numbers of the network's type and to 64-bit integers.
_bytes_at, _words_at = _pointer_to(types.uint8), _pointer_to(types.int32)


@intrinsic
def add_steps(typing: Any, address: Any, steps: Any) -> Any:
    """Add to a count atomically, because other threads add too; return the old count."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        count = builder.inttoptr(arguments[0], ir.PointerType())
        # `monotonic`: the count orders no other memory, because threads share weights without locks.
        return builder.atomic_rmw("add", count, arguments[1], "monotonic")

    return types.int64(types.int64, types.int64), emit


@kernel
def load_images(source, layout, levels, like):
    """Read a group's images, batch first, into the context's input, batch last.

    Args:
        source: Address of the images: bytes if `levels` has entries, otherwise numbers of the network's type.
        layout: int64: address of the input, number of features of an image, number of images.
        levels: Value of each byte; empty if the images are not bytes.
        like: Any number of the network's type.
    """
    features, images = layout[1], layout[2]
    target = floats(layout[0], features * images, like)
    # Either loop order steps over one of the arrays; this one writes runs and reads with steps.
    if levels.size:
        # A table replaces a division per value; the bits are those of `Context.load`.
        pixels = carray(_bytes_at(source), features * images)
        for feature in range(features):
            for image in range(images):
                target[feature * images + image] = levels[pixels[image * features + feature]]
    else:
        values = floats(source, features * images, like)
        for feature in range(features):
            for image in range(images):
                target[feature * images + image] = values[image * features + feature]


@kernel
def load_targets(source, target_arrays):
    """Copy a group's targets to the loss layer.

    Args:
        source: Address of the targets, one array after the other.
        target_arrays: int64 (arrays, 2): address of each array in the loss layer, and its number of 4-byte
            words.
    """
    for array in range(target_arrays.shape[0]):
        # Words fit the integers and the numbers of all losses, so one kernel copies both.
        words = target_arrays[array, 1]
        to, kept = carray(_words_at(target_arrays[array, 0]), words), carray(_words_at(source), words)
        for i in range(words):
            to[i] = kept[i]
        source += 4 * words


FIELDS = 17
"""Number of integers in a tape row: the kernel, and up to 16 fields."""

# Numbers of the kernels: positions in `KERNELS`, then two for the interpreter itself.
(
    MULTIPLY,
    MULTIPLY_ONE,
    MULTIPLY_BACK_ONE,
    CONVOLVE,
    CORRELATE,
    OUTER,
    ROW_SUMS,
    PACK,
    UNPACK,
    MAX_POOL,
    MAX_POOL_BACK,
    RELU,
    RELU_BACK,
    COPY,
    ADD,
    SOFTMAX,
    SOFTMAX_BACK,
    DESCEND,
    DESCEND_OUTER,
    AVERAGE_POOL,
    AVERAGE_POOL_BACK,
    TANH,
    TANH_BACK,
    SIGMOID,
    SIGMOID_BACK,
    MULTIPLY_VALUES,
    SQUARED_ERROR,
    SQUARED_ERROR_BACK,
    RESPONSE_NORM,
    RESPONSE_NORM_BACK,
    LOCAL_FORWARD,
    LOCAL_BACK,
    LOCAL_DELTA,
    CLEAR,
    MEAN,
    GROUPS,
) = range(36)

# In the order of the numbers.
KERNELS = (
    multiply,
    multiply_one,
    multiply_back_one,
    convolve,
    correlate,
    outer,
    row_sums,
    pack,
    unpack,
    max_pool,
    max_pool_back,
    relu,
    relu_back,
    copy,
    add,
    softmax,
    softmax_back,
    descend,
    descend_outer,
    average_pool,
    average_pool_back,
    tanh,
    tanh_back,
    sigmoid,
    sigmoid_back,
    multiply_values,
    squared_error,
    squared_error_back,
    response_norm,
    response_norm_back,
    local_forward,
    local_back,
    local_delta,
    clear,
)
"""Kernels by their numbers."""


@intrinsic
def _call(typing: Any, address: Any, t: Any, like: Any, hyper: Any) -> Any:
    """Call the compiled kernel at an address."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        """Emit the call of a compiled kernel, whose fields are all arguments after the address."""
        # A compiled kernel has numba's calling convention instead of C's. The kernel's status needs no check,
        # because kernels raise nothing.
        convention, fields = context.call_conv, signature.args[1:]
        kind = convention.get_function_type(types.none, fields)
        callee = builder.inttoptr(arguments[0], kind.as_pointer())
        convention.call_function(builder, callee, types.none, fields, arguments[1:])
        return context.get_dummy_value()

    return types.none(types.int64, t, like, hyper), emit


@kernel
def run(tape, like, hyper):
    """Run a tape. Returns the mean loss if a row computes it, else 0.

    Args:
        tape: int64 (rows, `FIELDS`); a row begins with its kernel's address, or with 0 to compute the mean
            loss.
        like: Any number of the arrays' type.
        hyper: Array of that type: rate, momentum, weight decay, and 1 with Nesterov's momentum, else 0.
    """
    mean = 0.0
    for row in range(tape.shape[0]):
        t = tape[row]
        if t[0]:
            _call(t[0], t, like, hyper)
        else:
            # The mean is not a kernel, because kernels return nothing. The mean's sum is in float64 for any
            # type.
            losses, total = floats(t[2], t[1], like), 0.0
            for i in range(t[1]):
                total += losses[i]
            mean = total / t[1]
    return mean


@kernel
def run_groups(tape, like, hyper, groups, rates, layout, target_arrays, levels, refused, steps, done):
    """Train groups one after the other: load each, run the tape, count a step.

    Args:
        tape: Forward, backward and rule; see `run`.
        like: Any number of the arrays' type.
        hyper: See `run`; each group sets the rate.
        groups: int64 (G, 3 + tensors): addresses of a group's images and of its targets; then results: the
            number of steps of other threads during the group's step, and for each tensor 1 if its gradient
            was refused, else 0.
        rates: float64 (G,): learning rates; replaced by the mean losses.
        layout: See `load_images`.
        target_arrays: See `load_targets`.
        levels: See `load_images`.
        refused: int64 (tensors,): flags that the tape sets for refused gradients.
        steps: int64 (1,): number of steps of all threads.
        done: int64 (G,): see `JobNotes`.
    """
    for group in range(groups.shape[0]):
        done[group] = -1
        load_images(groups[group, 0], layout, levels, like)
        load_targets(groups[group, 1], target_arrays)
        hyper[0] = rates[group]
        # Adding 0 reads the count atomically, while other threads add to it.
        before = add_steps(steps.ctypes.data, 0)
        # The rate is in `hyper` now, so the loss takes its place.
        rates[group] = run(tape, like, hyper)
        groups[group, 2] = add_steps(steps.ctypes.data, 1) - before
        # The tape only sets flags, so clear them before each group.
        for tensor in range(refused.size):
            groups[group, 3 + tensor] = refused[tensor]
            refused[tensor] = 0
        done[group] = 1 + groups[group, 2]


_addresses: dict[tuple[int, str], int] = {}


def _compiled(code: int) -> Any:
    # `MEAN` and `GROUPS` are not kernels: among the numbers to compile they mean the interpreter's functions.
    return {MEAN: run, GROUPS: run_groups}.get(code) or KERNELS[code]


def _signature(code: int, number: Any) -> tuple[Any, ...]:
    # Tapes call kernels by address, so numba sees no call from which to infer types.
    longs, table, numbers = types.int64[::1], types.int64[:, ::1], number[::1]
    if code == MEAN:
        return (table, number, numbers)
    if code == GROUPS:
        return (table, number, numbers, table, types.float64[::1], longs, table, numbers, *3 * (longs,))
    return (longs, number, numbers)


def _name(code: int, dtype: np.dtype[Any]) -> str:
    return kept_name(_compiled(code).__name__, dtype)


def are_kept() -> bool:
    """Return whether this process can read kernels that another process compiles."""
    return CACHE.is_kept


def are_ready(codes: Collection[int], dtype: np.dtype[Any]) -> bool:
    """Return whether these kernels and the interpreter are compiled, in this process or on disk."""
    return all((code, dtype.name) in _addresses or CACHE.has(_name(code, dtype)) for code in (MEAN, *codes))


def address(code: int, dtype: np.dtype[Any]) -> int:
    """Return a kernel's address, 0 for `MEAN`; the first call compiles the kernel or reads it from disk.

    Args:
        code: Number of the kernel.
        dtype: float32 or float64.
    """
    found = _addresses.get((code, dtype.name))
    if found is None:
        compiled = _compiled(code)
        signature = _signature(code, types.float32 if dtype == np.float32 else types.float64)
        compile_kept(partial(compiled.compile, signature))
        made = compiled.overloads[signature]
        # The address stays valid, because numba keeps the machine code as long as the function.
        entry = made.library.get_pointer_to_function(made.fndesc.llvm_func_name)
        # Numba does not report whether the disk has a kernel, so the cache has a note for each.
        CACHE.note(_name(code, dtype))
        found = _addresses[code, dtype.name] = 0 if code == MEAN else entry
    return found


def compile_kernels(
    codes: Collection[int], dtype: np.dtype[Any], progress: Callable[[int, int], None] | None = None
) -> None:
    """Compile some kernels and the interpreter for one type, or read both from disk.

    A process waits while another compiles into the folder, up to the limit of `KernelCache.turn`.

    Args:
        codes: Numbers of the kernels.
        dtype: float32 or float64.
        progress: Called with the number of ready kernels and of all kernels: once at the start, and after
            each kernel.
    """
    # Every tape needs the interpreter too.
    wanted = sorted({MEAN, *codes})
    # Ready kernels are only read, so they need no lock.
    with nullcontext() if are_ready(codes, dtype) else CACHE.turn():
        for done, code in enumerate(wanted):
            if progress is not None:
                progress(done, len(wanted))
            address(code, dtype)
    if progress is not None:
        progress(len(wanted), len(wanted))
