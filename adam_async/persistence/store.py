"""A write-back store of shards' states, on disk behind a server.

Theory of operation
-------------------
Updates are acknowledged from memory, and the disk follows (AD-50 to AD-54 in docs/reference/paper-map.md).
Rounds append the newest state of each dirty shard to segment files (`rounds.py`). A crash
loses the updates since the last round, about `flush_s`; the copies on other servers have them.

A server that must not lose an acknowledged update appends each log entry before it acknowledges it
(`EntryLog`). After a crash it takes its states from disk and applies the later entries again. Entries
that the states cover are superfluous, so the files of entries stay short.

Entries that arrive during a write and its sync wait, and the next write takes them all (*group commit*). Once
no entry waits, the log appends an empty record without another sync. The empty record's head proves that the
earlier entries were on disk, so later damage to them is not taken for a torn tail.

Both kinds of files consist of checksummed frames (`frames.py`). Damaged bytes are never returned: for each
shard recovery takes the newest whole state. Recovery names what the damage cost, and puts damaged files into
quarantine (`contents.py`, `opening.py`). On a full disk the server goes on from memory. Any other failure of
a write or a sync ends the process, because the fate of its bytes is unknown (`folder.py`).
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from adam_async.errors import DiskFailed, first_cause
from adam_async.persistence import opening
from adam_async.persistence.contents import Contents, Recovery
from adam_async.persistence.folder import DiskFull, Folder, payload_of
from adam_async.persistence.frames import Part
from adam_async.persistence.records import (
    ENTRIES,
    EntryKey,
    EntryRecord,
    FlushSettings,
    Identity,
    StateKey,
    StateName,
    SyncedRecord,
)
from adam_async.persistence.rounds import Rounds, Take
from adam_async.persistence.usage import SegmentStatistics
from adam_async.runtime.clock import Clock
from adam_async.runtime.disk import Disk


@dataclass(slots=True, eq=False)
class _Waiting:
    """An entry that is not on disk."""

    key: EntryKey
    parts: Sequence[Part]
    done: "asyncio.Future[None]"


class EntryLog:
    """The entries of one folder.

    Args:
        batch_bytes: Size of a write in bytes at which further entries wait for the next one.
        retry_s: Pause after a full disk, in seconds.
    """

    def __init__(self, folder: Folder, *, batch_bytes: int, retry_s: float) -> None:
        self._folder = folder
        self._batch_bytes = batch_bytes
        self._retry_s = retry_s
        self._waiting: deque[_Waiting] = deque()
        self._wake = asyncio.Event()
        self._error: Exception | None = None

    async def append_durably(self, key: EntryKey, parts: Sequence[Part]) -> None:
        """Append an entry; see `SegmentStore.append_durably`."""
        if self._error is not None:
            raise self._error
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(key, parts, done))
        self._wake.set()
        await done

    def fail(self, error: Exception) -> None:
        """Fail all waiting and later calls."""
        self._error = self._error or error
        for waiting in self._waiting:
            if not waiting.done.done():
                waiting.done.set_exception(error)
        self._waiting.clear()

    async def run(self) -> None:
        """Write entries until cancelled. Raises DiskFailed."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                await self._write_group()
            if self._folder.entries.is_synced:
                with suppress(DiskFull):
                    await self._folder.append_entries([payload_of(SyncedRecord())])

    async def _write_group(self) -> None:
        group = self._group()
        payloads = [
            payload_of(EntryRecord(self._folder.next_number(), each.key, _sizes(each.parts)), each.parts)
            for each in group
        ]
        try:
            with self._folder.reporting_if_stuck("a write of log entries"):
                locations = await self._folder.append_entries(payloads)
        except DiskFull:
            self._folder.note_room(ENTRIES, False)
            await asyncio.sleep(self._retry_s)
            return
        with self._folder.reporting_if_stuck("a sync of log entries"):
            await self._folder.entries.sync()
        self._folder.note_room(ENTRIES, True)
        for each, payload, location in zip(group, payloads, locations, strict=True):
            assert self._waiting.popleft() is each
            self._folder.put(payload, location)
            if not each.done.done():  # its caller may be cancelled
                each.done.set_result(None)

    def _group(self) -> list[_Waiting]:
        """Return the first waiting entries; they stay in the queue until they are on disk."""
        group: list[_Waiting] = []
        size = 0
        for each in self._waiting:
            if group and size >= self._batch_bytes:
                break
            group.append(each)
            size += sum(_sizes(each.parts))
        return group


def _sizes(parts: Sequence[Part]) -> tuple[int, ...]:
    return tuple([memoryview(part).nbytes for part in parts])


class SegmentStore:
    """The states of one store's shards on one server, in a separate folder.

    Args:
        disk: Disk of the states, made with `private`. The caller owns the disk.
        entries_disk: Disk of the log entries with a separate thread, so that a durable append does not wait
            behind a round of states; `disk` itself works too.
        path: Folder that only this server and this store use; made if absent.
        identity: Owner of the folder.
        take: Copies a state.
        clock: Returns the time of the loop's clock, in seconds.
        wall_clock: Returns the time in seconds since 1970.
        notice: Reports a text to the operator: damage, a full disk and its end, rounds that take too long.
    """

    def __init__(
        self,
        disk: Disk,
        entries_disk: Disk,
        path: Path,
        identity: Identity,
        *,
        take: Take,
        clock: Clock,
        wall_clock: Clock,
        notice: Callable[[str], None],
        settings: FlushSettings | None = None,
    ) -> None:
        self._disk = disk
        self._entries_disk = entries_disk
        self._path = path
        self._identity = identity
        self._take = take
        self._clock = clock
        self._wall_clock = wall_clock
        self._notice = notice
        self._settings = settings if settings is not None else FlushSettings()
        self._contents = Contents()
        self.recovery = Recovery()
        """Contents of the folder at its opening."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator["SegmentStore"]:
        """Lock, read and repair the folder, for as long as the block lasts. `recovery` has the contents then.

        All recovered states and entries are on disk when the block begins. Run `run` in the block, as a task.
        The block's end writes nothing: for an orderly end, call `flush` before it.

        Raises:
            OtherRun, OtherContents, OtherFormat: The folder is another owner's; the folder stays untouched.
            ConfigError: Another process has the folder, or the folder cannot be read, made or repaired.
            DiskFailed: A write failed.
        """
        async with opening.opened(
            self._disk,
            self._entries_disk,
            self._path,
            self._identity,
            notice=self._notice,
            segment_bytes=self._settings.segment_bytes,
        ) as (folder, contents):
            self._folder: Folder = folder
            self._contents = contents
            self.recovery = contents.recovery()
            self._rounds = Rounds(
                folder,
                self._take,
                self._settings,
                clock=self._clock,
                wall_clock=self._wall_clock,
                notice=self._notice,
            )
            self._log = EntryLog(
                folder, batch_bytes=self._settings.batch_bytes, retry_s=self._settings.flush_s
            )
            yield self

    async def read_state(self, name: StateName) -> tuple[StateKey, list[memoryview]]:
        """Read a name's newest state on disk; the parts have the borders of `State.parts`.

        Raises:
            KeyError: The folder has no state of this name.
            DamagedState: The bytes are damaged by now.
        """
        key, location = self._folder.usage.states[name]
        return key, await self._folder.read(location)

    async def read_entry(self, key: EntryKey) -> list[memoryview]:
        """Read an entry of `recovery`; call this before the first round after `applied` of its home.

        Raises:
            KeyError: The folder had no such entry.
            DamagedState: The bytes are damaged by now.
        """
        return await self._folder.read(self._contents.entries[key])

    def mark(self, name: StateName, nbytes: int, updates: int = 1) -> None:
        """Mark a shard dirty: its state has changed. Cheap; call it for each shard of an applied entry.

        Args:
            nbytes: Size of the shard's state, in bytes.
            updates: Number of updates, for the statistics.
        """
        self._rounds.mark(name, nbytes, updates)

    def is_dirty(self, name: StateName) -> bool:
        """Return whether a state has changes that no round has taken, or for which the disk had no room."""
        return name in self._rounds.dirty

    def applied(self, home: str, position: int) -> None:
        """Note that all entries of a bundle up to a position are applied, and their shards marked.

        A complete round makes the entries up to this position superfluous on disk. Only a user of
        `append_durably` needs it.
        """
        self._rounds.applied(home, position)

    def forget(self, home: str) -> None:
        """Forget a bundle that the server has left. The bundle needs no place on disk any more."""
        self._rounds.forget(home)

    def release(self, home: str) -> None:
        """Forget the marks of a bundle that has left the server; its states and entries stay on disk.

        Rounds are complete without its last changes, and keep its entries after the last complete round.
        """
        self._rounds.release(home)

    async def append_durably(self, key: EntryKey, parts: Sequence[Part]) -> None:
        """Append a log entry; return once it is on disk. One ``fdatasync`` serves all calls that wait.

        Calls return in their order. On a full disk a call waits until there is room. Cancelling it drops the
        answer only. The parts must not change before the return.

        Raises:
            DiskFailed: The fate of the entry is unknown; the process must acknowledge nothing any more.
        """
        await self._log.append_durably(key, parts)

    async def flush(self) -> None:
        """Write a round now: the shards marked before the call are on disk on return.

        Shards stay dirty (`is_dirty`) if their states could not be taken, or the disk has no room.

        Raises:
            DiskFailed: As for `run`.
        """
        await self._rounds.flush()

    async def run(self) -> None:
        """Write rounds and entries until cancelled. When it ends, all waiting and later calls fail.

        Raises:
            DiskFailed: A write or sync failed for another reason than a full disk. The caller ends its
                process: after a failed sync the fate of all unsynced bytes is unknown (I11).
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._rounds.run(), name="rounds of states")
                group.create_task(self._log.run(), name="log of entries")
        except BaseExceptionGroup as errors:
            cause = first_cause(errors)
            self._fail(cause if isinstance(cause, Exception) else self._closed())
            raise cause from cause.__cause__
        finally:
            self._fail(self._closed())

    def _closed(self) -> DiskFailed:
        return DiskFailed(f"the store in {self._path} was closed before the write was on disk")

    def _fail(self, error: Exception) -> None:
        self._rounds.fail(error)
        self._log.fail(error)

    def statistics(self) -> SegmentStatistics:
        """Return the counts and ages now."""
        folder, rounds, counts = self._folder, self._rounds, self._rounds.counts
        is_clean = not rounds.dirty and not rounds.in_round
        return SegmentStatistics(
            **asdict(counts),
            written_bytes=folder.states.written_bytes,
            syncs=folder.states.syncs + folder.entries.syncs,
            disk_bytes=sum(folder.usage.sizes.values()),
            live_bytes=folder.usage.live_bytes,
            dirty=len(rounds.dirty),
            dirty_age_s=rounds.dirty_age_s,
            in_round=rounds.in_round,
            period_s=rounds.period_s,
            on_disk_as_of=self._wall_clock() if is_clean else folder.as_of,
            is_full=folder.is_full,
        )

    def __repr__(self) -> str:
        return f"<SegmentStore {self._path}>"
