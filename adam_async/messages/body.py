"""Pure: the base of all messages, the roles, and the conversion to and from messages of a link."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from numpy.typing import NDArray

from adam_async.messages.finite import finder
from transport import Message, RemoteProtocolError

ROLES = ("controller", "ps", "data", "worker", "driver", "client", "reader")
"""Roles of a cluster. `driver` is the command or program that started the run; `client` is a program that
opens a store to push and pull, and `reader` a program that only reads."""


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages: a frozen record of builtins."""


Rows = Mapping[type[Body], frozenset[tuple[str, str]]]
"""The (from, to) pairs of roles that may send each message of a conversation."""

_B = TypeVar("_B", bound=Body)

_AS_THEY_ARE = (bytes,)
"""Types whose values stay unchanged in a message's meta; as text, bytes would be a third longer."""


def pack(body: Body, tensors: Sequence[NDArray[Any]] = ()) -> Message:
    """Return a body and its tensors as a message of a link."""
    return Message(
        type=type(body).__name__,
        meta=msgspec.to_builtins(body, builtin_types=_AS_THEY_ARE),
        tensors=tuple(tensors),
    )


def unpack(message: Message, expected: type[_B]) -> _B:
    """Validate a received message as `expected`.

    Raises:
        RemoteProtocolError: The message has another type, or a field is missing, mistyped or out of bounds.
    """
    if message.type != expected.__name__:
        raise RemoteProtocolError("message", f"expected {expected.__name__}, got {message.type}")
    try:
        body = msgspec.convert(message.meta, expected, builtin_types=_AS_THEY_ARE)
    except msgspec.ValidationError as error:
        raise RemoteProtocolError("message", f"malformed {message.type}: {error}") from None
    look = finder(expected)
    if look is not None and (found := look(body)):
        raise RemoteProtocolError(
            "message", f"malformed {message.type}: a number is not finite - at `${found}`"
        )
    return body
