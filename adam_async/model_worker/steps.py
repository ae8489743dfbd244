"""From trained groups to pushes and pulls: the loop's side of training.

A step is `push_every` consecutive groups, as they finish. Its gradients are added up here, on the loop,
in that order; with one group per step the group's own push buffer is what travels. The push of a step
names, for each shard, the oldest version that its groups read, and how many of our own pushes a local
step had already put into the copy they read; that is what staleness is counted from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from adam_async.messages import Finished
from adam_async.model_worker.pulls import Landing, Puller
from adam_async.model_worker.training import GroupTrainer, Trained
from adam_async.model_worker.updates import PushBuffer, PushMessage, PushPlan
from adam_async.model_worker.way import OnStep
from adam_async.model_worker.weights import TensorCopy, WorkerWeights
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
        puller: How values come back.
        trainer: Whose push buffers they travel in.
        weights: The worker's copy, whose local steps are counted.
        rate: Learning rate that the pushes carry.
        push_every: Groups per step.
        pull_every: Steps per pull.
        clock: Steps that the replica has behind it.
        on_finished: Called for each group whose push is acknowledged.
        on_step: Called with each step, before its pushes leave.
    """

    def __init__(
        self,
        *,
        table: ShardTable,
        plan: PushPlan,
        client: ParameterClient,
        puller: Puller,
        trainer: GroupTrainer,
        weights: WorkerWeights,
        rate: float,
        push_every: int,
        pull_every: int,
        clock: int,
        on_finished: Callable[[Finished], None],
        on_step: OnStep | None = None,
    ) -> None:
        self._plan = plan
        self._client = client
        self._puller = puller
        rest = [spec for message in plan.messages if not message.pulls for spec in message.specs]
        self._rest = puller.questions(rest)
        self._answers = len(self._rest) + sum(message.pulls for message in plan.messages)
        self._trainer = trainer
        self._weights = weights
        self._rate = rate
        self._push_every = push_every
        self._pull_every = pull_every
        self._on_finished = on_finished
        self._on_step = on_step
        self._open: _Step | None = None
        self.clock = clock
        places = {spec.id: place for shards in table.by_tensor.values() for place, spec in enumerate(shards)}
        self._places = [[places[spec.id] for spec in message.specs] for message in plan.messages]

    def add(self, trained: Trained, on_landed: Callable[[], None]) -> None:
        """Take a trained group. Never waits.

        `on_landed` is called when the values that follow the group's step are installed; at once, if
        the group ends no step or no pull is due with it.
        """
        if self._push_every == 1:
            self._push(_Step(trained.buffer, [trained]), on_landed)
            return
        step = self._open
        if step is None:
            step = self._open = _Step(self._trainer.step_buffers.take())
            step.buffer.clear()
        step.groups.append(trained)
        step.buffer.add(trained.buffer)
        self._trainer.group_buffers.give_back(trained.buffer)
        if len(step.groups) < self._push_every:
            on_landed()
            return
        self._open = None
        self._push(step, on_landed)

    def close(self, on_landed: Callable[[], None]) -> None:
        """Push the step that is being collected, short as it is: there are no more groups for us."""
        step, self._open = self._open, None
        if step is not None:
            self._push(step, on_landed)

    def _push(self, step: _Step, on_landed: Callable[[], None]) -> None:
        self.clock += 1
        if self._on_step is not None:
            self._on_step(self.clock, [group.lease for group in step.groups])
        self._weights.count_local_steps(_stepped_by_all(step.groups))
        step.unsettled = len(self._plan.messages)
        landing = None
        if self.clock % self._pull_every == 0:
            landing = Landing(self._puller, self._answers, on_landed)
        for index, message in enumerate(self._plan.messages):
            self._push_message(step, index, message, landing)
        if landing is None:
            on_landed()
            return
        for server, specs in self._rest:
            self._puller.ask(landing, server, specs)

    def _push_message(self, step: _Step, index: int, message: PushMessage, landing: Landing | None) -> None:
        versions, own = self._read_versions(step.groups, message, self._places[index])
        pulls = landing is not None and message.pulls
        push = StepPush(
            parts=message.wire_parts,
            shards=message.shards,
            tensors=step.buffer.tensors(index),
            versions=versions,
            own=own,
            clock=self.clock,
            images=step.buffer.images,
            rate=self._rate,
            pull=pulls,
        )
        self._client.push(
            message.server,
            push,
            on_free=partial(self._free, step),
            on_values=partial(landing.arrived, message.specs) if landing is not None and pulls else None,
            into=landing.into(message.specs) if landing is not None and pulls else None,
        )

    def _free(self, step: _Step) -> None:
        step.unsettled -= 1
        if not step.unsettled:
            self._settled(step)

    @staticmethod
    def _read_versions(
        groups: Sequence[Trained], message: PushMessage, places: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Oldest version of each shard that the groups read, and what of our own was in that copy."""
        if len(groups) == 1:
            read = groups[0].read
            copies, counts = read.copies, read.own
            versions = [copies[s.tensor].versions[p] for s, p in zip(message.specs, places, strict=True)]
            return tuple(versions), tuple([counts[spec.tensor] for spec in message.specs])
        oldest = [
            min((group.read.copies[s.tensor].versions[p], group.read.own[s.tensor]) for group in groups)
            for s, p in zip(message.specs, places, strict=True)
        ]
        return tuple([version for version, _ in oldest]), tuple([own for _, own in oldest])

    def _settled(self, step: _Step) -> None:
        self._trainer.step_buffers.give_back(step.buffer)
        for group in step.groups:
            lease = group.lease
            self._on_finished(Finished(lease.epoch, lease.number, lease.attempt, lease.images, group.loss))


def _stepped_by_all(groups: Sequence[Trained]) -> dict[str, TensorCopy]:
    """The copies that hold a whole push: those that the local step of every group of it went into."""
    first, *others = groups
    return {
        name: copy
        for name, copy in first.stepped.items()
        if all(group.stepped.get(name) is copy for group in others)
    }
