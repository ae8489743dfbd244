"""Pure: tensors of a message: text, packed records, numbers.

The receiver validates all tensors before their use.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from transport import Message, RemoteProtocolError

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors that the decoding of a peer's bytes may raise; the decoder's own error covers most faults, not
all."""


@cache
def _text_decoder(expected: Any) -> msgspec.json.Decoder[Any]:
    """Return the decoder of a type, cached because its construction takes longer than the decoding of a small
    message."""
    return msgspec.json.Decoder(expected)


@cache
def decoder_of(expected: Any) -> Callable[[bytes], Any]:
    """Return the function that decodes packed bytes as a type, made once for the same reason."""
    return msgspec.msgpack.Decoder(expected).decode


def text_tensor(value: Any) -> NDArray[np.uint8]:
    """Return any builtin or record as a tensor of JSON text."""
    return np.frombuffer(msgspec.json.encode(value), np.uint8)


def read_text_tensor(message: Message, expected: Any, most_bytes: int) -> Any:
    """Validate the JSON text in a tensor of a message.

    Args:
        message: Message with one tensor of bytes.
        most_bytes: Maximum length of the text, in bytes; one of `bounds`.

    Raises:
        RemoteProtocolError: The message does not have exactly one tensor of bytes, or the text is too long or
            has another type.
    """
    text = _only_bytes(message, "text", most_bytes)
    try:
        return _text_decoder(expected).decode(text)
    except UNREADABLE as error:
        raise RemoteProtocolError("message", f"malformed text beside {message.type}: {error}") from None


def read_number(value: float | None) -> float:
    """Return a number from JSON text, where null is a number that is not finite, such as a diverged loss."""
    return float("nan") if value is None else float(value)


def packed_tensor(value: Any) -> NDArray[np.uint8]:
    """Return any builtin or record as a tensor of packed bytes, which, unlike text, represent every float."""
    return np.frombuffer(msgspec.msgpack.encode(value), np.uint8)


def read_packed_tensor(message: Message, expected: Any, most_bytes: int) -> Any:
    """Validate the packed bytes in a tensor of a message; see `packed_tensor`.

    Args:
        message: Message with one tensor of bytes.
        most_bytes: Maximum number of bytes; one of `bounds`.

    Raises:
        RemoteProtocolError: The message does not have exactly one tensor of bytes, or the values are too long
            or have another type.
    """
    return read_packed(_only_bytes(message, "packed", most_bytes), expected, of=message)


def _only_bytes(message: Message, kind: str, most_bytes: int) -> bytes:
    """Return the bytes of a message's only tensor, within the limit."""
    if len(message.tensors) != 1 or message.tensors[0].dtype != np.uint8:
        raise RemoteProtocolError("tensors", f"{message.type} must carry one {kind} tensor")
    size = message.tensors[0].nbytes
    if size > most_bytes:
        raise RemoteProtocolError(
            "tensors", f"{size} bytes beside {message.type} are above the limit of {most_bytes}"
        )
    return message.tensors[0].tobytes()


def read_packed(packed: bytes, expected: Any, *, of: Message) -> Any:
    """Validate packed bytes of a message.

    Raises:
        RemoteProtocolError: The values have another type.
    """
    try:
        return decoder_of(expected)(packed)
    except UNREADABLE as error:
        raise RemoteProtocolError("message", f"malformed bytes beside {of.type}: {error}") from None


def check_tensor(tensor: NDArray[Any], what: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Check the shape and dtype of a tensor.

    Raises:
        RemoteProtocolError: The tensor differs; the message has the expected and the received properties.
    """
    if tensor.shape != shape or tensor.dtype != dtype:
        raise RemoteProtocolError(
            "tensors", f"{what}: expected {dtype}{shape}, got {tensor.dtype}{tensor.shape}"
        )
