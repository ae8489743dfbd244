"""Pure: the training of a group in one partition of a model, and the dataflow graph around it.

A group passes through a partition in a chain of segments (`adam_async/model/partition/network.py`). A segment
fires for a group once the earlier segment has run and all blocks that the segment reads have arrived, in any
order. The loop then sends the blocks of the segment that other workers read:

    group -> [segment-0] -> [segment-1] -> ... -> [segment-n] -> (summed) -> trained -> [push, light]
              |        ^ in-3                 ^ in-7, in-9        ^ in-12
              +-> [leave-0, light]             +-> ...

The last segment fills the push buffer. If other workers compute parts of the same weights' gradients,
`summed` fills the buffer instead. The worker waits for these parts, and adds them in worker order.
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
from adam_async.run.config import Config
from adam_async.worker.puller import Snapshot, WorkerWeights
from adam_async.worker.push_plan import PushBuffer, PushPlan
from adam_async.worker.reliable_stream import Parcel
from adam_async.worker.training import Admitted, GroupTrainer, ThreadScratch, Trained
from dataflow import Firing, Graph, Node

SendBlock = Callable[[int, Parcel], None]
"""Function that sends a block to the worker of a partition, on the loop."""


@dataclass(slots=True, eq=False)
class Passage:
    """A group in transit through the partition."""

    admitted: Admitted
    read: Snapshot
    arrays: Mapping[str, NDArray[Any]]
    loss: float | None = None
    """Mean loss over the group's images, if this partition computes the loss."""


class WirePool:
    """Pool of send buffers for one crossing. Lending and returning are atomic, from any thread."""

    def __init__(self, partition: Partition, crossing: Crossing, images: int) -> None:
        self._partition = partition
        self._crossing = crossing
        self._size = int(np.prod(partition.wire_shape(crossing, images)))
        self._free: deque[NDArray[Any]] = deque()
        self.made = 0

    def take(self, images: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Take a free buffer; return it flat, and as the view for a group with this many images."""
        try:
            # Without a lock: two threads may find the pool empty at once, and each makes a buffer.
            flat = self._free.pop()
        except IndexError:
            self.made += 1
            flat = np.zeros(self._size, self._partition.network.dtype)
        shape = self._partition.wire_shape(self._crossing, images)
        return flat, flat[: int(np.prod(shape))].reshape(shape)

    def give_back(self, flat: NDArray[Any], _: NDArray[Any]) -> None:
        """Return a buffer that no link and no other worker reads."""
        self._free.append(flat)


class PartitionTrainer(GroupTrainer):
    """Trains one worker's partition; several compute threads call its methods at once.

    Args:
        partition: The partition.
        config: The run.
        weights: The worker's copy.
        plan: Messages and protocols of the gradients.
        buffers: Number of push buffers made ahead.
    """

    def __init__(
        self, partition: Partition, config: Config, *, weights: WorkerWeights, plan: PushPlan, buffers: int
    ) -> None:
        super().__init__(partition.network, config, weights=weights, plan=plan, buffers=buffers)
        self._partition = partition
        self._buffer_pools = {
            crossing.number: WirePool(partition, crossing, config.images_per_group)
            for crossing in partition.outgoing
        }
        self.targets = {crossing.number: crossing.target for crossing in partition.outgoing}
        """Partition that receives each outgoing crossing, by the number of the crossing."""
        rows = partition.input_rows
        # The data server cuts rows of images. Images that the model reads flat arrive whole.
        self._features = slice(rows.start, rows.stop) if len(partition.network.input_shape) == 1 else None
        self._reads_images = len(rows) > 0
        self._loss_at = next((n for n, s in enumerate(partition.segments) if s.back), -1)

    @property
    def wires_made(self) -> int:
        """Number of send buffers."""
        return sum(buffer_pool.made for buffer_pool in self._buffer_pools.values())

    def begin(self, context: Context, group: ImageGroup | Admitted) -> Passage:
        """Load a group, and take the snapshot that it reads."""
        # In bsp all groups of a step read the step's snapshot; otherwise each reads the newest copy.
        admitted = group if isinstance(group, Admitted) else Admitted(group)
        images = admitted.group
        # One snapshot for all segments: all segments of a group must read the same values.
        read = self._weights.snapshot() if admitted.read is None else admitted.read
        lease = images.lease
        # To a partition without input rows, the data server sends only labels.
        pictures = images.images if self._reads_images else None
        if pictures is not None and self._features is not None:
            pictures = pictures.reshape(len(pictures), -1)[:, self._features]
        context.load(pictures, images.labels, dice=self._dice, keys=(lease.epoch, lease.number))
        return Passage(admitted, read, read.arrays)

    def run(self, number: int, context: Context, passage: Passage, received: Sequence[Any]) -> list[Parcel]:
        """Run one segment with the blocks that it receives; return its blocks for other workers."""
        segment = self._partition.segments[number]
        parcels = [self._parcel(crossing, passage) for crossing in segment.sends]
        # Segments compute between wires: received blocks, and send buffers, without a copy in between.
        wires = [*received, *(parcel.tensor for parcel in parcels)]
        self._partition.connect(context, segment, wires)
        self.compute(number, context, passage)
        self._partition.send_errors(context, segment)
        # The memory of the wires is lent: links read the sent blocks, and the received ones return to a pool.
        self._partition.disconnect(context, segment)
        return parcels

    def compute(self, number: int, context: Context, passage: Passage) -> None:
        """Run one segment whose wires are connected."""
        partition = self._partition
        partition.compute(passage.arrays, context, partition.segments[number])
        # If the loss layer is in this partition, the first segment with backward layers begins at that layer.
        if number == self._loss_at and partition.has_loss:
            passage.loss = partition.network.loss(context)

    def run_last(self, context: Context, passage: Passage) -> list[Parcel]:
        """Write partial weight gradients for other workers, after the last segment."""
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
        scratch: MutableMapping["PartitionTrainer", ThreadScratch],
    ) -> Trained:
        """Fill the push buffer, add the partial gradients of other workers, and make the local step.

        Args:
            context: Context of the group.
            passage: Passage of the group.
            parts: Partial weight gradients of other workers, in the order of `Partition.sums`.
            scratch: Scratch memory of the thread.
        """
        lease = passage.admitted.group.lease
        buffer = self.group_buffers.take()
        buffer.fill(context)
        # A partial gradient is added to a delta, so a tensor with parts from other workers has no factors.
        if parts:
            self._add_up(buffer, parts)
        # A group's gradient is a mean. Servers average over images in bsp, so a short group has less weight.
        if self._by_images and buffer.images < self._group_images:
            buffer.scale_all(buffer.images / self._group_images)
        stepped = {}
        if self._local:
            stepped = self._local_step(context, buffer, _scratch(scratch, self), lease, {})
        admitted = passage.admitted
        return Trained(lease, passage.loss, buffer, passage.read, stepped, admitted.step, admitted.index)

    def _add_up(self, buffer: PushBuffer, parts: Sequence[NDArray[Any]]) -> None:
        """Add partial gradients in the order of the workers: ((first + second) + own) + fourth."""
        # Floating-point sums depend on their order. A fixed order gives the same bits in every run.
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
        lease = passage.admitted.group.lease
        buffer_pool = self._buffer_pools[crossing]
        # The last holder returns the buffer: the link, or the stream that may have to send it again.
        flat, tensor = buffer_pool.take(lease.images)
        block = Block(crossing, lease.epoch, lease.number, lease.attempt)
        return Parcel(block, tensor, partial(buffer_pool.give_back, flat))


def _scratch(
    scratch: MutableMapping[PartitionTrainer, ThreadScratch], trainer: PartitionTrainer
) -> ThreadScratch:
    """Find the thread's scratch memory for a partition: a thread may work for several partitions."""
    found = scratch.get(trainer)
    if found is None:
        # The dictionary has weak keys: the memory is freed with the run.
        found = scratch[trainer] = ThreadScratch(trainer.network)
    return found


def partition_graph(
    trainer: PartitionTrainer,
    partition: Partition,
    send_block: SendBlock,
    push: Callable[[Firing, Trained], None],
    *,
    waits_for_pull: bool,
) -> Graph:
    """Return the dataflow graph of one partition of a replica.

    Args:
        trainer: Trainer whose methods run on compute threads.
        partition: The partition.
        send_block: Sends blocks to other workers; on the loop.
        push: Takes trained groups; on the loop.
        waits_for_pull: Whether a tag is complete only with token ``landed``.
    """
    nodes: list[Node] = []
    inputs = ["group", *(f"in-{crossing.number}" for crossing in partition.incoming)]
    before, last = "group", len(partition.segments) - 1
    for number, segment in enumerate(partition.segments):
        # The last segment fills the push buffer, unless the buffer needs partial gradients of other workers.
        ends = number == last and not partition.sums
        sends = bool(segment.sends) or (number == last and bool(partition.partial))
        after = "trained" if ends else f"ran-{number}"
        outputs = (after, f"out-{number}") if sends else (after,)
        step = _step(trainer, number, last=number == last, ends=ends, sends=sends)
        received = tuple(f"in-{crossing}" for crossing in segment.receives)
        nodes.append(Node(f"segment-{number}", step, inputs=(before, *received), outputs=outputs, heavy=True))
        if sends:
            # A light node: links belong to the loop, and blocks leave before the next segment ends.
            nodes.append(Node(f"leave-{number}", _leaver(trainer, send_block), inputs=(f"out-{number}",)))
        before = after
    if partition.sums:
        # Partial gradients arrive in any order. The node fires when all parts have arrived, and sorts them by
        # worker.
        received = tuple(f"in-{crossing.number}" for crossing in partition.sums)
        nodes.append(
            Node("summed", _summed(trainer), inputs=(before, *received), outputs=("trained",), heavy=True)
        )
    nodes.append(Node("push", push, inputs=("trained",)))
    if waits_for_pull:
        inputs.append("landed")
    return Graph(inputs=tuple(inputs), nodes=tuple(nodes))


def _step(
    trainer: PartitionTrainer, number: int, *, last: bool, ends: bool, sends: bool
) -> Callable[..., Any]:
    # The loss and the refused pushes show a diverging run; a warning per group would not add information.
    @np.errstate(over="ignore", invalid="ignore", divide="ignore")
    def step(firing: Firing, before: Any, *received: NDArray[Any]) -> Any:
        """Run one segment; return the group's passage, or at the end its result, and the blocks to send."""
        context = firing.context
        passage: Passage = trainer.begin(context, before) if number == 0 else before
        parcels = trainer.run(number, context, passage, received)
        if last:
            parcels += trainer.run_last(context, passage)
        after = trainer.finish(context, passage, (), firing.scratch) if ends else passage
        return (after, parcels) if sends else after

    return step


def _leaver(trainer: PartitionTrainer, send_block: SendBlock) -> Callable[[Firing, list[Parcel]], None]:
    targets = trainer.targets

    def leave(firing: Firing, parcels: list[Parcel]) -> None:
        for parcel in parcels:
            send_block(targets[parcel.block.crossing], parcel)

    return leave


def _summed(trainer: PartitionTrainer) -> Callable[..., Trained]:
    @np.errstate(over="ignore", invalid="ignore", divide="ignore")
    def summed(firing: Firing, passage: Passage, *parts: NDArray[Any]) -> Trained:
        return trainer.finish(firing.context, passage, parts, firing.scratch)

    return summed
