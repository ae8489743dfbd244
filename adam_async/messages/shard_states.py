"""Pure: driver and parameter server: shards with all that travels with them."""

from typing import Annotated

import msgspec

from adam_async.messages.body import Body, Rows
from adam_async.messages.bounds import (
    MOST_IN_A_META,
    Clock,
    Count,
    DrawnId,
    Names,
    PushNumber,
    ReplicaText,
    RunId,
    ShardNumber,
    Shards,
    Version,
)


class ShardState(msgspec.Struct, frozen=True, array_like=True):
    """Everything that travels with a shard, beside its values and its rule state."""

    shard: ShardNumber
    version: Version
    clocks: Annotated[dict[ReplicaText, Clock], msgspec.Meta(max_length=MOST_IN_A_META)]
    """Replica (as text) to the step that it has finished."""
    numbers: Annotated[
        tuple[tuple[DrawnId, DrawnId, PushNumber], ...], msgspec.Meta(max_length=MOST_IN_A_META)
    ]
    """Dedup table: session, incarnation, number of the last push ordered."""


class ReadShards(Body, frozen=True, kw_only=True):
    """Ask for shards with all that travels with them. What came before on the same link is in them."""

    run: RunId
    generation: Version
    shards: Shards


class ShardStates(Body, frozen=True, kw_only=True):
    """Tensors: for each shard its values (flat), then its rule's arrays in the order of `arrays`."""

    states: Annotated[tuple[ShardState, ...], msgspec.Meta(max_length=MOST_IN_A_META)]
    arrays: Names
    """Names of the rule's arrays: elementwise ones, then those of one number per shard."""


class LoadShards(Body, frozen=True, kw_only=True):
    """Set shards of a run that is preparing. Tensors as in `ShardStates`."""

    run: RunId
    generation: Version
    states: Annotated[tuple[ShardState, ...], msgspec.Meta(max_length=MOST_IN_A_META)]
    arrays: Names


class Loaded(Body, frozen=True, kw_only=True):
    """Acknowledgement of `LoadShards`. `left` counts shards of this server that wait for theirs."""

    left: Count


ROWS: Rows = {
    ReadShards: frozenset({("driver", "ps")}),
    ShardStates: frozenset({("ps", "driver")}),
    LoadShards: frozenset({("driver", "ps")}),
    Loaded: frozenset({("ps", "driver")}),
}
