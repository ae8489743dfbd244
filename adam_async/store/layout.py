"""Pure: which messages a store's push or pull needs, and the place of each shard in its array.

A message goes to one server, and names shards of one rule and one type only (a *family*), in the order of
their numbers. Plans are made once for each set of names.
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

MESSAGE_BYTES = 4 << 20
"""Bytes of values after which the shards of a server continue in the next message, unless one shard is
larger: the server receives one message while it applies the one before."""

MESSAGE_SHARDS = 512
"""Maximum number of shards of one message; their numbers and versions must fit into a frame's meta."""

PLANS_KEPT = 64
"""Number of sets of names whose plans are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A range of one array that is one range of a message: consecutive shards."""

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
    runs: tuple[Run, ...]
    """Ranges of arrays, in the order of the shards."""
    parts: tuple[Part, ...]
    """Parts of a push of dense gradients."""
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """Number of values."""
        return sum([run.stop - run.start for run in self.runs])

    def gather(self, flat: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        """Return the values of the message, from flat arrays by name; a view if they are one range."""
        if len(self.runs) == 1:
            run = self.runs[0]
            return flat[run.name][run.start : run.stop]
        return np.concatenate([flat[run.name][run.start : run.stop] for run in self.runs])


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


class StoreLayout:
    """The shards of a store, and their servers.

    Args:
        arrays: The arrays.
        table: Their shards.
        buckets: Primary of each bucket.
    """

    def __init__(self, arrays: Sequence[ArrayRecord], table: ShardTable, buckets: Sequence[str]) -> None:
        self.arrays: Mapping[str, ArrayRecord] = {array.name: array for array in arrays}
        self.table = table
        self.buckets = buckets
        self._plans: dict[tuple[str, ...], tuple[ShardMessage, ...]] = {}
        self.everything = self.messages(tuple(self.arrays))

    def messages(self, names: tuple[str, ...]) -> tuple[ShardMessage, ...]:
        """Return the messages for all shards of these arrays."""
        plan = self._plans.get(names)
        if plan is None:
            specs = [spec for name in names for spec in self.table.by_tensor.get(name, ())]
            plan = tuple(self._cut(specs))
            if len(self._plans) >= PLANS_KEPT:
                del self._plans[next(iter(self._plans))]
            self._plans[names] = plan
        return plan

    def _cut(self, specs: Sequence[ShardSpec]) -> list[ShardMessage]:
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
        return [_message(server, group) for server, group in groups]

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
            )
            for server, specs in by_server.items()
        )


def _message(server: str, specs: Sequence[ShardSpec]) -> ShardMessage:
    runs: list[Run] = []
    for spec in specs:
        if runs and runs[-1].name == spec.tensor and runs[-1].stop == spec.start:
            runs[-1] = Run(name=spec.tensor, start=runs[-1].start, stop=spec.stop)
        else:
            runs.append(Run(name=spec.tensor, start=spec.start, stop=spec.stop))
    return ShardMessage(
        server=server,
        rule=specs[0].rule,
        shards=tuple(spec.id for spec in specs),
        specs=tuple(specs),
        runs=tuple(runs),
        parts=(Part(False, len(specs)),),
        dtype=np.dtype(specs[0].dtype),
    )
