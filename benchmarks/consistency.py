"""Cost of waiting for other replicas: `bsp`, `ssp:S` and `asp` compared with each other and with PyTorch DDP.

    ADAM_DATA_DIR=DIR python -m benchmarks.consistency --torch 'PYTHON torch_mnist.py --data DIR' --json FILE
    ... --only slack --pairs 15

Every run is one epoch of `mnist-adam`, in one or more separate processes, with 16 images per group, plain
SGD, float32, one compute thread per worker, and two workers. The two runs of a ratio have the same seed.
Cases:

- `lockstep`: bsp as processes, and in one process, against PyTorch DDP over gloo with two processes of 16
  images each: the same batch of 32, the same rate on both sides.
- `slack`: ssp:1000 against asp, both on copies, in one process: the cost of clocks without waits.
- `paced`: asp, ssp:4 and bsp with both workers limited to `--share` of a core, then with one of them at a
  fifth of that, against the same mode with equal shares. Every replica has its share of the epoch, so the
  slow replica determines the length of an epoch in every mode; the modes differ in the work of the other
  replica until then. Each mode therefore has a second row: the rate of the first `--first` seconds.

Two cores run five busy processes here (two workers, a server, the data server, the driver): two workers at
full speed get less than a core each, and a stopped process leaves its core to the others. Only in `paced` do
the shares leave room; `cpu_s` has the processor time that each worker got.

If both sides are ours, the row also has the ratio of the processor time of the workers, or of the one
process, which other programs disturb less.
"""

import asyncio
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from adam_async import Config, LocalCluster, ProcessCluster, RunResult
from adam_async.run.counts import ServerCounts
from adam_async.run.learning_rate import default_rate
from adam_async.run.series import add_up, waited_s
from adam_async.runtime.child_process import ChildProcess
from benchmarks.harness import Option, Row, apart, compared, interleaved, printed, run
from benchmarks.images import mnist, save
from benchmarks.pacing import Pacer, cpu_seconds, duties

POLL_S = 0.005


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run in a process of its own."""

    options: dict[str, Any]
    """Options of `Config`."""
    images: int
    """Number of training images; 0 takes all."""
    first_s: float = 0.0
    """Length of the beginning of the run whose rate is reported too, in seconds; 0 for none."""
    shares: tuple[float, ...] = ()
    """Share of a core that each worker may use; empty: no limit."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Measured rates of one run."""

    images_per_s: float
    test_accuracy: float
    rate: float
    first_images_per_s: float = 0.0
    staleness_mean: float = 0.0
    clock_wait_s: float = 0.0
    cpu_s: tuple[float, ...] = ()
    """Processor seconds of each worker process during training, or of the one process."""


# --- one run, in its own process -------------------------------------------------------------


async def perform(run: Run) -> Found:
    """Train one epoch with the given options."""
    config = Config(model="mnist-adam", epochs=1, threads=1, schedule="constant", **run.options)
    dataset = await mnist(run.images)
    if not config.processes:
        async with LocalCluster(config, dataset=dataset) as local:
            before = time.process_time()
            result = await local.train()
            used_s = round(time.process_time() - before, 2)
        return found(run, result, local.driver.config, (used_s,))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "images.npz"
        save(dataset, file)
        config = msgspec.structs.replace(config, data=str(file))
        async with ProcessCluster(config) as processes, asyncio.TaskGroup() as group:
            pacing = group.create_task(pace(processes, run), name="pace")
            result = await processes.train()
            cpu_s = await pacing
        return found(run, result, processes.driver.config, cpu_s)


async def pace(cluster: ProcessCluster, run: Run) -> tuple[float, ...]:
    """Hold the workers back from the first group to the last; return the processor seconds of each."""
    progress = cluster.driver.progress
    while progress.phase != "training":  # noqa: ASYNC110 - a change causes no event
        await asyncio.sleep(POLL_S)
    workers = [cluster.children[f"worker-{number}"] for number in range(cluster.config.replicas)]
    pids = [each.pid for each in workers if isinstance(each, ChildProcess) and each.pid is not None]
    before = [cpu_seconds(pid) for pid in pids]
    with Pacer(duties(run.shares), pids):
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
        first_images_per_s=early[-1].images / early[-1].s if early else 0.0,
        test_accuracy=epoch.test_accuracy,
        staleness_mean=round(add_up(each.staleness for each in servers).mean, 2),
        clock_wait_s=round(waited_s(counted)[2], 2),
        cpu_s=cpu_s,
        rate=config.rate,
    )


# --- the cases -------------------------------------------------------------------------------


def peer(command: str, *, rate: float, seed: int) -> Found:
    """One epoch of the peer: its rate, and its accuracy."""
    words = f"--mode ddp --batch 16 --momentum 0 --lr {rate} --seed {seed} --to-accuracy 2 --max-epochs 1"
    row = printed(command, *words.split())[-1]
    return Found(images_per_s=60_000 / row["seconds"], test_accuracy=row["reached"], rate=rate)


def row(case: str, ours: Sequence[Found], peer: Sequence[Found], *, first: bool = False) -> Row:
    """One row, over the runs of all rounds."""
    mine, theirs = (
        [each.first_images_per_s if first else each.images_per_s for each in side] for side in (ours, peer)
    )
    used = [sum(b.cpu_s) / sum(a.cpu_s) for a, b in zip(ours, peer, strict=True) if a.cpu_s and b.cpu_s]
    last = ours[-1]
    return compared(
        case,
        mine,
        theirs,
        "images/s",
        accuracy=round(statistics.median(each.test_accuracy for each in ours), 4),
        peer_accuracy=round(statistics.median(each.test_accuracy for each in peer), 4),
        rate=last.rate,
        staleness=last.staleness_mean,
        clock_wait_s=last.clock_wait_s,
        cpu_s=last.cpu_s,
        cpu_ratio=round(statistics.median(used), 3) if used else None,
    )


def lockstep(arguments: Namespace) -> Iterator[Row]:
    """bsp against PyTorch DDP."""
    if not arguments.torch:
        print("no --torch: lockstep is left out", flush=True)
        return
    options: dict[str, Any] = {"consistency": "bsp", "replicas": 2}
    rate = default_rate(Config(schedule="constant", **options))
    cases = {"2 worker processes": True, "one process": False}
    found: dict[str, list[Found]] = {case: [] for case in (*cases, "peer")}
    for seed in range(arguments.rounds):
        found["peer"].append(peer(arguments.torch, rate=rate, seed=seed))
        for case, processes in cases.items():
            more = {"processes": processes, "seed": seed, "rate": rate}
            found[case].append(apart(perform, Run(options=options | more, images=0)))
    for case in cases:
        yield row(f"bsp, {case}, beside PyTorch DDP", found[case], found["peer"])


def slack(arguments: Namespace) -> Iterator[Row]:
    """ssp with more slack than any replica uses, against asp."""
    sides = {
        mode: partial(
            apart,
            perform,
            Run(options={"consistency": mode, "replicas": 2, "weights": "copy"}, images=arguments.images),
        )
        for mode in ("ssp:1000", "asp")
    }
    found = interleaved(sides, arguments.pairs)
    yield row("ssp:1000 beside asp, one process, into copies", found["ssp:1000"], found["asp"])


def paced(arguments: Namespace) -> Iterator[Row]:
    """asp, ssp:4 and bsp, with both workers paced equally, then one at a fifth of the other's share."""
    share, found = arguments.share, dict[tuple[str, bool], Found]()
    for uneven in (False, True):
        for mode in ("asp", "ssp:4", "bsp"):
            run = Run(
                options={"consistency": mode, "replicas": 2, "processes": True},
                images=arguments.paced_images,
                first_s=arguments.first,
                shares=(share, share / 5 if uneven else share),
            )
            found[mode, uneven] = apart(perform, run)
    for mode in ("ssp:4", "bsp"):
        case = f"{mode} beside asp, workers at {share:g} of a core"
        yield row(case, [found[mode, False]], [found["asp", False]])
    for first in (False, True):
        part = f", first {arguments.first:g} s" if first else ""
        for mode in ("asp", "ssp:4", "bsp"):
            case = f"{mode}, one at a fifth, beside both at {share:g} of a core{part}"
            yield row(case, [found[mode, True]], [found[mode, False]], first=first)


CASES: dict[str, Callable[[Namespace], Iterator[Row]]] = {
    "lockstep": lockstep,
    "slack": slack,
    "paced": paced,
}


def measure(arguments: Namespace) -> Iterator[Row]:
    """Yield the rows of the wanted cases."""
    for case in arguments.only:
        yield from CASES[case](arguments)


if __name__ == "__main__":
    run(
        __doc__,
        measure,
        torch=Option(None, "command of the peer"),
        only=Option(list(CASES), choices=list(CASES)),
        images=Option(0, "training images of slack; 0: all"),
        rounds=Option(3, "rounds of lockstep"),
        pairs=Option(20, "rounds of slack"),
        share=Option(0.4, "share of a core for each paced worker"),
        paced_images=Option(24_000, "training images of paced"),
        first=Option(3.0, "seconds of the paced runs' second rate"),
    )
