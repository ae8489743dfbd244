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

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import asyncio
import json
import math
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import uvloop

from adam_async import Config, Disk, LocalCluster, load_dataset
from adam_async.data_server.dataset import Dataset
from adam_async.run.counts import ServerCounts
from adam_async.run.learning_rate import default_rate
from adam_async.run.series import add_up
from adam_async.runtime.kernel_cache import use_kernel_cache

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
REPLICAS = (1, 2, 4, 8)
ARMS = ("one rate", "default rate", "divided by staleness")

# --- measuring -------------------------------------------------------------------------------


async def measure(replicas: list[int], seeds: int, epochs: int) -> list[dict[str, Any]]:
    """Run all cases, one after the other; a record per run."""
    async with Disk() as disk:
        dataset = await load_dataset(os.environ["ADAM_DATA_DIR"], disk)
    alone = default_rate(Config(weights="copy", schedule="constant"), groups_in_flight=2)
    return [
        await once(dataset, arm, count, seed, epochs, alone)
        for seed in range(seeds)
        for count in replicas
        for arm in ARMS
        if count > 1 or arm != "default rate"  # with one replica, the default rate is the one rate
    ]


async def once(
    dataset: Dataset, arm: str, replicas: int, seed: int, epochs: int, alone: float
) -> dict[str, Any]:
    """Train once; return the record of the run."""
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
INK, PAPER, PALE = "#1f2933", "#ffffff", "#dfe4ea"
COLOURS = dict(zip(ARMS, ("#c2185b", "#1f5fa8", "#3c8d40"), strict=True))


def picture(rows: list[dict[str, Any]]) -> str:
    """The whole drawing: a point per run, a line through the means of each arm; both axes are logarithmic."""
    most = max(row["staleness_mean"] for row in rows)
    widest = 2 ** math.ceil(math.log2(most + 1))
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-size="13" '
            'font-family="sans-serif" role="img" aria-label="Test accuracy against mean staleness">'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>',
        *axes(widest),
    ]
    for place, arm in enumerate(ARMS):
        parts += curve([row for row in rows if belongs(row, arm)], widest, COLOURS[arm])
        parts += legend(LEFT + 10 + 225 * place, COLOURS[arm], arm)
    return "\n".join([*parts, "</svg>"]) + "\n"


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
    parts = []
    for error in MARKS:
        y = y_of(1 - error)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{PALE}"/>')
        parts.append(text(LEFT - 8, y + 4, f"{1 - error:.0%}", anchor="end"))
    for power in range(int(math.log2(widest)) + 1):
        x = x_of(2**power, widest)
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="{PALE}"/>')
        parts.append(text(x, HEIGHT - BOTTOM + 20, str(2**power)))
    parts.append(text(x_of(0, widest), HEIGHT - BOTTOM + 20, "0"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        text(middle, HEIGHT - 16, "mean staleness of a push, in pushes (numbers in the picture: replicas)")
    )
    return parts


def curve(rows: list[dict[str, Any]], widest: int, colour: str) -> list[str]:
    """The points of one arm, and a line through the means of its numbers of replicas."""
    parts, line = [], []
    for replicas in sorted({row["replicas"] for row in rows}):
        group = [row for row in rows if row["replicas"] == replicas]
        points = [(x_of(row["staleness_mean"], widest), y_of(row["test_accuracy"])) for row in group]
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in points]
        x, y = (sum(values) / len(points) for values in zip(*points, strict=True))
        line.append(f"{x:.1f},{y:.1f}")
        parts.append(text(x + 9, y - 7, str(replicas), anchor="start", colour=colour))
    path = " ".join(line)
    return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>', *parts]


def legend(x: float, colour: str, name: str) -> list[str]:
    """Return the entry of an arm in the legend."""
    return [
        f'<line x1="{x}" y1="30" x2="{x + 26}" y2="30" stroke="{colour}" stroke-width="3"/>',
        text(x + 34, 34, name, anchor="start"),
    ]


def text(x: float, y: float, words: str, *, anchor: str = "middle", colour: str = INK) -> str:
    """Return a text element at a position."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--replicas", type=int, nargs="+", default=list(REPLICAS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1)
    arguments = parser.parse_args()
    file = arguments.folder / "staleness.json"
    if not arguments.draw:
        use_kernel_cache()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            rows = runner.run(measure(arguments.replicas, arguments.seeds, arguments.epochs))
        file.write_text(json.dumps(rows, indent=1) + "\n")
    (arguments.folder / "staleness.svg").write_text(picture(json.loads(file.read_text())))


if __name__ == "__main__":
    main()
