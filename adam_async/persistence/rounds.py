"""Rounds: the newest state of each dirty shard, written once, and all of them synced together.

Theory of operation
-------------------
An update only marks its shard. After `flush_s` a round takes the marks. A round copies one shard after the
other on the loop, hands batches of them to the disk's thread, and syncs once at the end (*folding*: many
updates, one write). So a shard is written at most once per round and at most once per update, and the loop
never waits for the disk.

A round ends with a record that has its states, and the files that belong to the folder. After its sync the
older states of these shards are superseded, and files that have only superseded states are removed. The
record comes first, so a file that is missing later means damage, never an unfinished removal. An empty record
follows, and is not synced: the head of this record proves that the round was on disk.

If shards that seldom change keep old files in use, the files of states grow beyond twice the size of the
states, plus one file. Then the round appends these shards' states again (*compaction*). Compaction stops once
it has written as many bytes as the updates. So the disk writes at most about two bytes per byte folded, not
counting heads and records.

The owner may have states of its own (`records.LEADING`), such as facts without which the shards' states
cannot be read. Before a round keeps a shard's copy, it copies the owner's states that have changed. So after
a crash at any byte, no shard's state is newer than they are.

A round that takes longer than half of `flush_s` lengthens the pause before the next one, so the disk is busy
for at most half of the time. The store reports this, because a crash may lose that time's updates. A full
disk ends a round early: its last batch is cut off, and the shards in it stay dirty.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from adam_async.persistence.contents import Location
from adam_async.persistence.folder import DamagedState, DiskFull, Folder, Payload, payload_of
from adam_async.persistence.records import (
    LEADING,
    STATES,
    FlushSettings,
    State,
    StateKey,
    StateName,
    StateRecord,
    SyncedRecord,
)
from adam_async.persistence.usage import RoundCounts
from adam_async.runtime.clock import Clock


@dataclass(frozen=True, slots=True)
class Mark:
    """A dirty shard."""

    since: float
    """Time of the first update that no round has taken, in seconds of the loop's clock."""
    nbytes: int
    """Size of its state, in bytes."""


class DirtyStates:
    """The dirty shards of one folder."""

    def __init__(self) -> None:
        self._marks: dict[StateName, Mark] = {}
        self.leading: set[StateName] = set()
        """Dirty states of the owner itself."""
        self.nbytes = 0
        """Total size in bytes of the dirty shards' states."""

    def __len__(self) -> int:
        return len(self._marks)

    def __contains__(self, name: StateName) -> bool:
        return name in self._marks

    def names(self) -> list[StateName]:
        """Return the dirty shards."""
        return list(self._marks)

    def oldest(self) -> float | None:
        """Return the time of the oldest update that no round has taken; None if there is none."""
        return min([mark.since for mark in self._marks.values()], default=None)

    def add(self, name: StateName, mark: Mark) -> None:
        """Mark a shard; an earlier mark keeps its time."""
        known = self._marks.get(name)
        if known is not None:
            self.nbytes -= known.nbytes
            mark = Mark(min(known.since, mark.since), mark.nbytes)
        self._marks[name] = mark
        if name.home == LEADING:
            self.leading.add(name)
        self.nbytes += mark.nbytes

    def pop(self, name: StateName) -> Mark | None:
        """Remove the mark of a shard, before the shard is copied: later updates mark it again."""
        mark = self._marks.pop(name, None)
        self.leading.discard(name)
        if mark is not None:
            self.nbytes -= mark.nbytes
        return mark

    def forget(self, home: str) -> None:
        """Remove the marks of a bundle."""
        for name in [name for name in self._marks if name.home == home]:
            self.pop(name)


Take = Callable[[StateName], Awaitable[State | None]]
"""Callback that copies the newest state of a shard, on the loop, between two entries. The callback returns
None if it cannot copy now (an update comes first, or the owner has not loaded the recovered state yet). The
state on disk then stays, and a dirty shard stays dirty. The store awaits one call at a time, so that the
owner can do other work in between."""

YIELD_BYTES = 1 << 20
"""Size of copied states after which the loop does other work, in bytes."""

BUSY_SHARE = 0.5
"""Share of `flush_s` that a round may take before the time between rounds grows."""


@dataclass(slots=True, eq=False)
class _Round:
    """A round in progress."""

    begin: float
    as_of: float
    floors: dict[str, int]
    is_complete: bool = True
    is_compaction: bool = False
    keys: list[StateKey] = field(default_factory=list)
    """Keys of the states that are written."""
    batch: list[tuple[StateKey, Payload, Mark | None]] = field(default_factory=list)
    """States that are copied but not yet written, with their marks."""
    batch_bytes: int = 0


class Rounds:
    """The rounds of one folder."""

    def __init__(
        self,
        folder: Folder,
        take: Take,
        settings: FlushSettings,
        *,
        clock: Clock,
        wall_clock: Clock,
        notice: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._take = take
        self._settings = settings
        self._clock = clock
        self._wall_clock = wall_clock
        self._notice = notice
        self.dirty = DirtyStates()
        """The dirty shards."""
        self._applied: dict[str, int] = {}
        self._released: dict[str, int] = {}
        """Number of releases, by bundle."""
        self._flushes: list[asyncio.Future[None]] = []
        self._wake = asyncio.Event()
        self._error: Exception | None = None
        self._has_forgotten = False
        self._unlisted: list[StateKey] = []
        """Keys of states on disk whose round found no room for its record."""
        self._listed: list[StateKey] = []
        """Keys of the last round, which the next one lists again."""
        self._unreadable: set[StateName] = set()
        """Names whose states on disk could not be read for compaction."""
        self._current: _Round | None = None
        """Round in progress; None between rounds."""
        self._last_began = clock() - settings.flush_s
        self.period_s = settings.flush_s
        self._is_slow = False
        """Whether a notice has reported rounds that take too long."""
        self.counts = RoundCounts()
        folder.states.beginning = lambda: [folder.directory()]

    # --- the owner's side --------------------------------------------------------------------

    def mark(self, name: StateName, nbytes: int, updates: int) -> None:
        """See `SegmentStore.mark`."""
        self.counts.updates += updates
        was_large = self.dirty.nbytes >= self._settings.dirty_bytes
        self.dirty.add(name, Mark(self._clock(), nbytes))
        if len(self.dirty) == 1 or (not was_large and self.dirty.nbytes >= self._settings.dirty_bytes):
            self._wake.set()

    def applied(self, home: str, position: int) -> None:
        """See `SegmentStore.applied`."""
        self._applied[home] = position

    def forget(self, home: str) -> None:
        """See `SegmentStore.forget`."""
        self.dirty.forget(home)
        self._applied.pop(home, None)
        if self._current is not None:
            self._current.floors.pop(home, None)
        self._folder.forget(home)
        self._has_forgotten = True

    def release(self, home: str) -> None:
        """See `SegmentStore.release`."""
        self.dirty.forget(home)
        self._applied.pop(home, None)
        self._released[home] = self._released.get(home, 0) + 1
        current = self._current
        if current is not None:
            current.floors.pop(home, None)
            if home in self._folder.floors:
                current.floors[home] = self._folder.floors[home]
            # A full disk marks the batch's states again, but not those of this bundle.
            current.batch = [
                (key, payload, None if key.home == home else mark) for key, payload, mark in current.batch
            ]

    async def flush(self) -> None:
        """See `SegmentStore.flush`."""
        if self._error is not None:
            raise self._error
        done = asyncio.get_running_loop().create_future()
        self._flushes.append(done)
        self._wake.set()
        await done

    def fail(self, error: Exception) -> None:
        """Fail all waiting and later calls of `flush`."""
        self._error = self._error or error
        self._resolve(self._flushes, error)

    @property
    def dirty_age_s(self) -> float:
        """Age in seconds of the oldest update that no round has taken; 0 if there is none."""
        oldest = self.dirty.oldest()
        return 0.0 if oldest is None else self._clock() - oldest

    @property
    def in_round(self) -> bool:
        """Whether a round is in progress: its states are neither dirty nor on disk."""
        return self._current is not None

    # --- the timing of rounds ----------------------------------------------------------------

    async def run(self) -> None:
        """Write rounds until cancelled. Raises DiskFailed."""
        while True:
            due = self._due()
            if due is None or due > self._clock():
                await self._wait(due)
                continue
            flushes, self._flushes = self._flushes, []
            try:
                await self._timed_round()
            except BaseException:
                self._flushes += flushes  # `fail` follows
                raise
            self._resolve(flushes, None)

    def _due(self) -> float | None:
        """Return the time of the next round; None if no update or call waits for a round."""
        if self._flushes:
            return self._clock()
        oldest = self.dirty.oldest()
        if oldest is None:
            return None
        due = max(oldest, self._last_began) + self.period_s
        if self.dirty.nbytes >= self._settings.dirty_bytes and not self._folder.is_full:
            return min(due, self._last_began + self.period_s / 2)
        return due

    async def _wait(self, due: float | None) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout(None if due is None else due - self._clock()):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _resolve(self, flushes: list[asyncio.Future[None]], error: Exception | None) -> None:
        for done in flushes:
            if not done.done():
                if error is None:
                    done.set_result(None)
                else:
                    done.set_exception(error)
        flushes.clear()

    async def _timed_round(self) -> None:
        self._last_began = self._clock()
        floors = {**self._folder.floors, **self._applied}
        self._current = current = _Round(self._last_began, self._wall_clock(), floors)
        try:
            with self._folder.reporting_if_stuck("a round"):
                await self._round(current)
        finally:
            self._current = None
        self.counts.round_s = self._clock() - current.begin
        self._set_period(self.counts.round_s)

    def _set_period(self, round_s: float) -> None:
        """Choose the time between rounds, and report when it begins and ceases to exceed `flush_s`."""
        flush_s = self._settings.flush_s
        self.period_s = max(flush_s, round_s / BUSY_SHARE)
        if self.period_s > flush_s and not self._is_slow:
            self._is_slow = True
            self._notice(
                f"a round in {self._folder.path} took {round_s:.2f} s, so rounds come every "
                f"{self.period_s:.2f} s now instead of {flush_s:g} s, and a crash may lose updates of that "
                "time; a faster disk helps, or a longer --flush-s"
            )
        # Only a clear change back is reported, so rounds near the limit report nothing.
        elif self._is_slow and round_s < BUSY_SHARE / 2 * flush_s:
            self._is_slow = False
            self._notice(f"rounds in {self._folder.path} come every {flush_s:g} s again")

    # --- one round ---------------------------------------------------------------------------

    async def _round(self, current: _Round) -> None:
        try:
            for name in self.dirty.names():
                before = current.batch_bytes
                await self._copy(current, name)
                await self._grown(current, before)
            await self._write_batch(current)
            await self._compact(current)
        except DiskFull:
            current.is_complete = False
            self._folder.note_room(STATES, False)
        except BaseException:
            self._restore(current)
            raise
        await self._end(current)

    async def _copy(self, current: _Round, name: StateName) -> None:
        """Copy a dirty state into the batch."""
        mark = self.dirty.pop(name)
        if mark is None:  # forgotten meanwhile
            return
        departures = self._departures(name.home)
        state = await self._take(name)
        if state is not None:
            await self._add(current, state, mark, departures)
        elif self._departures(name.home) == departures:
            self.dirty.add(name, mark)
            current.is_complete = False

    def _departures(self, home: str) -> tuple[int, int]:
        """Return numbers that grow when a bundle is forgotten or released."""
        return self._folder.forgotten.get(home, -1), self._released.get(home, 0)

    async def _add(
        self, current: _Round, state: State, mark: Mark | None, departures: tuple[int, int]
    ) -> None:
        """Add a copy to the batch, behind changed states of the owner.

        All come into one batch, because a full disk marks its batch's states again.

        Args:
            departures: `_departures` before the copy.
        """
        if state.key.home != LEADING:
            for name in sorted(self.dirty.leading):
                await self._copy(current, name)
        if self._departures(state.key.home) != departures:
            return
        self._folder.check_order(state.key)
        sizes = tuple([memoryview(part).nbytes for part in state.parts])
        payload = payload_of(StateRecord(self._folder.next_number(), state.key, sizes), state.parts)
        current.batch.append((state.key, payload, mark))
        current.batch_bytes += payload.nbytes

    async def _grown(self, current: _Round, before: int) -> None:
        """Write the batch if it is large enough; otherwise let the loop do other work now and then.

        Args:
            before: Size of the batch before the last copies, in bytes.
        """
        if current.batch_bytes >= self._settings.batch_bytes:
            await self._write_batch(current)
        elif current.batch_bytes // YIELD_BYTES > before // YIELD_BYTES:
            await asyncio.sleep(0)

    async def _write_batch(self, current: _Round) -> None:
        """Append the copied states; if the disk is full, they are dirty again."""
        batch = current.batch
        if not batch:
            return
        try:
            locations = await self._folder.append_states([payload for _, payload, _ in batch])
        except DiskFull:
            self._restore(current)
            raise
        current.batch, current.batch_bytes = [], 0
        for (key, payload, _), location in zip(batch, locations, strict=True):
            self._folder.put(payload, location)
            current.keys.append(key)
            if current.is_compaction:
                self.counts.compaction_writes += 1
                self.counts.compaction_bytes += location.nbytes
            else:
                self.counts.writes += 1
                self.counts.state_bytes += location.nbytes

    def _restore(self, current: _Round) -> None:
        for key, payload, mark in current.batch:
            if mark is not None and self._folder.counts(payload):
                self.dirty.add(key.name, mark)
        current.batch, current.batch_bytes = [], 0

    async def _compact(self, current: _Round) -> None:
        """Append again the states that keep mostly superfluous files in use."""
        current.is_compaction = True
        usage = self._folder.usage
        for name in usage.victims(self._folder.growing, self._settings.segment_bytes):
            if self.counts.compaction_bytes + current.batch_bytes >= self.counts.state_bytes:
                break
            known = usage.states.get(name)
            if name in self.dirty or name in self._unreadable or known is None:
                continue
            before, departures = current.batch_bytes, self._departures(name.home)
            state = await self._taken_or_read(name, known)
            if state is not None:
                await self._add(current, state, None, departures)
                await self._grown(current, before)
        await self._write_batch(current)

    async def _taken_or_read(self, name: StateName, known: tuple[StateKey, Location]) -> State | None:
        """Return the owner's state; if there is none, the state on disk, or None if that is damaged."""
        state = await self._take(name)
        if state is not None:
            return state
        try:
            return State(known[0], await self._folder.read(known[1]))
        except DamagedState as error:
            self._unreadable.add(name)
            self._notice(str(error))
            return None

    async def _end(self, current: _Round) -> None:
        """Write the record of the round, sync, and remove the files that it made superfluous."""
        folder = self._folder
        # A copy, because a release during the write must not change the floors of the record.
        floors = dict(current.floors if current.is_complete else folder.floors)
        superfluous = folder.superfluous(floors)
        keys = folder.newest([*self._unlisted, *current.keys])
        if not (keys or superfluous or self._has_forgotten or floors != folder.floors):
            self._finish(current)
            return
        as_of = current.as_of if current.is_complete else folder.as_of
        has_forgotten, self._has_forgotten = self._has_forgotten, False
        try:
            record = folder.round_of(folder.newest([*self._listed, *keys]), floors, as_of)
            await folder.append_states([payload_of(record)])
        except DiskFull:
            self._has_forgotten |= has_forgotten
            self._unlisted = keys
            folder.note_room(STATES, False)
            await folder.states.sync()
            return
        await folder.states.sync()
        folder.ended(record)
        self._listed, self._unlisted = keys, []
        self._finish(current)
        await folder.remove(superfluous)
        with suppress(DiskFull):
            await folder.append_states([payload_of(SyncedRecord())])

    def _finish(self, current: _Round) -> None:
        if current.is_complete:
            self._folder.as_of = current.as_of
            self._folder.note_room(STATES, True)
            self.counts.rounds += 1
