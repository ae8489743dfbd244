"""Pure: what rides beside a message as a tensor: text, packed records, numbers.

The receiver validates all of it before it believes it.
"""

from functools import cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.messages.finite import finder
from transport import Message, RemoteProtocolError

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What the bytes of a peer may raise: the decoder has words of its own for most of it, but not for all."""


@cache
def _text_decoder(expected: Any) -> msgspec.json.Decoder[Any]:
    """One for each type: to make one takes longer than to decode a small message."""
    return msgspec.json.Decoder(expected)


@cache
def _packed_decoder(expected: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(expected)


def text_tensor(value: Any) -> NDArray[np.uint8]:
    """Write any builtin or record as JSON text that rides as a tensor."""
    return np.frombuffer(msgspec.json.encode(value), np.uint8)


def read_text_tensor(message: Message, expected: Any, most_bytes: int) -> Any:
    """Validate the JSON text that rides beside a message.

    Args:
        message: With one tensor of bytes.
        expected: Type of the value.
        most_bytes: A longer text is not decoded; one of the bounds in `sizes`.

    Raises:
        RemoteProtocolError: There is no such tensor, or the text is too long or not what is expected.
    """
    text = _only_bytes(message, "text", most_bytes)
    try:
        return _text_decoder(expected).decode(text)
    except UNREADABLE as error:
        raise RemoteProtocolError("message", f"malformed text beside {message.type}: {error}") from None


def read_number(value: float | None) -> float:
    """A number out of JSON text, which writes null for what is not finite, such as a diverged loss."""
    return float("nan") if value is None else float(value)


def packed_tensor(value: Any) -> NDArray[np.uint8]:
    """Write any builtin or record as bytes that ride as a tensor; unlike text it holds every float."""
    return np.frombuffer(msgspec.msgpack.encode(value), np.uint8)


def read_packed_tensor(message: Message, expected: Any, most_bytes: int) -> Any:
    """Validate what rides beside a message, as `packed_tensor` writes it.

    Args:
        message: With one tensor of bytes.
        expected: Type of the value.
        most_bytes: More bytes are not decoded; one of the bounds in `sizes`.

    Raises:
        RemoteProtocolError: There is no such tensor, or it is too long or not what is expected.
    """
    return read_packed(_only_bytes(message, "packed", most_bytes), expected, of=message)


def _only_bytes(message: Message, kind: str, most_bytes: int) -> bytes:
    """Return the bytes of the one tensor of a message, if they are within the limit."""
    if len(message.tensors) != 1 or message.tensors[0].dtype != np.uint8:
        raise RemoteProtocolError("tensors", f"{message.type} must carry one {kind} tensor")
    size = message.tensors[0].nbytes
    if size > most_bytes:
        raise RemoteProtocolError(
            "tensors", f"{size} bytes beside {message.type} are above the limit of {most_bytes}"
        )
    return message.tensors[0].tobytes()


def read_packed(packed: bytes, expected: Any, *, of: Message) -> Any:
    """Validate packed bytes that came with a message.

    Raises:
        RemoteProtocolError: They are not what is expected, or a number in them is not finite.
    """
    try:
        value = _packed_decoder(expected).decode(packed)
    except UNREADABLE as error:
        raise RemoteProtocolError("message", f"malformed bytes beside {of.type}: {error}") from None
    look = finder(expected)
    if look is not None and (found := look(value)):
        text = f"malformed bytes beside {of.type}: a number is not finite - at `${found}`"
        raise RemoteProtocolError("message", text)
    return value


def check_tensor(tensor: NDArray[Any], what: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Refuse a tensor that is not what its message promises.

    Raises:
        RemoteProtocolError: Naming what was expected and what came.
    """
    if tensor.shape != shape or tensor.dtype != dtype:
        raise RemoteProtocolError(
            "tensors", f"{what}: expected {dtype}{shape}, got {tensor.dtype}{tensor.shape}"
        )
