"""Pure: the training of one image group on a compute thread, and the dataflow graph around it.

One partition has the whole model, so its layers exchange no message. Forward and backward pass are one
segment: one job of the compute pool.

    group -> [train, heavy] -> trained -> [push, light]        landed

A tag is in flight until its nodes have fired and its inputs have arrived. The input `landed` has no reader;
it exists only if the worker trains on a copy with one group in flight, and not in bsp. The tag then ends when
its step's pull is installed; with one replica and a pull at every step, training is exactly serial SGD. On
other copies pulls run in the background; training in place needs no pulls.

In place (AD-11, AD-14) the passes read the shards in the servers' memory. The run's own rule applies each
finite gradient there, without copies or locks. The worker pushes only a report of the step. Between two
groups a thread waits while a reader keeps the storage still. Staleness is the number of steps that other
threads applied to the memory between the group's first read and the end of its own step.

A training mode is on a copy (`copy_mode.py`), in place (`in_place_mode.py`), or on one partition of a model.
A mode is complete after its construction: `ModeSetup` has the run, the servers, and `GroupEvents`: the only
calls from the mode to the session that feeds it. Groups enter the mode's graph, and events leave it.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.client.parameter_client import ParameterClient
from adam_async.data_server.client import ImageGroup
from adam_async.messages import Finished, Lease
from adam_async.model import InPlaceStep, StepBuffers
from adam_async.model.context import Context, StepInput
from adam_async.model.keyed_random import Dice
from adam_async.model.network import Network, Trainable
from adam_async.model.rules import Rule, new_scratch, plain_step
from adam_async.parameter_server.storage import ShardStorage, StepNotes
from adam_async.run.config import Config
from adam_async.run.learning_rate import Schedule
from adam_async.run.shard_table import ShardTable
from adam_async.worker.gradient_clipping import Scaling
from adam_async.worker.puller import Snapshot, TensorCopy, WorkerWeights
from adam_async.worker.push_plan import BackwardSection, PushBuffer, PushBufferPool, PushPlan
from dataflow import Firing, Graph, Node, Tag


@dataclass(frozen=True, slots=True, eq=False)
class Admitted:
    """A group to train, which joins a step before its training in ssp and bsp."""

    group: ImageGroup
    step: Any = None
    """Collector of the step's groups; None if the group joins a step after its training."""
    index: int = 0
    """Position of the group among the groups of its step."""
    read: Snapshot | None = None
    """Values that the group reads; None: the current values when it trains."""


@dataclass(slots=True, eq=False)
class Trained:
    """Result of one group on a compute thread. Only the event loop changes the object."""

    lease: Lease
    loss: float | None
    """Mean loss over the group's images; None in a cut replica's part that does not compute the loss."""
    buffer: PushBuffer
    read: Snapshot
    stepped: dict[str, TensorCopy]
    """Copies that the local step changed; empty without a local step."""
    step: Any = None
    """Collector of the step's groups; None before the group joins a step, and after its gradient is added."""
    index: int = 0
    """Position of the group among the groups of its step."""
    over: bool = False
    """Whether the group is trained. The messages of a section that is reported afterwards are sent with the
    rest."""


OnSection = Callable[[int, Tag, Trained | None], None]
"""Function that takes the number of a finished section of the backward pass, its group's tag, and the group,
or None if the group's messages are sent all at once."""


OnStep = Callable[[int, Sequence[Lease]], None]
"""Function that takes a step just before its push to the servers: its clock, and its groups' leases."""


class ThreadScratch:
    """Training memory of one compute thread, which the thread's consecutive groups share.

    Args:
        network: The model.
        context: Context of the thread's groups; None if each group in flight has its own.
    """

    def __init__(self, network: Trainable, context: Any = None) -> None:
        self.context = context
        largest = max((p.size for p in network.parameters), default=0)
        self.product = np.empty(largest, network.dtype)
        self.rule = new_scratch(network.dtype)


class GroupTrainer:
    """Trains groups on a worker's copy; several compute threads call its methods at once.

    Args:
        network: The model.
        config: The run.
        weights: The worker's copy.
        plan: Messages and protocols of the gradients.
        buffers: Number of push buffers of each kind made ahead; more are made when all are in use.
        sections: Sections of the backward pass. With two or more sections, `on_section` is called after each
            section except the last.
        on_section: Called on the compute thread.
    """

    def __init__(
        self,
        network: Trainable,
        config: Config,
        *,
        weights: WorkerWeights,
        plan: PushPlan,
        buffers: int,
        sections: Sequence[BackwardSection] = (),
        on_section: OnSection | None = None,
    ) -> None:
        self._sections = sections
        self._on_section = on_section
        self._pushed = tuple(plan.protocols)
        self.network = self._network = network
        self._weights = weights
        self.schedule = self._schedule = Schedule.of(config)
        self._rate = self._schedule.fixed
        self._local = config.local_steps
        self._dice = Dice(config.seed)
        group_images = self._group_images = config.images_per_group
        # In bsp, servers average over the images of a step, so a group counts by its images.
        self._by_images = config.synchronous
        self._scaling = Scaling.of(config)
        self._scales_steps = config.push_every == 1
        self.group_buffers = PushBufferPool(lambda: PushBuffer(network, plan, group_images), buffers)
        self.step_buffers = self.group_buffers
        if config.push_every > 1:
            # A step's gradients add up in a buffer for the images of all its groups.
            self.step_buffers = PushBufferPool(lambda: PushBuffer(network, plan, plan.images), buffers)

    @property
    def buffers_made(self) -> int:
        """Number of push buffers of both kinds."""
        return sum(buffer_pool.made for buffer_pool in {self.group_buffers, self.step_buffers})

    # The loss and the refused pushes show a diverging run; a warning per group would not add information.
    @np.errstate(over="ignore", invalid="ignore", divide="ignore")
    def train(self, firing: Firing, group: ImageGroup | Admitted) -> Trained:
        """Run forward, backward, gradients and local step, on `Admitted.read` or on the current values."""
        admitted = group if isinstance(group, Admitted) else Admitted(group)
        group, step, index = admitted.group, admitted.step, admitted.index
        read = self._weights.snapshot() if admitted.read is None else admitted.read
        scratch: ThreadScratch = firing.scratch
        # The context of the thread, not of the group: its arrays are still in the processor's caches.
        context, lease, arrays = scratch.context, group.lease, read.arrays
        keyed = {"dice": self._dice, "keys": (lease.epoch, lease.number)}
        buffer = self.group_buffers.take()
        if len(self._sections) > 1 and len(group.labels) == self._group_images:
            context.load(group.images, group.labels, **keyed)
            loss = self._network.forward(arrays, context)
            trained = Trained(lease, loss, buffer, read, {}, step, index)
            self._train_back(firing.tag, context, trained)
            return trained
        # A short group is sent at once, but the tag's graph waits for its sections.
        for number in range(len(self._sections) - 1):
            assert self._on_section is not None
            self._on_section(number, firing.tag, None)
        loss = buffer.train(arrays, context, group.images, group.labels, **keyed)
        if self._by_images and buffer.images < self._group_images:
            buffer.scale_all(buffer.images / self._group_images)
        scaled = self._scale(buffer, read, lease) if self._scaling is not None else {}
        stepped = self._local_step(context, buffer, scratch, lease, scaled) if self._local else {}
        return Trained(lease, loss, buffer, read, stepped, step, index)

    def _train_back(self, tag: Tag, context: Context, trained: Trained) -> None:
        """Run the backward pass section by section; messages of a finished section may be sent."""
        assert isinstance(self._network, Network), "only a whole network has sections"
        assert self._on_section is not None
        arrays, buffer = trained.read.arrays, trained.buffer
        buffer.images = context.images
        for number, section in enumerate(self._sections):
            self._network.backward_layers(arrays, context, section.layers)
            buffer.fill_messages(context, section.messages)
            if number < len(self._sections) - 1:
                self._on_section(number, tag, trained)

    def _scale(self, buffer: PushBuffer, read: Snapshot, lease: Lease) -> dict[str, float]:
        """Apply the limits if the group is a step; otherwise only compute the factors of its local step."""
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
        """Apply the group's plain step to the current copies, without locks (AD-14)."""
        stepped = {}
        rate = self._rate_of(lease)
        for name in self._pushed:
            copy = self._weights.current(name)
            factor = scaled.get(name, 1.0)
            delta = buffer.delta(name)
            if delta is None:
                delta = self._multiply(context, name, scratch)
            elif self._scales_steps:
                factor = 1.0  # the buffer is scaled already
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
    """Return the dataflow graph of a replica that is one partition.

    Args:
        train: Forward, backward and gradients; on a compute thread.
        push: Takes the result of `train`; on the loop.
        batch: Maximum number of groups per call of `train`; if it is above 1, `train` takes lists.
        jobs: Maximum number of simultaneous calls of `train`; see `dataflow.Node`.
        ahead: Function for each section of the backward pass except the last, called on the loop with its
            token: ``ahead-0`` and so on.
        waits_for_pull: Whether a tag is complete only with token ``landed``.
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
    return Graph(inputs=tuple(inputs), nodes=tuple(nodes))


@dataclass(frozen=True, slots=True, eq=False)
class TrainedInPlace:
    """Outcome of one group."""

    lease: Lease
    loss: float
    """Mean loss over the group's images."""
    staleness: int
    refused: tuple[str, ...]
    """Tensors whose gradient was not finite and so not applied."""


@dataclass(frozen=True, slots=True, eq=False)
class ThreadMemory:
    """Training memory of one compute thread, which the thread's consecutive groups share."""

    context: Context
    buffers: StepBuffers
    notes: StepNotes | None
    """Notes for a server in another process; None without one."""


class InPlaceTrainer:
    """Trains groups on the storage of a run; `train` runs on compute threads, several at once.

    Args:
        network: The model.
        rule: The run's update rule.
        storage: The memory of the run's servers.
        schedule: Learning rate of a group.
        group_images: Maximum number of images in a group.
        dice: Random numbers of layers such as dropout.
        clock: Clock for the times of groups, in seconds; None to measure no times.

    Attributes:
        trained: Groups whose steps are in the values, in the order in which they ended. The loop takes them.
    """

    def __init__(
        self,
        *,
        network: Network,
        rule: Rule,
        storage: ShardStorage,
        schedule: Schedule,
        group_images: int,
        dice: Dice,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._network = network
        self._step = InPlaceStep(network, rule)
        self._storage = storage
        self._schedule = schedule
        self._rate = schedule.fixed
        self._group_images = group_images
        self._dice = dice
        self._clock = clock
        self.trained: deque[TrainedInPlace] = deque()

    def new_memory(self) -> "ThreadMemory":
        """Make the training memory of one compute thread."""
        notes = self._storage.notes.popleft() if self._storage.notes else None
        return ThreadMemory(self._network.context(self._group_images), self._step.new_scratch(), notes)

    # The loss and the refused steps show a diverging run; a warning per group would not add information.
    @np.errstate(over="ignore", invalid="ignore", divide="ignore")
    def train(self, firings: Sequence[Firing], groups: Sequence[ImageGroup]) -> list[TrainedInPlace]:
        """Run forward, backward and rule in place, group by group."""
        memory: ThreadMemory = firings[0].scratch
        clock = self._clock
        with self._storage.gate:
            if clock is None:
                return self._train_groups(memory, groups)
            trained = []
            for firing, group in zip(firings, groups, strict=True):
                firing.started = clock()
                trained += self._train_groups(memory, (group,))
                firing.finished = clock()
            return trained

    def _train_groups(self, memory: "ThreadMemory", groups: Sequence[ImageGroup]) -> list[TrainedInPlace]:
        storage, found, notes = self._storage, list[TrainedInPlace](), None
        if memory.notes is not None:
            leases = [group.lease for group in groups]
            notes = memory.notes.begin([(lease.epoch, lease.number, lease.images) for lease in leases])
        for outcomes in self._step.train_groups(
            storage.weights,
            storage.states,
            memory.context,
            memory.buffers,
            [self._input(group) for group in groups],
            steps=storage.steps,
            dice=self._dice,
            notes=notes,
        ):
            trained = [
                TrainedInPlace(group.lease, outcome.loss, outcome.staleness, outcome.refused)
                for group, outcome in zip(groups[len(found) :], outcomes, strict=False)
            ]
            self.trained.extend(trained)
            found += trained
            storage.gate.pass_through()
        return found

    def _input(self, group: ImageGroup) -> StepInput:
        lease = group.lease
        return StepInput(
            images=group.images,
            labels=group.labels,
            keys=(lease.epoch, lease.number),
            rate=self._schedule.rate(lease.progress) if self._rate is None else self._rate,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEvents:
    """Functions that take the events of groups. The loop calls all methods except `section_done`."""

    finished: Callable[[Finished], None]
    """Function that takes the report of a group whose step the servers have counted."""
    landed: Callable[[Tag], None]
    """Function that takes the tag of a group after its pull is installed."""
    section_done: OnSection
    """Function that takes a finished section of a group's backward pass, on the compute thread."""
    stepped: OnStep | None = None
    """Function that takes each step; None in a run without a timeline."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModeSetup:
    """The parts of a run that every training mode needs."""

    config: Config
    table: ShardTable
    """Shards of the model, or of the partition."""
    buckets: Sequence[str]
    """Home of each bucket."""
    client: ParameterClient
    events: GroupEvents
