"""Few photographs at the defaults: the share of photographs held back whose class a run finds.

    python -m benchmarks.photographs --json FILE [--seeds 5] [--photos 40]

Each seed makes a folder of photographs of three classes (`tests/photos.py`), with 20 others held back, and
trains on it twice: with all options at their defaults, and with rule `adam` (the peer), which has the usual
groups. Wanted: a median of at least 90 %, in at most 30 s from reading the folder to the result.
"""

import time
from argparse import Namespace
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Literal

from adam_async import Config, LocalCluster
from benchmarks.harness import Option, Row, compared, run
from tests.photos import write_photos

HELD_BACK = 20
"""Number of photographs held back."""

RULES: dict[str, Literal["auto", "adam"]] = {"ours": "auto", "peer": "adam"}
"""Values of `rule`; ``auto`` is the default, and also decides the groups and the rate."""

WANTED, MOST_S = 0.9, 30.0
"""Minimum median of the shares, and maximum of the seconds."""


async def measure(options: Namespace) -> AsyncIterator[Row]:
    """Yield the row."""
    shares: dict[str, list[float]] = {name: [] for name in RULES}
    seconds: dict[str, list[float]] = {name: [] for name in RULES}
    for seed in range(options.seeds):
        with TemporaryDirectory() as folder:
            write_photos(Path(folder, "train"), options.photos, seed=seed)
            write_photos(Path(folder, "test"), HELD_BACK, seed=1000 + seed)
            for name, rule in RULES.items():
                begin = time.monotonic()
                async with LocalCluster(Config(data=folder, rule=rule, seed=seed)) as cluster:
                    result = await cluster.train()
                seconds[name].append(round(time.monotonic() - begin, 1))
                shares[name].append(result.test_accuracy)
    yield compared(
        f"{options.photos} photographs, {HELD_BACK} held back, {options.seeds} seeds",
        shares["ours"],
        shares["peer"],
        "share of photographs held back",
        met=median(shares["ours"]) >= WANTED and median(seconds["ours"]) <= MOST_S,
        shares=shares["ours"],
        peer_shares=shares["peer"],
        seconds=median(seconds["ours"]),
        peer_seconds=median(seconds["peer"]),
    )


if __name__ == "__main__":
    run(__doc__, measure, seeds=5, photos=Option(40, "photographs for training"))
