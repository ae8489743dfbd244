"""Cost of cutting a model on one machine: two workers of a replica against the same model on one worker.

    ADAM_DATA_DIR=DIR python -m benchmarks.partitions --json FILE [--rounds 5] [--only local processes blocks]

Two networks, `mnist-adam` and an MLP 784-2048-2048-10; plan `layers` at 16 images per group, plan `vertical`
at 64; plain SGD on copies, float32, the default number of groups in flight. Both sides of a pair have the
default rate of the cut run, which has at least as many groups in flight. One epoch per run; runs alternate,
and the ratio is the median of the ratios within each round. Cases:

- `local`: all roles in one process. The workers share a pool of two threads, cut or not. Wanted: 0.9 for
  `layers` and 0.85 for `vertical`.
- `processes`: each role a process, two threads per worker, so the cut model has twice the threads on the same
  cores. Wanted: 0.75 and 0.65.
- `blocks`: cost of a crossing tensor for the event loop of a worker, TCP over loopback: processor time of the
  one loop of both ends, per tensor sent or received. `message` is two `PeerWorker`s alone, with a message for
  each block, the maximum cost of a block; `graph` has the part graphs with nodes that compute nothing, over
  links as in training, with all firings, admissions and queues of the pool. The blocks are those of
  `mnist-adam`, `vertical`, 16 images. Wanted: at most 25 us for `message`.

Rows: case, ours, peer (the uncut model; the goal in microseconds), ratio, unit, goal of the ratio, and test
accuracy of both after the run.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop
from numpy.typing import NDArray

from adam_async import Config, Disk, LocalCluster, ProcessCluster, load_dataset
from adam_async.data_server.client import ImageGroup
from adam_async.data_server.dataset import Dataset
from adam_async.messages import Block, Greet, Lease, role_table
from adam_async.model import ModelSpec, Network, mlp, named_model
from adam_async.model.context import Context
from adam_async.model.partition.network import Partition
from adam_async.model.partition.plan import PlanKind
from adam_async.model.partition.planner import vertical_plan
from adam_async.run.config import default_in_flight
from adam_async.run.learning_rate import default_rate
from adam_async.run.result import RunResult
from adam_async.runtime.callbacks import Callbacks
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.kernel_cache import use_kernel_cache
from adam_async.worker.partition_trainer import PartitionTrainer, Passage, WirePool, partition_graph
from adam_async.worker.peer_workers import ExpectedBlocks, PeerWorker, PeerWorkerEvents
from adam_async.worker.reliable_stream import Parcel
from adam_async.worker.training import Admitted
from benchmarks.consistency import save
from dataflow import ComputePool, Engine, EngineSettings, Tag
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
BLOCKS_IN_FLIGHT = 4

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


async def rates(mode: str, rounds: int, whole: Dataset) -> list[dict[str, Any]]:
    """All pairs of a mode, in turns."""
    cases = [(name, plan) for name in MODELS for plan in PLANS]
    found: dict[tuple[str, PlanKind], list[tuple[RunResult, RunResult]]] = {case: [] for case in cases}
    for turn in range(rounds):
        for name, plan in cases:
            dataset = first_images(whole, IMAGES[name, plan])
            runs = [partial(train, config, MODELS[name], dataset) for config in configs(mode, plan)]
            results = [await run() for run in (reversed(runs) if turn % 2 else runs)]
            cut, uncut = reversed(results) if turn % 2 else results
            found[name, plan].append((cut, uncut))
    return [row(mode, name, plan, pairs) for (name, plan), pairs in found.items()]


def row(mode: str, name: str, plan: PlanKind, pairs: Sequence[tuple[RunResult, RunResult]]) -> dict[str, Any]:
    """The row of one case."""
    speeds = [(cut.epochs[0].images_per_s, uncut.epochs[0].images_per_s) for cut, uncut in pairs]
    ratio = statistics.median(cut / uncut for cut, uncut in speeds)
    where = "one process" if mode == "local" else "processes"
    config = configs(mode, plan)[0]
    return {
        "case": f"{name}, {plan}, {PLANS[plan]} images per group, {where}: 2 workers / uncut",
        "ours": round(statistics.median(cut for cut, _ in speeds)),
        "peer": round(statistics.median(uncut for _, uncut in speeds)),
        "ratio": round(ratio, 3),
        "unit": "images/s",
        "wanted": WANTED[mode, plan],
        "met": ratio >= WANTED[mode, plan],
        "ratios": [round(cut / uncut, 3) for cut, uncut in speeds],
        "accuracy": round(statistics.median(cut.test_accuracy for cut, _ in pairs), 4),
        "peer_accuracy": round(statistics.median(uncut.test_accuracy for _, uncut in pairs), 4),
        "rate": round(config.rate, 5),
    }


def first_images(dataset: Dataset, count: int) -> Dataset:
    """The first training images, with all test images."""
    return Dataset(
        name=dataset.name,
        source=dataset.source,
        train_images=dataset.train_images[:count],
        train_labels=dataset.train_labels[:count],
        test_images=dataset.test_images,
        test_labels=dataset.test_labels,
        num_classes=dataset.num_classes,
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


class Idle(PartitionTrainer):
    """Sends and receives the blocks of a part, and computes nothing."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._buffer_pools = {c.number: WirePool(partition, c, PLANS["layers"]) for c in partition.outgoing}
        self.targets = {c.number: c.target for c in partition.outgoing}

    def begin(self, context: Context, group: Any) -> Passage:
        """Does nothing: no group is loaded or read."""
        nothing: Any = None
        return Passage(Admitted(group), nothing, {})

    def run(self, number: int, context: Context, passage: Passage, received: Sequence[Any]) -> list[Parcel]:
        """See `PartitionTrainer.run`."""
        return [self._parcel(crossing, passage) for crossing in self._partition.segments[number].sends]

    def run_last(self, context: Context, passage: Passage) -> list[Parcel]:
        """See `PartitionTrainer.run_last`."""
        return [self._parcel(crossing.number, passage) for crossing in self._partition.partial]

    def finish(self, context: Context, passage: Any, parts: Any, scratch: Any) -> Any:
        """Report nothing about the trained group."""
        return passage


async def graph_us(groups: int) -> float:
    """Part graphs of both workers on one loop, with a pool of two threads."""
    parts = cut_parts()
    ends = [End(part) for part in parts]
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(ComputePool(threads=THREADS, name="idle"))
        await joined(stack, ends)
        engines = []
        for end in ends:
            graph = partition_graph(
                Idle(end.partition),
                end.partition,
                partial(leave, end.peer_worker),
                lambda firing, trained: None,
                waits_for_pull=False,
            )
            early = BLOCKS_IN_FLIGHT * 2 * len(end.partition.incoming)
            engine = Engine(
                graph, pool=pool, in_flight=BLOCKS_IN_FLIGHT, settings=EngineSettings(early_limit=early)
            )
            engines.append(await stack.enter_async_context(engine))
            end.take = partial(deliver, engine)
        begin = time.thread_time()
        async with asyncio.TaskGroup() as group:
            for number, engine in enumerate(engines):
                group.create_task(feed(engine, groups), name=f"feed-{number}")
        used_s = time.thread_time() - begin
    crossings = sum(len(part.outgoing) for part in parts)
    return used_s / (2 * crossings * groups) * 1e6


def leave(peer_worker: PeerWorker, _: int, parcel: Parcel) -> None:
    """Send a block to the only other worker."""
    peer_worker.put(parcel)


def deliver(engine: Engine, arrived: Arrived) -> None:
    """Deliver the blocks of some groups to their nodes, as in training."""
    engine.deliver_all(
        [
            (f"in-{block.crossing}", Tag(block.epoch, block.number, block.attempt), tensor)
            for block, tensor in arrived
        ]
    )


async def feed(engine: Engine, groups: int) -> None:
    """Admit all groups, one after the other."""
    images = PLANS["layers"]
    labels = np.zeros(images, np.int64)
    for number in range(groups):
        tag = Tag(1, number, 1)
        await engine.admit(tag)
        group = ImageGroup(Lease(1, number, 1, images), None, labels)
        engine.deliver("group", tag, group)
    await engine.drain()


async def blocks(rounds: int) -> list[dict[str, Any]]:
    """Both measurements of a tensor, in turns."""
    found: dict[str, list[float]] = {"message": [], "graph": []}
    for _ in range(rounds):
        found["message"].append(await message_us(20_000))
        found["graph"].append(await graph_us(600))
    names = {"message": "a message for each block", "graph": "part graphs that compute nothing"}
    return [
        {
            "case": f"loop time of a tensor sent or received, TCP, {names[case]}",
            "ours": round(statistics.median(each), 1),
            "peer": WANTED_US,
            "ratio": round(WANTED_US / statistics.median(each), 3),
            "unit": "us",
            "rounds": [round(us, 1) for us in each],
        }
        for case, each in found.items()
    ]


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and return every row."""
    async with Disk() as disk:
        dataset = await load_dataset(os.environ["ADAM_DATA_DIR"], disk)
    rows = []
    for case in arguments.only:
        found = (
            await blocks(arguments.rounds)
            if case == "blocks"
            else await rates(case, arguments.rounds, dataset)
        )
        for each in found:
            print(json.dumps(each), flush=True)
        rows += found
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the rows, as JSON")
    cases = ["local", "processes", "blocks"]
    parser.add_argument("--only", nargs="+", choices=cases, default=cases)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    use_kernel_cache()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = runner.run(measure(arguments))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
