"""What a data server's transforms cost, and what they bring: images per second, and accuracy over seeds.

    ADAM_DATA_DIR=DIR python -m benchmarks.augmentation --json FILE [--seeds 5] [--epochs 12]
    ... --only speed                                                      or accuracy

`speed`: the default recipe for grey images (shift, rotation, scale, shear, elastic distortion) on blocks of
MNIST as a data server makes them, one thread, with the compiled kernels and with NumPy's; beside one image
after the other with Pillow's affine transform, without elastic distortion (if Pillow is there). Images per
second of the thread's processor time; wanted: 25 000. `gather` is the same blocks without transforms, out of
memory; wanted: 40 000.

`accuracy`: `mnist-adam` in one process, all options at their defaults but a cosine schedule, with
augmentation and without; test accuracy after the last epoch of each seed, and the rate of training.
Wanted: at least 99.3 % in the mean of 5 seeds, and more than without.

Rows: case, ours, peer (what is wanted; for `accuracy` without augmentation), ratio or points, unit.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from numpy.typing import NDArray

from adam_async import Config, Disk, LocalCluster, RunResult, load_dataset
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.order import epoch_order
from adam_async.data_server.stock import Stock
from adam_async.data_server.transforms.recipe import Recipe, default_steps
from adam_async.dice import Dice
from adam_async.kernel_cache import use_kernel_cache

IMAGES_PER_GROUP = 16
SECONDS = 3.0
"""Processor time of one measurement."""
WANTED_TRANSFORMED, WANTED_GATHERED = 25_000, 40_000
WANTED_ACCURACY = 0.993


def rate_of(work: Callable[[int], int], seconds: float = SECONDS) -> float:
    """Images per second of the thread's processor time; `work` says how many it made."""
    work(0)
    begin, images, turn = time.thread_time(), 0, 0
    while time.thread_time() - begin < seconds:
        turn += 1
        images += work(turn)
    return images / (time.thread_time() - begin)


def blocks_of(dataset: Dataset, transform: Any) -> Callable[[int], int]:
    """Make block after block of one epoch."""
    order = epoch_order(
        Dice(0), epoch=1, num_images=len(dataset.train_labels), images_per_group=IMAGES_PER_GROUP
    )
    stock = Stock(dataset, order, transform=transform)
    blocks = len(stock.prepare(range(order.num_groups))) if transform is not None else 700
    return lambda turn: len(stock.make(turn % blocks).labels)


def pillow(dataset: Dataset) -> Callable[[int], int]:
    """The affine part of the recipe with Pillow, image by image."""
    from PIL import Image

    dice = np.random.default_rng(0)

    def work(turn: int) -> int:
        images = dataset.train_images[turn % 500 * 80 :][:80]
        for image in images:
            angle, scale, shear, down, right = dice.uniform(-1, 1, 5)
            matrix = np.linalg.inv(affine(0.17 * angle, 1 + 0.1 * scale, 0.1 * shear, 2 * down, 2 * right))
            picture = Image.fromarray(image[0])
            np.asarray(
                picture.transform(
                    picture.size,
                    Image.Transform.AFFINE,
                    tuple(matrix[:2].reshape(-1)),
                    Image.Resampling.BILINEAR,
                )
            )
        return len(images)

    return work


def affine(angle: float, scale: float, shear: float, down: float, right: float) -> NDArray[Any]:
    """About the middle of an image of 28 x 28."""
    middle = np.array([[1, 0, 13.5], [0, 1, 13.5], [0, 0, 1.0]])
    turn = np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1.0]])
    moved = np.array([[scale, shear, right], [0, scale, down], [0, 0, 1.0]])
    return np.asarray(middle @ turn @ moved @ np.linalg.inv(middle))


def speed(dataset: Dataset) -> list[dict[str, Any]]:
    """Rows of images per second."""
    rows = [speed_row("gather", rate_of(blocks_of(dataset, None)), WANTED_GATHERED)]
    for kernels in ("numba", "numpy") if find_spec("numba") is not None else ("numpy",):
        recipe = Recipe.of(default_steps(dataset.image_shape), dataset.image_shape, kernels=kernels)

        def transform(images: Any, numbers: Any, recipe: Recipe = recipe) -> Any:
            return recipe.apply(images, numbers, dice=Dice(0), epoch=1)

        rate = rate_of(blocks_of(dataset, transform))
        rows.append(speed_row(f"transform, {kernels}", rate, WANTED_TRANSFORMED))
    if find_spec("PIL") is not None:
        rows.append(speed_row("Pillow, affine only, image by image", rate_of(pillow(dataset)), None))
    return rows


def speed_row(case: str, rate: float, wanted: int | None) -> dict[str, Any]:
    """One rate."""
    return {
        "case": case,
        "ours": round(rate),
        "peer": wanted,
        "ratio": None if wanted is None else round(rate / wanted, 2),
        "unit": "images/s of one core",
    }


async def accuracy(dataset: Dataset, seeds: int, epochs: int) -> dict[str, Any]:
    """The row of accuracies."""
    found: dict[bool, list[RunResult]] = {True: [], False: []}
    for seed in range(seeds):
        for augment in (False, True):
            config = Config(model="mnist-adam", augment=augment, epochs=epochs, schedule="cosine", seed=seed)
            async with LocalCluster(config, dataset=dataset) as cluster:
                found[augment].append(await cluster.train())
    last = {augment: [run.epochs[-1].test_accuracy for run in runs] for augment, runs in found.items()}
    rates = {
        augment: statistics.median(epoch.images_per_s for run in runs for epoch in run.epochs)
        for augment, runs in found.items()
    }
    mean = {augment: statistics.mean(values) for augment, values in last.items()}
    return {
        "case": f"mnist-adam with augmentation / without, {epochs} epochs, {seeds} seeds",
        "ours": round(mean[True], 5),
        "peer": round(mean[False], 5),
        "points": round(100 * (mean[True] - mean[False]), 3),
        "unit": "test accuracy",
        "wanted": WANTED_ACCURACY,
        "met": mean[True] >= WANTED_ACCURACY and mean[True] > mean[False],
        "accuracies": last[True],
        "peer_accuracies": last[False],
        "images_per_s": round(rates[True]),
        "peer_images_per_s": round(rates[False]),
        "rate_ratio": round(rates[True] / rates[False], 3),
    }


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every row."""
    async with Disk() as disk:
        dataset = await load_dataset(os.environ["ADAM_DATA_DIR"], disk)
    rows = speed(dataset) if "speed" in arguments.only else []
    if "accuracy" in arguments.only:
        rows.append(await accuracy(dataset, arguments.seeds, arguments.epochs))
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--only", nargs="+", choices=["speed", "accuracy"], default=["speed", "accuracy"])
    arguments = parser.parse_args()
    use_kernel_cache()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = runner.run(measure(arguments))
    for row in rows:
        print(json.dumps(row), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
