"""Groups in flight hide a slow link: rates of a cut model over a slow link, against the prediction.

    ADAM_DATA_DIR=DIR python -m benchmarks.in_flight --json FILE --picture docs/images/in_flight.svg
    ... --images 16 --delays 0 5 --in-flight 1 16                a part of it
    python -m benchmarks.in_flight --draw FILE --picture docs/images/in_flight.svg

`mnist-adam` is cut vertically over the two workers of one replica, with halos sent (`--halo`), all roles in
one process, and a pool of two threads. Messages between the two workers take `d` longer in each direction.
With `n` groups in flight the prediction is the smaller of two rates, in groups per second:

    B(n)               measured over the same links at d = 0, with the same n
    n / (c d + t1)     each slot is occupied until its group has taken the longest path

- `c`: crossings in sequence from a group's beginning to the end of its slot, see `slot_chain`: 10 with halos
  sent. The crossing of weight gradients at the end counts: the worker that adds them up keeps the slot until
  they have arrived (its graph ends after node `summed`), and the other worker does not. Acknowledgements and
  pulls do not count; only for n = 1 a slot waits for its values, which is part of `t1`. With halos computed
  twice `c` is 8, and `longest_chain` 9: that chain begins at one worker and ends at the other, so the first
  worker can begin its next group earlier.
- `t1`: seconds of one group alone, 1 / B(1).
- `d`: time of a message between the same two nodes through the same slow link, just before training begins:
  the mean of `PINGS`. `busy_ms` is the same time during training, when the loop has more work.

A rate is measured in a window after a warm-up, from one finished group to another, a whole multiple of n
later (groups that began together stay together). Bounds: within 15 % of the prediction, or 30 % within a
factor of 2 of the knee, which is at n = B(n) (c d + t1).

Rows: ours and peer (the prediction) in groups/s, knee (n over the knee's n), bound and whether it is met,
delays in ms.
"""

import asyncio
import json
import math
import random
import statistics
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adam_async import Config, LocalCluster
from adam_async.data_server.dataset import Dataset
from adam_async.messages import Greet, pack, role_table, unpack
from adam_async.model import Network as NeuralNetwork
from adam_async.model import named_model
from adam_async.model.partition.network import Partition
from adam_async.model.partition.planner import Halo, vertical_plan
from benchmarks.harness import Option, Row, compared, run
from benchmarks.images import mnist
from benchmarks.in_flight_plot import picture
from transport import Identity, LocalNetwork, Network, TransportError
from transport.link import Link
from transport.slow import SlowNetwork

ENDS = ("worker-0", "worker-1")
SUMMING = 1
"""Number of the worker that adds up the gradients of shared weights, and so keeps each group longest."""
PINGS = 20
POLL_S = 0.001
WARM_UP_S = 0.7
TIMES = 4
"""Number of repetitions of the training images, so that no epoch ends within a window."""
BOUND, BOUND_AT_KNEE = 0.15, 0.30


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Measured rate of one point."""

    groups_per_s: float
    delay_s: float
    """Delay of a message on an idle loop, in seconds; 0 without slow links."""
    busy_s: float
    """Delay of a message during training, in seconds."""


class Pings:
    """Time of messages through the links of the workers: from one end to the other, in one process.

    Args:
        network: The network of the cluster.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._stack = AsyncExitStack()
        self._sent: list[float] = []
        self._took: list[float] = []

    async def __aenter__(self) -> "Pings":
        one, other = (Identity(role="worker", node=node, incarnation=1) for node in ENDS)
        listener = await self._stack.enter_async_context(
            self._network.listen("local://", other, self._answer)
        )
        self._link = await self._network.dial(listener.address, one, peer_role="worker")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._link.abort()
        await self._stack.aclose()

    async def _answer(self, link: Link) -> None:
        with suppress(TransportError):
            while True:
                number = unpack(await link.receive(), Greet).received
                self._took.append(time.perf_counter() - self._sent[number])

    async def send(self, count: int, every_s: float) -> None:
        """Send this many, one after the other."""
        for _ in range(count):
            ping = Greet(
                run="", replica=0, replica_generation=0, partition=0, received=len(self._sent), begun=0
            )
            self._sent.append(time.perf_counter())
            self._link.send_nowait(pack(ping))
            await asyncio.sleep(every_s)

    async def mean_s(self) -> float:
        """Mean of all delays since the last call."""
        while len(self._took) < len(self._sent):  # noqa: ASYNC110 - a change causes no event
            await asyncio.sleep(POLL_S)
        mean = statistics.mean(self._took)
        self._sent.clear()
        self._took.clear()
        return mean


# --- one point -------------------------------------------------------------------------------


@asynccontextmanager
async def slow_network(delay_s: float) -> AsyncIterator[Network]:
    """Local links, slow between the two workers. With a given network the workers of a replica use links."""
    local = LocalNetwork(rules=role_table())
    if not delay_s:
        yield local
        return
    async with SlowNetwork(local, delay_s=delay_s, dice=random.Random(7), between=ENDS) as slow:
        yield slow


def config_of(images: int, in_flight: int, halo: Halo, **more: Any) -> Config:
    """The run that is measured."""
    return Config(
        schedule="constant",
        model="mnist-adam",
        partitions=2,
        plan="vertical",
        halo=halo,  # a fixed kind, because the plan would otherwise depend on measured times
        threads=1,
        images_per_group=images,
        in_flight=in_flight,
        **more,
    )


async def measured(
    dataset: Dataset, options: Namespace, *, images: int, in_flight: int, delay_s: float, trip_s: float
) -> Found:
    """The rate of one point.

    Args:
        dataset: Enough images that no epoch ends.
        options: Arguments of the command line.
        images: Number of images of a group.
        in_flight: Number of groups in flight.
        delay_s: Delay of the slow links, in seconds.
        trip_s: Time of all crossings of a group, in seconds; the warm-up is at least twice as long.
    """
    config = config_of(images, in_flight, options.halo, epochs=1)
    async with (
        slow_network(delay_s) as network,
        Pings(network) as pings,
        LocalCluster(config, dataset=dataset, network=network, address="local://") as cluster,
    ):
        await pings.send(PINGS, 0.003)
        quiet_s = await pings.mean_s()
        training = asyncio.create_task(cluster.train(), name="train")
        try:
            await reach(cluster, training, 1)
            await asyncio.sleep(max(WARM_UP_S, 2 * trip_s))
            first = finished(cluster) + 1
            begin = await reach(cluster, training, first)
            while time.perf_counter() - begin < options.seconds:
                await pings.send(1, 0.05)
            groups = ((finished(cluster) - first) // in_flight + 1) * in_flight
            end = await reach(cluster, training, first + groups)
            busy_s = await pings.mean_s()
        finally:
            training.cancel()
            with suppress(asyncio.CancelledError):
                await training
    return Found(groups_per_s=groups / (end - begin), delay_s=quiet_s if delay_s else 0.0, busy_s=busy_s)


def finished(cluster: LocalCluster) -> int:
    """Number of groups that have left the worker that keeps them longest."""
    engine = cluster.workers[SUMMING].statistics().engine
    return engine.finished if engine else 0


async def reach(cluster: LocalCluster, training: asyncio.Task[Any], count: int) -> float:
    """Wait until this many groups are finished; returns the time of the observation."""
    while finished(cluster) < count:
        if training.done():
            await training
            raise SystemExit("the epoch ended within a window: raise TIMES or shorten --seconds")
        await asyncio.sleep(POLL_S)
    return time.perf_counter()


# --- all of them -----------------------------------------------------------------------------


def slot_chain(parts: Sequence[Partition]) -> float:
    """Number of crossings for which a slot is occupied, if two workers have equally many slots.

    With way[a][b] crossings from a group's beginning at worker a to its end at worker b, the next group
    begins at b in the slot that it leaves there. A slot is therefore occupied in the long run for the longest
    mean cycle: from a worker to itself, or to the other one and back.
    """
    way = [_ends(parts, begin) for begin in range(2)]
    return max(way[0][0], way[1][1], (way[0][1] + way[1][0]) / 2)


def _ends(parts: Sequence[Partition], begin: int) -> list[float]:
    """End of a group at each worker, in crossings since its beginning at one of them."""
    ends = [0.0 if part.worker == begin else -math.inf for part in parts]
    arrived: dict[int, float] = {}
    left = [list(part.segments) for part in parts]
    while any(left):
        for worker, segments in enumerate(left):
            if segments and arrived.keys() >= set(segments[0].receives):
                segment = segments.pop(0)
                ends[worker] = max(ends[worker], *(arrived[number] for number in segment.receives), -math.inf)
                arrived |= dict.fromkeys(segment.sends, ends[worker] + 1)
    arrived |= {sum_.number: ends[part.worker] + 1 for part in parts for sum_ in part.partial}
    return [
        max(ends[part.worker], *(arrived[sum_.number] for sum_ in part.sums), -math.inf) for part in parts
    ]


def crossings_of(halo: Halo) -> float:
    """`slot_chain` of the measured plan."""
    model = NeuralNetwork(named_model("mnist-adam"))
    plan = vertical_plan(model, 2, halo=halo)
    return slot_chain([Partition(model, plan, worker) for worker in range(2)])


async def curves(options: Namespace, images: int, dataset: Dataset) -> AsyncIterator[Row]:
    """Yield all points of one group size; points of one number in flight one after the other."""
    crossings = crossings_of(options.halo)

    async def point(n: int, delay_s: float) -> Found:
        trip_s = crossings * delay_s
        return await measured(dataset, options, images=images, in_flight=n, delay_s=delay_s, trip_s=trip_s)

    alone_s = 1 / (await point(1, 0.0)).groups_per_s
    for n in options.in_flight:
        free = await point(n, 0.0)
        for delay_ms in sorted({0, *options.delays}):
            found = await point(n, delay_ms / 1e3) if delay_ms else free
            trip_s = crossings * found.delay_s + alone_s
            predicted = min(free.groups_per_s, n / trip_s) if delay_ms else free.groups_per_s
            knee = n / (free.groups_per_s * trip_s)
            bound = BOUND_AT_KNEE if 0.5 <= knee <= 2 else BOUND
            yield compared(
                f"{images} images per group, {n} in flight, {delay_ms:g} ms",
                [found.groups_per_s],
                [predicted],
                "groups/s",
                images=images,
                in_flight=n,
                asked_ms=delay_ms,
                delay_ms=round(found.delay_s * 1e3, 3),
                busy_ms=round(found.busy_s * 1e3, 3),
                alone_ms=round(alone_s * 1e3, 3),
                knee=round(knee, 3),
                bound=bound,
                met=abs(found.groups_per_s / predicted - 1) <= bound,
            )


async def measure(options: Namespace) -> AsyncIterator[Row]:
    """Yield every row, and draw them; with `--draw` the rows of a file."""
    rows: list[Row] = []
    async for row in all_rows(options):
        rows.append(row)
        yield row
    if options.picture:
        options.picture.write_text(picture(rows))


async def all_rows(options: Namespace) -> AsyncIterator[Row]:
    """Yield every row, or those of the file to draw."""
    if options.draw is not None:
        for row in json.loads(options.draw.read_text())["rows"]:
            yield row
        return
    many = await mnist(times=TIMES)
    for images in options.images:
        async for row in curves(options, images, many):
            yield row


if __name__ == "__main__":
    run(
        __doc__,
        measure,
        draw=Option(None, "measure nothing, and take the rows of this file", type=Path),
        images=Option([16, 1], "images per group", choices=[16, 1]),
        delays=Option([0.0, 2.0, 5.0, 10.0, 20.0], "ms"),
        in_flight=[1, 2, 4, 8, 16, 32, 64],
        halo=Option("exchange", choices=["exchange", "recompute"]),
        seconds=Option(3.0, "of each window, at least"),
        picture=Option(None, "draw the rates into this SVG file", type=Path),
    )
