"""Pure: driver and parameter server: shards with all that travels with them."""

import msgspec

from adam_async.messages.body import Body, Rows


class ShardState(msgspec.Struct, frozen=True, array_like=True):
    """Everything that travels with a shard, beside its values and its rule state."""

    shard: int
    version: int
    clocks: dict[str, int]
    """Replica (as text) to the step that it has finished."""
    numbers: tuple[tuple[int, int, int], ...]
    """Dedup table: session, incarnation, number of the last push ordered."""


class ReadShards(Body, frozen=True, kw_only=True):
    """Ask for shards with all that travels with them. What came before on the same link is in them."""

    run: str
    generation: int
    shards: tuple[int, ...]


class ShardStates(Body, frozen=True, kw_only=True):
    """Tensors: for each shard its values (flat), then its rule's arrays in the order of `arrays`."""

    states: tuple[ShardState, ...]
    arrays: tuple[str, ...]
    """Names of the rule's arrays: elementwise ones, then those of one number per shard."""


class LoadShards(Body, frozen=True, kw_only=True):
    """Set shards of a run that is preparing. Tensors as in `ShardStates`."""

    run: str
    generation: int
    states: tuple[ShardState, ...]
    arrays: tuple[str, ...]


class Loaded(Body, frozen=True, kw_only=True):
    """Acknowledgement of `LoadShards`. `left` counts shards of this server that wait for theirs."""

    left: int


ROWS: Rows = {
    ReadShards: frozenset({("driver", "ps")}),
    ShardStates: frozenset({("ps", "driver")}),
    LoadShards: frozenset({("driver", "ps")}),
    Loaded: frozenset({("ps", "driver")}),
}
