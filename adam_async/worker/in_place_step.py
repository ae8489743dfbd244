"""Pure: the training of one image group on a compute thread, on the servers' memory.

The zero-copy path of one process (AD-11, AD-14): forward and backward pass read the shards in their memory,
and the run's own rule applies each finite gradient there, without locks. The worker pushes only a report of
the step.

Staleness is the number of steps that other threads applied to the memory between the group's first read and
the end of its own step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from adam_async.data_server.client import ImageGroup
from adam_async.messages import Lease
from adam_async.model import InPlaceStep, StepBuffers
from adam_async.model.context import Context
from adam_async.model.keyed_random import Dice
from adam_async.model.network import Network
from adam_async.model.rules import Rule
from adam_async.model.step import StepInput
from adam_async.parameter_server.storage import ShardStorage
from adam_async.run.learning_rate import Schedule
from dataflow import Firing


@dataclass(frozen=True, slots=True, eq=False)
class TrainedInPlace:
    """Outcome of one group."""

    lease: Lease
    loss: float
    """Mean loss over the group's images."""
    staleness: int
    refused: tuple[str, ...]
    """Tensors whose gradient was not finite and therefore not applied."""


@dataclass(frozen=True, slots=True, eq=False)
class ThreadMemory:
    """Training memory of one compute thread, which the thread's consecutive groups share."""

    context: Context
    buffers: StepBuffers


class InPlaceTrainer:
    """Trains groups on the storage of a run; `train` runs on compute threads, several at once.

    Args:
        network: The model.
        rule: The run's update rule.
        storage: The memory of the run's servers.
        schedule: Learning rate of a group.
        group_images: Maximum number of images of a group.
        dice: Random numbers of layers such as dropout.
        clock: Clock for the times of groups, in seconds; None measures no times.
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

    def new_memory(self) -> "ThreadMemory":
        """Make the training memory of one compute thread."""
        return ThreadMemory(self._network.context(self._group_images), self._step.new_scratch())

    # The loss and the refused steps show a diverging run; a warning per group would not add information.
    @np.errstate(over="ignore", invalid="ignore", divide="ignore")
    def train(self, firings: Sequence[Firing], groups: Sequence[ImageGroup]) -> list[TrainedInPlace]:
        """Run forward, backward and rule in place, group by group."""
        memory: ThreadMemory = firings[0].scratch
        clock = self._clock
        if clock is None:
            return self._train_groups(memory, groups)
        trained = []
        for firing, group in zip(firings, groups, strict=True):
            firing.started = clock()
            trained += self._train_groups(memory, (group,))
            firing.finished = clock()
        return trained

    def _train_groups(self, memory: "ThreadMemory", groups: Sequence[ImageGroup]) -> list[TrainedInPlace]:
        storage = self._storage
        outcomes = self._step.train_groups(
            storage.weights,
            storage.states,
            memory.context,
            memory.buffers,
            [self._input(group) for group in groups],
            steps=storage.steps,
            dice=self._dice,
        )
        return [
            TrainedInPlace(group.lease, outcome.loss, outcome.staleness, outcome.refused)
            for group, outcome in zip(groups, outcomes, strict=True)
        ]

    def _input(self, group: ImageGroup) -> StepInput:
        lease = group.lease
        return StepInput(
            images=group.images,
            labels=group.labels,
            keys=(lease.epoch, lease.number),
            rate=self._schedule.rate(lease.progress) if self._rate is None else self._rate,
        )
