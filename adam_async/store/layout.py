"""Pure: the messages of a store's push or pull, and each shard's position in its array.

A message goes to one server, and names shards of only one rule and one type (a *family*), in the order of
their numbers. The layout caches the plan of each set of names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from adam_async.messages import Part
from adam_async.run.ids import ShardId
from adam_async.run.shard_table import ShardSpec, ShardTable
from adam_async.run.store_record import ArrayRecord
from adam_async.store.arrays import names_in

MESSAGE_BYTES = 2 << 20
"""Maximum size in bytes of the values in one message, unless one shard is larger: the server receives a
message while it applies earlier ones."""

MESSAGE_SHARDS = 500
"""Maximum number of shards in one message, whose numbers and versions, all different, must fit into a frame's
meta. Larger messages would not be faster: a server applies one while the next is on its way."""

PLANS_KEPT = 64
"""Maximum number of sets of names whose plans are cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRange:
    """Consecutive shards that are one range of an array, and one range of a message."""

    name: str
    start: int
    stop: int
    at: int
    """Index of the range in the values of its message."""
    is_whole: bool
    """Whether the range is the whole array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMessage:
    """The shards of one message."""

    server: str
    rule: int
    shards: tuple[ShardId, ...]
    ranges: tuple[ArrayRange, ...]
    """Ranges of arrays, in the order of the shards."""
    parts: tuple[Part, ...]
    """Parts of a push with dense gradients."""
    dtype: np.dtype[Any]
    size: int
    """Number of values."""
    index: slice | NDArray[np.intp]
    """Index of the shards in an array with an entry for each shard of the store."""
    names: tuple[str, ...]
    """Name of each shard's array."""
    whole: bool
    """Whether the message has several arrays, each of one shard."""


class Place(NamedTuple):
    """Range of a whole array in the answer to a message."""

    message: int
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlan:
    """The messages for all shards of some arrays.

    Attributes:
        names: Names of the arrays.
        dtypes: Type of each array.
        shapes: Shape of each array.
        picks: For each message of whole arrays, a function that picks these from a list of all arrays; None
            for other messages.
        positions: Position of each array in the lists.
        places: Ranges of the arrays in the answers to messages that have them whole.
        apart: Arrays that are cut into several messages. Each has its parts in order: the message's number,
            and the range in its values.
    """

    messages: tuple[ShardMessage, ...]
    names: tuple[str, ...]
    dtypes: list[np.dtype[Any]]
    shapes: list[tuple[int, ...]]
    picks: tuple[Callable[[list[NDArray[Any]]], Any] | None, ...]
    positions: Mapping[str, int]
    places: Mapping[str, Place]
    apart: tuple[tuple[ArrayRecord, tuple[tuple[int, slice], ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorMessage:
    """The shards of one array on one server, for a push of factors."""

    server: str
    rule: int
    name: str
    shards: tuple[ShardId, ...]
    rows: tuple[slice, ...]
    """Rows of the shards."""
    parts: tuple[Part, ...]
    index: slice | NDArray[np.intp]
    """Index of the shards in an array with an entry for each shard of the store."""

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each shard's array."""
        return (self.name,) * len(self.shards)


class StoreLayout:
    """The shards of a store, and their servers.

    Args:
        arrays: The arrays.
        table: Their shards.
        buckets: Home of each bucket.
    """

    def __init__(self, arrays: Sequence[ArrayRecord], table: ShardTable, buckets: Sequence[str]) -> None:
        self.arrays: Mapping[str, ArrayRecord] = {array.name: array for array in arrays}
        self.table = table
        self.buckets = buckets
        self.unread: NDArray[np.int64] = np.full(len(table.shards), -1, np.int64)
        """Versions before any read: -1 for each shard."""
        self.plans: dict[tuple[tuple[str, ...], ...], StorePlan] = {}
        self.everything = self.plan(tuple(self.arrays)).messages

    @cached_property
    def pushed_to(self) -> Mapping[str, tuple[ShardId, ...]]:
        """The shards that are pushed to, by server."""
        found: dict[str, list[ShardId]] = {}
        for spec in self.table.shards:
            if not spec.frozen:
                found.setdefault(self.buckets[spec.bucket], []).append(spec.id)
        return {server: tuple(found[server]) for server in sorted(found)}

    def plan(self, *groups: tuple[str, ...]) -> StorePlan:
        """Return the messages for all shards of some arrays; no message has arrays from two of the groups.

        Raises:
            StoreError: A name is unknown; the error lists it and some of the store's names.
        """
        plan = self.plans.get(groups)
        if plan is None:
            names = tuple([name for group in groups for name in group])
            names_in(self.arrays, names)
            messages = tuple([message for group in groups for message in self._cut(group)])
            places = {
                each.name: Place(number, each.at, each.at + each.stop, self.arrays[each.name].shape)
                for number, message in enumerate(messages)
                for each in message.ranges
                if each.is_whole
            }
            records = [self.arrays[name] for name in names]
            parts: dict[str, dict[int, tuple[int, slice]]] = {name: {} for name in names}
            for number, message in enumerate(messages):
                for each in message.ranges:
                    place = slice(each.at, each.at + each.stop - each.start)
                    parts[each.name][each.start] = number, place
            positions = {name: position for position, name in enumerate(names)}
            plan = StorePlan(
                messages=messages,
                names=names,
                dtypes=[np.dtype(record.dtype) for record in records],
                shapes=[record.shape for record in records],
                picks=tuple([_pick(message, positions) if message.whole else None for message in messages]),
                positions=positions,
                places=places,
                apart=tuple(
                    [
                        (record, tuple([of[start] for start in sorted(of)]))
                        for record in records
                        if record.name not in places
                        for of in (parts[record.name],)
                    ]
                ),
            )
            if len(self.plans) >= PLANS_KEPT:
                del self.plans[next(iter(self.plans))]
            self.plans[groups] = plan
        return plan

    def _message(self, server: str, specs: Sequence[ShardSpec]) -> ShardMessage:
        """Plan the message for some of a server's shards; neighbouring shards of an array are one range."""
        ends: list[tuple[str, int, int]] = []
        for spec in specs:
            if ends and ends[-1][0] == spec.tensor and ends[-1][2] == spec.start:
                ends[-1] = (spec.tensor, ends[-1][1], spec.stop)
            else:
                ends.append((spec.tensor, spec.start, spec.stop))
        ranges, at = [], 0
        for name, start, stop in ends:
            is_whole = stop - start == self.arrays[name].size
            ranges.append(ArrayRange(name=name, start=start, stop=stop, at=at, is_whole=is_whole))
            at += stop - start
        return ShardMessage(
            server=server,
            rule=specs[0].rule,
            shards=tuple([spec.id for spec in specs]),
            ranges=tuple(ranges),
            parts=(Part(False, len(specs)),),
            dtype=np.dtype(specs[0].dtype),
            size=at,
            index=_index(specs),
            names=tuple([spec.tensor for spec in specs]),
            whole=1 < len(specs) == len(ranges) and all(each.is_whole for each in ranges),
        )

    def _cut(self, names: Sequence[str]) -> list[ShardMessage]:
        """Cut the shards of arrays into messages of one server, rule and type each; see `MESSAGE_BYTES`."""
        specs = [spec for name in names for spec in self.table.by_tensor.get(name, ())]
        open_: dict[tuple[str, int, str], list[ShardSpec]] = {}
        room: dict[tuple[str, int, str], int] = {}
        groups: list[tuple[str, list[ShardSpec]]] = []
        for spec in sorted(specs, key=lambda each: each.id):
            server = self.buckets[spec.bucket]
            key = (server, spec.rule, spec.dtype)
            group = open_.get(key)
            if group is None or spec.nbytes > room[key] or len(group) >= MESSAGE_SHARDS:
                group = open_[key] = []
                groups.append((server, group))
                room[key] = MESSAGE_BYTES
            group.append(spec)
            room[key] -= spec.nbytes
        return [self._message(server, group) for server, group in groups]

    def factor_messages(self, name: str) -> tuple[FactorMessage, ...] | None:
        """Return the messages for a push of factors; None if a row of the array is cut over shards."""
        by_server: dict[str, list[ShardSpec]] = {}
        for spec in self.table.by_tensor.get(name, ()):
            if not spec.whole_rows:
                return None
            by_server.setdefault(self.buckets[spec.bucket], []).append(spec)
        return tuple(
            FactorMessage(
                server=server,
                rule=specs[0].rule,
                name=name,
                shards=tuple(spec.id for spec in specs),
                rows=tuple(spec.rows for spec in specs),
                parts=(Part(True, len(specs)),),
                index=_index(specs),
            )
            for server, specs in by_server.items()
        )


def _pick(message: ShardMessage, positions: Mapping[str, int]) -> Callable[..., Any]:
    """Return a function that picks a message's arrays, of which it has several, from a list of all arrays."""
    wanted = [positions[name] for name in message.names]
    together = slice(wanted[0], wanted[0] + len(wanted))
    return itemgetter(together) if wanted == [*range(together.start, together.stop)] else itemgetter(*wanted)


def _index(specs: Sequence[ShardSpec]) -> slice | NDArray[np.intp]:
    first, count = int(specs[0].id), len(specs)
    if all(int(spec.id) == first + at for at, spec in enumerate(specs)):
        return slice(first, first + count)
    return np.array([int(spec.id) for spec in specs], np.intp)
