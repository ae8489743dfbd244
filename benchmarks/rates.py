"""Test accuracy by learning rate, mode and seed: the choice of the default rates, and their results.

    python -m benchmarks.rates --data-dir MNIST --rates 0.06 0.09 0.12 --json search.json
    python -m benchmarks.rates --data-dir MNIST --test --seeds 1 2 3 4 5 --json rates.json
    python -m benchmarks.rates --data digits --modes "one process" --json digits.json --more="--epochs 12"

The first command searches on a split of the training images, whose last 5,000 serve as test images. The
second command trains at the defaults and is the only one that uses the test set; it takes no rates. The third
command holds back every fifth image of the data set `digits`. Each row is one mode and rate: the accuracies
of all seeds after the last epoch, their mean and minimum.
"""

import asyncio
import shlex
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from adam_async.data_server.sources.datasets import load_dataset
from adam_async.runtime.disk import Disk
from benchmarks.harness import Option, Row, run, trained

HELD_BACK = {"mnist": slice(-5_000, None), "digits": slice(None, None, 5)}
"""Training images that are the test images of the search, by data set. The images of `digits` are sorted by
their writers."""

MODES = {
    "one process": [],
    "bsp, 2 replicas": ["--consistency", "bsp", "--replicas", "2"],
    "ssp:4, 2 replicas": ["--consistency", "ssp:4", "--replicas", "2"],
    "processes, 2 replicas": ["--processes", "--replicas", "2"],
    "cut in two": ["--partitions", "2"],
    "cut in two, processes": ["--partitions", "2", "--processes"],
}


async def split(name: str, data_dir: Path | None, file: Path) -> None:
    """Write a data set without its test images, with the training images of `HELD_BACK` in their place."""
    async with Disk() as disk:
        whole = await load_dataset(name, disk, data_dir=data_dir)
    images, labels, held = np.asarray(whole.train_images[:]), whole.train_labels[:], HELD_BACK[name]
    rest, rest_labels = np.delete(images, held, axis=0), np.delete(labels, held, axis=0)
    np.savez(file, x_train=rest, y_train=rest_labels, x_test=images[held], y_test=labels[held])


def row(mode: str, rate: float, totals: list[dict[str, Any]]) -> Row:
    """Return the row of the runs of one mode and rate, from the totals of their reports."""
    accuracies = [run["test_accuracy"] for run in totals]
    return {
        "case": f"{mode}, rate {rate or 'default'}",
        "mean": round(statistics.mean(accuracies), 5),
        "least": min(accuracies),
        "accuracies": accuracies,
        "images_per_s": round(statistics.median(run["images_per_s"] for run in totals)),
    }


def measure(options: Namespace) -> Iterator[Row]:
    """Yield the row of each mode and rate."""
    if options.test and options.rates != [0.0]:
        raise SystemExit("--test takes no --rates: they are chosen on the validation split")
    found: dict[tuple[str, float], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = options.data_dir or options.data
        if not options.test:
            data = Path(folder) / "split.npz"
            asyncio.run(split(options.data, options.data_dir, data))
        for seed, mode, rate in product(options.seeds, options.modes, options.rates):
            words = ["--keep-going", "--seed", str(seed), "--data", str(data), *MODES[mode]]
            words += [*(["--rate", str(rate)] if rate else []), *shlex.split(options.more)]
            found.setdefault((mode, rate), []).append(trained(*words, within_s=1800)["totals"])
    for (mode, rate), totals in found.items():
        yield row(mode, rate, totals)


if __name__ == "__main__":
    run(
        __doc__,
        measure,
        data=Option("mnist", "data set", choices=list(HELD_BACK)),
        data_dir=Option(None, "folder of MNIST's files", type=Path),
        modes=Option(list(MODES), choices=list(MODES)),
        rates=Option([0.0], "0 is the default"),
        seeds=[11, 12],
        test=Option(False, "train on all images, and evaluate on the test set"),
        more=Option("", "further options of every run, as one text"),
    )
