"""The bare kernel loop: forward, backward, all gradients and the rule, on its own weights.

    python -m benchmarks.kernels --json kernels.json [--kernels numpy numba] [--layers]

Every thread trains its own copy of the weights, like worker replicas without a server. `share` compares the
operations of training with those of the BLAS in products of 512 x 512, on as many threads in the same round.
With `--layers` the rows are microseconds per group of each layer's forward pass and of its backward pass,
which has the error gradient of the input, if it is needed, and the gradients of all tensors. On a machine
with AVX-512, as if it had none:

    ADAM_VECTORS=avx2 OPENBLAS_CORETYPE=Haswell python -m benchmarks.kernels
"""

import asyncio
import statistics
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np

from adam_async.model import InPlaceStep, Network, Rule, Sgd, named_model, new_rule_state
from adam_async.model.keyed_random import Dice
from adam_async.report.baseline import measure_sgemm
from benchmarks.harness import Option, Row, measured, run, turns

RATE = 0.01
POOL_IMAGES = 1024
"""Number of distinct images in a thread's cycle: too many for the cache, as in training."""
PASS_S = 0.02
"""Length of one measurement of one pass of one layer, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the result."""

    model: str
    threads: int
    group: int
    rule: Rule
    kernels: str = "numpy"

    @property
    def name(self) -> str:
        """Name of the row."""
        momentum = (
            f", momentum {self.rule.momentum}" if isinstance(self.rule, Sgd) and self.rule.momentum else ""
        )
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{self.model}, {threads}, group {self.group}, {self.rule.name}{momentum}, {self.kernels}"


class Loop(threading.Thread):
    """One thread that trains until its time is over."""

    def __init__(self, case: Case, number: int, start_line: threading.Barrier, seconds: float) -> None:
        super().__init__(name=f"kernels-{number}")
        self._case, self._start_line, self._seconds = case, start_line, seconds
        network = Network(named_model(case.model), kernels=case.kernels)
        dice = Dice(number)
        self._weights = network.initial_weights(dice)
        self._state = new_rule_state(network, case.rule)
        self._context = network.context(case.group)
        self._step = InPlaceStep(network, case.rule)
        self._scratch = self._step.new_scratch()
        shape = (POOL_IMAGES, *network.spec.input_shape)
        drawn = dice.bits("images", count=int(np.prod(shape)))
        self._images = (drawn >> np.uint64(56)).astype(np.uint8).reshape(shape)
        self._labels = dice.permutation("labels", POOL_IMAGES) % 10
        self.images_per_s = 0.0

    def _train(self, groups: int) -> None:
        for number in range(groups):
            start = number * self._case.group % (POOL_IMAGES - self._case.group + 1)
            stop = start + self._case.group
            self._context.load(self._images[start:stop], self._labels[start:stop])
            self._step.train(self._weights, self._state, self._context, self._scratch, rate=RATE)

    def run(self) -> None:
        """Warm up, wait for the others, train for the given time."""
        self._train(10)
        self._start_line.wait(timeout=60.0)
        groups, began = 0, time.perf_counter()
        while (spent := time.perf_counter() - began) < self._seconds:
            self._train(10)
            groups += 10
        self.images_per_s = groups * self._case.group / spent


def images_per_s(case: Case, seconds: float) -> float:
    """Images per second of one run of a case, all threads together."""
    start_line = threading.Barrier(case.threads)
    loops = [Loop(case, number, start_line, seconds) for number in range(case.threads)]
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join()
    return sum(loop.images_per_s for loop in loops)


# --- layer by layer ------------------------------------------------------------------------------


def microseconds(step: Callable[[], object]) -> float:
    """Time of one step, as the mean of `PASS_S`."""
    step()
    count, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < PASS_S:
        step()
        count += 1
    return 1e6 * spent / count


def passes(network: Network, group: int) -> dict[str, Callable[[], None]]:
    """Return each layer's forward pass and backward pass, by name."""
    context, weights = network.context(group), network.initial_weights(Dice(1))
    shape = (group, *network.spec.input_shape)
    images = Dice(1).normal("images", count=int(np.prod(shape))).reshape(shape)
    context.load(images, Dice(1).permutation("labels", group) % 10)
    network.forward(weights, context)
    network.backward(weights, context)
    gradients = {p.name: np.empty(p.shape, network.dtype) for p in network.parameters}

    def forward(number: int) -> None:
        network.forward_layers(weights, context, range(number, number + 1))

    def back(number: int) -> None:
        network.backward_layers(weights, context, range(number, number + 1))
        for parameter in network.layers[number].parameters:
            network.deltas(context, {parameter.name: gradients[parameter.name]})

    found: dict[str, Callable[[], None]] = {}
    for number, layer in enumerate(network.layers):
        found[f"{layer.name} forward"] = partial(forward, number)
        found[f"{layer.name} back"] = partial(back, number)
    return found


def layers(options: Namespace) -> Iterator[Row]:
    """Yield a row for each pass of each layer."""
    found: dict[str, list[float]] = {}
    for group, kernels in turns(product(options.groups, options.kernels), options.rounds):
        for name, step in passes(Network(named_model(options.model), kernels=kernels), group).items():
            case = f"{options.model}, {name}, group {group}, {kernels}"
            found.setdefault(case, []).append(microseconds(step))
    for case, values in found.items():
        yield measured(case, values, "us/group")


def measure(options: Namespace) -> Iterator[Row]:
    """Yield the rows of whole networks, or of their layers."""
    if options.layers:
        yield from layers(options)
        return
    cases = [
        Case(model=options.model, threads=threads, group=group, rule=Sgd(momentum=momentum), kernels=kernels)
        for momentum, group, threads, kernels in product(
            options.momentum, options.groups, options.threads, options.kernels
        )
    ]
    operations = Network(named_model(options.model)).operations
    found: dict[Case, list[tuple[float, float]]] = {case: [] for case in cases}
    for case in turns(cases, options.rounds):
        rate, sgemm = images_per_s(case, options.seconds), asyncio.run(measure_sgemm(case.threads))
        found[case].append((rate, operations * rate / sgemm))
    for case, each in found.items():
        share = round(statistics.median(share for _, share in each), 3)
        yield measured(case.name, [rate for rate, _ in each], "images/s", share=share)


if __name__ == "__main__":
    run(
        __doc__,
        measure,
        model="mnist-adam",
        momentum=Option([0.0, 0.9], "momentum of plain SGD"),
        rounds=5,
        groups=Option([1, 16, 64], "images per group"),
        threads=[1, 2],
        seconds=Option(1.0, "seconds per case and round"),
        kernels=Option(["numpy"], choices=["numpy", "numba"]),
        layers=Option(False, "measure layer by layer"),
    )
