"""The cost of a store on disk: acknowledgements beside a slow disk, rates of training, modes, writes.

    ADAM_DATA_DIR=DIR python -m benchmarks.store_disk --json FILE [--part latency ack rate] [--folder DIR]

Every part compares clusters of processes on this machine, alternately. Ratios of `latency` and `rate` are
medians of the ratios within a round or pair; other ratios are ratios of medians. `--folder` is on the disk to
measure.

- `latency`: two servers with two copies (mode `replicated`), each with a disk of its own that takes 10 MB/s
  and 50 ms per sync (`benchmarks.slow_disks`; needs root and gcc), beside two servers without disks. A client
  pushes the gradients of a model at a fixed rate, with the factors that a worker sends for 16 images. A
  latency counts from the time at which its push is due. The goal: a 99th percentile at most 1.2 times that
  without disks. `disk` is the disk as a process measures it.
- `ack`: pushes per second of a client with several pushes under way, by mode, on the real disk and without
  disks. The first row is the disk.
- `rate`: `--epochs` epochs of training with two workers and two servers, with and without `--store`, on the
  real disk, in `--pairs` pairs; the goal is 0.95. `interval` is a bootstrap interval (95 %) of the median of
  their ratios: single pairs differ by tens of percent. A row of `--ack durable` has no goal. From the reports
  with a store: pieces written over all epochs, which are at most min(updates, pieces x (rounds + 1)) on each
  server, and bytes written per byte of updated pieces, at most 2.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from adam_async import ArraySpec, Factors, ParameterStore, Sgd
from adam_async.model import Network, named_model
from adam_async.persistence.contents import contents_of
from adam_async.persistence.scan import scan, segment_name
from adam_async.store.arrays import Gradient
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
LATENCY_GOAL, RATE_GOAL, AMPLIFICATION_GOAL = 1.2, 0.95, 2.0
EPOCH_S = 600.0
"""Deadline of an epoch of training, in seconds."""
DRAWS = 10_000
"""Number of samples of a bootstrap."""


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


async def latency(model: str, flush_s: float, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a model: acknowledgements beside slow disks and without disks."""
    gradients = gradients_of(model)
    disk_mb: list[float] = []
    with slow_disks(folder, NODES, bytes_per_s=SLOW_BYTES_PER_S, sync_ms=SLOW_SYNC_MS) as (disks, within):
        disk = measured(disks / NODES[0], within)
        async with AsyncExitStack() as stack:
            sides: dict[str, tuple[Cluster, ParameterStore, list[list[float]]]] = {}
            for side, at, words in (("without", None, ()), ("with", disks, within)):
                cluster = await stack.enter_async_context(started(at, flush_s=flush_s, within=words))
                opening = ParameterStore.open(
                    cluster.controller, specs_of(model), name="model", rule=Sgd(), copies=2, servers=2
                )
                sides[side] = cluster, await stack.enter_async_context(opening), []
            for number in range(-1, options.rounds):
                for cluster, store, rounds in sides.values():
                    await asyncio.sleep(SETTLE_S)
                    before = written_bytes(cluster.pids)
                    latencies = await paced(store, gradients, options.per_s, options.seconds)
                    if number >= 0:  # the first round compiles the kernels of the rule
                        rounds.append(latencies)
                        disk_mb.append((written_bytes(cluster.pids) - before) / options.seconds / 1e6)
    ratios = [
        _p99(mine) / _p99(theirs) for mine, theirs in zip(sides["with"][2], sides["without"][2], strict=True)
    ]
    ratio = statistics.median(ratios)
    return {
        "case": f"latency: {model}, replicated, --flush-s {flush_s:g}",
        "disk": disk,
        "pushes_per_s": options.per_s,
        **{side: row_of([each for one in rounds for each in one]) for side, (_, _, rounds) in sides.items()},
        "disk_mb_per_s_of_two": round(statistics.mean(disk_mb[1::2]), 2),
        "ratio": round(ratio, 2),
        "ratios": [round(each, 2) for each in ratios],
        "goal": LATENCY_GOAL,
        "met": ratio <= LATENCY_GOAL,
    }


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


async def modes(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of all modes."""
    updates: dict[str, tuple[dict[str, ArraySpec], dict[str, Gradient]]] = {
        "16 KiB": ({"w": ArraySpec((4096,))}, {"w": np.full(4096, 1e-6, np.float32)}),
        "mlp": (specs_of("mlp"), gradients_of("mlp")),
    }
    rows: list[dict[str, Any]] = [{"case": "ack: the disk", **measured(folder)}]
    (folder / "ack").mkdir()
    async with AsyncExitStack() as stack:
        clusters = [
            await stack.enter_async_context(started(at, flush_s=1.0)) for at in (None, folder / "ack")
        ]
        for update, (specs, gradients) in updates.items():
            found: dict[str, list[tuple[float, list[float]]]] = {name: [] for name in MODES}
            for number in range(-1, options.ack_rounds):
                for name, (has_disk, copies, durable) in MODES.items():
                    async with ParameterStore.open(
                        clusters[has_disk].controller,
                        specs,
                        name=f"{update} {name} {number}",
                        rule=Sgd(),
                        copies=copies,
                        servers=2,
                        durable=durable,
                    ) as store:
                        await asyncio.sleep(SETTLE_S)
                        result = await busy(store, gradients, options.seconds if number >= 0 else 1.0)
                        await store.delete()
                    if number >= 0:
                        found[name].append(result)
            for name, results in found.items():
                rate = statistics.median([each for each, _ in results])
                base = statistics.median([each for each, _ in found[f"no disk, {name.split(', ')[1]}"]])
                latencies = row_of([each for _, many in results for each in many])
                rows.append(
                    {
                        "case": f"ack: {update}, {name}",
                        "pushes_per_s": round(rate, 1),
                        **latencies,
                        "ratio": round(rate / base, 3),
                    }
                )
    return rows


# --- training --------------------------------------------------------------------------------------


def median_interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the ends of a 95 % interval of the median of some ratios, by bootstrap; equal in each call."""
    draws = np.random.default_rng(1).choice(np.asarray(ratios), (DRAWS, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return round(float(low), 3), round(float(high), 3)


def train(model: str, epochs: int, words: Sequence[str], folder: Path) -> dict[str, Any]:
    """Train a model with two workers; returns the report."""
    file = folder / "report.json"
    command = [sys.executable, "-m", "adam_async", "train", "--processes"]
    command += ["--replicas", "2", "--data", "mnist", "--model", model, "--epochs", str(epochs)]
    done = subprocess.run(
        [*command, "--report", str(file), *words], capture_output=True, text=True, timeout=epochs * EPOCH_S
    )
    if done.returncode:
        raise SystemExit(f"training ended with {done.returncode}: {done.stderr[-2000:]}")
    report: dict[str, Any] = json.loads(file.read_text())
    return report


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


def rates(model: str, copies: int, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of trainings of a model."""
    mode = "single" if copies == 1 else "replicated"
    found: dict[str, list[float]] = {"without": [], mode: [], "durable": []}
    writes: list[dict[str, Any]] = []
    for number in range(options.pairs):
        store = Path(tempfile.mkdtemp(dir=folder))
        kinds = {
            "without": [],
            mode: ["--store", str(store / mode)],
            "durable": ["--store", str(store / "durable"), "--ack", "durable"],
        }
        names = ["without", mode] if number % 2 == 0 else [mode, "without"]
        if number < options.durable_runs:
            names.append("durable")
        for name in names:
            words = ["--servers", "2", "--copies", str(copies), *kinds[name]]
            report = train(model, options.epochs, words, store)
            found[name].append(report["totals"]["images_per_s"])
            print(f"{model}, {copies} copies, {name}: {found[name][-1]:.0f} images/s", flush=True)
            if name == mode:
                writes += writes_of(report, store / mode)
        shutil.rmtree(store)
    ratios = [mine / theirs for mine, theirs in zip(found[mode], found["without"], strict=True)]
    case = f"rate: {model}, {copies} {'copy' if copies == 1 else 'copies'}"
    rows: list[dict[str, Any]] = [
        {
            "case": f"{case}, {mode}",
            "with": round(statistics.median(found[mode])),
            "without": round(statistics.median(found["without"])),
            "unit": "images/s",
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(each, 3) for each in ratios],
            "interval": median_interval(ratios),
            "epochs": options.epochs,
            "goal": RATE_GOAL,
            "met": statistics.median(ratios) >= RATE_GOAL,
        },
        {"case": f"{case}, writes", "servers": writes, "met": all(each["met"] for each in writes)},
    ]
    if found["durable"]:
        durable = statistics.median(found["durable"])
        rows.append(
            {
                "case": f"{case}, durable",
                "with": round(durable),
                "unit": "images/s",
                "ratio": round(durable / statistics.median(found["without"]), 3),
            }
        )
    return rows


async def measure(folder: Path, options: argparse.Namespace) -> AsyncIterator[dict[str, Any]]:
    """Yield the rows of the wanted parts."""
    if "latency" in options.part:
        for number, (model, flush_s) in enumerate(LATENCY_CASES):
            (folder / f"slow-{number}").mkdir()
            yield await latency(model, flush_s, folder / f"slow-{number}", options)
    if "ack" in options.part:
        for row in await modes(folder, options):
            yield row
    if "rate" in options.part:
        for copies in options.copies:
            for model in options.model:
                for row in await asyncio.to_thread(rates, model, copies, folder, options):
                    yield row


async def run(folder: Path, options: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    async for row in measure(folder, options):
        print(json.dumps(row), flush=True)
        rows.append(row)
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the rows, as JSON")
    parser.add_argument("--part", nargs="+", default=["latency", "ack", "rate"])
    parser.add_argument("--folder", type=Path, help="folder on the disk; by default that of temporary files")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a window")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of latency")
    parser.add_argument("--ack-rounds", type=int, default=2, help="rounds of ack")
    parser.add_argument("--per-s", type=float, default=100.0, help="pushes per second of latency")
    parser.add_argument("--pairs", type=int, default=6, help="pairs of trainings of rate")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of a training of rate")
    parser.add_argument("--model", nargs="+", default=list(MODELS), help="models of trainings of rate")
    parser.add_argument("--copies", type=int, nargs="+", default=[2], help="copies of trainings of rate")
    parser.add_argument("--durable-runs", type=int, default=1, help="durable trainings of each model")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="adam-async-disk-", dir=options.folder))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(folder, options))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
