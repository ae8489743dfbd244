"""The baseline: the rate of a run's kernels on the run's number of threads, without roles and messages.

Each thread of a compute pool trains its own weights (in a run in place, all threads share one set) on groups
of real training images. The baseline works in slices of about 50 ms, between which a cancellation takes
effect. The rate is images per second of compute time, times the threads. Two slices per thread are always
queued, so the threads never wait; the time between two slices does not count.

A training rate alone depends on the machine as much as on the program. Training's operations per second,
divided by the rate of matrix products (sgemm) on as many threads, are the share of the machine that training
uses. The matrices have 512 rows and columns: they fit into the caches, at almost a BLAS's best rate.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.dataset import StoredImages
from adam_async.model.context import StepBuffers, StepInput
from adam_async.model.in_place import InPlaceStep, new_rule_state
from adam_async.model.keyed_random import Dice
from adam_async.model.network import Network
from adam_async.model.rules import Rule, RuleState
from dataflow import ComputePool

SIDE = 512
SGEMM_S = 0.3
"""Duration of the products on all threads, in seconds, after one uncounted product per thread."""

OPERATIONS = 2 * SIDE**3
"""Number of operations in one product: two per multiply-add."""


class Factors:
    """One thread's matrices."""

    def __init__(self) -> None:
        self._a: NDArray[np.float32] = np.full((SIDE, SIDE), 0.5, np.float32)
        self._b, self._product = self._a.copy(), np.empty_like(self._a)
        self.multiply()

    def multiply(self) -> int:
        """Compute one product; returns the number of products."""
        np.matmul(self._a, self._b, out=self._product)
        return 1


async def measure_sgemm(threads: int, seconds: float = SGEMM_S) -> float:
    """Multiply on all threads at once; return their total operations per second.

    The BLAS must use one thread, as under the command line; more threads would change the measurement.

    Args:
        seconds: Duration; at least one product is computed.
    """
    contexts = [Factors() for _ in range(threads)]
    async with ComputePool(threads=threads, name="sgemm", contexts=contexts) as pool:
        done = await keep_busy(pool, Factors.multiply, seconds, cost="sgemm")
        return done * OPERATIONS * threads / pool.statistics().busy_s


async def keep_busy(
    pool: ComputePool, job: Callable[..., int], seconds: float, *arguments: Any, cost: str
) -> int:
    """Run a job on every thread of a pool for a time, with the thread's context; return the summed
    results."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds

    async def lane() -> int:
        """Run jobs one after the other until the end; return their sum."""
        total = 0
        while True:
            total += await pool.run(job, *arguments, cost=cost, with_context=True)
            if loop.time() >= end:
                return total

    # Two lanes per thread, so no thread waits for the loop between two jobs.
    async with asyncio.TaskGroup() as group:
        lanes = range(2 * pool.statistics().threads)
        tasks = [group.create_task(lane(), name=f"{cost}-{number}") for number in lanes]
    return sum(task.result() for task in tasks)


SLICE_S = 0.05
"""Intended duration of one job in seconds."""

SECONDS = 3.0
WARM_UP_S = 0.3
"""Default time in seconds of training before the baseline is measured."""

IMAGES = 4096
"""Maximum number of images that a thread repeats: 3 MB for MNIST, more than a core's own caches usually
hold."""


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """The bare kernel loop before and after training, in images per second of all threads together."""

    threads: int
    before: float
    after: float
    sgemm: float
    """Operations per second of single-precision matrix products on as many threads: the mean of measurements
    before and after training."""

    @property
    def images_per_s(self) -> float:
        """Mean of both measurements, because the speed of shared machines changes during a run."""
        return (self.before + self.after) / 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedWeights:
    """Values and rule state of every tensor, and the number of applied steps."""

    values: Mapping[str, NDArray[Any]]
    state: Mapping[str, RuleState]
    steps: NDArray[np.int64]

    @classmethod
    def of(cls, network: Network, rule: Rule) -> Self:
        """Draw the values and allocate the state."""
        return cls(
            values=network.initial_weights(Dice(1)),
            state=new_rule_state(network, rule),
            steps=np.zeros(1, np.int64),
        )


class BareLoop:
    """One thread's context, images, weights and rule state. One thread at a time uses the object.

    Args:
        images: Training images, uint8 (N, C, H, W), N at least one.
        labels: Their classes, (N,).
        weights: Weights and rule state that several threads share; None: separate weights.
    """

    def __init__(
        self,
        network: Network,
        rule: Rule,
        *,
        rate: float,
        images: NDArray[np.uint8],
        labels: NDArray[np.int64],
        group_images: int,
        weights: "TrainedWeights | None" = None,
    ) -> None:
        self._step = InPlaceStep(network, rule)
        self._rate = rate
        self._images = images
        self._labels = labels
        self._group_images = min(group_images, len(labels))
        self._trained = weights or TrainedWeights.of(network, rule)
        self._context = network.context(self._group_images)
        self._dice = Dice(1)
        self._buffers = StepBuffers.of(network.trained, network.dtype)
        self._at = 0

    def train(self, groups: int) -> int:
        """Train a number of groups as a compute thread's job does; return their number of images."""
        trained = self._trained
        inputs = [self._next() for _ in range(groups)]
        for _ in self._step.train_groups(
            trained.values,
            trained.state,
            self._context,
            self._buffers,
            inputs,
            steps=trained.steps,
            dice=self._dice,
        ):
            pass
        return groups * self._group_images

    def _next(self) -> StepInput:
        if self._at + self._group_images > len(self._labels):
            self._at = 0
        start, self._at = self._at, self._at + self._group_images
        return StepInput(
            images=self._images[start : self._at],
            labels=self._labels[start : self._at],
            keys=(start,),
            rate=self._rate,
        )


async def measure(
    network: Network,
    rule: Rule,
    *,
    rate: float,
    images: NDArray[np.uint8] | StoredImages,
    labels: NDArray[np.int64],
    group_images: int,
    threads: int,
    shared: bool = False,
    seconds: float = SECONDS,
    warm_up_s: float = WARM_UP_S,
) -> float:
    """Run the bare kernel loop on separate threads; return the total images per second.

    Args:
        images: Training images, uint8 (N, C, H, W); each thread starts at a different one.
        shared: Whether all threads train the same weights.
        warm_up_s: Duration in seconds of a warm-up before the measurement, and maximum duration of the
            earlier search for a slice's number of groups.

    A cancellation ends the loop after the current slices of the threads.

    Raises:
        ValueError: The number of images is 0.
    """
    if not len(labels):
        raise ValueError("the baseline needs training images; there are none")
    loops = []
    weights = TrainedWeights.of(network, rule) if shared else None
    for number in range(threads):
        start = number * len(labels) // threads
        picked = np.arange(start, start + min(len(labels), IMAGES)) % len(labels)
        loop = BareLoop(
            network,
            rule,
            rate=rate,
            images=images[picked],
            labels=labels[picked],
            group_images=group_images,
            weights=weights,
        )
        loops.append(loop)
    async with ComputePool(threads=threads, name="baseline", contexts=loops) as pool:
        groups = await _slice_groups(pool, warm_up_s)
        await keep_busy(pool, BareLoop.train, warm_up_s, groups, cost="baseline")
        busy_before = pool.statistics().busy_s
        trained = await keep_busy(pool, BareLoop.train, seconds, groups, cost="baseline")
        return trained * threads / (pool.statistics().busy_s - busy_before)


async def _slice_groups(pool: ComputePool, at_most_s: float) -> int:
    """Return the number of groups in a slice: double it until a job takes half of `SLICE_S`, or the time is
    over."""
    groups, spent_s = 1, 0.0
    while True:
        before = pool.statistics().busy_s
        await pool.run(BareLoop.train, groups, cost="baseline", with_context=True)
        took_s = pool.statistics().busy_s - before
        spent_s += took_s
        if took_s >= SLICE_S / 2 or spent_s >= at_most_s:
            return groups
        groups *= 2
