"""Pure: driver or client and parameter server: shards with their values, versions, clocks and rule state.

The tables of versions and clocks are two tensors of int64 before the values, because a frame's meta has
only 16 KiB:

    (shards, 2)  number of the shard, version
    (rows, 3)    number of the shard, replica, step that the replica has finished

Push numbers are not sent, because the sessions of a run push only into that run, and no run continues the
sessions of another.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.messages.body import Body, Rows
from adam_async.messages.bounds import (
    MOST_IN_A_META,
    Clock,
    Count,
    DrawnId,
    Names,
    PushNumber,
    ReplicaNumber,
    ReplicaText,
    ShardNumber,
    Shards,
    StoreId,
    Version,
)
from transport import RemoteProtocolError


class ShardState(msgspec.Struct, frozen=True, array_like=True):
    """Tables of a shard, before its values and its rule state."""

    shard: ShardNumber
    version: Version
    clocks: Annotated[dict[ReplicaText, Clock], msgspec.Meta(max_length=MOST_IN_A_META)]
    """Last finished step by replica (as text)."""
    numbers: Annotated[
        tuple[tuple[DrawnId, DrawnId, PushNumber], ...], msgspec.Meta(max_length=MOST_IN_A_META)
    ] = ()
    """Push numbers of sessions in manifests of earlier checkpoints; unused."""


class ReadShards(Body, frozen=True, kw_only=True):
    """Request for the whole state of shards, with all earlier messages of the same link.

    In ssp and bsp the server answers once the values have all pushes up to `clock`, in bsp with the values of
    exactly this clock. In bsp the server then keeps all its shards at that clock until they are read, or the
    link closes.
    """

    store: StoreId
    generation: Version
    shards: Shards
    clock: Clock = 0
    """Clock for which the answer waits; 0 requests the values as they are."""


class ShardStates(Body, frozen=True, kw_only=True):
    """The whole state of shards. Tensors: two tables, then each shard's values (flat) and rule arrays."""

    arrays: Names
    """Names of the rule's arrays: elementwise ones, then arrays of one number per shard."""
    passed: Clock = 0
    """In bsp, clock of a shard that has passed the requested clock; the answer then has no shards. Otherwise
    0."""


class LoadShards(Body, frozen=True, kw_only=True):
    """Request to set shards of a run before its start, or of a store before it opens. Tensors: as in
    `ShardStates`."""

    store: StoreId
    generation: Version
    arrays: Names


class Loaded(Body, frozen=True, kw_only=True):
    """Acknowledgement of `LoadShards`. `left` is the number of this server's shards without values."""

    left: Count


TABLES = 2
"""Number of tensors with tables, before all others."""


def state_tables(states: Iterable[ShardState]) -> list[NDArray[np.int64]]:
    """Return the two tables of some shards, in their order."""
    versions: list[tuple[int, int]] = []
    clocks: list[tuple[int, int, int]] = []
    for state in states:
        versions.append((state.shard, state.version))
        clocks += [(state.shard, int(replica), clock) for replica, clock in state.clocks.items()]
    return [np.array(versions, np.int64).reshape(-1, 2), np.array(clocks, np.int64).reshape(-1, 3)]


def read_state_tables(
    tensors: Sequence[NDArray[Any]],
    *,
    most_shards: int | None = None,
    most_clocks: int | None = None,
) -> tuple[tuple[ShardState, ...], Sequence[NDArray[Any]]]:
    """Read the tables before a message's other tensors; return the states and the other tensors.

    Args:
        tensors: The tensors of the message.
        most_shards: Maximum number of shards; None for no bound, in a reader that chose the shards itself.
        most_clocks: Maximum number of clocks of all shards; None for no bound.

    Raises:
        RemoteProtocolError: A table is missing, too long or of another shape or type, a shard occurs twice, a
            clock belongs to no shard of the message, or a number is out of bounds.
    """
    if len(tensors) < TABLES:
        raise RemoteProtocolError("tensors", f"{TABLES} tables come first, got {len(tensors)} tensors")
    versions, clocks = tensors[:TABLES]
    for name, table, columns, most in (
        ("versions", versions, 2, most_shards),
        ("clocks", clocks, 3, most_clocks),
    ):
        if table.dtype != np.int64 or table.ndim != 2 or table.shape[1] != columns:
            found = f"{table.dtype}{table.shape}"
            raise RemoteProtocolError("tensors", f"{name}: expected int64(n, {columns}), got {found}")
        if most is not None and len(table) > most:  # before decoding, which blocks the loop
            raise RemoteProtocolError("tensors", f"{name} has {len(table)} rows, {most} are the most")
    try:
        of_shards = msgspec.convert(versions.tolist(), list[tuple[ShardNumber, Version]])
        of_replicas = msgspec.convert(clocks.tolist(), list[tuple[ShardNumber, ReplicaNumber, Clock]])
    except msgspec.ValidationError as error:
        raise RemoteProtocolError("tensors", f"versions or clocks: {error}") from None
    clocks_of: dict[int, dict[str, int]] = {shard: {} for shard, _ in of_shards}
    if len(clocks_of) != len(of_shards):
        raise RemoteProtocolError("tensors", "versions: a shard is named twice")
    for shard, replica, clock in of_replicas:
        if shard not in clocks_of:
            raise RemoteProtocolError("tensors", f"clocks: shard {shard} is not in this message")
        clocks_of[shard][str(replica)] = clock
    states = tuple([ShardState(shard, version, clocks_of[shard]) for shard, version in of_shards])
    return states, tensors[TABLES:]


ROWS: Rows = {
    ReadShards: frozenset({("driver", "ps")}),
    ShardStates: frozenset({("ps", "driver"), ("ps", "client")}),
    LoadShards: frozenset({("driver", "ps"), ("client", "ps")}),
    Loaded: frozenset({("ps", "driver"), ("ps", "client")}),
}
