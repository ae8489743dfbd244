"""Checkpoints of a model of 100 MB: the pause of training, writing, and resuming.

    python -m benchmarks.checkpoint --json checkpoint.json [--rounds 2] [--folder DIR]

An MLP of 25 million parameters learns noise with plain SGD in asp, in one process (in place) and as processes
(two workers, two servers, a pull every 4 steps), 64 images per group. Each run takes checkpoints every
`--every` groups and one at its end; a second run, in another process, continues it for one more epoch. The
measured times come from the runs' own profiles: the phases in which no thread trains. A checkpoint within an
epoch makes one such phase, from the last group before it to the first after it, so the wait for groups counts
too. With n checkpoints, the n longest phases count as theirs. Resuming lasts from the start of the
interpreter to the beginning of the first group, with kernels compiled before.

Rows: case, ours, peer, ratio (peer / ours: above 1 we are better), unit. Peers: the goals for the longest
pause and the longest resumption, 1 s and 5 s; and one plain file of the same bytes, written and synced to the
same disk.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop

from adam_async import Config, Disk, LocalCluster, ProcessCluster, Timeline, load_dataset
from adam_async.model.named import mlp
from adam_async.runtime.clock import fine_clock
from adam_async.runtime.kernel_cache import use_kernel_cache
from adam_async.runtime.trace_events import Fired

SIZES = (784, 4608, 4608, 10)
GROUP = 64
PAUSE_S, RESUME_S = 1.0, 5.0
CASES: dict[str, dict[str, Any]] = {
    "one process": {},
    "processes": {"processes": True, "replicas": 2, "servers": 2, "pull_every": 4},
}


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run in a separate process."""

    options: dict[str, Any]
    """Of `Config`."""
    folder: str
    """With `images.npz` and, later, `checkpoints`."""
    resume: bool = False


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Measured times of one run."""

    first_at: float
    """Start of its first group, on the clock that all processes share."""
    idle_s: tuple[float, ...]
    """Longest phases without training in seconds, one for each checkpoint within the epoch."""
    others_s: float
    """Longest phase without training in seconds, apart from checkpoints."""
    paused_s: tuple[float, ...]
    """Pause for each checkpoint in seconds, as reported by the driver."""
    written_s: tuple[float, ...]
    bytes: int
    """Figures of one checkpoint."""


async def perform(run: Run) -> Found:
    """Train as told, and look at the profile."""
    folder, timeline = Path(run.folder), Timeline()
    data, checkpoints = folder / "images.npz", folder / "checkpoints"
    config = Config(
        data=str(data),
        threads=1,
        images_per_group=GROUP,
        rate=0.001,
        epochs=2 if run.resume else 1,
        **run.options,
    )
    if not config.processes:
        config = msgspec.structs.replace(config, threads=2)
    places: dict[str, Any] = {"checkpoint": checkpoints, "resume": checkpoints if run.resume else None}
    spec = None if run.resume else mlp(SIZES)
    if config.processes:
        async with ProcessCluster(config, spec=spec, timeline=timeline, **places) as processes:
            result = await processes.train()
    else:
        async with Disk() as disk:
            dataset = await load_dataset(str(data), disk)
        async with LocalCluster(config, dataset=dataset, spec=spec, timeline=timeline, **places) as local:
            result = await local.train()
    parts = [timeline.part(), *timeline.others]
    fired = [event for part in parts for event in part.events if isinstance(event, Fired)]
    within = len(result.checkpoints) - 1
    idle = stretches(fired)
    return Found(
        first_at=min(event.started for event in fired),
        idle_s=tuple(idle[:within]),
        others_s=idle[within] if len(idle) > within else 0.0,
        paused_s=tuple(each.paused_s for each in result.checkpoints),
        written_s=tuple(each.written_s for each in result.checkpoints),
        bytes=result.checkpoints[-1].bytes,
    )


def stretches(fired: Iterable[Fired]) -> list[float]:
    """Seconds of each phase without training, the longest first."""
    found: list[float] = []
    over = float("inf")  # the first group has no earlier phase
    for event in sorted(fired, key=lambda event: event.started):
        found.append(event.started - over)
        over = event.finished if over == float("inf") else max(over, event.finished)
    return sorted((length for length in found if length > 0), reverse=True)


def ours(run: Run) -> tuple[Found, float]:
    """One run, and the seconds from its start to its first group."""
    command = [sys.executable, "-m", "benchmarks.checkpoint", "--run", msgspec.json.encode(run).decode()]
    begin = fine_clock()
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{run} failed: {done.stderr[-2000:]}")
    found = msgspec.json.decode(done.stdout.splitlines()[-1], type=Found)
    return found, found.first_at - begin


def plain_write(folder: Path, size: int) -> float:
    """Seconds to write one file of this many bytes, and to sync it to the disk."""
    data, file = np.random.default_rng(0).bytes(size), folder / "plain"
    begin = time.perf_counter()
    with open(file, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fdatasync(stream.fileno())
    seconds = time.perf_counter() - begin
    file.unlink()
    return seconds


def save_noise(file: Path, images: int) -> None:
    """Write images that are easy to make and hard to learn."""
    dice = np.random.default_rng(0)
    shape = (28, 28)
    np.savez(
        file,
        x_train=dice.integers(0, 256, (images, *shape), dtype=np.uint8),
        y_train=np.arange(images) % 10,
        x_test=dice.integers(0, 256, (256, *shape), dtype=np.uint8),
        y_test=np.arange(256) % 10,
    )


def row(case: str, ours: float, peer: float, **more: Any) -> dict[str, Any]:
    """One row of the result."""
    return {
        "case": case,
        "ours": round(ours, 3),
        "peer": round(peer, 3),
        "ratio": round(peer / ours, 2),
        "unit": "s",
        **more,
    }


def measure(case: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one case."""
    first: list[Found] = []
    plain_s, back_s = [], []
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            save_noise(Path(folder) / "images.npz", arguments.groups * GROUP)
            options = {**CASES[case], "checkpoint_every": arguments.every}
            found, _ = ours(Run(options=options, folder=folder))
            first.append(found)
            plain_s.append(plain_write(Path(folder), found.bytes))
            back_s.append(ours(Run(options=options, folder=folder, resume=True))[1])
    size = f"{first[-1].bytes / 1e6:.0f} MB, asp, {case}"
    idle = [seconds for found in first for seconds in found.idle_s]
    written = [seconds for found in first for seconds in found.written_s]
    return [
        row(
            f"longest pause for a checkpoint of {size}",
            max(idle),
            PAUSE_S,
            all=[round(seconds, 3) for seconds in idle],
            paused_by_the_driver=[round(seconds, 3) for found in first for seconds in found.paused_s],
            longest_stretch_without_checkpoint=round(max(found.others_s for found in first), 3),
        ),
        row(f"writing a checkpoint of {size}", statistics.median(written), statistics.median(plain_s)),
        row(f"resuming from a checkpoint of {size}, longest", max(back_s), RESUME_S),
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="file for the rows, as JSON")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--groups", type=int, default=48, help="training images of one epoch")
    parser.add_argument("--every", type=int, default=16, help="groups between two checkpoints")
    parser.add_argument(
        "--folder", type=Path, help="folder for checkpoints; by default that of temporary files"
    )
    arguments = parser.parse_args()
    use_kernel_cache()
    if arguments.run is not None:
        run = msgspec.json.decode(arguments.run, type=Run)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            print(msgspec.json.encode(runner.run(perform(run))).decode())
        return
    rows = []
    for case in arguments.only:
        for each in measure(case, arguments):
            rows.append(each)
            print(json.dumps(each), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
