"""Pure: driver or client and parameter server: shards with their values, versions, clocks and rule state.

Two tensors with the tables of the shards come before the values: `StateTables` as packed bytes, because a
frame's meta has only 16 KiB; and the bounds of all group sets as int64, one set after the other. Shards with
equal sets share one, as do those with equal loss sums. Push numbers are not sent, because a run's sessions
push only into that run, and no run continues another's sessions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from adam_async.messages.body import (
    Body,
    Clock,
    Count,
    Names,
    ReplicaNumber,
    Rows,
    ShardNumber,
    Shards,
    StoreId,
    Version,
)
from adam_async.messages.group_sets import (
    KEPT_EPOCHS,
    MOST_BOUNDS,
    MOST_SETS_BOUNDS,
    UNIT_BYTES,
    LossSum,
    LossSums,
    check_ascending,
)
from adam_async.messages.tensors import UNREADABLE, decoder_of, packed_tensor
from transport import RemoteProtocolError

T = TypeVar("T")

GroupSets = Mapping[int, tuple[int, ...]]
"""Groups that a shard has counted, by epoch, as ranges."""


@dataclass(frozen=True, slots=True)
class ShardState:
    """Tables of a shard, before its values and its rule state."""

    shard: int
    version: int
    clocks: Mapping[int, int]
    """Last finished step by replica."""
    groups: GroupSets = field(default_factory=dict)
    """Groups whose gradients are in the values, or were refused; shards of a message share equal ones."""
    losses: LossSums = field(default_factory=dict)
    """Losses of these groups."""


class ReadShards(Body, frozen=True, kw_only=True):
    """Request for the whole state of shards, with all earlier messages on the same link.

    In ssp and bsp the server answers once the values have all pushes up to `clock`, in bsp with the values of
    exactly this clock. In bsp the server then keeps all its shards at that clock until they are read, or the
    link closes.
    """

    store: StoreId
    generation: Version
    shards: Shards
    clock: Clock = 0
    """Clock that the answer waits for; 0 requests the values as they are."""


class ShardStates(Body, frozen=True, kw_only=True):
    """The whole state of shards. Tensors: the tables, then each shard's values (flat) and rule arrays."""

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


MOST_CLOCKS = 1024
"""Maximum number of clocks per shard in a message; a run has fewer replicas."""

NEW_BYTES = 64
"""Maximum size in bytes of the tables of a shard without clocks, groups and losses."""

STATE_BYTES = NEW_BYTES + 16 * MOST_CLOCKS + 128 * KEPT_EPOCHS
"""Maximum size in bytes of any shard's tables, without its groups' bounds."""

PackedLosses = tuple[Count, Annotated[bytes, Meta(max_length=UNIT_BYTES)]]
"""Number of images, and `LossSum.packed`."""

_Epoch = Annotated[int, Meta(ge=1, lt=1 << 32)]
_Length = Annotated[int, Meta(ge=0, le=MOST_BOUNDS, multiple_of=2)]
_EachEpoch = Meta(max_length=KEPT_EPOCHS)


class _Row(msgspec.Struct, frozen=True, array_like=True):
    shard: ShardNumber
    version: Version
    clocks: Annotated[dict[ReplicaNumber, Clock], Meta(max_length=MOST_CLOCKS)]
    sets: Count
    """Index of its sets of groups."""
    losses: Count
    """Index of its sums of losses."""


class StateTables(msgspec.Struct, frozen=True, array_like=True):
    """Tables of some shards."""

    shards: list[_Row]
    sets: list[Annotated[dict[_Epoch, _Length], _EachEpoch]]
    """Number of bounds in each epoch of each set."""
    losses: list[Annotated[dict[_Epoch, PackedLosses], _EachEpoch]]


def different(several: Sequence[Mapping[int, T]]) -> tuple[list[dict[int, T]], list[int]]:
    """Return the different sets or sums of some shards, and for each shard the index of its own."""
    numbers: dict[tuple[tuple[int, T], ...], int] = {}
    # Each object once: comparing values would search a long set once for each shard that shares it.
    by_id = {id(each): each for each in several}
    number_of = {
        key: numbers.setdefault(tuple(sorted(each.items())), len(numbers)) for key, each in by_id.items()
    }
    return [dict(items) for items in numbers], [number_of[id(each)] for each in several]


def state_tables(states: Sequence[ShardState]) -> list[NDArray[Any]]:
    """Return the tensors with the tables of some shards, in order."""
    sets, set_of = different([each.groups for each in states])
    sums, sum_of = different([each.losses for each in states])
    tables = StateTables(
        [
            _Row(each.shard, each.version, dict(each.clocks), *indexes)
            for each, *indexes in zip(states, set_of, sum_of, strict=True)
        ],
        [{epoch: len(ranges) for epoch, ranges in each.items()} for each in sets],
        [{epoch: (of.images, of.packed) for epoch, of in each.items()} for each in sums],
    )
    bounds = [bound for each in sets for ranges in each.values() for bound in ranges]
    return [packed_tensor(tables), np.array(bounds, np.int64)]


def read_state_tables(
    tensors: Sequence[NDArray[Any]], *, most_shards: int, is_new: bool = False
) -> tuple[tuple[ShardState, ...], Sequence[NDArray[Any]]]:
    """Read the tables before a message's other tensors; return the states and the other tensors.

    Args:
        tensors: The tensors of the message.
        most_shards: Maximum number of shards.
        is_new: Whether the shards have no clocks, groups and losses.

    Raises:
        RemoteProtocolError: A table is missing, too long or of another shape or type, a shard occurs twice,
            ranges do not ascend, or a number is out of bounds.
    """
    if len(tensors) < 2:
        raise RemoteProtocolError("tensors", f"2 tensors with tables come first, got {len(tensors)} tensors")
    packed, bounds = tensors[:2]
    most_bytes = NEW_BYTES + most_shards * (NEW_BYTES if is_new else STATE_BYTES)
    most_bounds = 0 if is_new else MOST_SETS_BOUNDS
    for name, table, dtype, most in (
        ("tables", packed, np.uint8, most_bytes),
        ("bounds", bounds, np.int64, most_bounds),
    ):
        if table.dtype != dtype or table.ndim != 1:
            expected = f"{dtype.__name__}(n,)"
            raise RemoteProtocolError(
                "tensors", f"{name}: expected {expected}, got {table.dtype}{table.shape}"
            )
        if len(table) > most:  # before decoding, which blocks the loop
            raise RemoteProtocolError("tensors", f"{name} have {len(table)} elements, {most} are the most")
    try:
        tables: StateTables = decoder_of(StateTables)(packed.tobytes())
    except UNREADABLE as error:
        raise RemoteProtocolError("tensors", f"tables: {error}") from None
    if len({row.shard for row in tables.shards}) != len(tables.shards):
        raise RemoteProtocolError("tensors", "tables: a shard is named twice")
    sets = _read_sets(tables.sets, bounds)
    sums = [{epoch: LossSum.read(*of) for epoch, of in each.items()} for each in tables.losses]
    for fault in (of.fault for each in sums for of in each.values()):
        if fault:
            raise RemoteProtocolError("tensors", fault)
    try:
        states = tuple(
            [ShardState(r.shard, r.version, r.clocks, sets[r.sets], sums[r.losses]) for r in tables.shards]
        )
    except IndexError:
        raise RemoteProtocolError("tensors", "tables: a shard names sets or losses without a row") from None
    if is_new and any(each.clocks or each.groups or each.losses for each in states):
        raise RemoteProtocolError("tensors", "tables: a new shard has no clocks, groups and losses")
    return states, tensors[2:]


def _read_sets(lengths: Sequence[Mapping[int, int]], bounds: NDArray[np.int64]) -> list[GroupSets]:
    """Return the sets of groups. Errors as in `read_state_tables`."""
    if sum([length for each in lengths for length in each.values()]) != len(bounds):
        raise RemoteProtocolError("tensors", f"bounds: the tables name other lengths than {len(bounds)}")
    found: list[GroupSets] = []
    start = 0
    for each in lengths:
        sets = {}
        for epoch, length in each.items():
            ranges = bounds[start : start + length]
            start += length
            check_ascending(ranges, "bounds")
            sets[epoch] = tuple(ranges.tolist())
        found.append(sets)
    return found


ROWS: Rows = {
    ReadShards: frozenset({("driver", "ps"), ("client", "ps")}),
    ShardStates: frozenset({("ps", "driver"), ("ps", "client")}),
    LoadShards: frozenset({("driver", "ps"), ("client", "ps")}),
    Loaded: frozenset({("ps", "driver"), ("ps", "client")}),
}
