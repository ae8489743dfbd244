"""Pure: computed pushes, each kept until all its shards have applied it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adam_async.client.parameter_client import StepPush
from adam_async.messages import Push
from adam_async.parameter_server.decode_push import read_gradients
from adam_async.parameter_server.gradients import PushGradients
from adam_async.run.shard_table import ShardSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardPush:
    """The part of one push for one shard."""

    gradients: PushGradients
    images: int
    rate: float
    version: int
    """Oldest version of the shard that the step's groups read."""
    own_applied: int
    """Number of the worker's own pushes since `version` that local steps had already applied to the copy that
    the groups read."""


class Pushes:
    """Pushes in transit from workers to shards."""

    def __init__(self, table: Sequence[ShardSpec], dtype: np.dtype[Any]) -> None:
        self._table = table
        self._dtype = dtype
        self._waiting: dict[tuple[int, int, int], ShardPush] = {}
        self._applied: dict[tuple[int, int, int], Callable[[], None]] = {}

    def put(self, replica: int, step: StepPush, on_free: Callable[[], None]) -> None:
        """Take one message of a step; call `on_free` when the last of its shards has applied it."""
        left = len(step.shards)

        def applied() -> None:
            nonlocal left
            left -= 1
            if not left:
                on_free()

        whole = read_gradients(_as_received(replica, step), step.tensors, self._table, self._dtype)
        parts = whole.only(range(len(step.shards))).parts
        for place, (shard, part) in enumerate(zip(step.shards, parts, strict=True)):
            key = (int(shard), replica, step.clock)
            self._waiting[key] = ShardPush(
                gradients=PushGradients((part,)),
                images=step.weight,
                rate=step.rate,
                version=step.versions[place],
                own_applied=step.own_applied[place],
            )
            self._applied[key] = applied

    def get(self, shard: int, replica: int, clock: int) -> ShardPush:
        """Return the part of a push for a shard."""
        return self._waiting[shard, replica, clock]

    def settle(self, shard: int, replica: int, clock: int) -> None:
        """Drop the part of a push after its shard has applied it."""
        key = (shard, replica, clock)
        del self._waiting[key]
        self._applied.pop(key)()

    def __len__(self) -> int:
        return len(self._waiting)


def _as_received(replica: int, step: StepPush) -> Push:
    """Return the message in the form that a server receives."""
    return Push(
        store="",
        session=0,
        incarnation=0,
        replica=replica,
        clock=step.clock,
        weight=step.weight,
        rate=step.rate,
        generation=0,
        parts=step.parts,
        shards=step.shards,
        numbers=(0,) * len(step.shards),
        versions=step.versions,
        own_applied=step.own_applied,
    )
