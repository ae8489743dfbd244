"""Notes of the progress of a run whose servers keep their shards on disks; see `checkpoint.run_notes`.

With each poll the driver learns the trained groups of the epoch, and for each server the age of the oldest
update that is not on its disk. A *point* is a moment of the run with its trained groups. A point is on the
disks once these ages show that every server has written the updates up to that moment. All times are those of
the driver, so that clocks need not agree.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from adam_async.checkpoint.manifest import MOST_RUNS, CheckpointError, EpochValues, Manifest, ProgressNote
from adam_async.checkpoint.run_notes import RunNote, RunNotesFile
from adam_async.driver.count_types import DataCounts, RoleStatistics, ServerCounts
from adam_async.messages import read_number
from adam_async.run.result import EpochResult
from adam_async.run.training_program import MOST_RANGES, ResumeRecord
from adam_async.runtime.clock import Clock

MOST_PENDING = 120
"""Maximum number of points that wait for the disks; a poll adds at most one."""

END_S = 0.1
"""Pause between two polls at the end of a run, in seconds."""


def runs_of(run: str, notes: Sequence[RunNote]) -> tuple[str, ...]:
    """Return the ids of a run and of those that it continues, the newest first."""
    before = [each for each in (notes[0].runs if notes else ()) if each != run]
    return (run, *before)[:MOST_RUNS]


async def note_begin(file: RunNotesFile, start: Manifest, wall_clock: Clock) -> None:
    """Write the first note of a run, before any server has its shards; keep the newest earlier note whose
    updates are on the disks.

    If the run continues an earlier run, the servers remove the shards of that run once those of the new run
    are whole on the disks. Until that moment a restart needs the note of the earlier run.

    Args:
        start: Point at which the run begins.

    Raises:
        CheckpointError: The note could not be written.
    """
    earlier = file.found.notes if file.found is not None else ()
    note = RunNote(
        manifest=msgspec.structs.replace(start, arrays=(), shards=(), files=(), checksum=""),
        at=wall_clock(),
        is_on_disk=False,
        runs=runs_of(start.run, earlier),
    )
    seen = ProgressNote(epoch=start.epoch, groups=start.groups, trained_again=start.trained_again)
    kept = [each for each in earlier if each.is_on_disk][:1]
    try:
        await file.write([note, *kept], seen, wall_clock())
    except OSError as error:
        raise CheckpointError(
            f"the notes of the run cannot be written to {file.folder}: {error.strerror or error}"
        ) from None


class RunNoting:
    """Writes the notes of one run, after `note_begin`.

    Args:
        common: Manifest with the fields that all notes share.
        spawn: Starts a task of the run, by name.
        warn: Reports that notes cannot be written.
        wall_clock: Seconds since 1970.
        timeout_s: Deadline of one write.
    """

    def __init__(
        self,
        file: RunNotesFile,
        common: Manifest,
        *,
        spawn: Callable[[str, Coroutine[Any, Any, None]], "asyncio.Task[None]"],
        warn: Callable[[str], None],
        wall_clock: Clock,
        timeout_s: float,
    ) -> None:
        self._file = file
        self._common = common
        self._spawn = spawn
        self._warn = warn
        self._wall_clock = wall_clock
        self._timeout_s = timeout_s
        found = file.found
        self._notes: tuple[RunNote, ...] = found.notes if found is not None else ()
        self._runs = runs_of(common.run, self._notes)
        self._seen = ProgressNote(epoch=0, groups=0, trained_again=common.trained_again)
        self._pending: deque[tuple[float, RunNote]] = deque()
        """Points that are not known to be on the disks, each with its time on the loop's clock."""
        first = self._notes[0] if self._notes else None
        self._is_noted = first is not None and first.manifest.run == common.run
        """Whether the file has a note of this run; a run that was taken over may have none."""
        if first is not None and self._is_noted and not first.is_on_disk:
            self._pending.append((asyncio.get_running_loop().time(), first))
        self._epochs = EpochValues()
        self._changed = False
        self.is_full = False
        """Whether a disk has no space."""
        self._writing: asyncio.Task[None] | None = None
        self._failed = False

    # --- polls -------------------------------------------------------------------------------

    def polled(
        self,
        answers: Mapping[str, RoleStatistics],
        *,
        asked_at: float,
        now: float,
        groups: int,
        ended: int,
        results: tuple[dict[str, Any], ...],
        epochs: Sequence[EpochResult],
    ) -> None:
        """Take the counts of one poll. Never waits.

        Args:
            asked_at: Time of the requests, on the loop's clock.
            now: Time of the poll's end, on the loop's clock.
            groups: Number of groups of the epoch in progress.
            ended: Number of the last ended epoch.
            results: Results of the ended epochs, in order; a driver that took a run over may lack the first
                results.
            epochs: The evaluated epochs.
        """
        counts = [each.counts for each in answers.values()]
        leader = next((c for c in counts if isinstance(c, DataCounts) and c.ledger and c.ledger.leads), None)
        if leader is not None and leader.epoch == ended + 1 and leader.finished_ranges is not UNSET:
            ranges = leader.finished_ranges[:MOST_RANGES]
            is_evaluated = not ended or (bool(epochs) and epochs[-1].epoch == ended)
            # If all groups are trained, the epoch ends soon, and `epoch_ended` adds its point.
            if len(results) == ended and is_evaluated and ranges != ((0, groups),):
                loss = read_number(leader.loss)
                resume = ResumeRecord(
                    epoch=ended + 1,
                    finished=ranges,
                    clock=0,
                    results=results,
                    images=leader.images,
                    loss=loss if math.isfinite(loss) else 0.0,
                    train_s=leader.train_s,
                )
                self._add(resume, epochs, now)
        self._cover([c for c in counts if isinstance(c, ServerCounts)], asked_at)
        self._write_soon()

    def epoch_ended(
        self, results: tuple[dict[str, Any], ...], epochs: Sequence[EpochResult], *, now: float
    ) -> None:
        """Take the end of an evaluated epoch.

        Args:
            results: Results of the ended epochs, in order; a driver that took a run over may lack the first
                results.
            epochs: The evaluated epochs.
            now: Time at which all updates of the epoch were applied, on the loop's clock.
        """
        if len(results) == epochs[-1].epoch:
            resume = ResumeRecord(epoch=len(results) + 1, finished=(), clock=0, results=results)
            self._add(resume, epochs, now)

    def _add(self, resume: ResumeRecord, epochs: Sequence[EpochResult], now: float) -> None:
        """Add a point that waits for the disks."""
        groups = sum(stop - start for start, stop in resume.finished)
        point = msgspec.structs.replace(
            self._common, epoch=resume.epoch, groups=groups, resume=resume, epochs=self._epochs.of(epochs)
        )
        self._seen = ProgressNote(
            epoch=point.epoch, groups=point.groups, trained_again=self._common.trained_again
        )
        note = RunNote(manifest=point, at=self._wall_clock(), is_on_disk=True, runs=self._runs)
        self._pending.append((now, note))
        if len(self._pending) > MOST_PENDING:
            del self._pending[1]

    def _cover(self, servers: Sequence[ServerCounts], asked_at: float) -> None:
        """Take the newest point whose updates all servers have on their disks."""
        disks = [each.disk for each in servers]
        self.is_full = any(disk is not UNSET and disk.full for disk in disks)
        ages = [disk.age_s for disk in disks if disk is not UNSET and disk.age_s is not None]
        if not servers or len(ages) < len(servers):
            return
        until = asked_at - max(ages)
        covered: RunNote | None = None
        while self._pending and self._pending[0][0] <= until:
            covered = self._pending.popleft()[1]
        if covered is not None:
            self._notes = (msgspec.structs.replace(covered, is_on_disk=True),)
            self._is_noted = True

    @property
    def is_behind(self) -> bool:
        """Whether points are not known to be on the disks."""
        return bool(self._pending)

    # --- the file ----------------------------------------------------------------------------

    def _write_soon(self) -> None:
        if self._is_noted:
            self._changed = True
            self._begin_write()

    def _begin_write(self) -> None:
        if self._writing is None or self._writing.done():
            self._writing = self._spawn("run-notes", self._write())

    async def _write(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                while self._changed:
                    self._changed = False
                    await self._file.write(self._notes, self._seen, self._wall_clock())
                    self._failed = False
        except (TimeoutError, OSError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else "the disk is slow"
            if not self._failed:
                self._warn(f"the notes of the run could not be written ({why}); training goes on")
            self._failed = True

    async def settle(self) -> None:
        """Wait for the write in progress, and write the last notes."""
        self._changed = self._is_noted
        while self._changed and not self._failed:
            self._begin_write()
            assert self._writing is not None
            await asyncio.wait([self._writing], timeout=self._timeout_s)
