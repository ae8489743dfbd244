"""Pure: the interpreter of tapes, one call for as many steps of as many layers as a tape holds.

A call from Python costs microseconds and needs the interpreter's lock before and after; where two compute
threads and an event loop share one interpreter, every call is a chance to wait for it. So a pass over a
network is a table, one row per kernel, and one call without the lock works it off. Rows are made by
`adam_async.model.fast.tape`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from adam_async.model.fast.curves import sigmoid, sigmoid_back, tanh, tanh_back
from adam_async.model.fast.local import local_back, local_delta, local_forward
from adam_async.model.fast.losses import softmax, softmax_back, squared_error, squared_error_back
from adam_async.model.fast.memory import floats, kernel
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
    MEAN,
    CLEAR,
) = range(35)

_KERNELS = (
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


@kernel
def run(tape, like, hyper):
    """Work a tape off. Returns the mean loss if the tape takes it, else 0.

    Args:
        tape: int64 (rows, `FIELDS`); a row's first number says which kernel.
        like: Any number of the type that all arrays have.
        hyper: What rules need: rate, momentum, weight decay; of that type.
    """
    mean = 0.0
    for row in range(tape.shape[0]):
        t = tape[row]
        code = t[0]
        if code == MULTIPLY:
            multiply(t, like, hyper)
        elif code == MULTIPLY_ONE:
            multiply_one(t, like, hyper)
        elif code == MULTIPLY_BACK_ONE:
            multiply_back_one(t, like, hyper)
        elif code == CONVOLVE:
            convolve(t, like, hyper)
        elif code == CORRELATE:
            correlate(t, like, hyper)
        elif code == OUTER:
            outer(t, like, hyper)
        elif code == ROW_SUMS:
            row_sums(t, like, hyper)
        elif code == PACK:
            pack(t, like, hyper)
        elif code == UNPACK:
            unpack(t, like, hyper)
        elif code == MAX_POOL:
            max_pool(t, like, hyper)
        elif code == MAX_POOL_BACK:
            max_pool_back(t, like, hyper)
        elif code == RELU:
            relu(t, like, hyper)
        elif code == RELU_BACK:
            relu_back(t, like, hyper)
        elif code == COPY:
            copy(t, like, hyper)
        elif code == ADD:
            add(t, like, hyper)
        elif code == SOFTMAX:
            softmax(t, like, hyper)
        elif code == SOFTMAX_BACK:
            softmax_back(t, like, hyper)
        elif code == DESCEND:
            descend(t, like, hyper)
        elif code == DESCEND_OUTER:
            descend_outer(t, like, hyper)
        elif code == AVERAGE_POOL:
            average_pool(t, like, hyper)
        elif code == AVERAGE_POOL_BACK:
            average_pool_back(t, like, hyper)
        elif code == TANH:
            tanh(t, like, hyper)
        elif code == TANH_BACK:
            tanh_back(t, like, hyper)
        elif code == SIGMOID:
            sigmoid(t, like, hyper)
        elif code == SIGMOID_BACK:
            sigmoid_back(t, like, hyper)
        elif code == MULTIPLY_VALUES:
            multiply_values(t, like, hyper)
        elif code == SQUARED_ERROR:
            squared_error(t, like, hyper)
        elif code == SQUARED_ERROR_BACK:
            squared_error_back(t, like, hyper)
        elif code == RESPONSE_NORM:
            response_norm(t, like, hyper)
        elif code == RESPONSE_NORM_BACK:
            response_norm_back(t, like, hyper)
        elif code == LOCAL_FORWARD:
            local_forward(t, like, hyper)
        elif code == LOCAL_BACK:
            local_back(t, like, hyper)
        elif code == LOCAL_DELTA:
            local_delta(t, like, hyper)
        elif code == CLEAR:
            clear(t, like, hyper)
        elif code == MEAN:
            losses, total = floats(t[2], t[1], like), 0.0
            for i in range(t[1]):
                total += losses[i]
            mean = total / t[1]
    return mean


def compile_kernels(dtype: np.dtype[Any], progress: Callable[[int, int], None] | None = None) -> None:
    """Compile all kernels for one type, or read them from the disk.

    Args:
        dtype: float32 or float64.
        progress: Called with how many are done and how many there are, before the first and after each.
    """
    number = types.float32 if dtype == np.float32 else types.float64
    rest = (number, types.Array(number, 1, "C"))
    signatures: list[tuple[Any, Any]] = [
        (part, (types.Array(types.int64, 1, "C"), *rest)) for part in _KERNELS
    ]
    signatures.append((run, (types.Array(types.int64, 2, "C"), *rest)))
    for done, (part, signature) in enumerate(signatures):
        if progress is not None:
            progress(done, len(signatures))
        part.compile(signature)
    if progress is not None:
        progress(len(signatures), len(signatures))
