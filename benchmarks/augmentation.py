"""Cost and benefit of a data server's transforms: images per second, and accuracy over seeds.

    ADAM_DATA_DIR=DIR python -m benchmarks.augmentation --json FILE [--torch PYTHON] [--seeds 5] [--epochs 12]
    ... --only speed [--rounds 5] [--seconds 1]                           or accuracy

`speed`: the default recipe for grey images (shift, rotation, scale, shear, elastic distortion) on blocks of
MNIST in the form of a data server's, one thread, with the compiled kernels and with NumPy's; and the default
recipe for colour (flip, crop, brightness, contrast, cutout) on blocks of random images of 32 x 32. The unit
is images per second of the process's processor time, which other processes disturb little. All cases run in
turn for `--rounds` rounds, and the medians count. `gather` is the same blocks without transforms, from
memory.

The peers process the same images. Pillow, if installed, applies an affine transform to one image after the
other, without elastic distortion. With `--torch`, an interpreter with PyTorch and NumPy, PyTorch applies the
same recipe by `affine_grid` and `grid_sample`, to 80 images at once and to one after the other
(`benchmarks/augmentation_torch.py`). Such an interpreter, in its own environment:

    python -m venv FOLDER && FOLDER/bin/pip install torch numpy           --torch FOLDER/bin/python

`accuracy`: `mnist-adam` in one process, all options at their defaults, with augmentation and without; test
accuracy after the last epoch of each seed, and the rate of training. Wanted: at least 99.3 % in the mean of 5
seeds, and more than without.

Rows: case, ours, peer (the goal; in rows with a peer, its rate; for `accuracy` the run without augmentation),
ratio or points, unit.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import asyncio
import io
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from numpy.typing import NDArray

from adam_async import Config, Disk, LocalCluster, RunResult, load_dataset
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.group_cache import BLOCK_BYTES
from adam_async.data_server.order import epoch_order
from adam_async.data_server.transforms.recipe import Recipe, default_steps
from adam_async.model.keyed_random import Dice
from adam_async.runtime.kernel_cache import use_kernel_cache

IMAGES_PER_GROUP = 16
PEER_IMAGES = 8000
"""Number of images of the data set that PyTorch gets."""
ROOT = Path(__file__).resolve().parent.parent
WANTED = {"gather": 40_000, "grey, numba": 120_000, "grey, numpy": 25_000, "colour, numba": 60_000}
WANTED_ACCURACY = 0.993


def rate_of(work: Callable[[int], int], seconds: float) -> float:
    """Images per second of the process's time; `work` returns the number of images that it made."""
    work(0)
    begin, images, turn = time.process_time(), 0, 0
    while time.process_time() - begin < seconds:
        turn += 1
        images += work(turn)
    return images / (time.process_time() - begin)


def blocks_of(dataset: Dataset, transform: Any) -> Callable[[int], int]:
    """Return a function that gathers and transforms a block of an epoch, of the size of a data server's."""
    order = epoch_order(
        Dice(0), epoch=1, num_images=len(dataset.train_labels), images_per_group=IMAGES_PER_GROUP
    )
    size = max(BLOCK_BYTES // prod((IMAGES_PER_GROUP, *dataset.image_shape)), 1) * IMAGES_PER_GROUP
    blocks = [order.indices[at : at + size] for at in range(0, len(order.indices), size)]

    def work(turn: int) -> int:
        chosen = blocks[turn % len(blocks)]
        images, _ = dataset.train_images.take(chosen, axis=0), dataset.train_labels.take(chosen)
        return len(images if transform is None else transform(images, chosen))

    return work


def pillow(dataset: Dataset) -> Callable[[int], int]:
    """Return a function that applies the affine part of the recipe with Pillow, image by image."""
    from PIL import Image

    dice = np.random.default_rng(0)

    def work(turn: int) -> int:
        images = dataset.train_images.take(np.arange(80) + turn % 500 * 80, axis=0)
        for image in images:
            angle, scale, shear, down, right = dice.uniform(-1, 1, 5)
            matrix = np.linalg.inv(affine(0.12 * angle, 1 + 0.07 * scale, 0.07 * shear, down, right))
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
    """Return the matrix of an affine map about the middle of an image of 28 x 28."""
    middle = np.array([[1, 0, 13.5], [0, 1, 13.5], [0, 0, 1.0]])
    turn = np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1.0]])
    moved = np.array([[scale, shear, right], [0, scale, down], [0, 0, 1.0]])
    return np.asarray(middle @ turn @ moved @ np.linalg.inv(middle))


def recipe_work(dataset: Dataset, kernels: str) -> Callable[[int], int]:
    """Return a function that applies the default recipe for such images to a block."""
    recipe = Recipe.of(default_steps(dataset.image_shape), dataset.image_shape, kernels=kernels)

    def transform(images: Any, numbers: Any) -> Any:
        return recipe.apply(images, numbers, dice=Dice(0), epoch=1)

    return blocks_of(dataset, transform)


def in_colour() -> Dataset:
    """Images with the shape of CIFAR-10's and random pixels, which take as long to transform as any."""
    pixels = np.random.default_rng(0).integers(0, 256, (4000, 3, 32, 32), np.uint8)
    labels = np.zeros(len(pixels), np.int64)
    return Dataset(
        name="random",
        source="random pixels",
        train_images=pixels,
        train_labels=labels,
        test_images=pixels[:1],
        test_labels=labels[:1],
        num_classes=10,
    )


def torchs(python: str, images: NDArray[np.uint8], batch: int, seconds: float) -> float:
    """Images per second of PyTorch's process time."""
    file = io.BytesIO()
    np.save(file, images)
    command = [
        python,
        "-m",
        "benchmarks.augmentation_torch",
        "--batch",
        str(batch),
        "--seconds",
        str(seconds),
    ]
    found = subprocess.run(command, input=file.getvalue(), cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return float(json.loads(found.stdout)["images_per_s"])


def speed(dataset: Dataset, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of images per second, and of the peers' rates."""
    seconds = arguments.seconds
    work = {"gather": blocks_of(dataset, None)}
    for kernels in ("numba", "numpy") if find_spec("numba") is not None else ("numpy",):
        work[f"grey, {kernels}"] = recipe_work(dataset, kernels)
        work[f"colour, {kernels}"] = recipe_work(in_colour(), kernels)
    if find_spec("PIL") is not None:
        work["Pillow, affine only, one by one"] = pillow(dataset)
    cases = {case: partial(rate_of, made, seconds) for case, made in work.items()}
    if arguments.torch:
        images = dataset.train_images.take(np.arange(PEER_IMAGES), axis=0)
        for batch, how in ((80, "80 at once"), (1, "one by one")):
            cases[f"PyTorch, {how}"] = partial(torchs, arguments.torch, images, batch, seconds)
    rates: dict[str, list[float]] = {case: [] for case in cases}
    for _ in range(arguments.rounds):
        for case, rate in cases.items():
            rates[case].append(rate())
    median = {case: statistics.median(found) for case, found in rates.items()}
    mine = "grey, numba" if "grey, numba" in median else "grey, numpy"
    rows = [speed_row(case, median[case], WANTED.get(case)) for case in work if not case.startswith("Pillow")]
    others = [case for case in median if case.startswith(("Pillow", "PyTorch"))]
    return rows + [speed_row(f"{mine} / {other}", median[mine], median[other]) for other in others]


def speed_row(case: str, rate: float, peer: float | None) -> dict[str, Any]:
    """One rate, and the goal or the peer's rate."""
    return {
        "case": case,
        "ours": round(rate),
        "peer": None if peer is None else round(peer),
        "ratio": None if peer is None else round(rate / peer, 2),
        "unit": "images/s of one core",
    }


async def accuracy(dataset: Dataset, seeds: int, epochs: int) -> dict[str, Any]:
    """The row of accuracies."""
    found: dict[bool, list[RunResult]] = {True: [], False: []}
    for seed in range(seeds):
        for augment in (False, True):
            config = Config(model="mnist-adam", augment=augment, epochs=epochs, seed=seed)
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
    """Measure and return every row."""
    async with Disk() as disk:
        dataset = await load_dataset(os.environ["ADAM_DATA_DIR"], disk)
    rows = speed(dataset, arguments) if "speed" in arguments.only else []
    if "accuracy" in arguments.only:
        rows.append(await accuracy(dataset, arguments.seeds, arguments.epochs))
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the rows, as JSON")
    parser.add_argument("--torch", help="a Python interpreter that has PyTorch and NumPy")
    parser.add_argument("--rounds", type=int, default=5, help="of speed")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="seconds of processor time per case and round"
    )
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
