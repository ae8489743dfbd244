"""The arrays of messages: their descriptions and layouts on the wire, and the memory that holds them.

In its message's meta, a tensor is described by a byte for its dtype, a byte for its number of dimensions and
32 bits for the length of each dimension (little endian). The tensor's bytes are a segment of the payload.
Segments start at multiples of 64 from the payload's start. So every tensor of a message received into an
aligned buffer is aligned too. No function here copies tensor bytes.

bfloat16 is available if ml_dtypes can be imported. Arrays of bfloat16 refuse to be memoryviews, so
`raw_bytes` views them as uint16.

Layouts are cached, because a training run sends the same few shapes repeatedly.

*Sent arrays.* `watched` calls a sender back when its arrays have no reader any longer. An event loop has no
callback for a buffer that the kernel has taken. But every loop drops its reference to such a buffer. The link
therefore sends a new view of each array, and a weak reference to the view fires when the loop drops the view.
``numpy.frombuffer`` makes the view: numpy shortens the base of an array's slices to the oldest array of the
chain, and only a frombuffer array has a memoryview as its base instead of the sender's array. A receiver that
keeps a slice keeps the view, and the sender cannot reuse the memory until the receiver frees the slice.

The callback may run on any thread (a compute thread may drop the last slice), exactly once.

*Received arrays.* `BufferPool.acquire` lends an array of bytes from reused memory: aligned buffers in
power-of-two sizes, each freed with its last view. Tensors are views of the lent array, users slice those, and
numpy keeps the lent array alive as the base of all of them. A weak reference to it therefore fires when the
last view is freed, and the memory returns to the free list at that moment, on the thread that dropped the
last view. (numpy shortens chains of bases to the oldest *array*, also through memoryviews; the memory below
is a bytearray or a mapping, so the chain ends at the lent array.)

Only atomic list and set operations run on that other thread; everything else runs on the loop's
thread. Memory from 1 MiB on is mapped: unwritten pages cost nothing, so a reservation takes only address
space until bytes arrive. A reused buffer has its pages already. This saves more time than a copy would cost:
fresh pages for 16 MiB take about as long as receiving 16 MiB.
"""

import logging
import mmap
import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from transport.errors import LocalProtocolError, RemoteProtocolError

try:
    import ml_dtypes
except ImportError:  # the extra `fast` is not installed
    BFLOAT16: np.dtype[Any] | None = None
else:
    BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

ALIGNMENT = 64
MAX_DIMS = 8
"""Maximum number of dimensions in a tensor."""

Tensor = NDArray[Any]

_UINT16: np.dtype[Any] = np.dtype(np.uint16)
_CODES: dict[np.dtype[Any], int] = {
    np.dtype(np.float32): 1,
    np.dtype(np.float16): 2,
    np.dtype(np.float64): 4,
    np.dtype(np.int8): 5,
    np.dtype(np.int16): 6,
    np.dtype(np.int32): 7,
    np.dtype(np.int64): 8,
    np.dtype(np.uint8): 9,
    np.dtype(np.bool_): 10,
}
if BFLOAT16 is not None:
    _CODES[BFLOAT16] = 3
_DTYPES: dict[int, np.dtype[Any]] = {code: dtype for dtype, code in _CODES.items()}


class TensorSpec(NamedTuple):
    """Position of one tensor in its message's payload."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Layout(NamedTuple):
    """The payload of a message.

    Attributes:
        packed: Packed descriptions of the tensors.
        specs: Place of each tensor.
        total_bytes: Length of the payload, padding included.
        tensor_bytes: The same without padding.
        plain: Whether the concatenated buffers of the tensors are the payload, without padding or views.
    """

    packed: bytes
    specs: tuple[TensorSpec, ...]
    total_bytes: int
    tensor_bytes: int
    plain: bool


def lay_out(tensors: Sequence[Tensor], limit_bytes: int, *, to_fill: bool = False) -> Layout:
    """Return the packed descriptions of arrays, and the place of each in the payload.

    Args:
        tensors: Arrays to send, or with ``to_fill`` arrays that a reply fills.
        limit_bytes: Maximum length of the payload.

    Raises:
        LocalProtocolError: A tensor is not an array, has an unsupported dtype or more than 8 dimensions, or
            is not C-contiguous; or all tensors together have more than ``limit_bytes``; or an array to fill
            is read-only.
    """
    for tensor in tensors:
        if not isinstance(tensor, np.ndarray):
            raise LocalProtocolError("tensor-dtype", f"{type(tensor).__name__} is not a numpy array")
        if not tensor.flags.c_contiguous:
            raise LocalProtocolError(
                "tensor-layout",
                f"an array of shape {tensor.shape} is not C-contiguous: pass numpy.ascontiguousarray(it)",
            )
        if to_fill and not tensor.flags.writeable:
            raise LocalProtocolError("into", "an array registered for a reply is read-only")
    if len(tensors) == 1:
        layout = _known_layout(((tensors[0].dtype, tensors[0].shape),))
    else:
        layout = _known_layout(tuple([(tensor.dtype, tensor.shape) for tensor in tensors]))
    if layout.total_bytes > limit_bytes:
        raise LocalProtocolError(
            "message-size",
            f"a payload of {layout.total_bytes} bytes exceeds the limit of {limit_bytes}: split the message",
        )
    return layout


@lru_cache(maxsize=1024)
def _known_layout(kinds: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]) -> Layout:
    """Lay out arrays of these types and shapes; cached, because a run sends the same few.

    Raises:
        LocalProtocolError: A type is not supported, or a shape is too long or too large.
    """
    packed: list[bytes] = []
    for dtype, shape in kinds:
        code = _CODES.get(dtype)
        if code is None:
            known = ", ".join(sorted(dtype.name for dtype in _CODES))
            raise LocalProtocolError(
                "tensor-dtype", f"dtype {dtype} is not supported; use, in native byte order: {known}"
            )
        if len(shape) > MAX_DIMS:
            raise LocalProtocolError("tensor-dims", f"{len(shape)} dimensions; {MAX_DIMS} are the most")
        if max(shape, default=0) >= 1 << 32:
            raise LocalProtocolError("message-size", f"shape {shape} has a dimension beyond 32 bits")
        packed.append(struct.pack(f"<BB{len(shape)}I", code, len(shape), *shape))
    return _place(b"".join(packed), kinds)


def _place(packed: bytes, kinds: Sequence[tuple[np.dtype[Any], tuple[int, ...]]]) -> Layout:
    """Lay tensors out in order, each at a multiple of 64."""
    specs: list[TensorSpec] = []
    end = total = 0
    for dtype, shape in kinds:
        size = prod(shape) * dtype.itemsize
        start = (end + ALIGNMENT - 1) & -ALIGNMENT
        end = start + size
        total += size
        specs.append(TensorSpec(dtype, shape, start, size))
    plain = end == total and all(dtype != BFLOAT16 for dtype, _ in kinds)
    return Layout(packed, tuple(specs), end, total, plain)


def read_layout(packed: bytes, limit_bytes: int) -> Layout:
    """Read the tensor descriptions of a received meta.

    Raises:
        RemoteProtocolError: A description is invalid, or all tensors together claim more than
            ``limit_bytes``.
    """
    kinds: list[tuple[np.dtype[Any], tuple[int, ...]]] = []
    position = 0
    while position < len(packed):
        code = packed[position]
        dims = packed[position + 1] if position + 1 < len(packed) else 0
        end = position + 2 + 4 * dims
        if dims > MAX_DIMS or end > len(packed):
            raise RemoteProtocolError("tensor-specs", f"{dims} dimensions, or the description is cut short")
        dtype = _DTYPES.get(code)
        if dtype is None:
            raise RemoteProtocolError("tensor-dtype", f"unknown dtype code {code}")
        shape: tuple[int, ...] = struct.unpack_from(f"<{dims}I", packed, position + 2)
        # Dimensions beside a zero are bounded too: numpy refuses a shape if the product of its other
        # dimensions overflows.
        if prod([size for size in shape if size]) * dtype.itemsize > limit_bytes:
            raise RemoteProtocolError("message-size", f"a tensor claims more than {limit_bytes} bytes")
        kinds.append((dtype, shape))
        position = end
    layout = _place(packed, kinds)
    if layout.total_bytes > limit_bytes:
        raise RemoteProtocolError("message-size", f"more than {limit_bytes} bytes are claimed")
    return layout


remembered_layout = lru_cache(maxsize=1024)(read_layout)
"""`read_layout` with a cache, for descriptions of at most `REMEMBERED_BYTES`."""

REMEMBERED_BYTES = 256
"""Maximum size of cached descriptions, in bytes. A peer chooses the keys: the cache limits the number of
entries, and this limits their size."""


def raw_bytes(tensor: Tensor) -> memoryview:
    """View the bytes of a non-empty C-contiguous array of a known dtype, without a copy."""
    if tensor.dtype == BFLOAT16:
        tensor = tensor.view(_UINT16)
    return tensor.data.cast("B")


Release = Callable[[], object]

LENT: Release = partial(bool)
"""Release for tensors that the sender may change once the sending method has returned; it does nothing,
because the link copies the bytes that it cannot send at once."""

logger = logging.getLogger(__name__)


class _Watch:
    """Calls back when the last of several views is freed. `_WATCHES` refers to the watch until then."""

    __slots__ = ("_callback", "_references", "_still")

    def __init__(self, views: tuple[Tensor, ...], callback: Release) -> None:
        self._callback = callback
        # There is one token less than views: the view that finds no token is the last. list.pop is atomic,
        # but a decrement is not.
        self._still = [None] * (len(views) - 1)
        self._references = [weakref.ref(view, self._gone) for view in views]
        _WATCHES.add(self)

    def _gone(self, reference: object) -> None:
        try:
            self._still.pop()
        except IndexError:
            _WATCHES.discard(self)
            self._references.clear()
            try:
                self._callback()
            except Exception:
                logger.exception("a release callback failed")


_WATCHES: set[_Watch] = set()
"""All open watches, because a weak reference that is itself dropped never calls back."""


def watched(tensors: tuple[Tensor, ...], callback: Release) -> tuple[Tensor, ...]:
    """Return new views of ``tensors``; call ``callback`` once, when all views are freed.

    If no tensor has an element, the callback is called at once.
    """
    anchors = tuple([_anchor(tensor) for tensor in tensors if tensor.size])
    if not anchors:
        callback()
        return tensors
    _Watch(anchors, callback)
    own = iter(anchors)
    return tuple([next(own).reshape(tensor.shape) if tensor.size else tensor for tensor in tensors])


def _anchor(tensor: Tensor) -> Tensor:
    """View an array in one dimension, over a memoryview."""
    raw = tensor.view(np.uint16) if tensor.dtype == BFLOAT16 else tensor  # refuses to be a memoryview
    return np.frombuffer(raw.data, tensor.dtype)


MIN_BYTES = 4 << 10
"""Minimum size of a pooled buffer, in bytes."""

MAX_BYTES = 32 << 20
"""Maximum size of a pooled buffer in bytes; the pool keeps no larger ones."""

_MAP_FROM_BYTES = 1 << 20
_MIN_SHIFT = MIN_BYTES.bit_length() - 1
_UINT8 = np.dtype(np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """State of a pool. ``outstanding`` buffers have live views; ``free_bytes`` wait for reuse."""

    outstanding: int
    outstanding_bytes: int
    free: int
    free_bytes: int
    acquired: int
    created: int


class _Block:
    """One piece of memory, lent or free."""

    __slots__ = ("free_list", "keep", "lent", "memory", "reference", "size")

    def __init__(self, size: int, free_list: "list[_Block]", keep: int, lent: "set[_Block]") -> None:
        self.size = size
        self.memory = _aligned(size)
        self.free_list = free_list
        self.keep = keep
        self.lent = lent
        self.reference: weakref.ref[Tensor] | None = None

    def returned(self, reference: object) -> None:
        """Take the memory back when its last view is freed; free it if the free list is full."""
        # May run on any thread: each line is atomic, and the block is free only after the last line.
        self.reference = None
        self.lent.discard(self)
        if len(self.free_list) < self.keep:
            self.free_list.append(self)


class BufferPool:
    """Lends aligned memory, which returns when its last view is freed.

    Args:
        retain_bytes: Free memory to keep for reuse, per size, in bytes; at least one buffer is kept.
    """

    def __init__(self, *, retain_bytes: int = 64 << 20) -> None:
        if retain_bytes < 0:
            raise ValueError(f"retain_bytes must not be negative, not {retain_bytes}")
        self._retain_bytes = retain_bytes
        self._free: list[list[_Block]] = [[] for _ in range(MAX_BYTES.bit_length() - _MIN_SHIFT)]
        self._lent: set[_Block] = set()
        self._acquired = 0
        self._created = 0

    def acquire(self, size_bytes: int) -> Tensor:
        """Lend ``size_bytes`` (at least 1) bytes as a uint8 array whose memory is 64-byte aligned.

        The memory returns when the array and all its views are freed. Buffers beyond 32 MiB are not kept for
        reuse.
        """
        return self.lend(size_bytes, _UINT8, (size_bytes,))[0]

    def lend(
        self, size_bytes: int, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> tuple[Tensor, memoryview]:
        """Lend an array of a dtype and shape as `acquire` does, with a view of its bytes to fill it.

        Use the view only while the array exists, because it does not keep the memory lent. The view may be
        longer than requested.
        """
        index = 0 if size_bytes <= MIN_BYTES else (size_bytes - 1).bit_length() - _MIN_SHIFT
        self._acquired += 1
        if index < len(self._free):
            free = self._free[index]
            try:
                block = free.pop()
            except IndexError:
                block = self._create(MIN_BYTES << index, free)
        else:
            block = self._create(size_bytes, [])
        lent: Tensor = np.ndarray(shape, dtype, block.memory)
        self._lent.add(block)
        block.reference = weakref.ref(lent, block.returned)
        return lent, block.memory

    def joined(self, parts: Sequence[Tensor], dtype: np.dtype[Any], size: int) -> Tensor:
        """Lend one array with copies of flat arrays of one dtype; ``size`` is their number of values."""
        copy = self.lend(size * dtype.itemsize, dtype, (size,))[0]
        np.concatenate(parts, out=copy)
        return copy

    def _create(self, size: int, free: list[_Block]) -> _Block:
        self._created += 1
        keep = max(1, self._retain_bytes // size) if size <= MAX_BYTES else 0
        return _Block(size, free, keep, self._lent)

    def statistics(self) -> PoolStatistics:
        """Return the numbers of buffers and bytes, lent and free."""
        lent = list(self._lent)
        free = [block for blocks in self._free for block in list(blocks)]
        return PoolStatistics(
            outstanding=len(lent),
            outstanding_bytes=sum(block.size for block in lent),
            free=len(free),
            free_bytes=sum(block.size for block in free),
            acquired=self._acquired,
            created=self._created,
        )

    def __repr__(self) -> str:
        now = self.statistics()
        return f"<BufferPool {now.outstanding} lent ({now.outstanding_bytes} B), {now.free} free>"


def _aligned(size: int) -> memoryview:
    """Make 64-byte aligned memory; memory from 1 MiB on is mapped, so that untouched pages cost nothing."""
    if size >= _MAP_FROM_BYTES:
        return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    raw = bytearray(size + ALIGNMENT)
    start = -np.frombuffer(raw, _UINT8).ctypes.data % ALIGNMENT
    return memoryview(raw)[start : start + size]
