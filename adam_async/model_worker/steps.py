"""From trained groups to pushes and pulls: the loop's side of training.

A step is `push_every` consecutive groups, as they finish. Its gradients are added up here, on the loop,
in that order; with one group per step the group's own push buffer is what travels. The push of a step
names, for each shard, the oldest version that its groups read, and how many of our own pushes a local
step had already put into the copy they read; that is what staleness is counted from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from adam_async.messages import Finished
from adam_async.model_worker.training import GroupTrainer, Trained
from adam_async.model_worker.updates import PushBuffer, PushMessage, PushPlan
from adam_async.model_worker.weights import WorkerWeights
from adam_async.parameter_server.client import ParameterClient, StepPush
from adam_async.placement import ShardTable


@dataclass(slots=True, eq=False)
class _Step:
    """A step that is being collected, or is on its way."""

    buffer: PushBuffer
    groups: list[Trained] = field(default_factory=list)
    unsettled: int = 0


class Stepper:
    """Collects groups into steps, pushes them, and says when a pull is due.

    Args:
        table: Shards of the model.
        plan: How gradients travel.
        client: Where they go.
        trainer: Whose push buffers they travel in.
        weights: The worker's copy, whose local steps are counted.
        rate: Learning rate that the pushes carry.
        push_every: Groups per step.
        pull_every: Steps per pull.
        clock: Steps that the replica has behind it.
        on_finished: Called for each group whose push is acknowledged.
    """

    def __init__(
        self,
        *,
        table: ShardTable,
        plan: PushPlan,
        client: ParameterClient,
        trainer: GroupTrainer,
        weights: WorkerWeights,
        rate: float,
        push_every: int,
        pull_every: int,
        clock: int,
        on_finished: Callable[[Finished], None],
    ) -> None:
        self._plan = plan
        self._client = client
        self._trainer = trainer
        self._weights = weights
        self._rate = rate
        self._push_every = push_every
        self._pull_every = pull_every
        self._on_finished = on_finished
        self._open: _Step | None = None
        self.clock = clock
        places = {spec.id: place for shards in table.by_tensor.values() for place, spec in enumerate(shards)}
        self._places = [[places[spec.id] for spec in message.specs] for message in plan.messages]

    def add(self, trained: Trained) -> bool:
        """Take a trained group. Returns whether a pull is due now. Never waits."""
        if trained.stepped:
            self._weights.count_local_steps(trained.stepped)
        step = self._open
        if self._push_every == 1:
            step = _Step(trained.buffer)
        elif step is None:
            step = self._open = _Step(self._trainer.step_buffers.take())
            step.buffer.clear()
        assert step is not None
        step.groups.append(trained)
        if self._push_every > 1:
            step.buffer.add(trained.buffer)
            self._trainer.group_buffers.give_back(trained.buffer)
            if len(step.groups) < self._push_every:
                return False
            self._open = None
        self._push(step)
        return self.clock % self._pull_every == 0

    def close(self) -> bool:
        """Push the step that is being collected, short as it is: the epoch has no more groups for us."""
        step, self._open = self._open, None
        if step is None:
            return False
        self._push(step)
        return self.clock % self._pull_every == 0

    def _push(self, step: _Step) -> None:
        self.clock += 1
        step.unsettled = len(self._plan.messages)
        images = step.buffer.images

        def free() -> None:
            step.unsettled -= 1
            if not step.unsettled:
                self._settled(step)

        for index, message in enumerate(self._plan.messages):
            versions, own = self._read_versions(step.groups, message, self._places[index])
            push = StepPush(
                parts=message.wire_parts,
                shards=message.shards,
                tensors=step.buffer.tensors(index),
                versions=versions,
                own=own,
                clock=self.clock,
                images=images,
                rate=self._rate,
            )
            self._client.push(message.server, push, on_free=free)

    @staticmethod
    def _read_versions(
        groups: Sequence[Trained], message: PushMessage, places: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Oldest version of each shard that the groups read, and what of our own was in that copy."""
        versions, own = [], []
        for spec, place in zip(message.specs, places, strict=True):
            tensor = spec.tensor
            oldest = min(
                (group.read.copies[tensor].versions[place], group.read.own[tensor]) for group in groups
            )
            versions.append(oldest[0])
            own.append(oldest[1])
        return tuple(versions), tuple(own)

    def _settled(self, step: _Step) -> None:
        self._trainer.step_buffers.give_back(step.buffer)
        for group in step.groups:
            lease = group.lease
            self._on_finished(Finished(lease.epoch, lease.number, lease.attempt, lease.images, group.loss))
