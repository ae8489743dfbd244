"""Pure: driver or client and parameter server: shards on a server's disk, from a lost store or a pin.

A server cuts the shards of a bundle into pieces and writes whole pieces (`parameter_server/shard_pieces.py`).
A pin is a store's state under a name, with an id that its client draws. `PinShards` makes it an entry in each
bundle's log. `ListPins` asks which bundles of which pins a server has on its disk.
"""

from typing import Annotated

import msgspec

from adam_async.messages.body import (
    Body,
    Clock,
    Count,
    DrawnId,
    Name,
    NodeId,
    PinName,
    PinNameOrNone,
    Rows,
    Shards,
    StoreId,
    Version,
)
from adam_async.messages.tensors import UNREADABLE, read_packed_tensor
from transport import Message, RemoteProtocolError

MOST_SAVED_BYTES = 32 << 20
"""Maximum size of a list of saved stores, in bytes; it has room for the largest store. A server with more
stores of a name sends several lists."""

MOST_LISTS = 4
"""Maximum number of lists that an asker reads of one server."""

MOST_RECORD_BYTES = 4 << 20
"""Maximum size of a run's record, in bytes."""

MOST_SAVED_PIECES = 1 << 20
"""Maximum number of a saved store's pieces on one server."""

MOST_SAVED_STORES = 64
"""Maximum number of saved stores with one name on a server."""

MOST_FAULTY_PIECES = 1_000
"""Maximum number of invalid pieces in a list of saved stores; each raises an exception in the reader, which
takes time."""

SAVED_PIECE_BYTES = 128
"""Maximum size of a packed `SavedPiece`, in bytes, with the longest name of a home."""


class SavedPiece(msgspec.Struct, frozen=True, array_like=True):
    """One piece of a bundle on a disk."""

    home: NodeId
    piece: Count
    generation: Version
    """Generation of the last entry in the piece. If two servers have the piece, the larger generation is
    newer, regardless of the positions, because a primary begins with all committed entries."""
    position: Count
    """Position of the last entry in the piece. If two servers have the piece with equal generations, the
    larger position is newer. In a store with cuts (`StoreRecord.takes_cuts`), the clock of the piece."""


class SavedStore(msgspec.Struct, frozen=True):
    """A store of which a server has pieces."""

    name: Name
    id: StoreId
    record: Annotated[bytes, msgspec.Meta(max_length=64 << 10)]
    """The record of the store, as JSON text."""
    arrays: Annotated[bytes, msgspec.Meta(max_length=4 << 20)]
    """The store's list of arrays, as JSON text."""
    pieces: Annotated[tuple[SavedPiece, ...], msgspec.Meta(max_length=MOST_SAVED_PIECES)]
    began_ms: Version
    """Time at which the server began to keep the store, in milliseconds since 1970; among saved stores with
    one name, the later is newer."""
    run: Annotated[bytes, msgspec.Meta(max_length=MOST_RECORD_BYTES)] = b""
    """The record of the run (`run.run_record`), in the store of a run."""
    run_order: tuple[Version, Count] = (0, 0)
    """Order of this record: of two servers' records of a run, the greater is newer."""


class _ListedStore(SavedStore, frozen=True):
    """A `SavedStore` whose pieces are not decoded."""

    pieces: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=MOST_SAVED_PIECES)]  # type: ignore[assignment]


class ListSaved(Body, frozen=True, kw_only=True):
    """Request for the stores with a name on a server's disk; an empty name asks for those of runs."""

    name: Name
    known: Annotated[tuple[StoreId, ...], msgspec.Meta(max_length=MOST_SAVED_STORES)] = ()
    """Ids of the stores that the asker has from earlier lists; the answer leaves them out."""
    pin: PinNameOrNone = ""
    """Name of a pin (`PinShards`): the answer has the pins of this name, each as a store."""


class SavedList(Body, frozen=True, kw_only=True):
    """Answer to `ListSaved`. Tensor: a packed tuple of `SavedStore`."""

    keeps: bool
    """Whether the server has a disk for shards."""
    followed: Annotated[tuple[StoreId, ...], msgspec.Meta(max_length=MOST_SAVED_STORES)] = ()
    """Ids of the stores with the name that are not in the list, because the disk still follows or reads
    them."""
    more: bool = False
    """Whether older stores did not fit into the list; the asker asks again."""


class ReadSaved(Body, frozen=True, kw_only=True):
    """Request for shards of one piece on the disk of a server. The answer is `ShardStates`."""

    store: StoreId
    home: NodeId
    piece: Count
    shards: Shards
    clock: Clock = 0
    """Clock of the piece in a store with cuts."""


_Listed = Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=MOST_SAVED_STORES)]

_PIECE: msgspec.msgpack.Decoder[SavedPiece] = msgspec.msgpack.Decoder(SavedPiece)
_STORE: msgspec.msgpack.Decoder[SavedStore] = msgspec.msgpack.Decoder(SavedStore)
_LISTED: msgspec.msgpack.Decoder[_ListedStore] = msgspec.msgpack.Decoder(_ListedStore)


def read_saved_list(message: Message) -> tuple[tuple[SavedStore, ...], tuple[str, ...]]:
    """Return the valid stores in the tensor of a `SavedList`, and the faults of invalid parts as text.

    The disk of a server may have files of other origin, so an invalid store or piece does not affect others.

    Raises:
        RemoteProtocolError: The list is too long, has too many invalid pieces, or is no list.
    """
    stores: list[SavedStore] = []
    faults: list[str] = []
    room = MOST_FAULTY_PIECES
    for number, packed in enumerate(read_packed_tensor(message, _Listed, MOST_SAVED_BYTES)):
        try:
            stores.append(_STORE.decode(packed))
        except UNREADABLE as error:
            try:
                store, fault, faulty = _without_faults(packed, room)
            except UNREADABLE:
                faults.append(f"store {number} of its list: {error}")
            else:
                stores.append(store)
                faults.append(f"store {store.id!r}: {fault}")
                room -= faulty
    return tuple(stores), tuple(faults)


def _without_faults(packed: msgspec.Raw, room: int) -> tuple[SavedStore, str, int]:
    """Return a store without its invalid pieces, the first such piece's fault, and their number.

    Raises:
        An error of `UNREADABLE`: Another field is invalid.
        RemoteProtocolError: More than `room` pieces are invalid.
    """
    listed = _LISTED.decode(packed)
    pieces: list[SavedPiece] = []
    fault, faulty = "", 0
    for number, piece in enumerate(listed.pieces):
        try:
            pieces.append(_PIECE.decode(piece))
        except UNREADABLE as error:
            fault = fault or f"piece {number} of its list: {error}"
            faulty += 1
            if faulty > room:
                text = f"above {MOST_FAULTY_PIECES} invalid pieces, the last one: {error}"
                raise RemoteProtocolError("saved", text) from None
    others = f", and {faulty - 1} more pieces" if faulty > 1 else ""
    values = {name: getattr(listed, name) for name in listed.__struct_fields__}
    return SavedStore(**{**values, "pieces": tuple(pieces)}), fault + others, faulty


_ASKING = frozenset({("driver", "ps"), ("client", "ps")})


MOST_PINS = 16
"""Maximum number of pins of a store."""

MOST_PIN_BUNDLES = 64
"""Maximum number of bundles in a store: as many as it has buckets."""

MOST_PIN_SERVERS = 512
"""Maximum number of servers with copies of a store."""

MOST_LISTED_PINS = 4096
"""Maximum number of pin bundles in a list."""

MOST_PINS_BYTES = 32 << 20
"""Maximum size of a list, in bytes."""

MOST_PIN_FAULT = 512
"""Maximum length of the reason why a server has not saved a pin, in characters."""


class PinShards(Body, frozen=True, kw_only=True):
    """Request to a bundle's primary to keep the shards as they are now, or to give a pin up.

    The answer follows the entry of the bundle's log. A repetition has no effect.
    """

    store: StoreId
    home: NodeId
    """Name of the bundle. Empty: this server removes the pin from its disk, or gives it up if it is written
    now, also without the bundle."""
    name: PinName
    pin: DrawnId
    removes: bool = False


class ShardsPinned(Body, frozen=True, kw_only=True):
    """Answer to `PinShards`: the entry is applied. The members save the shards after it."""


class ListPins(Body, frozen=True, kw_only=True):
    """Request for the pins on a server's disk of all stores with a name."""

    name: Name


class PinList(Body, frozen=True, kw_only=True):
    """Answer to `ListPins`. Tensor: a packed tuple of `PinState`."""


class PinFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle of a pin, as on a server's disk."""

    name: PinName
    pin: DrawnId
    store: StoreId
    """Id of the store at that time; a store that comes back after a loss of all servers has another id."""
    home: NodeId
    """Name of the bundle."""
    homes: Annotated[tuple[NodeId, ...], msgspec.Meta(max_length=MOST_PIN_BUNDLES)]
    """Names of all bundles of the pin."""
    servers: Annotated[tuple[NodeId, ...], msgspec.Meta(max_length=MOST_PIN_SERVERS)]
    """Servers that had copies in sync of any pinned shard; no other server can have saved these shards."""
    began_ms: Version
    """Time at which the server began to save the shards, in milliseconds since 1970."""
    nbytes: Count = 0
    """Size in bytes of the values and the rules' state."""


class PinState(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle of a pin on a server."""

    facts: PinFacts
    fault: Annotated[str, msgspec.Meta(max_length=MOST_PIN_FAULT)] = ""
    """Why the server has not saved the bundle; empty if its disk has the bundle, or is writing it."""
    writes: bool = False
    """Whether the server writes the bundle now."""


def pin_state_bytes(state: PinState) -> int:
    """Return at least the size of a packed state, in bytes."""
    facts = state.facts
    texts = (facts.name, facts.store, facts.home, *facts.homes, *facts.servers, state.fault)
    return _NUMBERS_BYTES + sum([len(text.encode()) + _TEXT_BYTES for text in texts])


_NUMBERS_BYTES, _TEXT_BYTES = 128, 3
"""Size in bytes of a packed state's numbers and field names, and of a text's length."""

_ListedPins = Annotated[tuple[PinState, ...], msgspec.Meta(max_length=MOST_LISTED_PINS)]


def read_pin_list(message: Message) -> tuple[PinState, ...]:
    """Return the pins in the tensor of a `PinList`. Raises RemoteProtocolError."""
    listed: tuple[PinState, ...] = read_packed_tensor(message, _ListedPins, MOST_PINS_BYTES)
    return listed


ROWS: Rows = {
    ListSaved: _ASKING,
    SavedList: frozenset({("ps", "driver"), ("ps", "client")}),
    ReadSaved: _ASKING,
    PinShards: frozenset({("client", "ps")}),
    ShardsPinned: frozenset({("ps", "client")}),
    ListPins: frozenset({("client", "ps"), ("reader", "ps")}),
    PinList: frozenset({("ps", "client"), ("ps", "reader")}),
}
