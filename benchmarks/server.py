"""Rate at which a parameter server applies pushes: deltas and factors, push by push and in batches.

    python -m benchmarks.server --json server.json [--rounds 9] [--images 128]

A push is processed as at its arrival from a link: its tensors are checked and scanned as in the server, then
the rule is applied to one shard after the other, while a server groups the shards of a message. The link is
left out, too, which benchmarks.push_pull measures. Gradients are those of a real group. Pushes cycle through
more memory than the caches hold, up to `--push-mb`.

The peers alternate with ours, without any overhead around them:

    factors   the bare matrix product of the same shapes, and one pass over the weights
    deltas    the memory bandwidth of this run: out = a + b on three arrays far larger than the caches; and
              the bare pass, one subtraction from the same weights of the same gradients
    queues    the same pushes without a queue, one after the other

Seconds are processor time of this thread, so other programs on its core count only by their effect on the
caches. A batch is several pushes in the queue, and its row counts all of them; rows also have pushes per
second, and the longest iteration of the server's loop in ms. The bytes of a delta are the necessary ones:
gradient read, weights and momentum read and written. The operations of factors are those of the products.
"""

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.messages import Push
from adam_async.model import KERNELS, ModelSpec, Network, Sgd, mlp, named_model
from adam_async.model.kernels import make_batches
from adam_async.model.keyed_random import Dice
from adam_async.parameter_server.apply import Applier
from adam_async.parameter_server.gradients import read_gradients
from adam_async.parameter_server.service import TURN_WORK
from adam_async.parameter_server.shard import Shard
from adam_async.parameter_server.storage import ShardStorage
from adam_async.run.partition import table_of
from adam_async.run.store_record import NUM_BUCKETS
from adam_async.worker.push_plan import Protocol, PushBuffer, PushMessage, plan_pushes
from benchmarks.harness import Option, Row, compared, interleaved, run

MODELS: dict[str, Callable[[], ModelSpec]] = {
    "fc 400x400": lambda: mlp((400, 400), input_shape=(1, 20, 20), name="fc 400x400"),
    "fc 2048x2048": lambda: mlp((2048, 2048), input_shape=(1, 32, 64), name="fc 2048x2048"),
    "mnist-adam": lambda: named_model("mnist-adam"),
}
RATE = 1e-4
SLICE_S = 0.1
"""Seconds for which one side works before the other."""
STREAM_VALUES = 24 << 20
"""Number of values of each of the three arrays for the memory bandwidth: 96 MiB each."""
MOST_BUFFERS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case, with one to three rows of the result."""

    model: str
    protocol: str
    batch: int
    momentum: float

    @property
    def name(self) -> str:
        rule = f", momentum {self.momentum}" if self.momentum else ""
        queued = f", {self.batch} queued" if self.batch > 1 else ""
        return f"{self.model}, {self.protocol}{rule}{queued}"


class Server:
    """The memory of one case, and the work of one batch on it: ours and bare."""

    def __init__(self, case: Case, *, images: int, push_bytes: int, kernels: str) -> None:
        self.case = case
        network = Network(MODELS[case.model]())
        self._network, self._images = network, images
        table = table_of(network)
        self._table = table.shards
        rule = Sgd(momentum=case.momentum)
        storage = ShardStorage(network.parameters, rule)
        self._weights = storage.weights
        initial = network.initial_weights(Dice(1))
        for name, values in initial.items():
            self._weights[name][...] = values
        wanted: Protocol = "delta" if case.protocol == "deltas" else "factors"
        plan = plan_pushes(network, table, ["ps-1"] * NUM_BUCKETS, images=images, wanted=wanted)
        self._plan = plan
        shards = {
            spec.id: Shard(spec=spec, values=storage.values(spec), rule_state=storage.rule_state(spec))
            for spec in table.shards
        }
        self._messages = [
            (index, _push(message), [shards[spec.id] for spec in message.specs])
            for index, message in enumerate(plan.messages)
        ]
        batches = make_batches(rule, network.dtype, kernels)
        self._applier = Applier(rule, table.shards, network.dtype, batches=batches)
        self._buffers = self._filled(initial, push_bytes)
        self._product = np.empty(max(p.size for p in network.parameters), network.dtype)
        self._at = 0
        self.bare_bytes = 4 * network.num_parameters * 3
        self.moved_bytes = 4 * network.num_parameters * (5 if case.momentum else 3)
        factored = [name for name, choice in plan.protocols.items() if choice.chosen == "factors"]
        self.operations = sum(2 * images * self._weights[name].size for name in factored)

    def _filled(self, weights: dict[str, NDArray[Any]], push_bytes: int) -> list[PushBuffer]:
        """Enough pushes that a cycle through them leaves the caches, each with the gradient of a group."""
        context = self._network.context(self._images)
        shape = (self._images, *self._network.spec.input_shape)
        buffers: list[PushBuffer] = []
        held = 0
        while len(buffers) < 2 * self.case.batch or (held < push_bytes and len(buffers) < MOST_BUFFERS):
            dice = Dice(len(buffers))
            images = (dice.bits("images", count=int(np.prod(shape))) >> np.uint64(56)).astype(np.uint8)
            context.load(images.reshape(shape), dice.permutation("labels", self._images) % 10)
            self._network.forward(weights, context)
            self._network.backward(weights, context)
            buffer = PushBuffer(self._network, self._plan, self._images)
            buffer.fill(context)
            buffers.append(buffer)
            held += sum(t.nbytes for index, _, _ in self._messages for t in buffer.tensors(index))
        return buffers

    def _next(self, count: int) -> list[PushBuffer]:
        found = [self._buffers[(self._at + number) % len(self._buffers)] for number in range(count)]
        self._at += count
        return found

    def apply(self) -> int:
        """Take a batch as the server does. Returns the pushes of the batch."""
        return self._take(self.case.batch)

    def apply_one(self) -> int:
        """Take a single push as the server does."""
        return self._take(1)

    def _take(self, count: int) -> int:
        queued = self._next(count)
        for index, push, shards in self._messages:
            gradients = [
                read_gradients(push, buffer.tensors(index), self._table, self._network.dtype)
                for buffer in queued
            ]
            self._applier.apply_pushes(shards, gradients)
        return len(queued)

    def longest_turn(self) -> float:
        """Apply a batch turn by turn, as the server's loop does. Returns the longest turn, in seconds."""
        queued = self._next(self.case.batch)
        longest = 0.0
        for index, push, shards in self._messages:
            work = self._applier.work_on(
                shards,
                [
                    read_gradients(push, buffer.tensors(index), self._table, self._network.dtype)
                    for buffer in queued
                ],
            )
            while not work.done:
                began = time.thread_time()
                work.run(TURN_WORK)
                longest = max(longest, time.thread_time() - began)
        return longest

    def bare(self) -> int:
        """Multiply the factors of one push and subtract the product from the weights; subtract deltas."""
        (buffer,) = self._next(1)
        for (index, _, _), message in zip(self._messages, self._plan.messages, strict=True):
            tensors = iter(buffer.tensors(index))
            for part in message.parts:
                if part.factors:
                    self._bare_product(part.shards[0].tensor, next(tensors), next(tensors))
                    continue
                flat, at = next(tensors), 0
                for spec in part.shards:
                    values = self._weights[spec.tensor].reshape(-1)[spec.start : spec.stop]
                    np.subtract(values, flat[at : at + spec.size], out=values)
                    at += spec.size
        return 1

    def _bare_product(self, tensor: str, x_IK: NDArray[Any], errors_RK: NDArray[Any]) -> None:
        weights = self._weights[tensor]
        product = self._product[: weights.size].reshape(weights.shape)
        np.matmul(errors_RK, x_IK.T, out=product)
        np.subtract(weights, product, out=weights)


def _push(message: PushMessage) -> Push:
    return Push(
        store="run",
        session=1,
        incarnation=1,
        replica=0,
        clock=1,
        weight=1,
        rate=RATE,
        generation=1,
        parts=message.wire_parts,
        shards=message.shards,
        numbers=1,
        versions=0,
        own_applied=0,
    )


class Stream:
    """The memory bandwidth of one thread."""

    def __init__(self) -> None:
        self._a, self._b = np.ones(STREAM_VALUES, np.float32), np.ones(STREAM_VALUES, np.float32)
        self._out = np.ones(STREAM_VALUES, np.float32)
        self.moved_bytes = 3 * self._out.nbytes

    def add(self) -> int:
        """Two arrays read, one written."""
        np.add(self._a, self._b, out=self._out)
        return 1


def per_second(work: Callable[[], int]) -> float:
    """Repeat the work for a slice of this thread's time; returns the sum of its results per second."""
    done, began = 0, time.thread_time()
    while (spent := time.thread_time() - began) < SLICE_S:
        done += work()
    return done / spent


def rows_of(server: Server, stream: Stream, rounds: int) -> Iterator[Row]:
    """Measure one case and its peers in turn."""
    works = {"ours": server.apply, "push by push": server.apply_one, "bare": server.bare, "add": stream.add}
    sides: dict[str, Callable[[], float]] = {name: partial(per_second, work) for name, work in works.items()}
    for work in works.values():
        work()
    found = interleaved({**sides, "turn": server.longest_turn}, rounds)
    case = server.case
    if case.protocol == "factors":
        scale, unit = server.operations / 1e9, "GFLOP/s"
        scales = {"bare product and one pass": ("bare", scale)}
    else:
        scale, unit = server.moved_bytes / 1e9, "GB/s"
        scales = {
            "memory bandwidth": ("add", stream.moved_bytes / 1e9),
            "bare pass": ("bare", server.bare_bytes / 1e9),
        }
    if case.batch > 1:
        scales["push by push"] = ("push by push", scale)
    for name, (side, by) in scales.items():
        yield compared(
            f"{case.name} / {name}",
            [rate * scale for rate in found["ours"]],
            [rate * by for rate in found[side]],
            unit,
            pushes_per_s=round(statistics.median(found["ours"]), 1),
            longest_turn_ms=round(max(found["turn"]) * 1e3, 2),
        )


def measure(options: Namespace) -> Iterator[Row]:
    """Yield the rows of all cases."""
    stream = Stream()
    for model, protocol, momentum, batch in product(
        options.models, options.protocols, options.momentum, options.batches
    ):
        case = Case(model=model, protocol=protocol, batch=batch, momentum=momentum)
        push_bytes = options.push_mb << 20
        server = Server(case, images=options.images, push_bytes=push_bytes, kernels=options.kernels)
        yield from rows_of(server, stream, options.rounds)


if __name__ == "__main__":
    run(
        __doc__,
        measure,
        models=Option(list(MODELS), choices=list(MODELS)),
        protocols=Option(["deltas", "factors"], choices=["deltas", "factors"]),
        batches=Option([1, 4], "pushes in the queue"),
        momentum=[0.0, 0.9],
        images=Option(128, "images of a push, the K of its factors"),
        kernels=Option("auto", "kernels of the rules", choices=KERNELS),
        push_mb=Option(128, "memory of the cycle of pushes, in MB"),
        rounds=9,
    )
