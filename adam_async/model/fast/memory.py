"""Pure: the kernels' view of memory, and their compiler.

A kernel takes one row of a tape: integers, some of them byte addresses. Python does not pass arrays one by
one, because unpacking an array takes longer than some kernels.

No kernel may assume finite numbers: only the fast-mathematics options of `REORDER` are on, which keep
infinities and NaN. The check for these values works on the bits, as integers, which no option affects.
"""

import hashlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import llvmlite
import numba
import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name
from numba import carray, config, njit, types
from numba.core.errors import NumbaError
from numba.core.event import Event, Listener, install_listener
from numba.extending import intrinsic

from adam_async.runtime.kernel_cache import KERNELS, KernelCache, kernel_digest, kernel_folder

logger = logging.getLogger(__name__)

REORDER = {"reassoc", "contract", "nsz"}
"""LLVM's options of fast mathematics: reorder sums, fuse products with sums, ignore the sign of 0."""


CACHE = KernelCache(config.CACHE_DIR or kernel_folder())
"""Cache of compiled kernels on disk."""


_COMPILER = hashlib.blake2b(
    " ".join(
        (
            *(kernel_digest(), numba.__version__, llvmlite.__version__, sys.implementation.cache_tag or ""),
            # Numba keeps one cache per source folder, and drops the kernels of older files.
            *(f"{path} {path.stat().st_mtime_ns}" for path in sorted(KERNELS.glob("*.py"))),
            *(
                config.CPU_NAME or get_host_cpu_name(),
                config.CPU_FEATURES or get_host_cpu_features().flatten(),
            ),
        )
    ).encode(),
    digest_size=8,
).hexdigest()
"""Digest of the kernels' files, the compiler and the processor, which decide whether numba finds the machine
code on disk."""


def kept_name(kernel_name: str, dtype: np.dtype[Any]) -> str:
    """Return a kernel's name in the cache; the name depends on source files, processor and compiler."""
    return f"{kernel_name}-{dtype.name}-{_COMPILER}"


def _kept(compiler: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Make a compiler keep its kernels in `CACHE`, and leave numba's setting for other code alone."""

    def decorate(function: Any) -> Any:
        """Compile a function while `CACHE` is numba's cache folder."""
        # Numba reads the setting when it makes the dispatcher, so restore it at once.
        chosen = config.CACHE_DIR
        config.CACHE_DIR = CACHE.folder
        try:
            return compiler(function)
        finally:
            config.CACHE_DIR = chosen

    return decorate


# NumPy's error model: a division by zero gives infinity or NaN, because kernels raise nothing.
kernel = _kept(njit(nogil=True, cache=CACHE.is_kept, error_model="numpy", fastmath=REORDER))
"""Decorator that compiles a kernel. The kernel runs without the interpreter's lock, and is kept on disk if
the cache is writable."""

exact = _kept(njit(nogil=True, cache=CACHE.is_kept, error_model="numpy", fastmath=False))
"""Decorator that compiles a kernel without fast mathematics, for checks of finite values and sums in a fixed
order.

The option ``fastmath=False`` is explicit, because without it a kernel takes the options of its first caller.
"""


def compile_kept(work: Callable[[], object]) -> None:
    """Call a function that compiles kernels or reads them from the cache; if the cache is damaged, compile
    again.

    Numba writes its files without a sync, so a loss of power can leave empty ones.
    """
    try:
        work()
    except NumbaError:
        raise
    except OSError:  # the cache has no room; a second call finds the kernel in memory
        work()
    except Exception as error:  # an index's unpickler raises errors of many types
        if not CACHE.is_kept:
            raise
        logger.warning("the kernels in %s are damaged (%r) and are compiled again", CACHE.folder, error)
        CACHE.forget()
        work()


class NotOnDiskError(Exception):
    """A kernel would be compiled in a block of `only_read`."""


_only_reads: ContextVar[bool] = ContextVar("only_reads", default=False)
"""Whether this thread is in an `only_read` block; other threads may compile meanwhile."""


class _Refusal(Listener):  # type: ignore[misc]  # numba has no types
    """Refuses compilations in blocks of `only_read`."""

    def on_start(self, event: Event) -> None:
        """Raise NotOnDiskError in a thread that only reads."""
        if _only_reads.get():
            raise NotOnDiskError

    def on_end(self, event: Event) -> None:
        """Do nothing."""


@contextmanager
def only_read() -> Iterator[None]:
    """Let this thread read kernels from the disk in the block, and compile none.

    Raises:
        NotOnDiskError: The block needs a kernel that is not on the disk; all marks of the cache are removed.
    """
    token = _only_reads.set(True)
    try:
        with install_listener("numba:compile", _Refusal()):
            yield
    finally:
        _only_reads.reset(token)


@intrinsic
def _float_pointer(typing: Any, address: Any, like: Any) -> Any:
    # `like` is never read; it only gives its type, because an intrinsic knows only types.
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.PointerType())

    return types.CPointer(like)(types.int64, like), emit


@intrinsic
def _bits_pointer(typing: Any, address: Any, like: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.PointerType())

    # An integer as wide as a value, so that a view of values becomes a view of bits.
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
    """Return the bytes of one value of `like`'s type."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # A constant, so that byte strides are constants in the loops.
        return ir.Constant(ir.IntType(64), 4 if like == types.float32 else 8)

    return types.int64(like), emit


@kernel
def floats(address, count, like):
    """Return the array of `count` values at an address."""
    # A view on the kernel's stack: it has no reference count and no memory to free.
    return carray(_float_pointer(address, like), count)


@kernel
def longs(address, count):
    """Return the array of `count` 64-bit integers at an address."""
    return carray(_long_pointer(address), count)


@exact
def largest(address, count, like):
    """Return the largest absolute value; infinity or NaN if a value is infinite or NaN.

    Without the sign, the bits of floating-point numbers, read as integers, have the order of the numbers,
    then infinity, then NaN. The result is therefore a maximum of integers, which vectors compute in any
    order.
    """
    bits = carray(_bits_pointer(address, like), count)
    kind = bits.dtype.type
    # In 64 bits the shift gives the smallest integer, and one less wraps around to the largest.
    without_sign = kind((1 << (8 * size_of(like) - 1)) - 1)
    found = kind(0)
    for i in range(count):
        # As floats, the result with a NaN would depend on the order.
        found = max(found, kind(bits[i] & without_sign))
    return _from_bits(found, like)
