"""From complete steps to messages: pushes with the versions for staleness, and the following pull.

A step's push names, for each shard, the oldest version that its groups read. The push also has the number of
the worker's own pushes that local steps had put into that copy. The server counts staleness from these
numbers. All that is the same in every step is in the plan of its messages (`push_plan.py`) and in the layouts
of their answers (`puller.py`).

In a recorded run a step's pushes carry the reads of its groups as bytes, for a replay: an array with one
element per group, in the order in which the worker's one thread trained them. The log of each bundle keeps
the reads (`parameter_server/replay_log.py`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.client.parameter_client import ParameterClient
from adam_async.client.session import StepFields
from adam_async.messages import Finished, OfEach, Pushed, joined
from adam_async.run.config import Config
from adam_async.run.group_ranges import name_groups
from adam_async.worker.gradient_clipping import Scaling
from adam_async.worker.puller import Landing, Puller, Snapshot, TensorCopy
from adam_async.worker.push_plan import PushBuffer, PushPlan, ServerShards
from adam_async.worker.training import GroupTrainer, OnStep, Trained


def reads_type(shards: int, tensors: int) -> np.dtype[Any]:
    """Return the type of one group's reads.

    The type's fields are the group's epoch and number; `Lease.progress`, which schedules depend on; the
    version of each shard of the model that it read; and the number of local steps in each tensor's copy when
    it was read.
    """
    return np.dtype(
        [
            ("epoch", "<u4"),
            ("number", "<u4"),
            ("progress", "<f8"),
            ("versions", "<u4", (shards,)),
            ("steps", "<u4", (tensors,)),
        ]
    )


class StepReads:
    """Packs the reads of one worker's steps.

    Args:
        shards: Number of shards of each tensor in the model, in shard order.
    """

    def __init__(self, shards: dict[str, int]) -> None:
        self._names = tuple(shards)
        self._dtype = reads_type(sum(shards.values()), len(shards))

    def pack(self, groups: Sequence[Trained]) -> NDArray[np.uint8]:
        """Return the reads of a step's groups as bytes."""
        rows = []
        for group in groups:
            lease, read, steps = group.lease, group.read, group.read.local
            assert steps is not None, "snapshots of a recorded run count local steps"
            versions = [version for name in self._names for version in read.copies[name].versions]
            rows.append(
                (lease.epoch, lease.number, lease.progress, versions, [steps[name] for name in self._names])
            )
        return np.array(rows, self._dtype).view(np.uint8)


class Step(msgspec.Struct, eq=False):
    """Groups whose gradients are pushed together; the step takes the answers to its messages."""

    pusher: "Pusher"
    number: int
    """Number of the step: the replica's clock before the step."""
    epoch: int
    """Epoch of the step's groups. In ssp and bsp, servers order the push once they know this epoch; 0 in
    asp."""
    needed: int = 0
    """Clock of the values that the step's groups read: the exact clock under bsp, otherwise the minimum."""
    read: Snapshot | None = None
    """Values that all groups of the step read, under bsp."""
    joined: int = 0
    """Number of groups that joined the step."""
    closed: bool = False
    """Whether no more groups join the step."""
    buffer: PushBuffer | None = None
    groups: list[Trained] = []
    """Trained groups whose gradients are in the buffer."""
    added: int = 0
    """Number of trained groups among them; a group in `groups` may still be computed, see `Stepper.ahead`."""
    early: dict[int, Trained] = {}
    """Trained groups that wait for an earlier group of the step, by their position in the step."""
    on_landed: Callable[[], None] | None = None
    """Callback of the step's last group."""
    begun: bool = False
    """Whether messages of the step may be sent."""
    fields: StepFields | None = None
    """Fields of all messages of a step that has begun."""
    landing: Landing | None = None
    """Pull after the step; None without a pull."""
    gone: set[int] = set()
    """Numbers of the messages sent while the others were computed."""
    reads: tuple[NDArray[Any], ...] = ()
    """The reads of the groups as the last tensor of each message; empty if the run is not recorded."""
    unsettled: int = 0
    """Number of the step's unacknowledged messages; 1 for a step without messages."""

    def pushed(self, number: int, answer: Pushed, values: NDArray[Any] | None) -> None:
        """See `PushReceiver`."""
        if values is not None and self.landing is not None:
            self.landing.arrived(number, answer.versions, values, answer.clock)

    def freed(self) -> None:
        """See `Receiver`. After the last message, free the buffer, and report the groups."""
        self.unsettled -= 1
        if self.unsettled:
            return
        pusher, fields = self.pusher, self.fields
        assert self.buffer is not None
        assert fields is not None
        pusher.trainer.step_buffers.give_back(self.buffer)
        for group in self.groups:
            lease, loss = group.lease, group.loss or 0.0
            report = Finished(lease.epoch, lease.number, lease.attempt, lease.images, loss, fields["clock"])
            pusher.on_finished(report)


class Pusher:
    """Sends complete steps, and pulls the values afterwards.

    Args:
        config: The run.
        plan: Messages and protocols of the gradients.
        client: Client of the servers.
        puller: Pulls values, and has the worker's copy, whose local steps are counted.
        trainer: Owner of the push buffers.
        on_finished: Called for each group whose push is acknowledged.
        on_step: Called with each step, before its pushes are sent.
        reads: Packs a step's reads; None if the run is not recorded.
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
        reads: StepReads | None = None,
    ) -> None:
        self.plan = plan
        self.client = client
        self.puller = puller
        self.trainer = trainer
        rest = [spec for message in plan.messages if not message.pulls for spec in message.specs]
        self._rest = puller.questions((*rest, *plan.read_only))
        self._layouts = [
            *(puller.layout_of(message.specs) if message.pulls else None for message in plan.messages),
            *(layout for _, layout in self._rest),
        ]
        """Layouts of the answers to the messages of a step, and to the questions after them."""
        self._answers = sum(layout is not None for layout in self._layouts)
        self._schedule = trainer.schedule
        self._rate = self._schedule.fixed
        self.on_finished = on_finished
        self._on_step = on_step
        # The trainer has applied the limits to a step of one group.
        self._scaling = Scaling.of(config) if config.push_every > 1 else None
        # In bsp the rule sees the mean over the step's images, otherwise the sum of its groups' means.
        self._unit = config.images_per_group if config.synchronous else None
        self._has_local_steps = config.local_steps
        self._reads = reads
        self.left_ahead = 0
        """Number of messages sent while the rest of their step was computed."""

    def begin(self, step: Step, clock: int, *, pulls: bool, on_landed: Callable[[], None] | None) -> None:
        """Prepare a step whose groups and buffer are known, before its first message is sent.

        Args:
            clock: Clock of the push.
            pulls: Whether a pull follows the step.
            on_landed: Called when the pulled values are installed.
        """
        step.begun, groups, buffer = True, step.groups, step.buffer
        assert buffer is not None
        if self._on_step is not None:
            self._on_step(clock, [group.lease for group in groups])
        if self._reads is not None:
            step.reads = (self._reads.pack(groups),)
        first, lease = groups[0], groups[0].lease
        if first.stepped:
            self.puller.weights.count_local_steps(_stepped_by_all(groups))
        named: tuple[int, ...] = (lease.epoch, lease.number, lease.number + 1)
        loss_sum = None if first.loss is None else first.loss * lease.images
        if len(groups) > 1:
            # An epoch ends after its groups' pushes, so a step has groups of only one epoch.
            assert all(group.lease.epoch == lease.epoch for group in groups)
            named = name_groups(lease.epoch, [group.lease.number for group in groups])
            losses = [group.loss * group.lease.images for group in groups if group.loss is not None]
            loss_sum = sum(losses) if losses else None
        rate = self._schedule.rate(lease.progress) if self._rate is None else self._rate
        if self._scaling is not None:
            unit = 1.0 if self._unit is None else self._unit / buffer.images
            self._scaling.apply(buffer, first.read.arrays, rate=rate, unit=unit)
        step.fields = {
            "clock": clock, "weight": buffer.images, "rate": rate, "epoch": step.epoch, "groups": named,
            "loss_sum": loss_sum, "recorded": self._reads is not None,
        }  # fmt: skip
        step.unsettled = max(len(self.plan.messages), 1)
        if pulls:
            step.landing = Landing(self.puller, self._layouts, self._answers, on_landed)

    def push_ahead(self, step: Step, messages: Sequence[int]) -> None:
        """Send messages of a begun step, before the others are complete."""
        self.left_ahead += len(messages)
        step.gone.update(messages)
        self._push(step, messages)

    def finish(self, step: Step) -> None:
        """Send the remaining messages, and pull the values that no answer to them contains."""
        messages, gone = self.plan.messages, step.gone
        left = range(len(messages))
        self._push(step, [index for index in left if index not in gone] if gone else left)
        landing = step.landing
        if landing is not None:
            for number, (server, _) in enumerate(self._rest, start=len(messages)):
                self.puller.ask(landing, server, number)
            if not self._answers and landing.on_landed is not None:
                self.client.answer_nothing(landing.on_landed)
        if not messages:  # other workers of the replica push all tensors of this partition
            step.freed()

    def _push(self, step: Step, messages: Iterable[int]) -> None:
        landing, buffer, groups, fields = step.landing, step.buffer, step.groups, step.fields
        assert buffer is not None
        assert fields is not None
        own_applied: OfEach = 0
        for index in messages:
            message, read = self.plan.messages[index], groups[0].read
            if len(groups) > 1:
                versions, own_applied = _oldest(groups, message.reads)
            else:
                copies = read.copies
                versions = joined([copies[tensor].versions[place] for tensor, place in message.reads])
                if self._has_local_steps:
                    own_applied = joined([read.own_applied[tensor] for tensor, _ in message.reads])
            layout = None if landing is None else self._layouts[index]
            into = None if landing is None or layout is None or layout.part is None else landing.into(index)
            self.client.connections[message.server].push(
                (*buffer.tensors(index), *step.reads),
                step,
                index,
                into,
                parts=message.wire_parts,
                shards=message.shards,
                versions=versions,
                own_applied=own_applied,
                pull=layout is not None,
                **fields,
            )

    def tick(self, shards: ServerShards, clock: int, epoch: int) -> None:
        """Report the replica's clock on shards without a push."""
        for server, some in shards:
            self.client.connections[server].tick(some, clock, epoch)


def _oldest(groups: Sequence[Trained], reads: Sequence[tuple[str, int]]) -> tuple[OfEach, OfEach]:
    """Return each shard's oldest version that the groups read, and this worker's pushes in that copy."""
    oldest = [
        min((group.read.copies[tensor].versions[place], group.read.own_applied[tensor]) for group in groups)
        for tensor, place in reads
    ]
    return joined([version for version, _ in oldest]), joined([own_applied for _, own_applied in oldest])


def _stepped_by_all(groups: Sequence[Trained]) -> dict[str, TensorCopy]:
    """Return the copies that the local steps of all groups in a push changed."""
    first, *others = groups
    return {
        name: copy
        for name, copy in first.stepped.items()
        if all(group.stepped.get(name) is copy for group in others)
    }
