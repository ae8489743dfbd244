"""Pure: what a compute thread does with one image group, and the graph that leads there.

One partition holds the whole model, so there is no message between its layers and the whole way
forward and back is one segment: one job of the compute pool.

    group -> [train, heavy] -> trained -> [push, light]        landed -> [land, light]

A tag is in flight until its nodes have fired. The second branch is there only if one group may be in
flight: the tag then ends when its step's pull has landed, and with a pull at every step training is
serial SGD, exactly. With more groups in flight pulls run in the background.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.client import ImageGroup
from adam_async.dice import Dice
from adam_async.messages import Lease
from adam_async.model.context import Context
from adam_async.model.network import Network
from adam_async.model.rules import new_scratch, plain_step
from adam_async.model_worker.updates import PushBuffer, PushPlan
from adam_async.model_worker.weights import Snapshot, TensorCopy, WorkerWeights
from dataflow import Firing, Graph, Node


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


class ThreadScratch:
    """Scratch memory of one compute thread."""

    def __init__(self, network: Network) -> None:
        largest = max((p.size for p in network.parameters), default=0)
        self.product = np.empty(largest, network.dtype)
        self.rule = new_scratch(network.dtype)


class BufferShelf:
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
        rate: Learning rate of the local step; 0 for none.
        group_images: Most images of a group.
        push_every: Groups of a step; with more than one, groups are added up in step buffers.
        buffers: Buffers made ahead of each kind; more are made while all are on their way.
        dice: What layers that draw, such as dropout, draw with.
    """

    def __init__(
        self,
        *,
        network: Network,
        weights: WorkerWeights,
        plan: PushPlan,
        rate: float,
        group_images: int,
        push_every: int,
        buffers: int,
        dice: Dice,
    ) -> None:
        self._network = network
        self._weights = weights
        self._rate = rate
        self._dice = dice
        self.group_buffers = BufferShelf(lambda: PushBuffer(network, plan, group_images), buffers)
        self.step_buffers = self.group_buffers
        if push_every > 1:
            self.step_buffers = BufferShelf(lambda: PushBuffer(network, plan, plan.images), buffers)

    @property
    def buffers_made(self) -> int:
        """Push buffers that exist, of both kinds."""
        return sum(shelf.made for shelf in {self.group_buffers, self.step_buffers})

    # A run that diverges is told by its loss and its refused pushes; a warning per group says nothing more.
    @np.errstate(over="ignore", invalid="ignore", divide="ignore")
    def train(self, firing: Firing, group: ImageGroup) -> Trained:
        """Forward, backward, gradients, local step."""
        context: Context = firing.context
        read = self._weights.snapshot()
        lease = group.lease
        context.load(group.images, group.labels, dice=self._dice, keys=(lease.epoch, lease.number))
        arrays = read.arrays
        loss = self._network.forward(arrays, context)
        self._network.backward(arrays, context)
        buffer = self.group_buffers.take()
        buffer.fill(context)
        stepped = self._local_step(context, buffer, firing.scratch) if self._rate else {}
        return Trained(lease, loss, buffer, read, stepped)

    def _local_step(
        self, context: Context, buffer: PushBuffer, scratch: ThreadScratch
    ) -> dict[str, TensorCopy]:
        """Apply the group's plain step to what is current now, without locks (AD-14)."""
        stepped = {}
        for parameter in self._network.trained:
            name = parameter.name
            copy = self._weights.current(name)
            delta = buffer.delta(name)
            if delta is None:
                delta = self._multiply(context, name, scratch)
            plain_step(copy.array, delta, rate=self._rate, scratch=scratch.rule)
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
    batch: int = 1,
    jobs: int | None = None,
) -> Graph:
    """The dataflow graph of a replica that is one partition.

    Args:
        train: Forward, backward and gradients; on a compute thread.
        push: Takes what `train` made; on the loop.
        batch: At most this many groups per call of `train`, which with more than one takes lists.
        jobs: At most this many of these calls at once; see `dataflow.Node`.
        waits_for_pull: Whether a tag is complete only when token ``landed`` has come.
    """
    nodes = [
        Node("train", train, inputs=("group",), outputs=("trained",), heavy=True, batch=batch, jobs=jobs),
        Node("push", push, inputs=("trained",)),
    ]
    if not waits_for_pull:
        return Graph(inputs=("group",), nodes=tuple(nodes))
    nodes.append(Node("land", _complete, inputs=("landed",)))
    return Graph(inputs=("group", "landed"), nodes=tuple(nodes))


def _complete(firing: Firing, token: None) -> None:
    """The tag is complete; the engine frees its slot and context."""
