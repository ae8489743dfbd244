"""Pure: the descriptions and layouts of arrays on the wire.

A tensor is described in the meta of its message by a byte for its dtype, a byte for its number of dimensions
and 32 bits for the length of each dimension (little endian). The tensor's bytes are a segment of the payload.
Segments start at multiples of 64 from the start of the payload, so every tensor of a message received into an
aligned buffer is aligned too. This file copies no tensor bytes.

bfloat16 is available if ml_dtypes can be imported. Its arrays refuse to be memoryviews, so `raw_bytes` views
them as uint16.

Layouts are cached, because a training run sends the same few shapes repeatedly.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
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
"""Maximum number of dimensions of a tensor."""

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
    """Position of one tensor in the payload of its message."""

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
        LocalProtocolError: A tensor is no array, has an unsupported dtype or more than 8 dimensions, or is
            not C-contiguous; or all tensors together have more than ``limit_bytes``; or an array to fill is
            read-only.
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
    """Lay out arrays of these types and shapes; cached, as a run sends the same few.

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
        # Dimensions beside a zero are bounded too, because numpy refuses a shape if the product of its other
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
"""Maximum size of cached descriptions, in bytes. A peer chooses them: the cache has a limit for its entries,
and this limits their size."""


def raw_bytes(tensor: Tensor) -> memoryview:
    """View the bytes of a non-empty C-contiguous array of a known dtype, without a copy."""
    if tensor.dtype == BFLOAT16:
        tensor = tensor.view(_UINT16)
    return tensor.data.cast("B")
