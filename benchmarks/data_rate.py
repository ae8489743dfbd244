"""Cost of the data server: training on images that another process transforms, against plain images.

    ADAM_DATA_DIR=DIR python -m benchmarks.data_rate --json FILE [--rounds 5] [--epochs 4]
        [--models mnist-adam mlp]

All options at their defaults, one process for training. Three ways in turn, for `--rounds` rounds:

    plain     the data server is in the process, and images are unchanged
    inside    the same with --augment
    outside   --augment, by `adam-async data` in another process (`train --data tcp://HOST:PORT`)

Images per second of the epochs after the first one (medians), and the number of waits for input in these (the
maximum of any round). Both processes share the machine's cores. Wanted: outside at least 0.75 of plain, and
no fetch blocked.

Rows: case, ours, peer (plain), ratio, unit, blocked fetches.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import uvloop

from adam_async import Config, Disk, LocalCluster, load_dataset
from adam_async.data_server.dataset import Dataset
from adam_async.run.counts import FetchCounts
from adam_async.runtime.kernel_cache import use_kernel_cache
from adam_async.worker.service import ModelWorker

WAYS = ("plain", "inside", "outside")


async def train(model: str, way: str, epochs: int, dataset: Dataset, host: str) -> tuple[float, int]:
    """Images per second, and blocked fetches, of all epochs but the first."""
    config = Config(model=model, epochs=epochs, augment=way != "plain")
    outside = way == "outside"
    blocked: list[int] = []
    async with LocalCluster(
        config, dataset=None if outside else dataset, data=(host,) if outside else ()
    ) as cluster:

        def count(_: object) -> None:
            blocked.append(sum(blocked_fetches(worker) for worker in cluster.workers))

        result = await cluster.train(count)
    later = result.epochs[1:]
    rate = sum(epoch.images for epoch in later) / sum(epoch.train_s for epoch in later)
    return rate, blocked[-1] - blocked[0]


def blocked_fetches(worker: ModelWorker) -> int:
    """Return the number of times that a worker has waited for input."""
    counts = worker.statistics().data
    assert isinstance(counts, FetchCounts)  # unset before the first training
    return counts.blocked_fetches


async def measure(models: list[str], rounds: int, epochs: int, host: str) -> list[dict[str, Any]]:
    """A row for each model and way."""
    async with Disk() as disk:
        dataset = await load_dataset("mnist", disk, data_dir=Path(os.environ["ADAM_DATA_DIR"]))
    rows = []
    for model in models:
        rates: dict[str, list[float]] = {way: [] for way in WAYS}
        blocked: dict[str, list[int]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way in WAYS:
                rate, count = await train(model, way, epochs, dataset, host)
                rates[way].append(rate)
                blocked[way].append(count)
        plain = statistics.median(rates["plain"])
        for way in WAYS[1:]:
            row = {
                "case": f"{model}, changed {way}",
                "ours": round(statistics.median(rates[way])),
                "peer": round(plain),
                "ratio": round(statistics.median(rates[way]) / plain, 3),
                "unit": "images/s",
                "blocked_fetches": max(blocked[way]),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--models", nargs="*", default=["mnist-adam", "mlp"])
    options = parser.parse_args()
    use_kernel_cache()
    command = [sys.executable, "-m", "adam_async", "data", "--data", "mnist", "--bind", "tcp://127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        host = next(word.strip(";") for word in line.split() if word.startswith("tcp://"))
        try:
            rows = uvloop.run(measure(options.models, options.rounds, options.epochs, host))
        finally:
            process.terminate()
    options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
