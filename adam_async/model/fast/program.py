"""Pure: the interpreter of tapes, one call for as many steps of as many layers as a tape holds.

A call from Python costs microseconds and needs the interpreter's lock before and after; where two compute
threads and an event loop share one interpreter, every call is a chance to wait for it. So a pass over a
network is a table, one row per kernel, and one call without the lock works it off. Rows are made by
`adam_async.model.fast.tape`.

A row holds the address of its kernel, so the interpreter is small, and only the kernels that a network needs
are compiled. `run` works one tape off, `run_groups` the same tape for several groups.
"""

from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from adam_async.model.fast.curves import sigmoid, sigmoid_back, tanh, tanh_back
from adam_async.model.fast.groups import add_steps, load_images, load_targets
from adam_async.model.fast.local import local_back, local_delta, local_forward
from adam_async.model.fast.losses import softmax, softmax_back, squared_error, squared_error_back
from adam_async.model.fast.memory import CACHE, floats, kept_name, kernel
from adam_async.model.fast.pixels import (
    average_pool,
    average_pool_back,
    max_pool,
    max_pool_back,
    pack,
    unpack,
)
from adam_async.model.fast.pointwise import add, clear, copy, multiply_values, relu, relu_back
from adam_async.model.fast.products import (
    convolve,
    correlate,
    multiply,
    multiply_back_one,
    multiply_one,
    outer,
    row_sums,
)
from adam_async.model.fast.response_norm import response_norm, response_norm_back
from adam_async.model.fast.updates import descend, descend_outer

FIELDS = 17
"""Whole numbers in a row of a tape: which kernel, and up to 16 fields."""

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
"""The kernels, by their numbers."""


@intrinsic
def _call(typing: Any, address: Any, t: Any, like: Any, hyper: Any) -> Any:
    """Call the compiled kernel at an address."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        convention, fields = context.call_conv, signature.args[1:]
        kind = convention.get_function_type(types.none, fields)
        callee = builder.inttoptr(arguments[0], kind.as_pointer())
        convention.call_function(builder, callee, types.none, fields, arguments[1:])
        return context.get_dummy_value()

    return types.none(types.int64, t, like, hyper), emit


@kernel
def run(tape, like, hyper):
    """Work a tape off. Returns the mean loss if the tape takes it, else 0.

    Args:
        tape: int64 (rows, `FIELDS`); a row begins with the address of its kernel, or with 0 to take the mean.
        like: Any number of the type that all arrays have.
        hyper: What rules need: rate, momentum, weight decay; of that type.
    """
    mean = 0.0
    for row in range(tape.shape[0]):
        t = tape[row]
        if t[0]:
            _call(t[0], t, like, hyper)
        else:
            losses, total = floats(t[2], t[1], like), 0.0
            for i in range(t[1]):
                total += losses[i]
            mean = total / t[1]
    return mean


@kernel
def run_groups(tape, like, hyper, groups, rates, layout, places, levels, refused, steps):
    """Train groups one after the other: load each, work the tape off, count a step.

    Args:
        tape: Forward, backward and rule; see `run`.
        like: Any number of the type that all arrays have.
        hyper: See `run`; each group sets the rate.
        groups: int64 (G, 3 + tensors): the addresses of a group's images and of its targets. The rest is
            filled: the steps that others counted while it was trained, and for each tensor 1 if its gradient
            was refused, else 0.
        rates: float64 (G,), the learning rates; replaced by the mean losses.
        layout: See `load_images`.
        places: See `load_targets`.
        levels: See `load_images`.
        refused: int64 (tensors,), where the tape notes what it refuses.
        steps: int64 (1,), the steps counted by all threads.
    """
    for group in range(groups.shape[0]):
        load_images(groups[group, 0], layout, levels, like)
        load_targets(groups[group, 1], places)
        hyper[0] = rates[group]
        before = add_steps(steps.ctypes.data, 0)
        rates[group] = run(tape, like, hyper)
        groups[group, 2] = add_steps(steps.ctypes.data, 1) - before
        for tensor in range(refused.size):
            groups[group, 3 + tensor] = refused[tensor]
            refused[tensor] = 0


_addresses: dict[tuple[int, str], int] = {}


def _compiled(code: int) -> Any:
    return {MEAN: run, GROUPS: run_groups}.get(code) or KERNELS[code]


def _signature(code: int, number: Any) -> tuple[Any, ...]:
    longs, table, numbers = types.int64[::1], types.int64[:, ::1], number[::1]
    if code == MEAN:
        return (table, number, numbers)
    if code == GROUPS:
        return (table, number, numbers, table, types.float64[::1], longs, table, numbers, longs, longs)
    return (longs, number, numbers)


def _name(code: int, dtype: np.dtype[Any]) -> str:
    return kept_name(_compiled(code).__name__, dtype)


def are_kept() -> bool:
    """Whether kernels that another process compiles can be read by this one."""
    return CACHE.is_kept


def are_ready(codes: Collection[int], dtype: np.dtype[Any]) -> bool:
    """Whether these kernels and the interpreter are compiled, in this process or on the disk."""
    return all((code, dtype.name) in _addresses or CACHE.has(_name(code, dtype)) for code in (MEAN, *codes))


def address(code: int, dtype: np.dtype[Any]) -> int:
    """The address of a kernel, which is compiled or read from the disk at the first time; 0 for `MEAN`.

    Args:
        code: Number of the kernel.
        dtype: float32 or float64.
    """
    found = _addresses.get((code, dtype.name))
    if found is None:
        compiled = _compiled(code)
        signature = _signature(code, types.float32 if dtype == np.float32 else types.float64)
        compiled.compile(signature)
        made = compiled.overloads[signature]
        entry = made.library.get_pointer_to_function(made.fndesc.llvm_func_name)
        CACHE.note(_name(code, dtype))
        found = _addresses[code, dtype.name] = 0 if code == MEAN else entry
    return found


def compile_kernels(
    codes: Collection[int], dtype: np.dtype[Any], progress: Callable[[int, int], None] | None = None
) -> None:
    """Compile some kernels and the interpreter for one type, or read them from the disk.

    Processes that compile into the same folder do so one after the other: the later ones find it done.

    Args:
        codes: Numbers of the kernels.
        dtype: float32 or float64.
        progress: Called with how many are done and how many there are, before the first and after each.
    """
    wanted = sorted({MEAN, *codes})
    with nullcontext() if are_ready(codes, dtype) else CACHE.turn():
        for done, code in enumerate(wanted):
            if progress is not None:
                progress(done, len(wanted))
            address(code, dtype)
    if progress is not None:
        progress(len(wanted), len(wanted))
