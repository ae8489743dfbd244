"""Pure: how kernels see memory, and how they are compiled.

A kernel takes one row of a tape: whole numbers, some of them addresses in bytes. Arrays never cross from
Python one by one, because unpacking one takes longer than many a kernel.

No kernel may assume that numbers are finite: of the liberties of fast mathematics only reordering and
fusing are taken, under which infinities and NaN survive. Looking for them is done on the bits, as
integers, where no liberty applies.
"""

import hashlib
import sys
from collections.abc import Callable
from typing import Any

import llvmlite
import numba
import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name
from numba import carray, config, njit, types
from numba.extending import intrinsic

from adam_async.runtime.kernel_cache import KernelCache, kernel_digest, kernel_folder

REORDER = {"reassoc", "contract", "nsz"}
"""Sums may be split into vectors, products fused with sums; what is not finite stays so."""


CACHE = KernelCache(config.CACHE_DIR or kernel_folder())
"""Where compiled kernels are kept."""


_COMPILER = hashlib.blake2b(
    " ".join(
        (
            *(kernel_digest(), numba.__version__, llvmlite.__version__, sys.implementation.cache_tag or ""),
            *(
                config.CPU_NAME or get_host_cpu_name(),
                config.CPU_FEATURES or get_host_cpu_features().flatten(),
            ),
        )
    ).encode(),
    digest_size=8,
).hexdigest()
"""Stands for all that machine code depends on: the kernels' text, the compiler and the processor."""


def kept_name(kernel_name: str, dtype: np.dtype[Any]) -> str:
    """Return a kernel's name in the cache, which differs by processor and compiler."""
    return f"{kernel_name}-{dtype.name}-{_COMPILER}"


def _kept(compiler: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let a compiler keep what it makes in our folder, and leave numba's setting to the program around us."""

    def decorate(function: Any) -> Any:
        chosen = config.CACHE_DIR
        config.CACHE_DIR = CACHE.folder
        try:
            return compiler(function)
        finally:
            config.CACHE_DIR = chosen

    return decorate


kernel = _kept(njit(nogil=True, cache=CACHE.is_kept, error_model="numpy", fastmath=REORDER))
"""Compile a kernel: without the interpreter's lock, kept on disk if our folder can be written to."""

exact = _kept(njit(nogil=True, cache=CACHE.is_kept, error_model="numpy", fastmath=False))
"""Compile a kernel that decides whether values are finite, or that needs its sums in their order.

Said outright, because a kernel that says nothing takes the liberties of whoever calls it first.
"""


@intrinsic
def _float_pointer(typing: Any, address: Any, like: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.PointerType())

    return types.CPointer(like)(types.int64, like), emit


@intrinsic
def _bits_pointer(typing: Any, address: Any, like: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.PointerType())

    bits = types.int32 if like == types.float32 else types.int64
    return types.CPointer(bits)(types.int64, like), emit


@intrinsic
def _long_pointer(typing: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.PointerType())

    return types.CPointer(types.int64)(types.int64), emit


@intrinsic
def _from_bits(typing: Any, bits: Any, like: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(like))

    return like(types.int32 if like == types.float32 else types.int64, like), emit


@intrinsic
def size_of(typing: Any, like: Any) -> Any:
    """Bytes of one value of the type of `like`."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(ir.IntType(64), 4 if like == types.float32 else 8)

    return types.int64(like), emit


@kernel
def floats(address, count, like):
    """The array of `count` values at an address."""
    return carray(_float_pointer(address, like), count)


@kernel
def longs(address, count):
    """The array of `count` 64-bit whole numbers at an address."""
    return carray(_long_pointer(address), count)


@exact
def largest(address, count, like):
    """The largest absolute value; inf or NaN if one is there.

    Without their sign, the bits of floating-point numbers are in the order of the numbers, infinity comes
    last, and NaN after it: an integer maximum, which vectors do in any order.
    """
    bits = carray(_bits_pointer(address, like), count)
    kind = bits.dtype.type
    without_sign = kind((1 << (8 * size_of(like) - 1)) - 1)
    found = kind(0)
    for i in range(count):
        found = max(found, kind(bits[i] & without_sign))
    return _from_bits(found, like)
