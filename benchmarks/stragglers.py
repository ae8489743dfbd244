"""Cost of one slow replica of four for an epoch, with `epoch_fraction` and without, against four equal ones.

    ADAM_DATA_DIR=DIR python -m benchmarks.stragglers --json FILE [--seeds 3] [--epochs 5] [--share 0.15]

`mnist-adam`, 16 images per group, asp, on copies of the weights through the servers, at a constant rate,
every other option at its default, all roles in one process, and four replicas of one thread each. Each
replica gets 15 % of the machine's time (`--slow worker-N:PACE`; the pace of a thread is the share times cores
/ threads); then one of them gets 3 %. The rest of the machine is for the event loop. Each case runs with the
default fraction, 0.75 (an epoch ends when three of the four have trained their share), and with 1 (when all
have). The runs of a seed take turns.

Rows: median seconds of training per epoch of each seed, of the uneven replicas (ours) and of equal ones with
the same fraction; the goal of peer / ours at 0.75 is at least 0.87. Mean accuracies after the last epoch of
both (the goal is within 0.3 points), accuracies of each seed, images per epoch left for the next one, and the
share of time that each worker of ours computed.
"""

import statistics
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence

from adam_async import Config, LocalCluster, RunResult
from adam_async.run.counts import WorkerCounts
from adam_async.runtime.machine import usable_cores
from benchmarks.harness import Option, Row, compared, run, turns
from benchmarks.images import mnist

REPLICAS = 4
THREADS = 1
SLOW_BY = 5
"""Factor by which the straggler computes less than the others."""
FRACTIONS = (0.75, 1.0)
GOAL = 0.87
WANTED_POINTS = 0.003


def config_of(arguments: Namespace, *, uneven: bool, fraction: float, seed: int) -> Config:
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


def row(case: str, slow: Sequence[RunResult], even: Sequence[RunResult]) -> Row:
    """The row of one fraction, over all seeds."""
    ours, peer = accuracies(slow), accuracies(even)
    seconds = [[epoch_seconds(each) for each in runs] for runs in (slow, even)]
    means = [statistics.mean(each) for each in (ours, peer)]
    return compared(
        case,
        seconds[0],
        seconds[1],
        "s per epoch",
        less_is_better=True,
        goal=GOAL,
        is_as_accurate=abs(means[0] - means[1]) <= WANTED_POINTS,
        accuracy=round(means[0], 4),
        peer_accuracy=round(means[1], 4),
        accuracies=[round(each, 4) for each in ours],
        peer_accuracies=[round(each, 4) for each in peer],
        skipped=round(statistics.mean(epoch.skipped for run in slow for epoch in run.epochs)),
        computing=computing(slow[-1]),
    )


def epoch_seconds(run: RunResult) -> float:
    """Return the median seconds of training per epoch of a run."""
    return statistics.median(epoch.train_s for epoch in run.epochs)


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


async def measure(arguments: Namespace) -> AsyncIterator[Row]:
    """Yield the row of each fraction."""
    dataset = await mnist(arguments.images)
    found: dict[tuple[float, bool], list[RunResult]] = {
        (fraction, uneven): [] for fraction in FRACTIONS for uneven in (False, True)
    }
    for fraction, uneven in turns(found, arguments.seeds):
        runs = found[fraction, uneven]
        config = config_of(arguments, uneven=uneven, fraction=fraction, seed=len(runs))
        async with LocalCluster(config, dataset=dataset) as cluster:
            runs.append(await cluster.train())
    low, high = arguments.share / SLOW_BY, arguments.share
    for fraction in FRACTIONS:
        case = f"epoch_fraction {fraction:g}, one of four replicas at {low:.0%} beside all at {high:.0%}"
        yield row(f"{case} of the machine", found[fraction, True], found[fraction, False])


if __name__ == "__main__":
    run(
        __doc__,
        measure,
        seeds=3,
        epochs=5,
        images=Option(0, "training images; 0: all"),
        share=Option(0.15, "share of the machine's time for each replica"),
    )
