"""Cost of cutting a model on one machine: two workers of a replica against the same model on one worker.

    ADAM_DATA_DIR=DIR python -m benchmarks.partitions --json FILE [--rounds 5] [--only local processes blocks]

Two networks, `mnist-adam` and an MLP 784-2048-2048-10; plan `layers` at 16 images per group, plan `vertical`
at 64; plain SGD on copies, float32, the default number of groups in flight. Both sides of a pair have the
default rate of the cut run, which has at least as many groups in flight. One epoch per run. Cases:

- `local`: all roles in one process. The workers share a pool of two threads, cut or not. Wanted: 0.9 for
  `layers` and 0.85 for `vertical`.
- `processes`: each role a process, two threads per worker, so the cut model has twice the threads on the same
  cores. Wanted: 0.75 and 0.65.
- `blocks`: cost of a crossing tensor for the event loop of a worker, TCP over loopback: processor time of the
  one loop of both ends, per tensor sent or received, of two `PeerWorker`s with a message for each block, the
  maximum cost of a block. The blocks are those of `mnist-adam`, `vertical`, 16 images. Wanted: at most 25 us.

The peer is the uncut model, or the goal in microseconds; rows of rates also have the accuracies of both.
"""

import asyncio
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async import Config, LocalCluster, ProcessCluster
from adam_async.data_server.dataset import Dataset
from adam_async.messages import Block, Greet, role_table
from adam_async.model import ModelSpec, Network, mlp, named_model
from adam_async.model.partition.network import Partition
from adam_async.model.partition.plan import PlanKind
from adam_async.model.partition.planner import vertical_plan
from adam_async.run.config import default_in_flight
from adam_async.run.learning_rate import default_rate
from adam_async.run.result import RunResult
from adam_async.runtime.callbacks import Callbacks
from adam_async.runtime.clock import system_entropy
from adam_async.worker.peer_workers import ExpectedBlocks, PeerWorker, PeerWorkerEvents
from adam_async.worker.reliable_stream import Parcel
from benchmarks.harness import Option, Row, compared, run, turns
from benchmarks.images import first_images, mnist, save
from transport import Identity, TcpNetwork
from transport.link import Link

MODELS: dict[str, ModelSpec] = {
    "mnist-adam": named_model("mnist-adam"),
    "mlp 784-2048-2048-10": mlp((784, 2048, 2048, 10), name="mlp-2048"),
}
PLANS: dict[PlanKind, int] = {"layers": 16, "vertical": 64}
"""Images per group, by plan."""
IMAGES = {
    ("mnist-adam", "layers"): 60_000,
    ("mnist-adam", "vertical"): 60_000,
    ("mlp 784-2048-2048-10", "layers"): 6_000,
    ("mlp 784-2048-2048-10", "vertical"): 24_000,
}
"""Training images of an epoch: some seconds of training each, and hundreds of groups."""
WANTED = {
    ("local", "layers"): 0.9,
    ("local", "vertical"): 0.85,
    ("processes", "layers"): 0.75,
    ("processes", "vertical"): 0.65,
}
WANTED_US = 25.0
THREADS = 2

Arrived = Sequence[tuple[Block, NDArray[Any]]]
"""Blocks of one message, with their tensors."""


# --- rates -----------------------------------------------------------------------------------


def configs(mode: str, plan: PlanKind) -> tuple[Config, Config]:
    """The cut run, and the run on a single worker."""
    processes = mode == "processes"
    each = THREADS if processes else THREADS // 2
    common: dict[str, Any] = {"epochs": 1, "images_per_group": PLANS[plan], "processes": processes}
    cut = Config(partitions=2, plan=plan, threads=each, schedule="constant", **common)
    whole = Config(weights="copy", threads=THREADS, schedule="constant", **common)
    rate = default_rate(cut, default_in_flight(each, 2))
    return msgspec.structs.replace(cut, rate=rate), msgspec.structs.replace(whole, rate=rate)


async def train(config: Config, spec: ModelSpec, dataset: Dataset) -> RunResult:
    """Train once, in one process or as processes."""
    if not config.processes:
        async with LocalCluster(config, dataset=dataset, spec=spec) as local:
            return await local.train()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "images.npz"
        save(dataset, file)
        config = msgspec.structs.replace(config, data=str(file))
        async with ProcessCluster(config, spec=spec) as processes:
            return await processes.train()


async def rates(mode: str, options: Namespace) -> AsyncIterator[Row]:
    """Yield the rows of a mode."""
    whole = await mnist()
    sides = [(name, plan, cut) for name in MODELS for plan in PLANS for cut in (True, False)]
    found: dict[tuple[str, PlanKind, bool], list[RunResult]] = {side: [] for side in sides}
    for side in turns(sides, options.rounds):
        name, plan, cut = side
        dataset = first_images(whole, options.images or IMAGES[name, plan])
        found[side].append(await train(configs(mode, plan)[0 if cut else 1], MODELS[name], dataset))
    for name in MODELS:
        for plan in PLANS:
            yield row(mode, name, plan, found[name, plan, True], found[name, plan, False])


def row(mode: str, name: str, plan: PlanKind, cut: Sequence[RunResult], uncut: Sequence[RunResult]) -> Row:
    """The row of one case."""
    where = "one process" if mode == "local" else "processes"
    return compared(
        f"{name}, {plan}, {PLANS[plan]} images per group, {where}: 2 workers / uncut",
        [run.epochs[0].images_per_s for run in cut],
        [run.epochs[0].images_per_s for run in uncut],
        "images/s",
        goal=WANTED[mode, plan],
        accuracy=round(statistics.median(run.test_accuracy for run in cut), 4),
        peer_accuracy=round(statistics.median(run.test_accuracy for run in uncut), 4),
        rate=round(configs(mode, plan)[0].rate, 5),
    )


# --- what a tensor costs ---------------------------------------------------------------------


def cut_parts() -> list[Partition]:
    """The two parts whose blocks are sent."""
    model = Network(MODELS["mnist-adam"])
    plan = vertical_plan(model, 2)
    return [Partition(model, plan, worker) for worker in range(2)]


class End:
    """One of two workers on a TCP link: a `PeerWorker`, which passes received blocks to `take`."""

    def __init__(self, own_applied: Partition) -> None:
        other = 1 - own_applied.worker
        self.partition = own_applied
        self.take: Any = None
        shapes = {c.number: partial(own_applied.wire_shape, c) for c in own_applied.incoming}
        self.peer_worker = PeerWorker(
            part=other,
            node=f"worker-{other}",
            address="",
            expected=ExpectedBlocks(shapes, own_applied.network.dtype, lambda _: PLANS["layers"]),
            lead=1 << 30,
            heeded=False,
            events=PeerWorkerEvents(blocks=self._on_blocks, progress=lambda: None, linked=lambda: None),
            callbacks=Callbacks(f"worker-{other}"),
        )

    def _on_blocks(self, arrived: Arrived) -> None:
        self.take(arrived)

    async def converse(self, link: Link) -> None:
        """Exchange messages over a link until cancelled."""
        greet = Greet(
            run="", replica=0, replica_generation=1, partition=self.peer_worker.part, received=0, begun=0
        )
        await self.peer_worker.converse(link, greet)


async def joined(stack: AsyncExitStack, ends: Sequence[End]) -> None:
    """Join two ends by a TCP link over loopback, until the stack ends."""
    network = TcpNetwork(token=None, entropy=system_entropy, rules=role_table())
    accepted: asyncio.Future[Link] = asyncio.get_running_loop().create_future()

    async def on_link(link: Link) -> None:
        accepted.set_result(link)
        await link.wait_closed()

    one, other = (Identity(role="worker", node=f"worker-{n}", incarnation=1) for n in range(2))
    listener = await stack.enter_async_context(network.listen("tcp://127.0.0.1:0", other, on_link))
    dialled = await network.dial(listener.address, one, peer_role="worker")
    stack.callback(dialled.abort)
    group = await stack.enter_async_context(asyncio.TaskGroup())
    for end, link in zip(ends, (dialled, await accepted), strict=True):
        stack.callback(group.create_task(end.converse(link), name="talk").cancel)


async def message_us(blocks: int) -> float:
    """Two workers alone, which answer each block with a block in a message of its own."""
    parts = cut_parts()
    ends = [End(part) for part in parts]
    done = asyncio.Event()
    turns = [outgoing_blocks(part) for part in parts]

    def answer(worker: int, arrived: Arrived) -> None:
        ((block, _),) = arrived
        if block.number >= blocks:
            done.set()
            return
        crossing, array = turns[worker][block.number % len(turns[worker])]
        parcel = Parcel(Block(crossing, 1, block.number + 1, 1), array, lambda _: None)
        ends[worker].peer_worker.put(parcel)

    for worker, end in enumerate(ends):
        end.take = partial(answer, worker)
    async with AsyncExitStack() as stack:
        await joined(stack, ends)
        begin = time.thread_time()
        answer(0, [(Block(0, 1, 0, 1), np.empty(0))])
        await done.wait()
        return (time.thread_time() - begin) / blocks / 2 * 1e6


def outgoing_blocks(part: Partition) -> list[tuple[int, NDArray[Any]]]:
    """Crossings that leave a part, with arrays of their size for a group of 16 images."""
    return [
        (c.number, np.zeros(part.wire_shape(c, PLANS["layers"]), part.network.dtype)) for c in part.outgoing
    ]


async def blocks(options: Namespace) -> AsyncIterator[Row]:
    """Yield the row of a tensor."""
    us = [await message_us(20_000) for _ in range(options.rounds)]
    case = "loop time of a tensor sent or received, TCP, a message for each block"
    yield compared(case, us, [WANTED_US] * len(us), "us", less_is_better=True)


async def measure(options: Namespace) -> AsyncIterator[Row]:
    """Yield the rows of the wanted cases."""
    for case in options.only:
        async for row in blocks(options) if case == "blocks" else rates(case, options):
            yield row


if __name__ == "__main__":
    cases = ["local", "processes", "blocks"]
    run(
        __doc__,
        measure,
        only=Option(cases, choices=cases),
        rounds=5,
        images=Option(0, "training images of an epoch; 0: some seconds of training"),
    )
