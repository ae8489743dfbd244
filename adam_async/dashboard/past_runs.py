"""A folder's past runs: reports of `train --report`, and event files of `train --events`.

A visitor names a run by its file, and only a name of the listed ones is read.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from adam_async.dashboard.state import State
from adam_async.report.report import Report
from adam_async.report.schema import SCHEMA
from adam_async.run.counts import EpochCounts, Evaluation
from adam_async.run.events import (
    AnyEvent,
    EpochEnds,
    Evaluated,
    Noted,
    RunBegins,
    RunEnds,
    Sampled,
    read_event,
)
from adam_async.runtime.disk import Disk

MOST_RUNS = 1000
"""Maximum number of listed files, the newest ones."""

MOST_FILE_BYTES = 256 << 20
"""Maximum size of a file, in bytes; for an event file, a quarter of it."""

KEPT = 4
"""Number of runs in memory, those that visitors have asked for last."""

ENDINGS = (".json", ".jsonl")


class PastRuns:
    """The runs of a folder.

    Args:
        folder: Folder of the files; folders in it are not read.
        disk: Reads them.
    """

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk
        self._read: dict[str, tuple[float, State]] = {}
        """Times at which files last changed, and their states."""

    async def names(self) -> list[str]:
        """Return the names of the files, the newest ones first. Raises OSError: the folder cannot be read."""
        return [*await self._disk.run(_listed, self._folder)]

    async def state(self, name: str) -> State | None:
        """Return the state at the end of a run; None if the folder has no file with this name.

        Raises:
            ValueError: The file is neither a report of this version nor an event file.
            OSError: The file cannot be read.
        """
        changed = (await self._disk.run(_listed, self._folder)).get(name)
        if changed is None:
            return None
        if name not in self._read or self._read[name][0] != changed:
            data = await self._disk.read_bytes(self._folder / name, MOST_FILE_BYTES)
            found = await self._disk.run(state_of, name, data)
            self._read.pop(name, None)
            while len(self._read) >= KEPT:
                del self._read[next(iter(self._read))]
            self._read[name] = changed, found
        return self._read[name][1]


def _listed(folder: Path) -> dict[str, float]:
    """Return by name the times at which the newest files last changed, newest first."""
    dated = [
        (file.stat().st_mtime, file.name)
        for ending in ENDINGS
        for file in folder.glob(f"*{ending}")
        if file.is_file() and file.name.isprintable()  # a name in no encoding has no JSON text
    ]
    return {name: changed for changed, name in sorted(dated, reverse=True)[:MOST_RUNS]}


def state_of(name: str, data: bytes) -> State:
    """Return the state at the end of the run in a file. Raises ValueError: the file has neither form."""
    state = State(name)
    for event in _events(data):
        state.take(event)
    return state


def _events(data: bytes) -> Iterator[AnyEvent]:
    if f'"{SCHEMA}"'.encode() in data[:200]:
        yield from events_of(msgspec.json.decode(data, type=Report))
        return
    lines = data.splitlines()
    for number, line in enumerate(lines):
        try:
            yield read_event(line)
        except msgspec.DecodeError:
            if number < len(lines) - 1:  # a program that was killed may leave half a line at the end
                raise


def events_of(report: Report) -> Iterator[AnyEvent]:
    """Yield the events of a report's run, as far as the report has them."""
    yield RunBegins(
        run=report.model.name,
        driver="",
        model=report.model.name,
        data=report.data.name,
        config=report.config,
        epochs=len(report.epochs),
        images=report.data.train_images,
    )
    samples = iter(report.series)
    sample = next(samples, None)
    for epoch in report.epochs:
        while sample is not None and sample.epoch <= epoch.epoch:
            yield Sampled(sample=sample)
            sample = next(samples, None)
        counts = EpochCounts(images=epoch.images, loss=epoch.train_loss, train_s=epoch.train_s)
        yield EpochEnds(epoch=epoch.epoch, counts=counts)
        yield Evaluated(evaluation=Evaluation(epoch.epoch, epoch.test_accuracy, epoch.validation_accuracy))
    for event in report.events:
        yield Noted(at=event.s, text=event.event)
    yield RunEnds(run=report.model.name, outcome="finished", reason=report.ended)
