"""The cost of a store on disk: acknowledgements beside a slow disk, rates of training, modes, writes.

    ADAM_DATA_DIR=DIR python -m benchmarks.store_disk --json FILE [--part latency ack rate] [--folder DIR]

Every part compares clusters of processes on this machine, in turns. `--folder` is on the disk to measure.

- `latency`: two servers with two copies (mode `replicated`), each with a disk of its own that takes 10 MB/s
  and 50 ms per sync (`benchmarks.slow_disks`; needs root and gcc), beside two servers without disks. A client
  pushes the gradients of a model at a fixed rate, with the factors that a worker sends for 16 images. A
  latency counts from the time at which its push is due. The goal: a 99th percentile without disks of at
  least 0.83 of that with them. `disk` is the disk as a process measures it.
- `ack`: pushes per second of a client with several pushes under way, by mode, on the real disk and without
  disks. The first row is the disk.
- `rate`: `--epochs` epochs of training with two workers and two servers, with and without `--store`, on the
  real disk, in `--pairs` pairs; the goal is 0.95, and single pairs differ by tens of percent. A row of
  `--ack durable` has no goal. From the reports with a store: pieces written over all epochs, which are at
  most min(updates, pieces x (rounds + 1)) on each server, and bytes written per byte of updated pieces, at
  most 2.
"""

import asyncio
import shutil
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from adam_async import ArraySpec, Factors, ParameterStore, Sgd
from adam_async.model import Network, named_model
from adam_async.persistence.contents import contents_of
from adam_async.persistence.scan import scan, segment_name
from adam_async.store.arrays import Gradient
from benchmarks.harness import Option, Row, compared, run, trained, turns
from benchmarks.slow_disks import measured, slow_disks
from benchmarks.store_kills import Cluster
from tests.drill.judging import percentile

MODELS = ("mlp", "mnist-adam")
LATENCY_CASES = (("mlp", 1.0), ("mlp", 0.1), ("mnist-adam", 1.0))
"""Model and `--flush-s`; with 0.1 s a round begins as soon as the one before it permits."""
NODES = ("ps-0", "ps-1")
IMAGES = 16
"""Images per group."""
SLOW_BYTES_PER_S, SLOW_SYNC_MS = 10_000_000, 50
SETTLE_S = 1.0
"""Pause before a window, in seconds."""
UNDER_WAY = 16
"""Number of unacknowledged pushes in `ack`."""
LATENCY_GOAL, RATE_GOAL, AMPLIFICATION_GOAL = 0.83, 0.95, 2.0
EPOCH_S = 600.0
"""Deadline of an epoch of training, in seconds."""
TRAINING = ("--processes", "--replicas", "2", "--data", "mnist")


def gradients_of(model: str) -> dict[str, Gradient]:
    """Return the gradients of a model as a worker pushes them: factors if these have fewer values."""
    draws = np.random.default_rng(1)
    found: dict[str, Gradient] = {}
    for parameter in Network(named_model(model)).parameters:
        shape = parameter.shape
        if len(shape) == 2 and IMAGES * sum(shape) < parameter.size:
            rows, inputs = shape
            found[parameter.name] = Factors(
                draws.standard_normal((IMAGES, inputs), np.float32),
                1e-6 * draws.standard_normal((IMAGES, rows), np.float32),
            )
        else:
            found[parameter.name] = 1e-6 * draws.standard_normal(shape, np.float32)
    return found


def specs_of(model: str) -> dict[str, ArraySpec]:
    return {each.name: ArraySpec(each.shape) for each in Network(named_model(model)).parameters}


@asynccontextmanager
async def started(
    folder: Path | None, *, flush_s: float, servers: int = len(NODES), within: Sequence[str] = ()
) -> AsyncIterator[Cluster]:
    """Run a controller and servers for a block; with `folder` on disks."""
    cluster = Cluster(folder, servers=servers, flush_s=flush_s, within=within)
    try:
        await cluster.start()
        yield cluster
    finally:
        cluster.kill()
        await cluster.ended()


def written_bytes(pids: Sequence[int]) -> int:
    """Return the bytes that processes have caused to be written to disks."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/io").read_text().splitlines()]
    return sum([int(line.split()[1]) for line in lines if line.startswith("write_bytes:")])


def row_of(latencies: Sequence[float]) -> dict[str, Any]:
    shares = (("p50_ms", 0.5), ("p99_ms", 0.99), ("max_ms", 1.0))
    return {name: round(1e3 * (percentile(latencies, share) or 0.0), 2) for name, share in shares}


# --- latency -----------------------------------------------------------------------------------


async def paced(
    store: ParameterStore, gradients: Mapping[str, Gradient], per_s: float, seconds: float
) -> list[float]:
    """Push at a fixed rate; returns the latencies."""
    latencies: list[float] = []

    async def push(due: float) -> None:
        await store.push(gradients)
        latencies.append(time.perf_counter() - due)

    begin = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(int(per_s * seconds)):
            due = begin + number / per_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(push(due))
    return latencies


async def latency(model: str, flush_s: float, folder: Path, options: Namespace) -> Row:
    """Return the row of a model: acknowledgements beside slow disks and without disks."""
    gradients = gradients_of(model)
    found: dict[str, list[list[float]]] = {"with": [], "without": []}
    disk_mb: list[float] = []
    with slow_disks(folder, NODES, bytes_per_s=SLOW_BYTES_PER_S, sync_ms=SLOW_SYNC_MS) as (disks, within):
        disk = measured(disks / NODES[0], within)
        async with AsyncExitStack() as stack:
            sides: dict[str, tuple[Cluster, ParameterStore]] = {}
            for side, at, words in (("without", None, ()), ("with", disks, within)):
                cluster = await stack.enter_async_context(started(at, flush_s=flush_s, within=words))
                opening = ParameterStore.open(
                    cluster.controller, specs_of(model), name="model", rule=Sgd(), copies=2, servers=2
                )
                sides[side] = cluster, await stack.enter_async_context(opening)
            for side in turns(found, options.rounds + 1):
                cluster, store = sides[side]
                await asyncio.sleep(SETTLE_S)
                before = written_bytes(cluster.pids)
                found[side].append(await paced(store, gradients, options.per_s, options.seconds))
                if side == "with":
                    disk_mb.append((written_bytes(cluster.pids) - before) / options.seconds / 1e6)
    # The first round compiles the kernels of the rule.
    slow, fast = ([1e3 * _p99(each) for each in found[side][1:]] for side in ("with", "without"))
    return compared(
        f"latency: {model}, replicated, --flush-s {flush_s:g}",
        slow,
        fast,
        "ms, 99 %",
        less_is_better=True,
        goal=LATENCY_GOAL,
        disk=disk,
        pushes_per_s=options.per_s,
        **{side: row_of([each for one in rounds[1:] for each in one]) for side, rounds in found.items()},
        disk_mb_per_s_of_two=round(statistics.mean(disk_mb[1:]), 2),
    )


def _p99(latencies: Sequence[float]) -> float:
    found = percentile(latencies, 0.99)
    assert found is not None
    return found


# --- modes of acknowledgement --------------------------------------------------------------------


MODES = {
    "no disk, 1 copy": (False, 1, False),
    "no disk, 2 copies": (False, 2, False),
    "single, 1 copy": (True, 1, False),
    "replicated, 2 copies": (True, 2, False),
    "durable, 1 copy": (True, 1, True),
    "durable, 2 copies": (True, 2, True),
}
"""By name: whether the servers have disks, the copies, and whether pushes are durable."""


async def busy(
    store: ParameterStore, gradients: Mapping[str, Gradient], seconds: float
) -> tuple[float, list[float]]:
    """Push with `UNDER_WAY` pushes under way; returns pushes per second, and the latencies."""
    latencies: list[float] = []
    begin = time.perf_counter()

    async def push() -> None:
        while (at := time.perf_counter()) < begin + seconds:
            await store.push(gradients)
            latencies.append(time.perf_counter() - at)

    await asyncio.gather(*[push() for _ in range(UNDER_WAY)])
    return len(latencies) / (time.perf_counter() - begin), latencies


async def modes(folder: Path, options: Namespace) -> AsyncIterator[Row]:
    """Yield the rows of all modes."""
    updates: dict[str, tuple[dict[str, ArraySpec], dict[str, Gradient]]] = {
        "16 KiB": ({"w": ArraySpec((4096,))}, {"w": np.full(4096, 1e-6, np.float32)}),
        "mlp": (specs_of("mlp"), gradients_of("mlp")),
    }
    yield {"case": "ack: the disk", **measured(folder)}
    (folder / "ack").mkdir()
    async with AsyncExitStack() as stack:
        places = (None, folder / "ack")
        clusters = [await stack.enter_async_context(started(at, flush_s=1.0)) for at in places]
        for update, (specs, gradients) in updates.items():
            found: dict[str, list[tuple[float, list[float]]]] = {name: [] for name in MODES}
            for name in turns(MODES, options.ack_rounds + 1):
                has_disk, copies, durable = MODES[name]
                async with ParameterStore.open(
                    clusters[has_disk].controller,
                    specs,
                    name=f"{update} {name} {len(found[name])}",
                    rule=Sgd(),
                    copies=copies,
                    servers=2,
                    durable=durable,
                ) as store:
                    await asyncio.sleep(SETTLE_S)
                    found[name].append(await busy(store, gradients, options.seconds))
                    await store.delete()
            for name, results in found.items():
                base = found[f"no disk, {name.split(', ')[1]}"]
                # The first round compiles the kernels of the rule.
                yield compared(
                    f"ack: {update}, {name}",
                    [rate for rate, _ in results[1:]],
                    [rate for rate, _ in base[1:]],
                    "pushes/s",
                    **row_of([each for _, many in results[1:] for each in many]),
                )


# --- training --------------------------------------------------------------------------------------


def pieces_in(folder: Path) -> int:
    """Return the number of states in the newest store of a server's folder."""
    stores = [path for path in folder.glob("store-*") if path.is_dir()]
    newest = max(stores, key=lambda path: path.stat().st_mtime)
    files = sorted(
        [(name, path) for path in newest.iterdir() if (name := segment_name(path.name)) is not None]
    )
    scans = [scan(path.name, path.read_bytes(), None) for _, path in files]
    return len(contents_of(scans, [name for name, _ in files]).states)


def writes_of(report: Mapping[str, Any], store: Path) -> Iterator[dict[str, Any]]:
    """Yield the counts of each server's disk, from the report of a run with a store."""
    for server in report["servers"]:
        disk, pieces = server["disk"], pieces_in(store / server["node"])
        permitted = min(disk["updates"], pieces * (disk["rounds"] + 1))
        yield {
            "node": server["node"],
            "pieces": pieces,
            "permitted": permitted,
            **{
                name: disk[name]
                for name in ("updates", "writes", "rounds", "amplification", "bytes", "syncs")
            },
            "met": disk["writes"] <= permitted and disk["amplification"] <= AMPLIFICATION_GOAL,
        }


def rates(model: str, copies: int, folder: Path, options: Namespace) -> Iterator[Row]:
    """Yield the rows of trainings of a model."""
    mode = "single" if copies == 1 else "replicated"
    found: dict[str, list[float]] = {"without": [], mode: [], "durable": []}
    writes: list[Row] = []

    def train(name: str) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as store:
            words = ["--model", model, "--epochs", str(options.epochs), "--servers", "2"]
            words += ["--copies", str(copies), *(["--store", store] if name != "without" else [])]
            words += ["--ack", "durable"] if name == "durable" else []
            report = trained(*TRAINING, *words, within_s=options.epochs * EPOCH_S)
            found[name].append(report["totals"]["images_per_s"])
            writes.extend(writes_of(report, Path(store)) if name == mode else ())

    for name in turns(("without", mode), options.pairs):
        train(name)
    for _ in range(options.durable_runs):
        train("durable")
    case = f"rate: {model}, {copies} {'copy' if copies == 1 else 'copies'}"
    more = {"epochs": options.epochs}
    yield compared(f"{case}, {mode}", found[mode], found["without"], "images/s", goal=RATE_GOAL, **more)
    yield {"case": f"{case}, writes", "servers": writes, "met": all(each["met"] for each in writes)}
    if found["durable"]:
        durable, base = (statistics.median(found[side]) for side in ("durable", "without"))
        ratio = round(durable / base, 3)
        yield {"case": f"{case}, durable", "ours": round(durable), "unit": "images/s", "ratio": ratio}


async def measure(options: Namespace) -> AsyncIterator[Row]:
    """Yield the rows of the wanted parts."""
    folder = Path(tempfile.mkdtemp(prefix="adam-async-disk-", dir=options.folder))
    try:
        if "latency" in options.part:
            for number, (model, flush_s) in enumerate(LATENCY_CASES):
                (folder / f"slow-{number}").mkdir()
                yield await latency(model, flush_s, folder / f"slow-{number}", options)
        if "ack" in options.part:
            async for row in modes(folder, options):
                yield row
        if "rate" in options.part:
            for copies in options.copies:
                for model in options.model:
                    for row in await asyncio.to_thread(list, rates(model, copies, folder, options)):
                        yield row
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    parts = ["latency", "ack", "rate"]
    run(
        __doc__,
        measure,
        part=Option(parts, choices=parts),
        folder=Option(None, "folder on the disk; by default that of temporary files", type=Path),
        seconds=Option(5.0, "length of a window"),
        rounds=Option(5, "rounds of latency"),
        ack_rounds=Option(2, "rounds of ack"),
        per_s=Option(100.0, "pushes per second of latency"),
        pairs=Option(20, "pairs of trainings of rate"),
        epochs=Option(3, "epochs of a training of rate"),
        model=Option(list(MODELS), "models of trainings of rate"),
        copies=Option([2], "copies of trainings of rate"),
        durable_runs=Option(1, "durable trainings of each model"),
    )
