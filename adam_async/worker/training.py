"""Pure: what a compute thread does with one image group, and the graph that leads there.

One partition holds the whole model, so there is no message between its layers and the whole way
forward and back is one segment: one job of the compute pool.

    group -> [train, heavy] -> trained -> [push, light]        landed -> [land, light]

A tag is in flight until its nodes have fired. The second branch is there only if one group may be in
flight: the tag then ends when its step's pull has landed, and with a pull at every step training is
serial SGD, exactly. With more groups in flight pulls run in the background.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.client import ImageGroup
from adam_async.messages import Lease
from adam_async.model.context import Context
from adam_async.model.keyed_random import Dice
from adam_async.model.network import Network
from adam_async.model.rules import new_scratch, plain_step
from adam_async.model.trainable import Trainable
from adam_async.run.learning_rate import Schedule
from adam_async.worker.gradient_clipping import Scaling
from adam_async.worker.push_plan import PushBuffer, PushPlan, Stage
from adam_async.worker.weights import Snapshot, TensorCopy, WorkerWeights
from dataflow import Firing, Graph, Node, Tag


@dataclass(frozen=True, slots=True, eq=False)
class Admitted:
    """A group that has its place in a step before it is trained."""

    group: ImageGroup
    step: Any
    """Whatever collects the groups of the step."""
    index: int
    """Its position among them."""
    read: Snapshot | None
    """What it shall read; None for what is current when it is trained."""


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """What a compute thread made of one group."""

    lease: Lease
    loss: float
    """Mean over the group's images."""
    buffer: PushBuffer
    read: Snapshot
    stepped: dict[str, TensorCopy]
    """Copies that the local step went into; empty without one."""
    admitted: Admitted | None = None
    """Its place, where groups have one from their admission on."""
    ahead: "Ahead | None" = None
    """Where messages of its step may leave before the way back is done."""


@dataclass(slots=True, eq=False)
class Ahead:
    """How far the step of a group has left while the group is still computed. The loop's alone."""

    step: Any = None
    """What has begun to leave."""
    over: bool = False
    """The group is trained: what is told of it now comes too late, and has left with the rest."""


class ThreadScratch:
    """Scratch memory of one compute thread."""

    def __init__(self, network: Trainable) -> None:
        largest = max((p.size for p in network.parameters), default=0)
        self.product = np.empty(largest, network.dtype)
        self.rule = new_scratch(network.dtype)


class PushBufferPool:
    """Push buffers that are free. Taking and giving back are atomic, from any thread."""

    def __init__(self, make: Callable[[], PushBuffer], made: int) -> None:
        self._make = make
        self._free = deque(make() for _ in range(made))
        self.made = made

    def take(self) -> PushBuffer:
        """Take a free buffer; if all are on their way, one more is made."""
        try:
            return self._free.pop()
        except IndexError:
            self.made += 1
            return self._make()

    def give_back(self, buffer: PushBuffer) -> None:
        """A buffer is settled and released."""
        self._free.append(buffer)


class GroupTrainer:
    """Trains groups on a worker's copy; its methods run on compute threads, several at once.

    Args:
        network: The model.
        weights: The worker's copy.
        plan: How gradients travel.
        schedule: Learning rate of a group.
        local: Whether a group makes a local step.
        group_images: Most images of a group.
        push_every: Groups of a step; with more than one, groups are added up in step buffers.
        buffers: Buffers made ahead of each kind; more are made while all are on their way.
        dice: What layers that draw, such as dropout, draw with.
        scaling: Limits of a step's gradient.
        stages: How the way back is cut. With more than one, `tell` is called on the compute thread, as
            ``tell(stage, tag, trained)``, when a stage other than the last is done; with None for a group
            whose messages leave all at once.
        by_images: Whether a group counts by its images, because servers average over those of a step.
    """

    def __init__(
        self,
        *,
        network: Trainable,
        weights: WorkerWeights,
        plan: PushPlan,
        schedule: Schedule,
        local: bool,
        group_images: int,
        push_every: int,
        buffers: int,
        dice: Dice,
        scaling: Scaling | None = None,
        by_images: bool = False,
        stages: Sequence[Stage] = (),
    ) -> None:
        self._stages = stages
        self._pushed = tuple(plan.protocols)
        self.tell: Callable[[int, Tag, Trained | None], None] = _told_nobody
        self.network = self._network = network
        self._weights = weights
        self._schedule = schedule
        self._rate = schedule.fixed
        self._local = local
        self._dice = dice
        self._group_images = group_images
        self._by_images = by_images
        self._scaling = scaling
        self._scales_steps = push_every == 1
        self.group_buffers = PushBufferPool(lambda: PushBuffer(network, plan, group_images), buffers)
        self.step_buffers = self.group_buffers
        if push_every > 1:
            self.step_buffers = PushBufferPool(lambda: PushBuffer(network, plan, plan.images), buffers)

    @property
    def buffers_made(self) -> int:
        """Push buffers that exist, of both kinds."""
        return sum(buffer_pool.made for buffer_pool in {self.group_buffers, self.step_buffers})

    def train(self, firing: Firing, group: ImageGroup) -> Trained:
        """Forward, backward, gradients, local step; on what is current."""
        return self._train(firing, group, self._weights.snapshot(), None)

    def train_admitted(self, firing: Firing, admitted: Admitted) -> Trained:
        """The same for a group that has its place, on what it shall read."""
        read = self._weights.snapshot() if admitted.read is None else admitted.read
        return self._train(firing, admitted.group, read, admitted)

    # A run that diverges is told by its loss and its refused pushes; a warning per group says nothing more.
    @np.errstate(over="ignore", invalid="ignore", divide="ignore")
    def _train(self, firing: Firing, group: ImageGroup, read: Snapshot, admitted: Admitted | None) -> Trained:
        context = firing.context
        lease = group.lease
        context.load(group.images, group.labels, dice=self._dice, keys=(lease.epoch, lease.number))
        arrays = read.arrays
        loss = self._network.forward(arrays, context)
        if len(self._stages) > 1:
            if context.images == self._group_images:
                trained = Trained(lease, loss, self.group_buffers.take(), read, {}, admitted, Ahead())
                self._train_back(firing.tag, context, trained)
                return trained
            for number in range(len(self._stages) - 1):
                self.tell(number, firing.tag, None)
        self._network.backward(arrays, context)
        buffer = self.group_buffers.take()
        buffer.fill(context)
        if self._by_images and buffer.images < self._group_images:
            buffer.scale_all(buffer.images / self._group_images)
        scaled = self._scale(buffer, read, lease) if self._scaling is not None else {}
        stepped = self._local_step(context, buffer, firing.scratch, lease, scaled) if self._local else {}
        return Trained(lease, loss, buffer, read, stepped, admitted)

    def _train_back(self, tag: Tag, context: Context, trained: Trained) -> None:
        """The way back, stage by stage; what is complete may leave."""
        assert isinstance(self._network, Network), "only a whole network has stages"
        arrays, buffer = trained.read.arrays, trained.buffer
        buffer.images = context.images
        for number, stage in enumerate(self._stages):
            self._network.backward_layers(arrays, context, stage.layers)
            buffer.fill_messages(context, stage.messages)
            if number < len(self._stages) - 1:
                self.tell(number, tag, trained)

    def _scale(self, buffer: PushBuffer, read: Snapshot, lease: Lease) -> dict[str, float]:
        """Keep the limits, where the group is a step; otherwise only find what its local step is to keep."""
        assert self._scaling is not None
        limit = self._scaling.apply if self._scales_steps else self._scaling.factors
        unit = self._group_images / buffer.images if self._by_images else 1.0
        return limit(buffer, read.arrays, rate=self._rate_of(lease), unit=unit)

    def _rate_of(self, lease: Lease) -> float:
        return self._schedule.rate(lease.progress) if self._rate is None else self._rate

    def _local_step(
        self,
        context: Context,
        buffer: PushBuffer,
        scratch: ThreadScratch,
        lease: Lease,
        scaled: Mapping[str, float],
    ) -> dict[str, TensorCopy]:
        """Apply the group's plain step to what is current now, without locks (AD-14)."""
        stepped = {}
        rate = self._rate_of(lease)
        for name in self._pushed:
            copy = self._weights.current(name)
            factor = scaled.get(name, 1.0)
            delta = buffer.delta(name)
            if delta is None:
                delta = self._multiply(context, name, scratch)
            elif self._scales_steps:
                factor = 1.0  # the buffer holds it as it leaves
            plain_step(copy.array, delta, rate=rate * factor, scratch=scratch.rule)
            copy.local += 1
            stepped[name] = copy
        return stepped

    def _multiply(self, context: Context, name: str, scratch: ThreadScratch) -> NDArray[Any]:
        factors = self._network.factors(context, name)
        assert factors is not None
        shape = self._network.parameter(name).shape
        out = scratch.product[: shape[0] * shape[1]].reshape(shape)
        return np.matmul(factors[1].T, factors[0], out=out)


def replica_graph(
    train: Callable[[Any, Any], Any],
    push: Callable[[Firing, Any], None],
    *,
    waits_for_pull: bool,
    ahead: Sequence[Callable[[Firing, Any], None]] = (),
    batch: int = 1,
    jobs: int | None = None,
) -> Graph:
    """The dataflow graph of a replica that is one partition.

    Args:
        train: Forward, backward and gradients; on a compute thread.
        push: Takes what `train` made; on the loop.
        batch: At most this many groups per call of `train`, which with more than one takes lists.
        jobs: At most this many of these calls at once; see `dataflow.Node`.
        ahead: For each stage of the way back but the last, what hears on the loop that it is done: token
            ``ahead-0`` and so on.
        waits_for_pull: Whether a tag is complete only when token ``landed`` has come.
    """
    nodes = [
        Node("train", train, inputs=("group",), outputs=("trained",), heavy=True, batch=batch, jobs=jobs),
        Node("push", push, inputs=("trained",)),
    ]
    inputs = ["group"]
    for number, leave in enumerate(ahead):
        inputs.append(f"ahead-{number}")
        nodes.append(Node(f"leave-{number}", leave, inputs=(inputs[-1],)))
    if waits_for_pull:
        inputs.append("landed")
        nodes.append(Node("land", _complete, inputs=("landed",)))
    return Graph(inputs=tuple(inputs), nodes=tuple(nodes))


def _told_nobody(stage: int, tag: Tag, trained: Trained | None) -> None:
    """Nothing leaves ahead."""


def _complete(firing: Firing, token: None) -> None:
    """The tag is complete; the engine frees its slot and context."""
