"""Accuracy against staleness: `mnist-adam` in asp on copies with 1, 2, 4 and 8 replicas, and its picture.

    ADAM_DATA_DIR=DIR python -m benchmarks.staleness_plot     measures, writes staleness.json and .svg
    python -m benchmarks.staleness_plot --draw                the picture alone, from staleness.json

All roles are in one process, and replicas of one thread each share the cores. So no replica is favoured, and
the runs do not measure speed. Three arms, plain SGD, 16 images per group:

- `one rate`: the default of one replica for all.
- `default rate`: falls with the groups in flight, and so with replicas.
- `divided by staleness`: one rate for all, which the servers divide by 1 + the staleness of each push.

Both files are written to `docs/images/`. Runs below 50 % have diverged and are drawn at the bottom.
"""

import json
import math
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adam_async import Config, LocalCluster
from adam_async.data_server.dataset import Dataset
from adam_async.run.counts import ServerCounts
from adam_async.run.learning_rate import default_rate
from adam_async.run.series import add_up
from adam_async.runtime.kernel_cache import use_kernel_cache
from benchmarks import svg
from benchmarks.harness import ROOT, Option, Row, looped, parsed
from benchmarks.images import mnist

FOLDER = ROOT / "docs" / "images"
REPLICAS = (1, 2, 4, 8)
ARMS = ("one rate", "default rate", "divided by staleness")

# --- measuring -------------------------------------------------------------------------------


async def measure(options: Namespace) -> list[Row]:
    """Run all cases, one after the other; returns a record of each run."""
    dataset = await mnist(options.images)
    alone = default_rate(Config(weights="copy", schedule="constant"), groups_in_flight=2)
    return [
        await once(dataset, arm, count, seed, options.epochs, alone)
        for seed in range(options.seeds)
        for count in options.replicas
        for arm in ARMS
        if count > 1 or arm != "default rate"  # with one replica, the default rate is the one rate
    ]


async def once(dataset: Dataset, arm: str, replicas: int, seed: int, epochs: int, alone: float) -> Row:
    """Train once; returns the record of the run."""
    config = Config(
        model="mnist-adam",
        weights="copy",
        schedule="constant",
        threads=1,
        replicas=replicas,
        seed=seed,
        epochs=epochs,
        rate=0.0 if arm == "default rate" else alone,
        scale_by_staleness=arm == "divided by staleness",
    )
    async with LocalCluster(config, dataset=dataset) as cluster:
        result = await cluster.train()
    staleness = add_up(
        each.staleness for each in result.statistics.values() if isinstance(each, ServerCounts)
    )
    found = {
        "arm": arm,
        "replicas": replicas,
        "seed": seed,
        "epochs": epochs,
        "images": sum(epoch.images for epoch in result.epochs),
        "rate": round(cluster.driver.config.rate, 6),
        "staleness_mean": round(staleness.mean, 2),
        "staleness_max": staleness.max,
        "test_accuracy": result.test_accuracy,
    }
    print(json.dumps(found), flush=True)
    return found


# --- drawing ---------------------------------------------------------------------------------

WIDTH, HEIGHT = 860, 430
LEFT, RIGHT, TOP, BOTTOM = 70, 30, 60, 60
WORST, BEST = 0.5, 0.01
"""Test error at the bottom and at the top."""
MARKS = (0.5, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01)
COLOURS = dict(zip(ARMS, ("#c2185b", "#1f5fa8", "#3c8d40"), strict=True))


def picture(rows: Sequence[dict[str, Any]]) -> str:
    """The whole drawing: a point per run, a line through the means of each arm; both axes are logarithmic."""
    most = max(row["staleness_mean"] for row in rows)
    widest = 2 ** math.ceil(math.log2(most + 1))
    parts = axes(widest)
    for place, arm in enumerate(ARMS):
        parts += curve([row for row in rows if belongs(row, arm)], widest, COLOURS[arm])
        parts += svg.legend(LEFT + 10 + 225 * place, 30, COLOURS[arm], arm)
    return svg.drawing(WIDTH, HEIGHT, "Test accuracy against mean staleness", parts)


def belongs(row: dict[str, Any], arm: str) -> bool:
    """Whether a run belongs to an arm; with one replica the one rate is the default rate."""
    return row["arm"] == arm or (arm == "default rate" and row["replicas"] == 1 and row["arm"] == "one rate")


def x_of(staleness: float, widest: float) -> float:
    """Position of a staleness on the page."""
    return LEFT + math.log2(1 + staleness) / math.log2(1 + widest) * (WIDTH - LEFT - RIGHT)


def y_of(accuracy: float) -> float:
    """Position of an accuracy on the page; outside values are at its edge."""
    error = min(max(1 - accuracy, BEST), WORST)
    return TOP + math.log(error / BEST) / math.log(WORST / BEST) * (HEIGHT - TOP - BOTTOM)


def axes(widest: int) -> list[str]:
    """Lines and numbers of both axes."""
    parts, bottom = [], HEIGHT - BOTTOM + 20
    for error in MARKS:
        y = y_of(1 - error)
        parts.append(svg.line(LEFT, f"{y:.1f}", WIDTH - RIGHT, f"{y:.1f}"))
        parts.append(svg.text(LEFT - 8, y + 4, f"{1 - error:.0%}", anchor="end"))
    for power in range(int(math.log2(widest)) + 1):
        x = x_of(2**power, widest)
        parts.append(svg.line(f"{x:.1f}", TOP, f"{x:.1f}", HEIGHT - BOTTOM))
        parts.append(svg.text(x, bottom, str(2**power)))
    words = "mean staleness of a push, in pushes (numbers in the picture: replicas)"
    title = svg.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16, words)
    return [*parts, svg.text(x_of(0, widest), bottom, "0"), title]


def curve(rows: list[dict[str, Any]], widest: int, colour: str) -> list[str]:
    """The points of one arm, and a line through the means of its numbers of replicas."""
    parts, means = [], []
    for replicas in sorted({row["replicas"] for row in rows}):
        group = [row for row in rows if row["replicas"] == replicas]
        places = [(x_of(row["staleness_mean"], widest), y_of(row["test_accuracy"])) for row in group]
        parts += svg.points(places, 3.5, colour)
        x, y = (sum(values) / len(places) for values in zip(*places, strict=True))
        means.append((x, y))
        parts.append(svg.text(x + 9, y - 7, str(replicas), anchor="start", colour=colour))
    return [svg.curve(means, 1.6, colour), *parts]


def main() -> None:
    """Run the command line."""
    options = parsed(
        __doc__,
        draw=Option(False, "measure nothing"),
        folder=Option(FOLDER, "folder of both files", type=Path),
        replicas=list(REPLICAS),
        seeds=2,
        epochs=1,
        images=Option(0, "training images; 0: all"),
    )
    file = options.folder / "staleness.json"
    if not options.draw:
        use_kernel_cache()
        file.write_text(json.dumps(looped(measure(options)), indent=1) + "\n")
    (options.folder / "staleness.svg").write_text(picture(json.loads(file.read_text())))


if __name__ == "__main__":
    main()
