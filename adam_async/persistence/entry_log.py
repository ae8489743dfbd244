"""Log entries on disk, durable before they are acknowledged, many with one sync.

Entries that arrive during a write and its sync wait, and the next write takes all of them (*group commit*).
Once no entry waits, the log appends an empty record, and does not sync again: the head of this record proves
that the entries before it were on disk, so later damage to them is not taken for a torn tail.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from adam_async.persistence.folder import DiskFull, Folder, payload_of
from adam_async.persistence.keys import EntryKey, Part
from adam_async.persistence.records import ENTRIES, EntryRecord, SyncedRecord


@dataclass(slots=True, eq=False)
class _Waiting:
    """An entry that is not on disk."""

    key: EntryKey
    parts: Sequence[Part]
    done: "asyncio.Future[None]"


class EntryLog:
    """The entries of one folder.

    Args:
        batch_bytes: Size from which on entries wait for the next write, in bytes.
        retry_s: Pause after a full disk, in seconds.
    """

    def __init__(self, folder: Folder, *, batch_bytes: int, retry_s: float) -> None:
        self._folder = folder
        self._batch_bytes = batch_bytes
        self._retry_s = retry_s
        self._waiting: deque[_Waiting] = deque()
        self._wake = asyncio.Event()
        self._error: Exception | None = None
        self.entries = 0
        """Number of durable entries."""
        self.entry_bytes = 0
        """Size of the durable entries, in bytes."""

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
            self.entries += 1
            self.entry_bytes += location.nbytes
            if not each.done.done():  # its caller may be cancelled
                each.done.set_result(None)

    def _group(self) -> list[_Waiting]:
        """Return the first entries that wait; they stay in the queue until they are on disk."""
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
