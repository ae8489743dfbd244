"""From trained groups to pushes and pulls: the loop's side of training.

A step is `push_every` groups, in the order in which they finish. The loop adds the gradients of a step in
that order; with one group per step it sends the group's own push buffer. The push of a step names, for each
shard, the oldest version that its groups read, and the number of the worker's own pushes that local steps had
put into that copy. The server counts staleness from these numbers.

In a run with a bound between replicas, groups belong to steps before they are trained
(`bounded_stepper.py`); a step is sent in the same way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from adam_async.messages import Finished
from adam_async.parameter_server.client import ParameterClient, StepPush
from adam_async.run.config import Config
from adam_async.run.group_ranges import name_groups
from adam_async.worker.gradient_clipping import Scaling
from adam_async.worker.puller import Landing, Puller
from adam_async.worker.push_plan import PushBuffer, PushMessage, PushPlan
from adam_async.worker.replay_log import ReadLog
from adam_async.worker.training import GroupTrainer, Trained
from adam_async.worker.training_mode import OnStep
from adam_async.worker.weights import TensorCopy


@dataclass(slots=True, eq=False)
class Step:
    """A step that is being collected or pushed."""

    buffer: PushBuffer
    groups: list[Trained] = field(default_factory=list)
    clock: int = 0
    """Clock of the step's push."""
    epoch: int = 0
    """Epoch of the step's groups. In ssp and bsp, servers order the push once they know this epoch; 0 in
    asp."""
    unsettled: int = 0
    """Number of messages of the step without an acknowledgement."""
    rate: float = 0.0
    landing: Landing | None = None
    """Pull after the step; None without a pull."""
    named: tuple[int, ...] = ()
    """Groups of the step; see `Push.groups`."""
    gone: set[int] = field(default_factory=set)
    """Indexes of messages sent while the others were computed."""


class Pusher:
    """Sends complete steps, and pulls the values after them.

    Args:
        config: The run.
        plan: Messages and protocols of the gradients.
        client: Client of the servers.
        puller: Pulls values, and has the worker's copy, whose local steps are counted.
        trainer: Owner of the push buffers.
        on_finished: Called for each group whose push is acknowledged.
        on_step: Called with each step, before its pushes are sent.
        log: Log of the reads of groups.
    """

    def __init__(
        self,
        config: Config,
        *,
        plan: PushPlan,
        client: ParameterClient,
        puller: Puller,
        trainer: GroupTrainer,
        on_finished: Callable[[Finished], None],
        on_step: OnStep | None = None,
        log: ReadLog | None = None,
    ) -> None:
        self._plan = plan
        self._client = client
        self._puller = puller
        rest = [spec for message in plan.messages if not message.pulls for spec in message.specs]
        self._rest = puller.questions((*rest, *plan.read_only))
        self._answers = len(self._rest) + sum(message.pulls for message in plan.messages)
        self._trainer = trainer
        self._weights = puller.weights
        self._schedule = trainer.schedule
        self._rate = self._schedule.fixed
        self._on_finished = on_finished
        self._on_step = on_step
        # The trainer has applied the limits to a step of one group.
        self._scaling = Scaling.of(config) if config.push_every > 1 else None
        # In bsp the rule sees the mean over the step's images, otherwise the sum of its groups' means.
        self._unit = config.images_per_group if config.synchronous else None
        self._log = log
        self.left_ahead = 0
        """Number of messages sent while the rest of their step was computed."""
        self._places = [[puller.places[spec.id] for spec in message.specs] for message in plan.messages]

    def send(self, step: Step, on_landed: Callable[[], None] | None) -> None:
        """Push a step. Never waits.

        Args:
            on_landed: Called when the values after the step are installed; None: no pull.
        """
        self.begin(step, on_landed)
        self.finish(step)

    def begin(self, step: Step, on_landed: Callable[[], None] | None) -> None:
        """Prepare a step whose messages are sent one by one; see `send`."""
        if self._on_step is not None:
            self._on_step(step.clock, [group.lease for group in step.groups])
        if self._log is not None:
            for group in step.groups:
                self._log.note(group.lease, step.clock, group.read)
        self._weights.count_local_steps(_stepped_by_all(step.groups))
        first = step.groups[0]
        lease = first.lease
        step.named = (lease.epoch, lease.number, lease.number + 1)
        if len(step.groups) > 1:
            # An epoch ends after the pushes of its groups, so a step has groups of one epoch.
            assert all(group.lease.epoch == lease.epoch for group in step.groups)
            step.named = name_groups(lease.epoch, [group.lease.number for group in step.groups])
        step.rate = self._schedule.rate(lease.progress) if self._rate is None else self._rate
        if self._scaling is not None:
            unit = 1.0 if self._unit is None else self._unit / step.buffer.images
            self._scaling.apply(step.buffer, first.read.arrays, rate=step.rate, unit=unit)
        step.unsettled = len(self._plan.messages)
        if on_landed is not None:
            step.landing = Landing(self._puller, self._answers, on_landed)

    def push_ahead(self, step: Step, messages: Sequence[int]) -> None:
        """Send messages of a begun step, before the others are complete."""
        self.left_ahead += len(messages)
        for index in messages:
            step.gone.add(index)
            self._push_message(step, index, self._plan.messages[index])

    def finish(self, step: Step) -> None:
        """Send the remaining messages, and pull the values that no answer to them contains."""
        for index, message in enumerate(self._plan.messages):
            if index not in step.gone:
                self._push_message(step, index, message)
        if step.landing is not None:
            for server, specs in self._rest:
                self._puller.ask(step.landing, server, specs)
            if not self._answers:
                self._client.answer_nothing(step.landing.over)
        if not self._plan.messages:  # other workers of the replica push all tensors of this partition
            self._settled(step)

    def _push_message(self, step: Step, index: int, message: PushMessage) -> None:
        landing = step.landing
        versions, own_applied = self._read_versions(step.groups, message, self._places[index])
        pulls = landing is not None and message.pulls
        push = StepPush(
            parts=message.wire_parts,
            shards=message.shards,
            tensors=step.buffer.tensors(index),
            versions=versions,
            own_applied=own_applied,
            clock=step.clock,
            weight=step.buffer.images,
            rate=step.rate,
            pull=pulls,
            epoch=step.epoch,
            groups=step.named,
        )
        self._client.push(
            message.server,
            push,
            on_free=partial(self._free, step),
            on_values=partial(landing.arrived, message.specs) if landing is not None and pulls else None,
            into=landing.into(message.specs) if landing is not None and pulls else None,
        )

    def _free(self, step: Step) -> None:
        step.unsettled -= 1
        if not step.unsettled:
            self._settled(step)

    @staticmethod
    def _read_versions(
        groups: Sequence[Trained], message: PushMessage, places: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return each shard's oldest version that the groups read, and this worker's pushes in that copy."""
        if len(groups) == 1:
            read = groups[0].read
            copies, counts = read.copies, read.own_applied
            versions = [copies[s.tensor].versions[p] for s, p in zip(message.specs, places, strict=True)]
            return tuple(versions), tuple([counts[spec.tensor] for spec in message.specs])
        oldest = [
            min(
                (group.read.copies[s.tensor].versions[p], group.read.own_applied[s.tensor])
                for group in groups
            )
            for s, p in zip(message.specs, places, strict=True)
        ]
        return tuple([version for version, _ in oldest]), tuple([own_applied for _, own_applied in oldest])

    def _settled(self, step: Step) -> None:
        self._trainer.step_buffers.give_back(step.buffer)
        for group in step.groups:
            lease = group.lease
            self._on_finished(
                Finished(lease.epoch, lease.number, lease.attempt, lease.images, group.loss, step.clock)
            )


class Stepper:
    """Collects groups into steps as they finish, and decides when to pull.

    Args:
        pusher: Sends the steps.
        trainer: Owner of the push buffers.
        push_every: Number of groups per step.
        pull_every: Number of steps per pull.
    """

    def __init__(self, *, pusher: Pusher, trainer: GroupTrainer, push_every: int, pull_every: int) -> None:
        self._pusher = pusher
        self._trainer = trainer
        self._push_every = push_every
        self._pull_every = pull_every
        self._open: Step | None = None
        self.clock = 0
        """Clock of the replica's last step; before the first step, the clock from the servers."""

    def start(self, clock: int) -> None:
        """Set the replica's clock before the first group."""
        self.clock = clock

    def add(self, trained: Trained, on_landed: Callable[[], None]) -> None:
        """Take a trained group. Never waits.

        `on_landed` is called when the values after the group's step are installed; at once if the group ends
        no step or no pull is due.
        """
        if self._push_every == 1:
            self._push_one(trained, on_landed)
            return
        step = self._open
        if step is None:
            step = self._open = Step(self._trainer.step_buffers.take())
            step.buffer.clear()
        step.groups.append(trained)
        step.buffer.add(trained.buffer)
        self._trainer.group_buffers.give_back(trained.buffer)
        if len(step.groups) < self._push_every:
            on_landed()
            return
        self._open = None
        self._push(step, on_landed)

    def ahead(self, trained: Trained, messages: Sequence[int], on_landed: Callable[[], None]) -> None:
        """Send complete messages of a group's step while the rest is computed. Never waits."""
        ahead = trained.ahead
        assert ahead is not None
        if not ahead.over:
            if ahead.step is None:
                ahead.step = self._begin(Step(trained.buffer, [trained]), on_landed)
            self._pusher.push_ahead(ahead.step, messages)

    def _push_one(self, trained: Trained, on_landed: Callable[[], None]) -> None:
        """Push a group that is a step; messages sent earlier are not repeated."""
        ahead = trained.ahead
        if ahead is None or ahead.step is None:
            step = self._begin(Step(trained.buffer, [trained]), on_landed)
        else:
            step = ahead.step
        if ahead is not None:
            # The step refers to its group: without this line, both would stay until the garbage collector
            # runs.
            ahead.over, ahead.step = True, None
        self._finish(step, on_landed)

    def close(self) -> None:
        """Push the open step, even if it is short: no more groups come."""
        step, self._open = self._open, None
        if step is not None:
            self._push(step, _nothing)

    def _push(self, step: Step, on_landed: Callable[[], None]) -> None:
        self._finish(self._begin(step, on_landed), on_landed)

    def _begin(self, step: Step, on_landed: Callable[[], None]) -> Step:
        self.clock += 1
        step.clock = self.clock
        self._pusher.begin(step, on_landed if self.clock % self._pull_every == 0 else None)
        return step

    def _finish(self, step: Step, on_landed: Callable[[], None]) -> None:
        self._pusher.finish(step)
        if step.landing is None:
            on_landed()


def _nothing() -> None:
    """Do nothing after a pull: no group waits for its values."""


def _stepped_by_all(groups: Sequence[Trained]) -> dict[str, TensorCopy]:
    """Return the copies that the local steps of all groups of a push changed."""
    first, *others = groups
    return {
        name: copy
        for name, copy in first.stepped.items()
        if all(group.stepped.get(name) is copy for group in others)
    }
