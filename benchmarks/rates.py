"""Test accuracy by learning rate, mode and seed: the choice of the default rates, and their results.

    python -m benchmarks.rates --data-dir MNIST --rates 0.06 0.09 0.12 --json search.json
    python -m benchmarks.rates --data-dir MNIST --test --seeds 1 2 3 4 5 --json rates.json
    python -m benchmarks.rates --data digits --modes "one process" --json digits.json -- --epochs 12

The first command searches on a split of the training images, whose last 5,000 serve as test images. The
second command trains at the defaults and is the only one that uses the test set; it takes no rates. The third
command holds back every fifth image of the data set `digits`. Each row is one mode and rate: the accuracies
of all seeds after the last epoch, their mean and minimum.
"""

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from adam_async.data_server.sources.datasets import load
from adam_async.runtime.disk import Disk

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
        whole = await load(name, disk, data_dir=data_dir)
    images, labels, held = (
        np.asarray(whole.train_images[:]),
        np.asarray(whole.train_labels[:]),
        HELD_BACK[name],
    )
    np.savez(
        file,
        x_train=np.delete(images, held, axis=0),
        y_train=np.delete(labels, held, axis=0),
        x_test=images[held],
        y_test=labels[held],
    )


def train(options: list[str]) -> tuple[float, float]:
    """Run a training; returns its test accuracy after the last epoch, and images per second."""
    command = [sys.executable, "-m", "adam_async", "train", "--keep-going", *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800)
    last = re.search(r"test accuracy ([\d.]+)% after .*?, ([\d,]+) images/s", done.stdout)
    if last is None:
        raise ValueError(f"no summary in the output of {command}: {done.stdout[-500:]!r}")
    return float(last[1]) / 100, float(re.sub(r"\D", "", last[2]))


def main() -> None:
    """Run the benchmark, print the rows, write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", default="mnist", choices=list(HELD_BACK), help="data set")
    parser.add_argument("--data-dir", type=Path, help="folder of MNIST's files")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0], help="0 is the default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12])
    parser.add_argument(
        "--test", action="store_true", help="train on all images, and evaluate on the test set"
    )
    parser.add_argument("--json", type=Path, help="file for the rows, as JSON")
    parser.add_argument("more", nargs="*", help="options of every run, after --")
    options = parser.parse_args()
    if options.test and options.rates != [0.0]:
        parser.error("--test takes no --rates: they are chosen on the validation split")
    with tempfile.TemporaryDirectory() as folder:
        data = options.data_dir or options.data
        if not options.test:
            data = Path(folder) / "split.npz"
            asyncio.run(split(options.data, options.data_dir, data))
        found: dict[tuple[str, float], list[tuple[float, float]]] = {}
        for seed in options.seeds:
            for mode in options.modes:
                for rate in options.rates:
                    given = ["--rate", str(rate)] if rate else []
                    run = [*MODES[mode], *given, "--seed", str(seed), "--data", str(data), *options.more]
                    found.setdefault((mode, rate), []).append(train(run))
                    print(row(mode, rate, found[mode, rate]), flush=True)
    rows = [row(mode, rate, runs) for (mode, rate), runs in found.items()]
    if options.json:
        text = json.dumps(
            {
                "benchmark": "rates",
                "data": options.data,
                "more": options.more,
                "test": options.test,
                "rows": rows,
            },
            indent=2,
        )
        options.json.write_text(text + "\n")


def row(mode: str, rate: float, runs: list[tuple[float, float]]) -> dict[str, Any]:
    """Results of the runs of one mode and rate."""
    accuracies = [accuracy for accuracy, _ in runs]
    return {
        "mode": mode,
        "rate": rate or "default",
        "seeds": len(runs),
        "mean": round(statistics.mean(accuracies), 5),
        "least": min(accuracies),
        "accuracies": accuracies,
        "images_per_s": round(statistics.median(images_per_s for _, images_per_s in runs)),
    }


if __name__ == "__main__":
    main()
