"""Few photographs at the defaults: the share of photographs held back whose class a run finds.

    python -m benchmarks.photographs --json FILE [--seeds 5] [--photos 40]

Each seed makes a folder of photographs of three classes (`tests/photos.py`), with 20 others held back, and
trains on it twice: with all options at their defaults, and with rule `adam`, which has the usual groups.
Wanted: a median of at least 90 %, in at most 30 s.

Rows: case, ours (median of the seeds), peer (the same with rule `adam`), unit, the share of each seed, and
the median of the seconds from reading the folder to the result.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import asyncio
import json
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import uvloop

from adam_async import Config, LocalCluster
from adam_async.runtime.kernel_cache import use_kernel_cache
from tests.photos import write_photos

HELD_BACK = 20
"""Number of photographs held back."""

RULES: dict[str, Literal["auto", "adam"]] = {"ours": "auto", "peer": "adam"}
"""Values of `rule`; ``auto`` is the default, and also decides the groups and the rate."""

WANTED, MOST_S = 0.9, 30.0
"""Minimum median of the shares, and maximum of the seconds."""


async def measure(seeds: int, photos: int) -> dict[str, Any]:
    """Return the row of this many training photographs."""
    shares: dict[str, list[float]] = {name: [] for name in RULES}
    seconds: dict[str, list[float]] = {name: [] for name in RULES}
    for seed in range(seeds):
        with TemporaryDirectory() as folder:
            write_photos(Path(folder, "train"), photos, seed=seed)
            write_photos(Path(folder, "test"), HELD_BACK, seed=1000 + seed)
            for name, rule in RULES.items():
                begin = time.monotonic()
                async with LocalCluster(Config(data=folder, rule=rule, seed=seed)) as cluster:
                    result = await cluster.train()
                seconds[name].append(round(time.monotonic() - begin, 1))
                shares[name].append(result.test_accuracy)
    found = {name: median(values) for name, values in shares.items()}
    return {
        "case": f"{photos} photographs, {HELD_BACK} held back, {seeds} seeds",
        "ours": found["ours"],
        "peer": found["peer"],
        "unit": "share of photographs held back",
        "met": found["ours"] >= WANTED and median(seconds["ours"]) <= MOST_S,
        "shares": shares["ours"],
        "peer_shares": shares["peer"],
        "seconds": median(seconds["ours"]),
        "peer_seconds": median(seconds["peer"]),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the row, as JSON")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--photos", type=int, default=40, help="photographs for training")
    arguments = parser.parse_args()
    use_kernel_cache()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        row = runner.run(measure(arguments.seeds, arguments.photos))
    print(json.dumps(row), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([row], indent=1) + "\n")


if __name__ == "__main__":
    main()
