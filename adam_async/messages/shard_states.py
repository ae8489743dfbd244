"""Pure: driver or client and parameter server: shards with their values, versions, clocks and rule state.

The tables are tensors of int64 before the values, because a frame's meta has only 16 KiB:

    (shards, 4)  number of the shard, version, number of its sets of groups, number of its sums of losses
    (rows, 3)    number of the shard, replica, step that the replica has finished
    (rows, 3)    number of the sets, epoch, length of the ranges
    (length,)    ranges of these rows, one after the other, see `run/group_ranges.py`
    (rows, 9)    number of the sums, epoch, images, 1 if their sum is finite or 0, its units as 5 words

Shards with equal sets of groups have the same number of sets, and those with equal sums the same number of
sums. Push numbers are not sent, because the sessions of a run push only into that run, and no run continues
the sessions of another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.messages.body import Body, Rows
from adam_async.messages.bounds import (
    Clock,
    Count,
    Names,
    ReplicaNumber,
    ShardNumber,
    Shards,
    StoreId,
    Version,
)
from adam_async.messages.group_sets import (
    KEPT_EPOCHS,
    MOST_BOUNDS,
    MOST_SETS_BOUNDS,
    check_ascending,
)
from adam_async.messages.loss_sums import UNIT_BYTES, LossSum, LossSums
from transport import RemoteProtocolError

T = TypeVar("T")

GroupSets = Mapping[int, tuple[int, ...]]
"""Groups that a shard has counted, by epoch, as ranges."""


@dataclass(frozen=True, slots=True)
class ShardState:
    """Tables of a shard, before its values and its rule state."""

    shard: int
    version: int
    clocks: Mapping[str, int]
    """Last finished step by replica (as text)."""
    groups: GroupSets = field(default_factory=dict)
    """Groups whose gradients are in the values, or were refused; shards of a message share equal ones."""
    losses: LossSums = field(default_factory=dict)
    """Losses of these groups."""


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


NAMES = ("versions", "clocks", "sets", "ranges", "losses")
"""Names of the tables, for errors."""

COLUMNS = ((4,), (3,), (3,), (), (4 + UNIT_BYTES // 8,))
"""Shapes of their rows."""

TABLES = len(COLUMNS)
"""Number of tensors with tables, before all others."""


MOST_CLOCKS = 1024
"""Maximum number of clocks for each shard of a message; a run has fewer replicas."""


def different(several: Sequence[Mapping[int, T]]) -> tuple[list[dict[int, T]], list[int]]:
    """Return the different sets or sums of some shards, and for each shard the number of its own."""
    numbers: dict[tuple[tuple[int, T], ...], int] = {}
    # Each object once: a comparison of values would search a long set once for each shard that shares it.
    by_id = {id(each): each for each in several}
    number_of = {
        key: numbers.setdefault(tuple(sorted(each.items())), len(numbers)) for key, each in by_id.items()
    }
    return [dict(items) for items in numbers], [number_of[id(each)] for each in several]


def state_tables(states: Sequence[ShardState]) -> list[NDArray[np.int64]]:
    """Return the tables of some shards, in their order."""
    sets, set_numbers = different([each.groups for each in states])
    sums, sum_numbers = different([each.losses for each in states])
    numbers = zip(states, set_numbers, sum_numbers, strict=True)
    versions = [(each.shard, each.version, *of_each) for each, *of_each in numbers]
    clocks = [(each.shard, int(replica), clock) for each in states for replica, clock in each.clocks.items()]
    ranges = [(at, epoch, kept) for at, each in enumerate(sets) for epoch, kept in each.items()]
    lengths = [(at, epoch, len(kept)) for at, epoch, kept in ranges]
    bounds = [bound for *_, kept in ranges for bound in kept]
    losses = [(at, epoch, *_row_of(each)) for at, kept in enumerate(sums) for epoch, each in kept.items()]
    return [
        np.array(rows, np.int64).reshape(-1, *columns)
        for rows, columns in zip((versions, clocks, lengths, bounds, losses), COLUMNS, strict=True)
    ]


def _row_of(losses: LossSum) -> tuple[int, ...]:
    words = np.frombuffer(losses.packed or bytes(UNIT_BYTES), "<i8").tolist()
    return losses.images, losses.units is not None, *words


def read_state_tables(
    tensors: Sequence[NDArray[Any]],
    *,
    most_shards: int,
    most_clocks: int | None = None,
    most_bounds: int = MOST_SETS_BOUNDS,
) -> tuple[tuple[ShardState, ...], Sequence[NDArray[Any]]]:
    """Read the tables before a message's other tensors; return the states and the other tensors.

    Args:
        tensors: The tensors of the message.
        most_shards: Maximum number of shards.
        most_clocks: Maximum number of clocks of all shards; by default `MOST_CLOCKS` for each of them.
        most_bounds: Maximum length of the ranges of all sets of groups.

    Raises:
        RemoteProtocolError: A table is missing, too long or of another shape or type, a shard occurs twice, a
            clock belongs to no shard of the message, ranges do not ascend, or a number is out of bounds.
    """
    if len(tensors) < TABLES:
        raise RemoteProtocolError("tensors", f"{TABLES} tables come first, got {len(tensors)} tensors")
    versions, clocks, lengths, bounds, losses = tensors[:TABLES]
    most_rows = KEPT_EPOCHS * (versions.size // 4)
    most_clocks = MOST_CLOCKS * most_shards if most_clocks is None else most_clocks
    most = (most_shards, most_clocks, most_rows, most_bounds, most_rows if most_bounds else 0)
    for name, table, columns, most_of in zip(NAMES, tensors, COLUMNS, most, strict=False):
        if table.dtype != np.int64 or table.ndim != 1 + len(columns) or table.shape[1:] != columns:
            expected = f"int64{('n', *columns)}".replace("'", "")
            raise RemoteProtocolError(
                "tensors", f"{name}: expected {expected}, got {table.dtype}{table.shape}"
            )
        if len(table) > most_of:  # before decoding, which blocks the loop
            raise RemoteProtocolError("tensors", f"{name} has {len(table)} rows, {most_of} are the most")
    try:
        of_shards = msgspec.convert(versions.tolist(), list[tuple[ShardNumber, Version, Count, Count]])
        of_replicas = msgspec.convert(clocks.tolist(), list[tuple[ShardNumber, ReplicaNumber, Clock]])
        of_sets = msgspec.convert(lengths.tolist(), list[tuple[Count, _Epoch, _Length]])
        of_sums = msgspec.convert(losses[:, :4].tolist(), list[tuple[Count, _Epoch, Count, _Flag]])
    except msgspec.ValidationError as error:
        raise RemoteProtocolError("tensors", f"versions, clocks, sets or losses: {error}") from None
    sets, sums = _read_sets(of_sets, bounds), _read_sums(of_sums, losses[:, 4:].astype("<i8"))
    clocks_of: dict[int, dict[str, int]] = {shard: {} for shard, *_ in of_shards}
    if len(clocks_of) != len(of_shards):
        raise RemoteProtocolError("tensors", "versions: a shard is named twice")
    for shard, replica, clock in of_replicas:
        if shard not in clocks_of:
            raise RemoteProtocolError("tensors", f"clocks: shard {shard} is not in this message")
        clocks_of[shard][str(replica)] = clock
    empty: dict[int, Any] = {}
    states = [
        ShardState(number, version, clocks_of[number], sets.get(of_set, empty), sums.get(of_sum, empty))
        for number, version, of_set, of_sum in of_shards
    ]
    return tuple(states), tensors[TABLES:]


_Epoch = Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]
_Flag = Annotated[int, msgspec.Meta(ge=0, le=1)]
_Length = Annotated[int, msgspec.Meta(ge=0, le=MOST_BOUNDS, multiple_of=2)]


def _read_sets(rows: Sequence[tuple[int, int, int]], bounds: NDArray[np.int64]) -> dict[int, GroupSets]:
    """Return the sets of groups by their number. Errors as in `read_state_tables`."""
    _check_keys(rows, "sets")
    if sum([length for *_, length in rows]) != len(bounds):
        raise RemoteProtocolError("tensors", f"ranges: their rows name other lengths than {len(bounds)}")
    found: dict[int, dict[int, tuple[int, ...]]] = {}
    start = 0
    for at, epoch, length in rows:
        ranges = bounds[start : start + length]
        start += length
        check_ascending(ranges, "ranges")
        found.setdefault(at, {})[epoch] = tuple(ranges.tolist())
    return dict(found)


def _read_sums(rows: Sequence[tuple[int, int, int, int]], words: NDArray[np.int64]) -> dict[int, LossSums]:
    """Return the sums of losses by their number. Errors as in `read_state_tables`."""
    _check_keys(rows, "losses")
    found: dict[int, dict[int, LossSum]] = {}
    for (at, epoch, images, is_finite), units in zip(rows, words, strict=True):
        sums = found.setdefault(at, {})
        sums[epoch] = LossSum.read(images, units.tobytes() if is_finite else b"")
        if fault := sums[epoch].fault:
            raise RemoteProtocolError("tensors", fault)
    return dict(found)


def _check_keys(rows: Sequence[tuple[int, ...]], name: str) -> None:
    """Raise RemoteProtocolError if the numbers and epochs of rows do not ascend, or one has many epochs."""
    if any(one[:2] >= other[:2] for one, other in pairwise(rows)):
        raise RemoteProtocolError("tensors", f"{name}: their numbers and epochs do not ascend")
    # The rows of a number are neighbours.
    if any(one[0] == other[0] for one, other in zip(rows, rows[KEPT_EPOCHS:], strict=False)):
        raise RemoteProtocolError("tensors", f"{name}: a shard keeps {KEPT_EPOCHS} epochs")


ROWS: Rows = {
    ReadShards: frozenset({("driver", "ps"), ("client", "ps")}),
    ShardStates: frozenset({("ps", "driver"), ("ps", "client")}),
    LoadShards: frozenset({("driver", "ps"), ("client", "ps")}),
    Loaded: frozenset({("ps", "driver"), ("ps", "client")}),
}
