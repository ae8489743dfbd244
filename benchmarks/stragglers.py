"""Cost of one slow replica of four for an epoch, with `epoch_fraction` and without, against four equal ones.

    ADAM_DATA_DIR=DIR python -m benchmarks.stragglers --json FILE [--seeds 3] [--epochs 5] [--share 0.15]

`mnist-adam`, 16 images per group, asp, on copies of the weights through the servers, at a constant rate,
every other option at its default, all roles in one process, and four replicas of one thread each. Each
replica gets 15 % of the machine's time (`--slow worker-N:PACE`; the pace of a thread is the share times cores
/ threads); then one of them gets 3 %. The rest of the machine is for the event loop. Each case runs with the
default fraction, 0.75 (an epoch ends when three of the four have trained their share), and with 1 (when all
have). The runs of a seed take turns.

Rows: case; ours and peer: median seconds of training per epoch, over epochs and seeds, of the uneven replicas
and of equal ones with the same fraction; ratio (ours / peer; the goal at 0.75 is at most 1.15); unit; mean
accuracies after the last epoch of both (the goal is within 0.3 points), accuracies of each seed, images per
epoch left for the next one, and the share of time that each worker of ours computed.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import asyncio
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from adam_async import Config, Disk, LocalCluster, RunResult, load_dataset
from adam_async.data_server.dataset import Dataset
from adam_async.run.counts import WorkerCounts
from adam_async.runtime.kernel_cache import use_kernel_cache
from adam_async.runtime.machine import usable_cores

REPLICAS = 4
THREADS = 1
SLOW_BY = 5
"""Factor by which the straggler computes less than the others."""
FRACTIONS = (0.75, 1.0)
WANTED_RATIO = 1.15
WANTED_POINTS = 0.003


def config_of(arguments: argparse.Namespace, *, uneven: bool, fraction: float, seed: int) -> Config:
    """One run.

    Args:
        arguments: Arguments of the command line.
        uneven: Whether the last worker is a straggler.
        fraction: Share of the replicas that must train their share of an epoch before it ends.
        seed: Seed of the run.
    """
    pace = arguments.share * usable_cores() / THREADS
    paces = [pace] * (REPLICAS - 1) + [pace / SLOW_BY if uneven else pace]
    return Config(
        model="mnist-adam",
        schedule="constant",
        weights="copy",
        kernels="numba",
        epochs=arguments.epochs,
        replicas=REPLICAS,
        threads=THREADS,
        epoch_fraction=fraction,
        slow=tuple(f"worker-{number}:{each:.4f}" for number, each in enumerate(paces)),
        seed=seed,
    )


async def train(config: Config, dataset: Dataset) -> RunResult:
    """Train one run."""
    async with LocalCluster(config, dataset=dataset) as cluster:
        return await cluster.train()


def row(
    name: str, arguments: argparse.Namespace, slow: Sequence[RunResult], even: Sequence[RunResult]
) -> dict[str, Any]:
    """The row of one fraction, over all seeds."""
    ours_s, peer_s = epoch_seconds(slow), epoch_seconds(even)
    ours, peer = accuracies(slow), accuracies(even)
    points = statistics.mean(ours) - statistics.mean(peer)
    return {
        "case": name,
        "ours": round(ours_s, 3),
        "peer": round(peer_s, 3),
        "ratio": round(ours_s / peer_s, 3),
        "unit": "s per epoch",
        "met": ours_s / peer_s <= WANTED_RATIO and abs(points) <= WANTED_POINTS,
        "epochs": arguments.epochs,
        "accuracy": round(statistics.mean(ours), 4),
        "peer_accuracy": round(statistics.mean(peer), 4),
        "accuracies": [round(each, 4) for each in ours],
        "peer_accuracies": [round(each, 4) for each in peer],
        "skipped": round(statistics.mean(epoch.skipped for run in slow for epoch in run.epochs)),
        "computing": computing(slow[-1]),
    }


def epoch_seconds(runs: Sequence[RunResult]) -> float:
    """Return the median seconds of training per epoch, over all runs."""
    return statistics.median(epoch.train_s for run in runs for epoch in run.epochs)


def accuracies(runs: Sequence[RunResult]) -> list[float]:
    """Return the test accuracy of each run after its last epoch."""
    return [run.epochs[-1].test_accuracy for run in runs]


def computing(run: RunResult) -> list[float]:
    """Return the share of time in which each worker computed, without the pauses of its pace."""
    train_s = sum(epoch.train_s for epoch in run.epochs)
    return [
        round(counts.pool.busy_s / train_s, 3)
        for _, counts in sorted(run.statistics.items())
        if isinstance(counts, WorkerCounts) and counts.pool is not None
    ]


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and return every row."""
    async with Disk() as disk:
        dataset = await load_dataset(os.environ["ADAM_DATA_DIR"], disk)
    found: dict[tuple[bool, float], list[RunResult]] = {}
    for seed in range(arguments.seeds):
        for fraction in FRACTIONS:
            for uneven in (False, True):
                config = config_of(arguments, uneven=uneven, fraction=fraction, seed=seed)
                found.setdefault((uneven, fraction), []).append(await train(config, dataset))
    low = arguments.share / SLOW_BY
    return [
        row(
            f"epoch_fraction {fraction:g}, one of four replicas at {low:.0%} beside all at "
            f"{arguments.share:.0%} of the machine",
            arguments,
            found[True, fraction],
            found[False, fraction],
        )
        for fraction in FRACTIONS
    ]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the rows, as JSON")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--share", type=float, default=0.15, help="share of the machine's time for each replica"
    )
    arguments = parser.parse_args()
    use_kernel_cache()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = runner.run(measure(arguments))
    for each in rows:
        print(json.dumps(each), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
