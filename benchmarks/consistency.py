"""Cost of waiting for other replicas: `bsp`, `ssp:S` and `asp` compared with each other and with PyTorch DDP.

    ADAM_DATA_DIR=DIR python -m benchmarks.consistency --torch 'PYTHON torch_mnist.py --data DIR' --json FILE
    ... --only slack --pairs 15

Every run is one epoch of `mnist-adam`, in one or more separate processes, with 16 images per group, plain
SGD, float32, one compute thread per worker, and two workers. The two runs of a ratio have the same seed, and
the ratio of a row is the median of the ratios of all rounds. Cases:

- `lockstep`: bsp as processes, and in one process, against PyTorch DDP over gloo with two processes of 16
  images each: the same batch of 32, the same rate on both sides.
- `slack`: ssp:1000 against asp, both on copies, in one process: the cost of clocks without waits.
- `stalls`: a seeded plan, the same for both sides, stops and resumes worker processes; no stall is as long as
  S steps take. ssp:S against asp.
- `paced`: asp, ssp:4 and bsp with both workers limited to `--share` of a core, then with one of them at a
  fifth of that, against the same mode with equal shares. Every replica has its share of the epoch, so the
  slow replica determines the length of an epoch in every mode; the modes differ in the work of the other
  replica until then. Each mode therefore has a second row: the rate of the first `--first` seconds.

Two cores run five busy processes here (two workers, a server, the data server, the driver): two workers at
full speed get less than a core each, and a stopped process leaves its core to the others. Only in `paced` do
the shares leave room; `cpu_s` has the processor time that each worker got.

Rows: case, ours and peer, ratio (above 1 ours is faster), unit, test accuracy of both. If both are ours, the
row also has the ratio of the processor time of the workers, or of the one process, which other programs
disturb less.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import asyncio
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop

from adam_async import Config, Disk, LocalCluster, ProcessCluster, RunResult, load_dataset
from adam_async.data_server.dataset import Dataset
from adam_async.run.counts import ServerCounts
from adam_async.run.learning_rate import default_rate
from adam_async.run.series import add_up, waited_s
from adam_async.runtime.child_process import ChildProcess
from adam_async.runtime.kernel_cache import use_kernel_cache
from benchmarks.pacing import Order, Pacer, cpu_seconds, duties, stalls

POLL_S = 0.005


class Stalls(msgspec.Struct, frozen=True, kw_only=True):
    """See `pacing.stalls`."""

    seed: int
    every_s: float
    longest_s: float


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run in a separate process."""

    options: dict[str, Any]
    """Options of `Config`."""
    images: int
    """Number of training images; 0 takes all."""
    first_s: float = 0.0
    """Length of the beginning of the run whose rate is reported too, in seconds; 0 for none."""
    stalls: Stalls | None = None
    shares: tuple[float, ...] = ()
    """Share of a core that each worker may use; empty: no limit."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Measured rates of one run."""

    images_per_s: float
    first_images_per_s: float | None
    test_accuracy: float
    staleness_mean: float
    clock_wait_s: float
    cpu_s: tuple[float, ...]
    """Processor seconds of each worker process during training, or of the one process."""
    rate: float


# --- one run, in its own process -------------------------------------------------------------


async def perform(run: Run) -> Found:
    """Train one epoch with the given options."""
    config = Config(model="mnist-adam", epochs=1, threads=1, schedule="constant", **run.options)
    dataset = await load_images(run.images)
    cpu_s: tuple[float, ...] = ()
    if not config.processes:
        async with LocalCluster(config, dataset=dataset) as local:
            before = time.process_time()
            result = await local.train()
            cpu_s = (round(time.process_time() - before, 2),)
        return found(run, result, local.driver.config, cpu_s)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "images.npz"
        save(dataset, file)
        config = msgspec.structs.replace(config, data=str(file))
        async with ProcessCluster(config) as processes, asyncio.TaskGroup() as group:
            pacing = group.create_task(pace(processes, run), name="pace")
            result = await processes.train()
            cpu_s = await pacing
        return found(run, result, processes.driver.config, cpu_s)


async def load_images(count: int) -> Dataset:
    """The first `count` training images, or all, with all test images."""
    async with Disk() as disk:
        dataset = await load_dataset(os.environ["ADAM_DATA_DIR"], disk)
    count = count or len(dataset.train_labels)
    return Dataset(
        name=dataset.name,
        source=dataset.source,
        train_images=dataset.train_images[:count],
        train_labels=dataset.train_labels[:count],
        test_images=dataset.test_images,
        test_labels=dataset.test_labels,
        num_classes=dataset.num_classes,
    )


def save(dataset: Dataset, file: Path) -> None:
    """Write images to a file that a data server of another process can read."""
    np.savez(
        file,
        x_train=np.asarray(dataset.train_images[:]),
        y_train=dataset.train_labels,
        x_test=dataset.test_images,
        y_test=dataset.test_labels,
    )


async def pace(cluster: ProcessCluster, run: Run) -> tuple[float, ...]:
    """Hold the workers back from the first group to the last; return the processor seconds of each."""
    progress = cluster.driver.progress
    while progress.phase != "training":  # noqa: ASYNC110 - a change causes no event
        await asyncio.sleep(POLL_S)
    workers = [cluster.children[f"worker-{number}"] for number in range(cluster.config.replicas)]
    pids = [each.pid for each in workers if isinstance(each, ChildProcess) and each.pid is not None]
    orders: Iterator[Order] = iter(())
    if run.stalls is not None:
        orders = stalls(workers=len(pids), **msgspec.to_builtins(run.stalls))
    elif run.shares:
        orders = duties(run.shares)
    before = [cpu_seconds(pid) for pid in pids]
    with Pacer(orders, pids):
        while progress.phase == "training":  # noqa: ASYNC110 - as above
            await asyncio.sleep(POLL_S)
        return tuple(round(cpu_seconds(pid) - had, 2) for pid, had in zip(pids, before, strict=True))


def found(run: Run, result: RunResult, config: Config, cpu_s: tuple[float, ...]) -> Found:
    """Return the measured rates of a run."""
    counted = result.statistics.values()
    servers = [each for each in counted if isinstance(each, ServerCounts)]
    early = [sample for sample in result.series if 0 < sample.s <= run.first_s]
    (epoch,) = result.epochs
    return Found(
        images_per_s=epoch.images_per_s,
        first_images_per_s=early[-1].images / early[-1].s if early else None,
        test_accuracy=epoch.test_accuracy,
        staleness_mean=round(add_up(each.staleness for each in servers).mean, 2),
        clock_wait_s=round(waited_s(counted)[2], 2),
        cpu_s=cpu_s,
        rate=config.rate,
    )


# --- the cases -------------------------------------------------------------------------------


def ours(run: Run) -> Found:
    """Perform one run of ours in a separate process."""
    command = [sys.executable, "-m", "benchmarks.consistency", "--run", msgspec.json.encode(run).decode()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{run} failed: {done.stderr[-2000:]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Found)


def peer(command: str, *, rate: float, seed: int) -> Found:
    """One epoch of the peer: its rate, and its accuracy."""
    words = f"--mode ddp --batch 16 --momentum 0 --lr {rate} --seed {seed} --to-accuracy 2 --max-epochs 1"
    done = subprocess.run(
        [*shlex.split(command), *words.split()], capture_output=True, text=True, timeout=600
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"the peer printed no rows: {done.stderr[-2000:]}")
    return Found(
        images_per_s=60_000 / lines[-1]["seconds"],
        first_images_per_s=None,
        test_accuracy=lines[-1]["reached"],
        staleness_mean=0.0,
        clock_wait_s=0.0,
        cpu_s=(),
        rate=rate,
    )


def row(case: str, pairs: Sequence[tuple[Found, Found]], *, first: bool = False) -> dict[str, Any]:
    """One row, over the runs of all rounds."""
    rates = [
        (one.first_images_per_s or 0.0, other.first_images_per_s or 0.0)
        if first
        else (one.images_per_s, other.images_per_s)
        for one, other in pairs
    ]
    used = [sum(other.cpu_s) / sum(one.cpu_s) for one, other in pairs if one.cpu_s and other.cpu_s]
    last = pairs[-1][0]
    return {
        "case": case,
        "ours": round(statistics.median(one for one, _ in rates)),
        "peer": round(statistics.median(other for _, other in rates)),
        "ratio": round(statistics.median(one / other for one, other in rates), 3),
        "unit": "images/s",
        "accuracy": round(statistics.median(one.test_accuracy for one, _ in pairs), 4),
        "peer_accuracy": round(statistics.median(other.test_accuracy for _, other in pairs), 4),
        "rate": last.rate,
        "staleness": last.staleness_mean,
        "clock_wait_s": last.clock_wait_s,
        "cpu_s": last.cpu_s,
        "cpu_ratio": round(statistics.median(used), 3) if used else None,
        "ratios": [round(one / other, 3) for one, other in rates],
    }


def lockstep(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """bsp against PyTorch DDP."""
    if not arguments.torch:
        print("no --torch: lockstep is left out", flush=True)
        return []
    cases: dict[str, list[tuple[Found, Found]]] = {"2 worker processes": [], "one process": []}
    options: dict[str, Any] = {"consistency": "bsp", "replicas": 2}
    rate = default_rate(Config(schedule="constant", **options))
    for seed in range(arguments.rounds):
        other = peer(arguments.torch, rate=rate, seed=seed)
        for case, pairs in cases.items():
            processes = case != "one process"
            run = Run(options={**options, "processes": processes, "seed": seed, "rate": rate}, images=0)
            pairs.append((ours(run), other))
    return [row(f"bsp, {case}, beside PyTorch DDP", pairs) for case, pairs in cases.items()]


def pair(turn: int, one: Run, other: Run) -> tuple[Found, Found]:
    """Both runs, in alternating order."""
    if turn % 2:
        second = ours(other)
        return ours(one), second
    return ours(one), ours(other)


def slack(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """ssp with more slack than any replica uses, against asp."""
    runs = [
        Run(options={"consistency": mode, "replicas": 2, "weights": "copy"}, images=arguments.images)
        for mode in ("ssp:1000", "asp")
    ]
    pairs = [pair(turn, *runs) for turn in range(arguments.pairs)]
    return [row("ssp:1000 beside asp, one process, into copies", pairs)]


def stalled(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """ssp:S against asp under the same stalls."""
    pairs = []
    for seed in range(arguments.rounds):
        plan = Stalls(seed=seed, every_s=0.5, longest_s=arguments.longest)
        runs = [
            Run(
                options={"consistency": mode, "replicas": 2, "processes": True},
                images=arguments.images,
                stalls=plan,
            )
            for mode in (f"ssp:{arguments.steps}", "asp")
        ]
        pairs.append(pair(seed, *runs))
    case = f"ssp:{arguments.steps} beside asp, stalls of up to {arguments.longest:g} s"
    return [row(case, pairs)]


def paced(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """asp, ssp:4 and bsp, with both workers paced equally, then one at a fifth of the other's share."""
    share = arguments.share
    even: dict[str, Found] = {}
    uneven: dict[str, Found] = {}
    for runs, shares in ((even, (share, share)), (uneven, (share, share / 5))):
        for mode in ("asp", "ssp:4", "bsp"):
            options = {"consistency": mode, "replicas": 2, "processes": True}
            runs[mode] = ours(
                Run(options=options, images=arguments.paced_images, first_s=arguments.first, shares=shares)
            )
    held = f"workers at {share:g} of a core"
    rows = [row(f"{mode} beside asp, {held}", [(even[mode], even["asp"])]) for mode in ("ssp:4", "bsp")]
    for first in (False, True):
        part = f", first {arguments.first:g} s" if first else ""
        rows += [
            row(f"{mode}, one at a fifth, beside both at {share:g} of a core{part}", [both], first=first)
            for mode, both in ((mode, (uneven[mode], even[mode])) for mode in even)
        ]
    return rows


CASES: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "lockstep": lockstep,
    "slack": slack,
    "stalls": stalled,
    "paced": paced,
}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--torch", help="command of the peer")
    parser.add_argument("--json", type=Path, help="file for the rows, as JSON")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--images", type=int, default=0, help="training images of slack and stalls; 0: all")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of lockstep and stalls")
    parser.add_argument("--pairs", type=int, default=15, help="rounds of slack")
    parser.add_argument("--steps", type=int, default=256, help="bound S of the runs with stalls")
    parser.add_argument("--longest", type=float, default=0.4, help="longest stall, in seconds")
    parser.add_argument("--share", type=float, default=0.4, help="share of a core for each paced worker")
    parser.add_argument("--paced-images", type=int, default=24_000, help="training images of paced")
    parser.add_argument("--first", type=float, default=3.0, help="seconds of the paced runs' second rate")
    arguments = parser.parse_args()
    use_kernel_cache()
    if arguments.run is not None:
        run = msgspec.json.decode(arguments.run, type=Run)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            print(msgspec.json.encode(runner.run(perform(run))).decode())
        return
    rows = []
    for case in arguments.only:
        for each in CASES[case](arguments):
            rows.append(each)
            print(json.dumps(each), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
