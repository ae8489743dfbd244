"""Pure: the shards of all servers in a recorded run, with the old versions that have further readers.

A computed push stays until all its shards have applied it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.driver.replay.recording import Recording
from adam_async.errors import RecordError
from adam_async.messages import Push, of_place
from adam_async.model.keyed_random import Dice
from adam_async.model.rules import Rule
from adam_async.parameter_server.gradients import PushGradients, read_gradients
from adam_async.parameter_server.shard import Shard
from adam_async.parameter_server.storage import ShardStorage
from adam_async.parameter_server.user_applier import applier_of
from adam_async.run.config import Config
from adam_async.run.ids import Version
from adam_async.run.shard_table import ShardSpec, ShardTable
from adam_async.run.step_model import RunModel, StepModel
from adam_async.run.user_rules import RuleSource


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
    """Pushes in transit from clients to shards, whose `Push.replica` is the number of the client.

    A shard may lack a lost worker's last pushes; the pushes do not wait for that shard.
    """

    def __init__(self, table: Sequence[ShardSpec], dtype: np.dtype[Any], recording: Recording) -> None:
        self._table = table
        self._dtype = dtype
        self._last: dict[tuple[int, int], int] = {}
        """Last clock of each shard and client. A shard has all of a client's pushes up to the last."""
        for order in recording.orders:
            for client in np.unique(order.clients).tolist():
                clocks = order.clocks[order.clients == client]
                self._last[order.shard, client] = int(clocks.max())
        self._waiting: dict[tuple[int, int, int], ShardPush] = {}
        self._applied: dict[tuple[int, int, int], Callable[[], None]] = {}

    def put(self, step: Push, tensors: Sequence[NDArray[Any]], on_free: Callable[[], None]) -> None:
        """Take one message of a step; call `on_free` when the last of its shards has applied it."""
        waits = [step.clock <= self._last.get((shard, step.replica), -1) for shard in step.shards]
        left = sum(waits)
        if not left:
            on_free()
            return

        def applied() -> None:
            nonlocal left
            left -= 1
            if not left:
                on_free()

        whole = read_gradients(step, tensors, self._table, self._dtype)
        parts = whole.only(range(len(step.shards))).parts
        for place, (shard, part) in enumerate(zip(step.shards, parts, strict=True)):
            if not waits[place]:
                continue
            key = (int(shard), step.replica, step.clock)
            self._waiting[key] = ShardPush(
                gradients=PushGradients((part,)),
                images=step.weight,
                rate=step.rate,
                version=of_place(step.versions, place),
                own_applied=of_place(step.own_applied, place),
            )
            self._applied[key] = applied

    def get(self, shard: int, client: int, clock: int) -> ShardPush:
        return self._waiting[shard, client, clock]

    def settle(self, shard: int, client: int, clock: int) -> None:
        """Drop the part of a push after its shard has applied or refused it."""
        key = (shard, client, clock)
        del self._waiting[key]
        self._applied.pop(key)()

    def __len__(self) -> int:
        return len(self._waiting)


@dataclass(frozen=True, slots=True, eq=False)
class RecordedModel:
    """The model of a recorded run, with the ranges of its shards.

    Attributes:
        config: Options of the run.
        network: The model.
        table: Shards of the model.
        buckets: Home of each bucket.
    """

    config: Config
    network: RunModel
    table: ShardTable
    buckets: Sequence[str]


def first_values(model: RunModel, seed: int) -> Callable[[str], NDArray[Any]]:
    """Return a function from the name of a tensor to its first values.

    Raises:
        StepFailed: The model is a step that did not return its first values.
    """
    if isinstance(model, StepModel):
        return model.initial(seed).__getitem__
    return partial(model.initial_values, Dice(seed))


class ReplayedShards:
    """The shards of a run, beginning with their initial values.

    Args:
        rules: The rules of the user that the replay may apply.

    Raises:
        ConfigError: The rule of the run is not among these, or has another file.
    """

    def __init__(self, model: RecordedModel, rule: Rule, rules: RuleSource) -> None:
        config, network, table = model.config, model.network, model.table
        self._table = table
        self._storage = ShardStorage(network.parameters, rule, network.dtype)
        self._shapes = {p.name: p.shape for p in network.parameters}
        self._applier = applier_of(rule, table.shards, network.dtype, rules)
        self._scale_by_staleness = config.scale_by_staleness
        self._group_images = config.images_per_group
        first = first_values(network, config.seed)
        self._kept: dict[tuple[int, int], NDArray[Any]] = {}
        self.shards: list[Shard] = []
        for name, weights in self._storage.weights.items():
            weights[...] = first(name)
        for spec in table.shards:
            values = self._storage.values(spec)
            self.shards.append(Shard(spec=spec, values=values, rule_state=self._storage.rule_state(spec)))

    def apply(self, shard: int, batch: Sequence[ShardPush]) -> list[bool]:
        """Apply a batch of pushes to a shard; return for each push whether it was finite and applied."""
        changed = self.shards[shard]
        rates = None
        if self._scale_by_staleness:
            stale = [changed.version + n - push.version - push.own_applied for n, push in enumerate(batch)]
            rates = [(push.rate / (1 + max(since, 0)),) for push, since in zip(batch, stale, strict=True)]
        (finite,) = self._applier.apply_pushes([changed], [push.gradients for push in batch], rates)
        changed.version = Version(changed.version + sum(finite))
        return list(finite)

    def apply_sum(self, shard: int, contributions: Sequence[ShardPush]) -> list[bool]:
        """Apply the sum of contributions if all of them and the sum are finite; return for each whether it
        was applied.

        A contribution that is not finite forms a batch alone, because the server refused it on arrival.
        """
        changed = self.shards[shard]
        gradients = [each.gradients for each in contributions]
        finite_each = [ok for each in gradients for ok in self._applier.check_finite([changed.spec], each)]
        if not all(finite_each):
            return finite_each
        scale = self._group_images / sum(each.images for each in contributions)
        (finite,) = self._applier.apply_sum([changed], gradients, scale=scale, rate=contributions[0].rate)
        changed.version = Version(changed.version + finite)
        return [finite] * len(contributions)

    def keep(self, shard: int) -> None:
        """Copy the current version of a shard."""
        now = self.shards[shard]
        self._kept[shard, now.version] = now.values.copy()

    def drop(self, shard: int, version: int) -> None:
        """Drop the copy of a version, if it exists."""
        self._kept.pop((shard, version), None)

    def tensor(self, name: str, versions: Sequence[int]) -> NDArray[Any]:
        """Return a copy of a tensor with the given version of each shard, which is current or kept.

        Raises:
            RecordError: The flags of the record's pushes count other versions than the pushes made.
        """
        flat = np.empty(prod(self._shapes[name]), self._storage.dtype)
        for spec, version in zip(self._table.by_tensor[name], versions, strict=True):
            now = self.shards[spec.id]
            values = now.values if now.version == version else self._kept.get((spec.id, version))
            if values is None:
                raise RecordError(f"the record is damaged: shard {spec.id} has no version {version} here")
            flat[spec.start : spec.stop] = values
        return flat.reshape(self._shapes[name])

    def weights(self) -> Mapping[str, NDArray[Any]]:
        """Return all current tensors, as views that change with the next batch."""
        return self._storage.weights
