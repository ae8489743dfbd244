"""Pure: what compute threads do with a group in one part of a cut model, and the graph that leads there.

The way of a group through a part is a chain of segments (`adam_async/model/partition/network.py`). A segment
fires when the one before it has run and all that it receives has arrived, in whatever order and for whatever
group; what it has for others leaves on the loop right after it:

    group -> [segment-0] -> [segment-1] -> ... -> [segment-n] -> (summed) -> trained -> [push, light]
              |        ^ in-3                 ^ in-7, in-9        ^ in-12
              +-> [leave-0, light]             +-> ...

The last one fills the push buffer. Where other workers have parts of the same weights' gradients, `summed`
waits for those, and adds them up in the order of the workers.
"""

from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.client import ImageGroup
from adam_async.messages import Block
from adam_async.model.context import Context
from adam_async.model.partition.network import Partition
from adam_async.model.partition.plan import Crossing
from adam_async.worker.push_plan import PushBuffer
from adam_async.worker.reliable_stream import Parcel
from adam_async.worker.training import Admitted, GroupTrainer, ThreadScratch, Trained
from adam_async.worker.weights import Snapshot
from dataflow import Firing, Graph, Node

Leave = Callable[[int, Sequence[Parcel]], None]
"""Takes what has become ready for others: the worker's part, and the blocks for it."""


@dataclass(slots=True, eq=False)
class Passage:
    """A group on its way through the part."""

    group: ImageGroup
    read: Snapshot
    arrays: Mapping[str, NDArray[Any]]
    admitted: Admitted | None
    loss: float = 0.0
    """Mean over the group's images, where the loss is computed here."""


class WirePool:
    """Memory for what crosses one way of one crossing. Taking and giving back are atomic, from any thread."""

    def __init__(self, partition: Partition, crossing: Crossing, images: int) -> None:
        self._partition = partition
        self._crossing = crossing
        self._size = int(np.prod(partition.wire_shape(crossing, images)))
        self._free: deque[NDArray[Any]] = deque()
        self.made = 0

    def take(self, images: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Give free memory, and the view of it that holds a group of so many images."""
        try:
            flat = self._free.pop()
        except IndexError:
            self.made += 1
            flat = np.zeros(self._size, self._partition.network.dtype)
        shape = self._partition.wire_shape(self._crossing, images)
        return flat, flat[: int(np.prod(shape))].reshape(shape)

    def give_back(self, flat: NDArray[Any], _: NDArray[Any]) -> None:
        """Nobody needs it any more."""
        self._free.append(flat)


class PartTrainer(GroupTrainer):
    """Trains the part of one worker; its methods run on compute threads, several at once.

    Args:
        partition: The part.
        group_images: Most images of a group.
        rest: As of `GroupTrainer`, with the part's network.
    """

    def __init__(self, partition: Partition, *, group_images: int, **rest: Any) -> None:
        super().__init__(network=partition.network, group_images=group_images, **rest)
        self._partition = partition
        self._buffer_pools = {
            crossing.number: WirePool(partition, crossing, group_images) for crossing in partition.outgoing
        }
        self._target = {crossing.number: crossing.target for crossing in partition.outgoing}
        rows = partition.input_rows
        # Rows of images are cut by the data server; of images that the model reads as flat ones, here.
        self._features = slice(rows.start, rows.stop) if len(partition.network.input_shape) == 1 else None
        self._reads_images = len(rows) > 0
        self._loss_at = next((n for n, s in enumerate(partition.segments) if s.back), -1)

    @property
    def wires_made(self) -> int:
        """Send buffers that exist."""
        return sum(buffer_pool.made for buffer_pool in self._buffer_pools.values())

    def begin(self, context: Context, group: ImageGroup | Admitted) -> Passage:
        """Load a group, and decide what it reads."""
        admitted = group if isinstance(group, Admitted) else None
        images = group.group if isinstance(group, Admitted) else group
        read = self._weights.snapshot() if admitted is None or admitted.read is None else admitted.read
        lease = images.lease
        pictures = images.images if self._reads_images else None
        if pictures is not None and self._features is not None:
            pictures = pictures.reshape(len(pictures), -1)[:, self._features]
        context.load(pictures, images.labels, dice=self._dice, keys=(lease.epoch, lease.number))
        return Passage(images, read, read.arrays, admitted)

    def run(self, number: int, context: Context, passage: Passage, received: Sequence[Any]) -> list[Parcel]:
        """Run one segment, with what it receives; returns what it has for others."""
        segment = self._partition.segments[number]
        parcels = [self._parcel(crossing, passage) for crossing in segment.sends]
        wires = [*received, *(parcel.tensor for parcel in parcels)]
        self._partition.connect(context, segment, wires)
        self.compute(number, context, passage)
        self._partition.send_errors(context, segment)
        self._partition.disconnect(context, segment)  # it is lent, and may be somebody's memory
        return parcels

    def compute(self, number: int, context: Context, passage: Passage) -> None:
        """Run one segment between wires that are there."""
        partition = self._partition
        partition.compute(passage.arrays, context, partition.segments[number])
        if number == self._loss_at and partition.has_loss:
            passage.loss = partition.network.loss(context)

    def run_last(self, context: Context, passage: Passage) -> list[Parcel]:
        """Behind the last segment: partial weight gradients for others."""
        parcels = []
        for crossing in self._partition.partial:
            parcel = self._parcel(crossing.number, passage)
            self._partition.write_partial(context, crossing, parcel.tensor)
            parcels.append(parcel)
        return parcels

    def finish(
        self,
        context: Context,
        passage: Passage,
        parts: Sequence[NDArray[Any]],
        scratch: MutableMapping[Any, ThreadScratch],
    ) -> Trained:
        """Fill the push buffer, with the partial gradients of others added, and make the local step.

        Args:
            context: Of the group.
            passage: Its passage.
            parts: Partial weight gradients of others, in the order of `Partition.sums`.
            scratch: Of the thread.
        """
        lease = passage.group.lease
        buffer = self.group_buffers.take()
        buffer.fill(context)
        if parts:
            self._add_up(buffer, parts)
        if self._by_images and buffer.images < self._group_images:
            buffer.scale_all(buffer.images / self._group_images)
        stepped = {}
        if self._local:
            stepped = self._local_step(context, buffer, _scratch(scratch, self), lease, {})
        return Trained(lease, passage.loss, buffer, passage.read, stepped, passage.admitted)

    def _add_up(self, buffer: PushBuffer, parts: Sequence[NDArray[Any]]) -> None:
        """Add partial gradients in the order of the workers: ((first + second) + own) + fourth."""
        before: dict[str, NDArray[Any]] = {}
        behind: list[tuple[str, NDArray[Any]]] = []
        for crossing, part in sorted(
            zip(self._partition.sums, parts, strict=True), key=lambda pair: pair[0].source
        ):
            at = 0
            for name in crossing.tensors:
                piece = part[at : at + self._network.parameter(name).size]
                at += len(piece)
                if crossing.source > self._partition.worker:
                    behind.append((name, piece))
                else:
                    before[name] = before[name] + piece if name in before else piece
        for name, piece in (*before.items(), *behind):
            buffer.add_partial(name, piece)
        buffer.spread()

    def _parcel(self, crossing: int, passage: Passage) -> Parcel:
        lease = passage.group.lease
        buffer_pool = self._buffer_pools[crossing]
        flat, tensor = buffer_pool.take(lease.images)
        block = Block(crossing, lease.epoch, lease.number, lease.attempt)
        return Parcel(block, tensor, partial(buffer_pool.give_back, flat))

    def by_target(self, parcels: Sequence[Parcel], leave: Leave) -> None:
        """Hand what has become ready over, by the worker that it goes to. On the loop."""
        for parcel in parcels:
            leave(self._target[parcel.block.crossing], (parcel,))


def _scratch(scratch: MutableMapping[Any, ThreadScratch], trainer: PartTrainer) -> ThreadScratch:
    """A thread may work for several parts of a replica, and keeps scratch memory for each."""
    found = scratch.get(trainer)
    if found is None:
        found = scratch[trainer] = ThreadScratch(trainer.network)
    return found


def part_graph(
    trainer: PartTrainer,
    partition: Partition,
    leave: Leave,
    push: Callable[[Firing, Trained], None],
    *,
    waits_for_pull: bool,
) -> Graph:
    """The dataflow graph of one part of a replica.

    Args:
        trainer: What runs on compute threads.
        partition: The part.
        leave: Takes what is ready for other workers; on the loop.
        push: Takes groups that are trained; on the loop.
        waits_for_pull: Whether a tag is complete only when token ``landed`` has come.
    """
    nodes: list[Node] = []
    inputs = ["group", *(f"in-{crossing.number}" for crossing in partition.incoming)]
    before, last = "group", len(partition.segments) - 1
    for number, segment in enumerate(partition.segments):
        ends = number == last and not partition.sums
        sends = bool(segment.sends) or (number == last and bool(partition.partial))
        after = "trained" if ends else f"ran-{number}"
        outputs = (after, f"out-{number}") if sends else (after,)
        step = _step(trainer, number, last=number == last, ends=ends, sends=sends)
        received = tuple(f"in-{crossing}" for crossing in segment.receives)
        nodes.append(Node(f"segment-{number}", step, inputs=(before, *received), outputs=outputs, heavy=True))
        if sends:
            nodes.append(Node(f"leave-{number}", _leaver(trainer, leave), inputs=(f"out-{number}",)))
        before = after
    if partition.sums:
        received = tuple(f"in-{crossing.number}" for crossing in partition.sums)
        nodes.append(
            Node("summed", _summed(trainer), inputs=(before, *received), outputs=("trained",), heavy=True)
        )
    nodes.append(Node("push", push, inputs=("trained",)))
    if waits_for_pull:
        inputs.append("landed")
        nodes.append(Node("land", _complete, inputs=("landed",)))
    return Graph(inputs=tuple(inputs), nodes=tuple(nodes))


def _step(trainer: PartTrainer, number: int, *, last: bool, ends: bool, sends: bool) -> Callable[..., Any]:
    # A run that diverges is told by its loss and its refused pushes; a warning per group says nothing more.
    @np.errstate(over="ignore", invalid="ignore", divide="ignore")
    def step(firing: Firing, before: Any, *received: NDArray[Any]) -> Any:
        context = firing.context
        passage: Passage = trainer.begin(context, before) if number == 0 else before
        parcels = trainer.run(number, context, passage, received)
        if last:
            parcels += trainer.run_last(context, passage)
        after = trainer.finish(context, passage, (), firing.scratch) if ends else passage
        return (after, parcels) if sends else after

    return step


def _leaver(trainer: PartTrainer, leave: Leave) -> Callable[[Firing, list[Parcel]], None]:
    def leaves(firing: Firing, parcels: list[Parcel]) -> None:
        trainer.by_target(parcels, leave)

    return leaves


def _summed(trainer: PartTrainer) -> Callable[..., Trained]:
    @np.errstate(over="ignore", invalid="ignore", divide="ignore")
    def summed(firing: Firing, passage: Passage, *parts: NDArray[Any]) -> Trained:
        return trainer.finish(firing.context, passage, parts, firing.scratch)

    return summed


def _complete(firing: Firing, token: None) -> None:
    """The tag is complete; the engine frees its slot and context."""
