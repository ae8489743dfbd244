"""Pure: client and parameter server: pins, states of a store under a name on the disks of its servers.

A pin has an id, which its client draws. `PinShards` makes it an entry of the log of each bundle. `ListPins`
asks which bundles of which pins a server has on its disk; `ListSaved` with `pin`, and `ReadSaved`, read them.
"""

from typing import Annotated

import msgspec

from adam_async.messages.body import Body, Rows
from adam_async.messages.bounds import Count, DrawnId, Name, NodeId, PinName, StoreId, Version
from adam_async.messages.tensors import read_packed_tensor
from transport import Message

MOST_PINS = 16
"""Maximum number of pins of a store."""

MOST_PIN_BUNDLES = 64
"""Maximum number of bundles of a store: as many as it has buckets."""

MOST_PIN_SERVERS = 512
"""Maximum number of servers with copies of a store."""

MOST_LISTED_PINS = 4096
"""Maximum number of bundles of pins in a list."""

MOST_PINS_BYTES = 32 << 20
"""Maximum size of a list, in bytes."""

MOST_PIN_FAULT = 512
"""Maximum length of the reason why a server has not saved a pin, in characters."""


class PinShards(Body, frozen=True, kw_only=True):
    """Request to keep the shards of a bundle as they are now, to its primary; or to give a pin up.

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
    """Request for the pins of all stores of a name on the disk of a server."""

    name: Name


class PinList(Body, frozen=True, kw_only=True):
    """Answer to `ListPins`. Tensor: a packed tuple of `PinState`."""


class PinFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle of a pin, as the disk of a server has it."""

    name: PinName
    pin: DrawnId
    store: StoreId
    """Id of the store at that time; the store that comes back after a loss of all servers has another one."""
    home: NodeId
    """Name of the bundle."""
    homes: Annotated[tuple[NodeId, ...], msgspec.Meta(max_length=MOST_PIN_BUNDLES)]
    """Names of all bundles of the pin."""
    servers: Annotated[tuple[NodeId, ...], msgspec.Meta(max_length=MOST_PIN_SERVERS)]
    """Servers that had copies in sync of any of them; no other server can have saved them."""
    began_ms: Version
    """Time at which the server began to save the shards, in milliseconds since 1970."""
    nbytes: Count = 0
    """Size of the values and of the state of the rules, in bytes."""


class PinState(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle of a pin on a server."""

    facts: PinFacts
    fault: Annotated[str, msgspec.Meta(max_length=MOST_PIN_FAULT)] = ""
    """Reason why the server has not saved the bundle; empty if it is on its disk, or comes there now."""
    writes: bool = False
    """Whether the server writes the bundle now."""


def pin_state_bytes(state: PinState) -> int:
    """Return the size of a packed state, in bytes; at least that."""
    facts = state.facts
    texts = (facts.name, facts.store, facts.home, *facts.homes, *facts.servers, state.fault)
    return _NUMBERS_BYTES + sum([len(text.encode()) + _TEXT_BYTES for text in texts])


_NUMBERS_BYTES, _TEXT_BYTES = 128, 3
"""Size of the numbers and names of fields of a packed state, and of the length of a text, in bytes."""

_Listed = Annotated[tuple[PinState, ...], msgspec.Meta(max_length=MOST_LISTED_PINS)]


def read_pin_list(message: Message) -> tuple[PinState, ...]:
    """Return the pins in the tensor of a `PinList`. Raises RemoteProtocolError."""
    listed: tuple[PinState, ...] = read_packed_tensor(message, _Listed, MOST_PINS_BYTES)
    return listed


ROWS: Rows = {
    PinShards: frozenset({("client", "ps")}),
    ShardsPinned: frozenset({("ps", "client")}),
    ListPins: frozenset({("client", "ps"), ("reader", "ps")}),
    PinList: frozenset({("ps", "client"), ("ps", "reader")}),
}
