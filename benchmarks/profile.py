"""Cost of a profile: the same training with and without one, in pairs, in one process.

    OPENBLAS_NUM_THREADS=1 python -m benchmarks.profile --data DIR --json profile.json [--rounds 6]

Each pair is two epochs of MNIST by `mnist-adam` at 16 images per group, one with a profile and one without,
in alternating order. Rows: case, ours (with a profile) and peer (without) in images per second, ratio (median
of the ratios of pairs; the goal is 0.9), unit, processor time per image as a ratio (with / without, which
other programs disturb less), and events per group.
"""

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any, Literal

import uvloop

from adam_async import Config, Dataset, Disk, LocalCluster, Timeline, load_dataset
from adam_async.runtime.kernel_cache import use_kernel_cache

CASES: tuple[tuple[Literal["numba", "numpy"], Literal["aliased", "copy"]], ...] = (
    ("numba", "aliased"),
    ("numba", "copy"),
    ("numpy", "aliased"),
    ("numpy", "copy"),
)
"""Kernels, and the place of the weights."""


async def train(config: Config, dataset: Dataset, timeline: Timeline | None) -> tuple[float, float]:
    """One run: images per second, and processor seconds per image."""
    async with LocalCluster(config, dataset=dataset, timeline=timeline) as cluster:
        before = time.process_time()
        result = await cluster.train()
        used_s = time.process_time() - before
    images = sum(epoch.images for epoch in result.epochs)
    return images / sum(epoch.train_s for epoch in result.epochs), used_s / images


async def measure(config: Config, dataset: Dataset, rounds: int) -> dict[str, Any]:
    """One row: pairs of runs that differ only in the profile."""
    await train(config, dataset, None)  # kernels are compiled
    with_, without, ratios, used = [], [], [], []
    for number in range(rounds):
        timeline = Timeline(limit_events=1_000_000)
        found = {}
        for noted in (True, False) if number % 2 else (False, True):
            found[noted] = await train(config, dataset, timeline if noted else None)
        with_.append(found[True][0])
        without.append(found[False][0])
        ratios.append(found[True][0] / found[False][0])
        used.append(found[True][1] / found[False][1])
    groups = config.epochs * -(-len(dataset.train_labels) // config.images_per_group)
    return {
        "case": f"{config.kernels} kernels, weights {config.weights}",
        "ours": round(statistics.median(with_)),
        "peer": round(statistics.median(without)),
        "ratio": round(statistics.median(ratios), 3),
        "unit": "images/s",
        "processor_time_ratio": round(statistics.median(used), 3),
        "events_per_group": round(timeline.num_events / groups, 1),
    }


async def run(data: str, rounds: int) -> list[dict[str, Any]]:
    """All cases, one after the other."""
    rows = []
    async with Disk() as disk:
        dataset = await load_dataset(data, disk)
    for kernels, weights in CASES:
        config = Config(model="mnist-adam", epochs=2, kernels=kernels, weights=weights)
        rows.append(await measure(config, dataset, rounds))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="mnist", help="mnist, or a folder with the four MNIST files")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    use_kernel_cache()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = runner.run(run(arguments.data, arguments.rounds))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
