"""L-BFGS beside Downpour SGD with Adagrad and with a fixed rate: loss by seconds and by bytes (DistBelief).

    python -m benchmarks.downpour --data-dir MNIST --json FILE [--images 4000] [--seconds 8]

All sides train one model on the same images, with two workers as threads of this process and two server
processes. A worker of Downpour pulls with each push of 20 images. The clock stops while losses are measured.
Bytes are those of the clients' links to the servers; the record of L-BFGS, 10 KB a move, is apart.

The rates come from a search over images held back from training, by their loss after `--epochs`. Rows:
the search; the best rate of Adagrad beside the best fixed one; both at these rates over paired seeds; points
(seconds, MB, training loss, test accuracy) of each side; the losses at shares of the time and of the bytes.
"""

import asyncio
import statistics
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async import LBFGS, Adagrad, Disk, ImageLoss, ParameterStore, Sgd, load_dataset
from adam_async.lbfgs.optimizer import Iteration
from adam_async.model import Network
from adam_async.model.keyed_random import Dice
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.model.spec import ModelSpec
from adam_async.run.model_selection import choose_model
from benchmarks.harness import Option, Row, compared, role, rounded, run
from dataflow import ComputePool

WORKERS, PIECE, PUSH = 2, 250, 20
"""Workers of each side; images of a piece of L-BFGS, and of a push of Downpour."""

POINTS = 4
"""Number of points of an epoch of Downpour."""

RULES: dict[str, type[Adagrad | Sgd]] = {"adagrad": Adagrad, "sgd": Sgd}
Set = tuple[NDArray[Any], NDArray[Any]]
Point = tuple[float, float, float, float]
"""Seconds, MB, training loss, test accuracy."""


class Side:
    """One training from its first values, with its points."""

    def __init__(self, where: str, spec: ModelSpec, train: Set, test: Set, seed: int) -> None:
        self.where = where
        self.network = Network(spec, np.float32)
        self.first = self.network.initial_weights(Dice(seed))
        self.images, self.labels = train
        self.test = test
        self.whole = ImageLoss(self.network, *train, batch=PIECE)
        self.part = ImageLoss(self.network, *train, batch=PUSH)
        self.points: list[Point] = []
        self.stores: list[ParameterStore] = []
        self.seconds = 0.0
        self.begin = 0.0

    async def open(self, stack: AsyncExitStack, name: str, **options: Any) -> ParameterStore:
        """Open the store of this side for one more client."""
        opening = ParameterStore.open(self.where, self.first, name=name, **options)
        self.stores.append(await stack.enter_async_context(opening))
        return self.stores[-1]

    def start(self) -> None:
        """Start the clock."""
        self.begin = asyncio.get_running_loop().time()

    def stop(self) -> None:
        """Stop the clock."""
        self.seconds += asyncio.get_running_loop().time() - self.begin

    def has_time(self, seconds: float) -> Callable[[int], bool]:
        """Return a function that returns whether the clock is below some seconds."""
        return lambda _: self.seconds < seconds

    def add(self, values: Any) -> None:
        """Add the point of some values."""
        loss = self.loss(values, self.whole)
        right = np.mean(self.network.predict(values, self.test[0]) == self.test[1])
        self.points.append((self.seconds, self.bytes() / 1e6, loss, float(right)))

    def loss(self, values: Any, of: ImageLoss) -> float:
        """Return the mean loss of values."""
        return sum([of(values, batch)[0] for batch in of.batches])

    def bytes(self) -> int:
        """Return the bytes of all clients' links to servers, both ways."""
        traffics = [store.link.endpoint.traffic for store in self.stores]
        links = [link for traffic in traffics if traffic is not None for link in traffic.links]
        rows = [row for link in links if link.peer.role == "ps" for row in link.statistics().by_type.values()]
        return sum(
            [
                each.frame_bytes_in + each.frame_bytes_out + each.payload_bytes_in + each.payload_bytes_out
                for each in rows
            ]
        )


async def downpour(side: Side, rule: str, rate: float, seed: int, goes_on: Callable[[int], bool]) -> Any:
    """Train by Downpour while `goes_on(epochs)`, which is asked after each epoch; returns the values."""
    dice, batches, scale = np.random.default_rng(seed), side.part.batches, len(side.images) / PUSH
    async with AsyncExitStack() as stack:
        options = {"rule": RULES[rule](rate=rate)}
        stores = [await side.open(stack, "downpour", **options) for _ in range(WORKERS)]
        pools = [
            await stack.enter_async_context(ComputePool(threads=1, name=f"downpour-{number}"))
            for number in range(WORKERS)
        ]

        def work(values: Any, batch: Any) -> dict[str, NDArray[Any]]:
            _, gradient = side.part(values, batch)
            return {name: each * np.float32(scale) for name, each in gradient.items()}

        async def replica(store: ParameterStore, pool: ComputePool, mine: NDArray[np.intp]) -> None:
            values = await store.pull()
            for number in mine:
                gradient = await pool.run(work, values, batches[number], cost="gradient")
                values = await store.push_pull(gradient, read=values)

        epoch = 0
        while goes_on(epoch):
            order, epoch = dice.permutation(len(batches)), epoch + 1
            for part in np.array_split(order, POINTS):
                side.start()
                async with asyncio.TaskGroup() as group:
                    for number, (store, pool) in enumerate(zip(stores, pools, strict=True)):
                        group.create_task(replica(store, pool, part[number::WORKERS]))
                side.stop()
                values = await stores[0].pull()
                side.add(values)
        await stores[0].delete()
    return values


async def lbfgs(side: Side, seconds: float) -> None:
    """Minimise by L-BFGS for some seconds."""
    async with AsyncExitStack() as stack:
        store = await side.open(stack, "lbfgs")

        async def take(_: Iteration) -> bool:
            side.stop()
            side.add(await store.pull())
            side.start()
            return side.seconds < seconds

        optimizer = LBFGS(store, side.whole, side.whole.batches, workers=WORKERS, tolerance=0)
        side.start()
        await optimizer.minimise(100_000, take)
        await optimizer.forget()
        await store.delete()


async def measure(options: Namespace) -> AsyncIterator[Row]:
    """Yield the rows."""
    async with Disk() as disk:
        data = await load_dataset(options.data, disk, data_dir=options.data_dir)
    images, labels = np.asarray(data.train_images[: options.images]), data.train_labels[: options.images]
    spec = choose_model("mlp", data.info(), text=None, layers=BUILTIN_LAYERS)
    held = slice(None, None, 5)
    validation, test = (images[held], labels[held]), (data.test_images, data.test_labels)
    rest = np.delete(images, held, axis=0), np.delete(labels, held, axis=0)
    with ExitStack() as roles:
        where = roles.enter_context(role("controller")).address
        for _ in range(2):
            roles.enter_context(role("ps", "--controller", where))

        async def held_back(rule: str, rate: float, seed: int) -> float:
            """Train on the rest; return the loss of the held back images."""
            side = Side(where, spec, rest, validation, seed)
            values = await downpour(side, rule, rate, seed, lambda epoch: epoch < options.epochs)
            return side.loss(values, ImageLoss(side.network, *validation, batch=PIECE))

        best: dict[str, float] = {}
        for rule, rates in (("adagrad", options.adagrad_rates), ("sgd", options.sgd_rates)):
            losses: dict[float, list[float]] = {rate: [] for rate in rates}
            for seed, rate in product((101, 102), rates):
                losses[rate].append(await held_back(rule, rate, seed))
            means = {rate: statistics.mean(each) for rate, each in losses.items()}
            best[rule] = min(means, key=lambda rate: np.nan_to_num(means[rate], nan=np.inf))
            found = {str(rate): rounded(mean) for rate, mean in means.items()}
            yield {"case": f"loss of held back images by rate, {rule}", "losses": found, "best": best[rule]}
        yield {
            "case": "best rate of adagrad and best fixed rate",
            **best,
            "ratio": rounded(best["adagrad"] / best["sgd"]),
        }
        pairs: dict[str, list[float]] = {rule: [] for rule in RULES}
        for seed in range(1, options.seeds + 1):
            for rule in RULES if seed % 2 else reversed(RULES):
                pairs[rule].append(await held_back(rule, best[rule], seed))
        case = f"loss of held back images after {options.epochs} epochs, adagrad beside sgd"
        yield compared(case, pairs["adagrad"], pairs["sgd"], "nats", less_is_better=True)
        sides: dict[str, list[Point]] = {}
        for name in ("lbfgs", *RULES):
            side = Side(where, spec, (images, labels), test, 1)
            if name == "lbfgs":
                await lbfgs(side, options.seconds)
            else:
                await downpour(side, name, best[name], 1, side.has_time(options.seconds))
            sides[name] = side.points
            shown = side.points[:: max(len(side.points) // 24, 1)]
            yield {"case": f"points of {name}", "points": [list(map(rounded, each)) for each in shown]}
    for (at, unit), share in product(((0, "s"), (1, "MB")), (0.125, 0.25, 0.5, 1.0)):
        most = min(points[-1][at] for points in sides.values()) * share
        yield {
            "case": f"training loss at {rounded(most)} {unit}",
            **{name: _until(points, at, most) for name, points in sides.items()},
        }


def _until(points: Sequence[Point], at: int, most: float) -> float | None:
    """Return the loss of the last point up to some seconds or MB; None before the first."""
    return next((rounded(point[2]) for point in reversed(points) if point[at] <= most), None)


if __name__ == "__main__":
    run(
        __doc__,
        measure,
        data=Option("mnist", "data set", choices=["mnist", "digits"]),
        data_dir=Option(None, "folder of MNIST's files", type=Path),
        images=Option(4000, "number of training images"),
        seconds=Option(8.0, "seconds of each side"),
        epochs=Option(3, "epochs of the search and of the pairs"),
        seeds=Option(8, "number of pairs"),
        adagrad_rates=[0.003, 0.01, 0.02, 0.04, 0.08],
        sgd_rates=[0.02, 0.05, 0.1, 0.2, 0.4],
    )
