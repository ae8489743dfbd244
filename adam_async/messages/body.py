"""Pure: the base of all messages, their fields' types, roles, and conversion to and from a link's messages.

If a message has a number for each shard, it travels as one number if all are equal, and otherwise as a tuple
with one number per shard; see `joined`.

A field has one of the types in this file, or is a `bool`, a bounded sequence of such values, or another
record; a test walks all messages and finds any other field. Every correct value lies within its bound. The
bounds keep a peer's extreme values out of memory, arithmetic and waits; the receiving role compares a value
with its present state. Bounds refuse NaN and infinities too; only a `Loss` has none.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from numpy.typing import NDArray

from adam_async.messages.tensors import UNREADABLE, decoder_of
from transport import LocalProtocolError, Message, RemoteProtocolError

MOST_IN_A_META = 8192
"""Maximum number of elements of one field: half the bytes of a frame's meta (16 KiB)."""

MOST_RANGES = 512
"""Maximum number of group ranges that a step names, and of groups in a step."""

# --- numbers -----------------------------------------------------------------------------------

Count = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]
"""Number of things or bytes, or the index of one."""

Version = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]
"""Version of a shard, of the cluster map or of a record in it; or a generation, or a term."""

After = Annotated[int, Meta(ge=-1, le=(1 << 53) - 1)]
"""Newest version or clock that the sender knows; -1: none."""

DrawnId = Annotated[int, Meta(ge=0, le=(1 << 56) - 1)]
"""Identifier drawn or hashed from seven bytes: a session, a replica generation or an incarnation."""

Epoch = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
"""Number of an epoch, from 1; 0: none."""

Clock = Annotated[int, Meta(ge=0, le=(1 << 48) - 1)]
"""Number of steps that a replica has finished."""

PushNumber = Annotated[int, Meta(ge=0, le=(1 << 48) - 1)]
"""Number of a push in its session, from 1; 0: none."""

GroupNumber = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
"""Number of a group in its epoch."""

Attempt = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
"""Number of a lease among its group's leases, from 1."""

Staleness = Annotated[int, Meta(ge=0, le=(1 << 20) - 1)]
"""Number of other steps that were applied during the computation of a step."""

Images = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
"""Number of images, or the index of an image in a data set."""

Weight = Annotated[int, Meta(ge=1, le=(1 << 32) - 1)]
"""Weight of a contribution in a mean: in training, its number of images."""

ReplicaNumber = Annotated[int, Meta(ge=0, le=(1 << 20) - 1)]
"""Number of a replica, from 0."""

Partition = Annotated[int, Meta(ge=0, le=(1 << 16) - 1)]
"""Number of a part of the model, or of a crossing between two parts."""

ShardNumber = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
"""Number of a shard in the shard table of a run or store."""

Index = Annotated[int, Meta(ge=0, le=MOST_IN_A_META)]
"""Index or number of servers, pieces, parts or another field's elements; or a numbered status."""

Row = Annotated[int, Meta(ge=0, le=(1 << 20) - 1)]
"""Row of an image."""

Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
"""Duration of a wait or of work, in seconds."""

Rate = Annotated[float, Meta(ge=0.0, le=1e12)]
"""Learning rate."""

Progress = Annotated[float, Meta(ge=0.0, le=1e12)]
"""Number of epochs, with a fraction."""

Loss = Annotated[float, Meta(extra={"diverges": True})]
"""Loss; it has no bound, because a diverged training's losses are NaN and infinities."""

Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""Any finite number: a coefficient, or a part of a sum."""

VectorNumber = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
"""Number of a vector of a store; 0: the values themselves."""

# --- texts -------------------------------------------------------------------------------------

NodeId = Annotated[str, Meta(max_length=80)]
"""Name of a node, at most as long as the handshake of a link allows."""

RoleName = Annotated[str, Meta(max_length=32)]
"""Name of a role."""

ArrayName = Annotated[str, Meta(max_length=1024)]
"""Name of an array of a store; empty: no array."""

RunId = Annotated[str, Meta(max_length=160)]
"""Name of a run: its driver's name and incarnation, and a number."""

StoreId = Annotated[str, Meta(max_length=160)]
"""Identity of a store; the store of a run has the run's name."""

Name = Annotated[str, Meta(max_length=160)]
"""Name of a group of controllers, a controller, a key of the map or an array; or a digest."""

Addresses = Annotated[str, Meta(max_length=4096)]
"""Address, or several addresses separated by commas."""

Digest = Annotated[bytes, Meta(max_length=32)]
"""SHA-256 digest; empty without one."""

Packed = Annotated[bytes, Meta(max_length=16384)]
"""Bytes in a frame's meta."""

# --- several -----------------------------------------------------------------------------------

Shards = Annotated[tuple[ShardNumber, ...], Meta(max_length=MOST_IN_A_META)]
"""Numbers of shards."""

PushNumbers = Annotated[tuple[PushNumber, ...], Meta(max_length=MOST_IN_A_META)]
"""Push numbers, one for each of some shards."""

Versions = Annotated[tuple[Version, ...], Meta(max_length=MOST_IN_A_META)]
"""Versions, one for each of some shards."""

PushNumberOfEach = PushNumber | PushNumbers
"""The number of a push at each of some shards: one that they share, or one for each."""

VersionOfEach = Version | Versions
"""Versions of some shards: one for all of them, or one for each."""

Indices = Annotated[tuple[Index, ...], Meta(max_length=MOST_IN_A_META)]
"""Indices into another field."""

NamedGroups = Annotated[tuple[GroupNumber, ...], Meta(max_length=1 + 2 * MOST_RANGES)]
"""Groups whose gradients a step sums: their epoch, then each range's first group and one past its last. The
ranges ascend and do not touch."""

PinName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z", max_length=64)]
"""Name of a pin of a store."""

PinNameOrNone = Annotated[str, Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?\Z", max_length=64)]
"""Name of a pin; empty: none."""

Names = Annotated[tuple[Name, ...], Meta(max_length=96)]
"""Names of arrays, or of members of a group."""

# --- texts and packed records beside a message ---------------------------------------------------
# The receiver compares the length of the tensor with the bound before it decodes anything, because
# decoding blocks the loop and the peer chooses the length.

MOST_VALUE_BYTES = 64 << 10
"""Maximum size of one record in the cluster map, in bytes of JSON text; such a record decodes in some
milliseconds."""

MOST_MAP_BYTES = 8 << 20
"""Maximum size of the cluster map, in bytes of JSON text; controllers refuse a record that would exceed
it."""

MOST_MAP_TEXT_BYTES = 2 * MOST_MAP_BYTES
"""Maximum size of a cluster map, or of its changes, in one answer, in bytes. The limit exceeds
`MOST_MAP_BYTES`, because the text also has names, and shares and places that the controllers add."""

MOST_INFO_BYTES = 32 << 10
"""Maximum size of a node's `info` field in the cluster map, in bytes of JSON text. The `info` of a data
server may have the names of some thousand classes."""

SMALL_INFO_BYTES = 1 << 10
"""Maximum size of a worker's, client's or reader's `info`, in bytes of JSON text. A worker reports two
numbers, clients and readers nothing."""

MOST_STATISTICS_BYTES = 8 << 20
"""Maximum size of one role's statistics, in bytes of JSON text."""

MOST_PROFILE_BYTES = 32 << 20
"""Maximum size of one part of a profile, in bytes of JSON text: five times the size of 50,000 events."""

MOST_MANIFEST_BYTES = 16 << 20
"""Maximum size of one part of a file list, in bytes of JSON text: 2,000 paths of 4 KiB, all escaped."""

MOST_AGREE_BYTES = 4 << 20
"""Maximum size of one consensus message, in bytes; a message has entries of at most 1 MiB, or a piece of a
snapshot."""


ROLES = ("controller", "ps", "data", "worker", "driver", "client", "reader")
"""Roles of a cluster. `driver` is the command or program that started the run. `client` is a program that
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
