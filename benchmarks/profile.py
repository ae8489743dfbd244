"""Cost of a profile: the same training with and without one, in pairs, in one process.

    ADAM_DATA_DIR=DIR python -m benchmarks.profile --json profile.json [--rounds 6]

Each pair is two epochs of MNIST by `mnist-adam` at 16 images per group, with a profile (ours) and without.
The goal is 0.9. Rows also have the ratio of the processor time per image (with / without), which other
programs disturb less, and events per group.
"""

import statistics
import time
from argparse import Namespace
from collections.abc import AsyncIterator
from typing import Literal

from adam_async import Config, Dataset, LocalCluster, Timeline
from benchmarks.harness import Option, Row, compared, run, turns
from benchmarks.images import mnist

CASES: tuple[tuple[Literal["numba", "numpy"], Literal["aliased", "copy"]], ...] = (
    ("numba", "aliased"),
    ("numba", "copy"),
    ("numpy", "aliased"),
    ("numpy", "copy"),
)
"""Kernels, and the place of the weights."""

GOAL = 0.9


async def train(config: Config, dataset: Dataset, timeline: Timeline | None) -> tuple[float, float]:
    """Images per second, and processor seconds per image, of one run."""
    async with LocalCluster(config, dataset=dataset, timeline=timeline) as cluster:
        before = time.process_time()
        result = await cluster.train()
        used_s = time.process_time() - before
    images = sum(epoch.images for epoch in result.epochs)
    return images / sum(epoch.train_s for epoch in result.epochs), used_s / images


async def measure(options: Namespace) -> AsyncIterator[Row]:
    """Yield a row for each case: pairs of runs that differ only in the profile."""
    dataset = await mnist(options.images)
    for kernels, weights in CASES:
        config = Config(model="mnist-adam", epochs=2, kernels=kernels, weights=weights)
        await train(config, dataset, None)  # kernels are compiled
        events, found = 0, {True: list[tuple[float, float]](), False: list[tuple[float, float]]()}
        for with_profile in turns(found, options.rounds):
            timeline = Timeline(limit_events=1_000_000) if with_profile else None
            found[with_profile].append(await train(config, dataset, timeline))
            events = timeline.num_events if timeline else events
        rates, used = zip(*found[True], strict=True)
        plain_rates, plain_used = zip(*found[False], strict=True)
        ratio = statistics.median(a / b for a, b in zip(used, plain_used, strict=True))
        groups = config.epochs * -(-len(dataset.train_labels) // config.images_per_group)
        yield compared(
            f"{kernels} kernels, weights {weights}",
            rates,
            plain_rates,
            "images/s",
            goal=GOAL,
            processor_time_ratio=round(ratio, 3),
            events_per_group=round(events / groups, 1),
        )


if __name__ == "__main__":
    run(__doc__, measure, rounds=6, images=Option(0, "training images; 0: all"))
