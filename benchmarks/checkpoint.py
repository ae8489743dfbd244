"""Checkpoints of a model of 100 MB: the time for which training stands still, writing, and resuming.

    python -m benchmarks.checkpoint --json checkpoint.json [--rounds 2] [--folder DIR]
    python -m benchmarks.checkpoint --turns 9 [--json FILE]

An MLP of 25 million parameters learns noise with plain SGD, 64 images per group: in asp in one process (in
place) and as processes (two workers, two servers, a pull every 4 steps), and in bsp as processes. Each run
takes checkpoints every `--every` groups and one at its end; a second run, in another process, continues it
for one more epoch. The measured times come from the runs' own profiles. A *reading* lasts from `MARGIN_S`
before the first shards of a checkpoint within the epoch reach the driver to `MARGIN_S` after the last ones.

Two times are measured, each over the readings and outside of them: the longest period in which no thread
trains, and the longest time from a push, or a report of steps in place, to its acknowledgement. In bsp
threads wait for each sum, and a push of this size waits for its server, also without a checkpoint. So the
pause for a checkpoint is the longest time over a reading less the longest one outside; the row has both.
Resuming lasts from the start of the interpreter to the beginning of the first group, with kernels and modules
compiled before, as those of an installed package are.

Rows: case, ours, peer, ratio (peer / ours: above 1 we are better), unit. Peers: the goals for the longest
pause and the longest resumption, 20 ms and 5 s; and one plain file of the same bytes, written and synced to
the same disk. A pause below 1 ms counts as 1 ms.

With `--turns` runs as processes begin and resume in turns, each for one epoch of four groups. The row has the
median seconds from the start of the interpreter to the first group of both, and their difference, of which at
most 1.5 s are wanted.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop

from adam_async import Config, Disk, LocalCluster, ProcessCluster, Timeline, load_dataset
from adam_async.model.named import mlp
from adam_async.runtime.clock import fine_clock
from adam_async.runtime.kernel_cache import use_kernel_cache
from adam_async.runtime.trace_events import Carried, Event, Fired

SIZES = (784, 4608, 4608, 10)
GROUP = 64
PAUSE_S, RESUME_S = 0.02, 5.0
LONGER_S = 1.5
"""Longest time by which resuming may take longer than beginning, in seconds."""

TURN_GROUPS = 4
"""Number of groups of an epoch of `--turns`."""
MARGIN_S = 0.05
"""Time before and after the shards of a checkpoint that belongs to its reading, in seconds."""

APART_S = 0.2
"""Time between two messages of shards from which on they belong to two checkpoints, in seconds."""

CASES: dict[str, dict[str, Any]] = {
    "asp, one process": {},
    "asp, processes": {"processes": True, "replicas": 2, "servers": 2, "pull_every": 4},
    "bsp, processes": {"processes": True, "replicas": 2, "servers": 2, "consistency": "bsp"},
}


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run in a separate process."""

    options: dict[str, Any]
    """Options of `Config`."""
    folder: str
    """Folder with `images.npz` and, later, `checkpoints`."""
    resume: bool = False


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Measured times of one run."""

    first_at: float
    """Start of its first group, on the clock that all processes share."""
    idle_s: tuple[float, ...]
    """For each reading, the longest period over it in which no thread trains, in seconds."""
    idle_outside_s: float
    """Longest such period outside of all readings."""
    waits_s: tuple[float, ...]
    """For each reading, the longest time over it from a push to its acknowledgement, in seconds."""
    waits_outside_s: float
    """Longest such time outside of all readings."""
    read_s: tuple[float, ...]
    """Time of each reading in seconds, as reported by the driver; the last one is that of the end."""
    written_s: tuple[float, ...]
    bytes: int
    """Size of the last checkpoint, in bytes."""


async def perform(run: Run) -> Found:
    """Train with the options of a run, and measure times in its profile."""
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
    events = [event for part in parts for event in part.events]
    fired = [event for event in events if isinstance(event, Fired)]
    last_at = max(event.finished for event in fired)
    read = [each for each in readings(events) if each[0] < last_at]
    idle, idle_outside = longest(periods(fired), read)
    waiting, waiting_outside = longest(acknowledgements(events), read)
    return Found(
        first_at=min(event.started for event in fired),
        idle_s=idle,
        idle_outside_s=idle_outside,
        waits_s=waiting,
        waits_outside_s=waiting_outside,
        read_s=tuple(each.read_s for each in result.checkpoints),
        written_s=tuple(each.written_s for each in result.checkpoints),
        bytes=result.checkpoints[-1].bytes,
    )


Period = tuple[float, float]
"""Begin and end, on the clock that all processes share."""


def readings(events: Iterable[Event]) -> list[Period]:
    """The times in which shards reached the driver, with their margins, one for each checkpoint."""
    found: list[Period] = []
    for at in sorted(
        e.at for e in events if isinstance(e, Carried) and not e.sent and e.kind == "ShardStates"
    ):
        if found and at - found[-1][1] < APART_S:
            found[-1] = (found[-1][0], at)
        else:
            found.append((at, at))
    return [(begin - MARGIN_S, end + MARGIN_S) for begin, end in found]


def periods(fired: Iterable[Fired]) -> list[Period]:
    """The periods in which no thread trains, between the first group and the last one."""
    found: list[Period] = []
    over = float("inf")  # the first group has no earlier period
    for event in sorted(fired, key=lambda event: event.started):
        if event.started > over:
            found.append((over, event.started))
        over = event.finished if over == float("inf") else max(over, event.finished)
    return found


def acknowledgements(events: Iterable[Event]) -> list[Period]:
    """The times from each push or report of steps to its acknowledgement, link by link in order."""
    sent: dict[tuple[str, str], list[float]] = {}
    answered: dict[tuple[str, str], list[float]] = {}
    for event in events:
        if isinstance(event, Carried) and event.sent and event.kind in ("Push", "ReportSteps"):
            sent.setdefault((event.node, event.peer), []).append(event.at)
        elif isinstance(event, Carried) and not event.sent and event.kind in ("Pushed", "StepsReported"):
            answered.setdefault((event.node, event.peer), []).append(event.at)
    pairs = ((times, answered.get(link, [])) for link, times in sent.items())
    return [period for times, ends in pairs for period in zip(sorted(times), sorted(ends), strict=False)]


def longest(periods: Iterable[Period], read: Sequence[Period]) -> tuple[tuple[float, ...], float]:
    """Seconds of the longest period over each reading, and of the longest one outside of all."""
    over, outside = [0.0] * len(read), 0.0
    for begin, end in periods:
        at = [number for number, (first, last) in enumerate(read) if begin < last and end > first]
        for number in at:
            over[number] = max(over[number], end - begin)
        if not at:
            outside = max(outside, end - begin)
    return tuple(over), outside


def with_bytecode(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which Python keeps the modules that it compiles.

    Otherwise each of the seven processes of a checkout compiles all of its modules again, which no process of
    an installed package does.
    """
    return {name: text for name, text in environment.items() if name != "PYTHONDONTWRITEBYTECODE"}


def ours(run: Run) -> tuple[Found, float]:
    """One run, and the seconds from its start to its first group."""
    command = [sys.executable, "-m", "benchmarks.checkpoint", "--run", msgspec.json.encode(run).decode()]
    begin = fine_clock()
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=with_bytecode(os.environ))
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
    size = f"{first[-1].bytes / 1e6:.0f} MB, {case}"
    written = [seconds for found in first for seconds in found.written_s]
    read = [round(seconds, 3) for found in first for seconds in found.read_s]
    pauses = [
        (
            "no thread trains",
            [seconds for found in first for seconds in found.idle_s],
            max(found.idle_outside_s for found in first),
        ),
        (
            "a push waits for its acknowledgement",
            [seconds for found in first for seconds in found.waits_s],
            max(found.waits_outside_s for found in first),
        ),
    ]
    return [
        *(
            row(
                f"longest pause for a checkpoint of {size}: {what}",
                max(max(over, default=0.0) - outside, 0.001),
                PAUSE_S,
                over_readings=[round(seconds, 3) for seconds in over],
                longest_outside=round(outside, 3),
                read_s=read,
            )
            for what, over, outside in pauses
        ),
        row(f"writing a checkpoint of {size}", statistics.median(written), statistics.median(plain_s)),
        row(f"resuming from a checkpoint of {size}, longest", max(back_s), RESUME_S),
    ]


def turns(arguments: argparse.Namespace) -> dict[str, Any]:
    """Begin and resume the same run in turns; return the row."""
    options = CASES["asp, processes"]
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as first:
        save_noise(Path(first) / "images.npz", TURN_GROUPS * GROUP)
        found, _ = ours(Run(options=options, folder=first))
        for resume in (False, True) * arguments.turns:
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                shutil.copy(Path(first) / "images.npz", folder)
                if resume:
                    shutil.copytree(Path(first) / "checkpoints", Path(folder) / "checkpoints")
                seconds[resume].append(ours(Run(options=options, folder=folder, resume=resume))[1])
    begin, back = (statistics.median(seconds[resume]) for resume in (False, True))
    return {
        "case": f"resuming {found.bytes / 1e6:.0f} MB as processes, longer than beginning",
        "begin_s": [round(each, 2) for each in seconds[False]],
        "resume_s": [round(each, 2) for each in seconds[True]],
        "longer": round(back - begin, 3),
        "goal": LONGER_S,
        "unit": "s",
        "met": back - begin <= LONGER_S,
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="file for the rows, as JSON")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--turns", type=int, default=0, help="runs that begin and resume, and nothing else")
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
    rows = [turns(arguments)] if arguments.turns else []
    for each in rows:
        print(json.dumps(each), flush=True)
    for case in arguments.only if not arguments.turns else ():
        for each in measure(case, arguments):
            rows.append(each)
            print(json.dumps(each), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
