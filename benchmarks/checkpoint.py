"""Checkpoints of a model of 100 MB: the time for which training stands still, writing, and resuming.

    python -m benchmarks.checkpoint --json checkpoint.json [--rounds 2] [--folder DIR]
    python -m benchmarks.checkpoint --pairs 20 [--json FILE]

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

Peers: the goals for the longest pause and the longest resumption, 20 ms and 5 s; and one plain file of the
same bytes, written and synced to the same disk. A pause below 1 ms counts as 1 ms.

With `--pairs` runs as processes begin and resume in turns, each for one epoch of four groups. The row has the
median seconds from the start of the interpreter to the first group of both, and their difference, of which at
most 1.5 s are wanted.
"""

import os
import shutil
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from adam_async import Config, Disk, LocalCluster, ProcessCluster, Timeline, load_dataset
from adam_async.model.named import mlp
from adam_async.runtime.clock import fine_clock
from adam_async.runtime.trace_events import Carried, Event, Fired
from benchmarks.harness import Option, Row, apart, compared, rounded, run, turns
from benchmarks.images import save_noise

SIZES = (784, 4608, 4608, 10)
GROUP = 64
PAUSE_S, RESUME_S = 0.02, 5.0
LONGER_S = 1.5
"""Longest time by which resuming may take longer than beginning, in seconds."""

PAIR_GROUPS = 4
"""Number of groups of an epoch of `--pairs`."""
MARGIN_S = 0.05
"""Time before and after the shards of a checkpoint that belongs to its reading, in seconds."""

APART_S = 0.2
"""Time between two messages of shards from which on they belong to two checkpoints, in seconds."""

CASES: dict[str, dict[str, Any]] = {
    "asp, one process": {},
    "asp, processes": {"processes": True, "replicas": 2, "servers": 2, "pull_every": 4},
    "bsp, processes": {"processes": True, "replicas": 2, "servers": 2, "consistency": "bsp"},
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run in a separate process."""

    options: dict[str, Any]
    """Options of `Config`."""
    folder: str
    """Folder with `images.npz` and, later, `checkpoints`."""
    resume: bool = False


@dataclass(frozen=True, kw_only=True)
class Found:
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


def ours(run: Run) -> tuple[Found, float]:
    """One run in a process of its own, and the seconds from its start to its first group."""
    begin = fine_clock()
    found = apart(perform, run)
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


def rows_of(case: str, options: Namespace) -> Iterator[Row]:
    """Yield the rows of one case."""
    first: list[Found] = []
    plain_s, back_s = [], []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            save_noise(Path(folder) / "images.npz", options.groups * GROUP, side=28, tests=256)
            words = {**CASES[case], "checkpoint_every": options.every}
            first.append(ours(Run(options=words, folder=folder))[0])
            plain_s.append(plain_write(Path(folder), first[-1].bytes))
            back_s.append(ours(Run(options=words, folder=folder, resume=True))[1])
    size = f"{first[-1].bytes / 1e6:.0f} MB, {case}"
    for what, over, outside in (
        ("no thread trains", [each.idle_s for each in first], [each.idle_outside_s for each in first]),
        (
            "a push waits for its acknowledgement",
            [each.waits_s for each in first],
            [each.waits_outside_s for each in first],
        ),
    ):
        seconds = [second for each in over for second in each]
        pause = max(max(seconds, default=0.0) - max(outside), 0.001)
        yield compared(
            f"longest pause for a checkpoint of {size}: {what}", [pause], [PAUSE_S], "s", less_is_better=True,
            over_readings=[rounded(each) for each in seconds], longest_outside=rounded(max(outside)),
            read_s=[rounded(each) for found in first for each in found.read_s],
        )  # fmt: skip
    written = [statistics.median(found.written_s) for found in first]
    yield compared(f"writing a checkpoint of {size}", written, plain_s, "s", less_is_better=True)
    longest = f"resuming from a checkpoint of {size}, longest"
    yield compared(longest, [max(back_s)], [RESUME_S], "s", less_is_better=True)


def pairs(options: Namespace) -> Row:
    """Begin and resume the same run in turns; returns the row."""
    words = CASES["asp, processes"]
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(dir=options.folder) as first:
        save_noise(Path(first) / "images.npz", PAIR_GROUPS * GROUP, side=28, tests=256)
        found, _ = ours(Run(options=words, folder=first))
        for resume in turns(seconds, options.pairs):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                shutil.copy(Path(first) / "images.npz", folder)
                if resume:
                    shutil.copytree(Path(first) / "checkpoints", Path(folder) / "checkpoints")
                seconds[resume].append(ours(Run(options=words, folder=folder, resume=resume))[1])
    case = f"resuming {found.bytes / 1e6:.0f} MB as processes, longer than beginning"
    row = compared(case, seconds[True], seconds[False], "s", less_is_better=True)
    longer = statistics.median(seconds[True]) - statistics.median(seconds[False])
    return row | {"longer": rounded(longer), "goal": LONGER_S, "met": longer <= LONGER_S}


def measure(options: Namespace) -> Iterator[Row]:
    """Yield the rows of all cases, or that of `--pairs`."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package compiles no module again
    if options.pairs:
        yield pairs(options)
        return
    for case in options.only:
        yield from rows_of(case, options)


if __name__ == "__main__":
    run(
        __doc__,
        measure,
        only=Option(list(CASES), choices=list(CASES)),
        rounds=2,
        pairs=Option(0, "runs that begin and resume, and nothing else"),
        groups=Option(48, "training images of one epoch, in groups"),
        every=Option(16, "groups between two checkpoints"),
        folder=Option(None, "folder for checkpoints; by default that of temporary files", type=Path),
    )
