"""Pure: what an array looks like on the wire, and back.

A tensor is described by ``[code, dim, dim, ...]`` in the meta of its message; its bytes are a segment of
the payload. Segments start at multiples of 64 bytes from the start of the payload, so that every tensor of
a message received into an aligned buffer is aligned too. Nothing here copies tensor bytes.

bfloat16 exists where ml_dtypes can be imported. Its arrays refuse to be memoryviews, hence `raw_bytes`
looks at them as uint16.
"""

from collections.abc import Sequence
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

__all__ = ["ALIGNMENT", "MAX_DIMS", "Tensor", "TensorSpec", "describe", "parse_specs", "raw_bytes"]

ALIGNMENT = 64
MAX_DIMS = 8
MAX_TENSORS = 4096
"""No meta of 16 KiB describes more."""

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
    """Where one tensor lies in the payload of its message."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def describe(tensors: Sequence[Tensor], limit_bytes: int) -> tuple[list[list[int]], int, int]:
    """Describe arrays for the meta of their message.

    Returns:
        The specs as plain lists, the length of the payload with padding, and without.

    Raises:
        LocalProtocolError: Not an array, a dtype that does not travel, more than 8 dimensions, not
            C-contiguous, or more than ``limit_bytes`` in all.
    """
    specs: list[list[int]] = []
    end = 0
    total = 0
    for tensor in tensors:
        try:
            code = _CODES[tensor.dtype]
            shape = tensor.shape
        except (KeyError, AttributeError, TypeError):
            raise LocalProtocolError("tensor-dtype", _unfit(tensor)) from None
        if len(shape) > MAX_DIMS:
            raise LocalProtocolError("tensor-dims", f"{len(shape)} dimensions; {MAX_DIMS} are the most")
        if not tensor.flags.c_contiguous:
            raise LocalProtocolError(
                "tensor-layout",
                f"an array of shape {shape} is not C-contiguous: pass numpy.ascontiguousarray(it)",
            )
        specs.append([code, *shape])
        size = tensor.nbytes
        end = ((end + 63) & -64) + size
        total += size
    if end > limit_bytes:
        raise LocalProtocolError(
            "message-size", f"a payload of {end} bytes exceeds the limit of {limit_bytes}: split the message"
        )
    return specs, end, total


def _unfit(tensor: object) -> str:
    known = ", ".join(sorted(dtype.name for dtype in _CODES))
    if not isinstance(tensor, np.ndarray):
        return f"{type(tensor).__name__} is not a numpy array"
    return f"dtype {tensor.dtype} does not travel; these do, in native byte order: {known}"


def raw_bytes(tensor: Tensor) -> memoryview:
    """Look at the bytes of a C-contiguous array of a known dtype, without copying. Not empty."""
    if tensor.dtype == BFLOAT16:
        tensor = tensor.view(_UINT16)
    return tensor.data.cast("B")


def parse_specs(specs: object, limit_bytes: int) -> tuple[list[TensorSpec], int]:
    """Read the tensor descriptions of a received meta.

    Returns:
        The specs and the length of the whole payload, padding included.

    Raises:
        RemoteProtocolError: A description is not one, or claims more than ``limit_bytes`` in all.
    """
    if type(specs) is not list or len(specs) > MAX_TENSORS:
        raise RemoteProtocolError("tensor-specs", f"not a list of at most {MAX_TENSORS} descriptions")
    parsed: list[TensorSpec] = []
    end = 0
    for spec in specs:
        if type(spec) is not list or not 1 <= len(spec) <= MAX_DIMS + 1:
            raise RemoteProtocolError("tensor-specs", f"not a dtype and at most {MAX_DIMS} dimensions")
        for number in spec:
            if type(number) is not int or number < 0:
                raise RemoteProtocolError("tensor-specs", "a dtype code or dimension is not a natural number")
        dtype = _DTYPES.get(spec[0])
        if dtype is None:
            raise RemoteProtocolError("tensor-dtype", f"dtype code {spec[0]} is unknown here")
        shape = tuple(spec[1:])
        size = prod(shape) * dtype.itemsize
        start = (end + 63) & -64
        end = start + size
        # Dimensions beside a zero are bounded too, numpy would refuse them later.
        if end > limit_bytes or max(shape, default=0) > limit_bytes:
            raise RemoteProtocolError("message-size", f"more than {limit_bytes} bytes are claimed")
        parsed.append(TensorSpec(dtype, shape, start, size))
    return parsed, end
