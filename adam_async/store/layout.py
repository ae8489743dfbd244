"""Pure: the messages of a store's push or pull, and the position of each shard in its array.

A message goes to one server, and names shards of one rule and one type only (a *family*), in the order of
their numbers. The layout caches the plan of each set of names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.messages import Part
from adam_async.run.ids import ShardId
from adam_async.run.shard_table import ShardSpec, ShardTable
from adam_async.run.store_record import ArrayRecord
from adam_async.store.arrays import is_surely_finite, names_in

MESSAGE_BYTES = 2 << 20
"""Maximum size of the values of one message, in bytes, unless one shard is larger: the server receives one
message while it applies the earlier one."""

MESSAGE_SHARDS = 512
"""Maximum number of shards of one message, whose numbers and versions must fit into a frame's meta."""

PLANS_KEPT = 64
"""Maximum number of sets of names whose plans are cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRange:
    """Consecutive shards that are one range of an array, and one range of a message."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMessage:
    """The shards of one message."""

    server: str
    rule: int
    shards: tuple[ShardId, ...]
    specs: tuple[ShardSpec, ...]
    ranges: tuple[ArrayRange, ...]
    """Ranges of arrays, in the order of the shards."""
    parts: tuple[Part, ...]
    """Parts of a push of dense gradients."""
    dtype: np.dtype[Any]
    size: int
    """Number of values."""
    index: slice | NDArray[np.intp]
    """Index of the shards in an array with an entry for each shard of the store."""
    names: tuple[str, ...]
    """Name of each shard's array."""
    whole: bool
    """Whether the message has several arrays, each of one shard."""

    def gather(self, flat: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        """Return the values of the message, from flat arrays by name; a view if they are one range."""
        if self.whole:
            return np.concatenate([flat[name] for name in self.names])
        if len(self.ranges) == 1:
            only = self.ranges[0]
            return flat[only.name][only.start : only.stop]
        return np.concatenate([flat[each.name][each.start : each.stop] for each in self.ranges])


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRange:
    """Range of an array in the answer to a message of whole arrays."""

    message: int
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlan:
    """The messages for all shards of some arrays.

    Attributes:
        wanted: Name, shape and type of each array.
        answer_ranges: Ranges of the arrays in answers to messages of whole arrays.
    """

    messages: tuple[ShardMessage, ...]
    wanted: tuple[tuple[str, tuple[int, ...], np.dtype[Any]], ...]
    answer_ranges: Mapping[str, AnswerRange]

    def gather(self, arrays: Mapping[str, Any]) -> list[NDArray[Any]] | None:
        """Return the values of each message, after a fast check of all arrays.

        Returns None if an array is not a plain one, or has another shape or type, or may have a value that is
        not finite.
        """
        flat: dict[str, NDArray[Any]] = {}
        for name, shape, dtype in self.wanted:
            array = arrays[name]
            if type(array) is not np.ndarray or array.dtype != dtype or array.shape != shape:
                return None
            flat[name] = array.reshape(-1)
        found = []
        for message in self.messages:
            values = message.gather(flat)
            if not is_surely_finite(values):
                return None
            found.append(values)
        return found


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
        self._plans: dict[tuple[tuple[str, ...], ...], StorePlan] = {}
        self.everything = self.plan(tuple(self.arrays)).messages

    def plan(self, *groups: tuple[str, ...]) -> StorePlan:
        """Return the messages for all shards of some arrays; no message has arrays of two of the groups.

        Raises:
            StoreError: A name is unknown; the error lists it and some names of the store.
        """
        plan = self._plans.get(groups)
        if plan is None:
            names = [name for group in groups for name in group]
            names_in(self.arrays, names)
            messages = tuple([message for group in groups for message in self._cut(group)])
            plan = StorePlan(
                messages=messages,
                wanted=tuple(
                    [(name, self.arrays[name].shape, np.dtype(self.arrays[name].dtype)) for name in names]
                ),
                answer_ranges=self._answer_ranges(messages),
            )
            if len(self._plans) >= PLANS_KEPT:
                del self._plans[next(iter(self._plans))]
            self._plans[groups] = plan
        return plan

    def _answer_ranges(self, messages: Sequence[ShardMessage]) -> Mapping[str, AnswerRange]:
        ranges: dict[str, AnswerRange] = {}
        for number, message in enumerate(messages):
            if not message.whole:
                continue
            at = 0
            for spec in message.specs:
                shape = self.arrays[spec.tensor].shape
                ranges[spec.tensor] = AnswerRange(message=number, start=at, stop=at + spec.size, shape=shape)
                at += spec.size
        return ranges

    def _message(self, server: str, specs: Sequence[ShardSpec]) -> ShardMessage:
        names = tuple([spec.tensor for spec in specs])
        whole = len(names) > 1 and all(len(self.table.by_tensor[name]) == 1 for name in names)
        return _message(server, specs, names, whole)

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


def _index(specs: Sequence[ShardSpec]) -> slice | NDArray[np.intp]:
    first, count = int(specs[0].id), len(specs)
    if all(int(spec.id) == first + at for at, spec in enumerate(specs)):
        return slice(first, first + count)
    return np.array([int(spec.id) for spec in specs], np.intp)


def _message(server: str, specs: Sequence[ShardSpec], names: tuple[str, ...], whole: bool) -> ShardMessage:
    """Plan the message of some shards of a server; neighbouring shards of an array are one range."""
    ranges: list[ArrayRange] = []
    for spec in specs:
        if ranges and ranges[-1].name == spec.tensor and ranges[-1].stop == spec.start:
            ranges[-1] = ArrayRange(name=spec.tensor, start=ranges[-1].start, stop=spec.stop)
        else:
            ranges.append(ArrayRange(name=spec.tensor, start=spec.start, stop=spec.stop))
    return ShardMessage(
        server=server,
        rule=specs[0].rule,
        shards=tuple(spec.id for spec in specs),
        specs=tuple(specs),
        ranges=tuple(ranges),
        parts=(Part(False, len(specs)),),
        dtype=np.dtype(specs[0].dtype),
        size=sum(spec.size for spec in specs),
        index=_index(specs),
        names=names,
        whole=whole,
    )
