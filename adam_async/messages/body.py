"""Pure: the base of all messages, the roles, and the conversion to and from messages of a link.

A number for each shard of a message travels as one number if it is the same for all shards, and otherwise as
a tuple with one number for each; see `joined`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from numpy.typing import NDArray

from adam_async.messages.tensors import UNREADABLE, decoder_of
from transport import LocalProtocolError, Message, RemoteProtocolError

ROLES = ("controller", "ps", "data", "worker", "driver", "client", "reader")
"""Roles of a cluster. `driver` is the command or program that started the run; `client` is a program that
opens a store to push and pull, and `reader` a program that only reads."""


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages: a frozen record, encoded as a map; receivers ignore unknown fields."""


Rows = Mapping[type[Body], frozenset[tuple[str, str]]]
"""The (from, to) pairs of roles that may send each message of a conversation."""

_B = TypeVar("_B", bound=Body)

OfEach = int | tuple[int, ...]
"""One number for all shards of a message, or one for each of them."""

_ENCODE = msgspec.msgpack.Encoder().encode


def pack(body: Body, tensors: Sequence[NDArray[Any]] = ()) -> Message:
    """Return a body and its tensors as a message of a link.

    Raises:
        LocalProtocolError: A number exceeds 64 bits, or a text has a lone surrogate.
    """
    name = type(body).__name__
    try:
        return Message(type=name, meta=_ENCODE(body), tensors=tuple(tensors))
    except (OverflowError, UnicodeEncodeError) as error:
        raise LocalProtocolError("meta", f"a field of {name} cannot be encoded: {error}") from None


def unpack(message: Message, expected: type[_B]) -> _B:
    """Validate a received message as `expected`.

    Raises:
        RemoteProtocolError: The message has another type, or a field is missing, mistyped or out of bounds.
    """
    if message.type != expected.__name__:
        raise RemoteProtocolError("message", f"expected {expected.__name__}, got {message.type}")
    try:
        body: _B = decoder_of(expected)(message.meta)
    except UNREADABLE as error:
        raise RemoteProtocolError("message", f"malformed {message.type}: {error}") from None
    return body


def unpack_as(classes: Mapping[str, type[_B]], message: Message) -> _B:
    """Validate a received message as the class that its type names; for errors see `unpack`."""
    cls = classes.get(message.type)
    if cls is None:
        raise RemoteProtocolError("message", f"unknown message {message.type!r}")
    return unpack(message, cls)


def joined(numbers: Sequence[int]) -> OfEach:
    """Return numbers of shards in the form in which they travel."""
    first = numbers[0] if numbers else 0
    return first if numbers and numbers.count(first) == len(numbers) else tuple(numbers)


def each_of(numbers: OfEach, shards: int) -> tuple[int, ...]:
    """Return one number for each shard of a message."""
    return (numbers,) * shards if isinstance(numbers, int) else numbers


def of_place(numbers: OfEach, place: int) -> int:
    """Return the number for one shard of a message."""
    return numbers if isinstance(numbers, int) else numbers[place]


def fits(shards: int, *several: OfEach) -> bool:
    """Return whether a message has numbers for each of its shards."""
    return all(isinstance(numbers, int) or len(numbers) == shards for numbers in several)
