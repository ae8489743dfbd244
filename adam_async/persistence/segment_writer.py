"""Appends frames to the files of one kind, one file after the other.

A file begins with its start frame, durable before any other frame, so that each file of a folder has an
owner. Appends are not durable before `sync`. A full disk costs only the append in progress: its bytes are cut
off, and later appends go on from there. After any other failure, and any failure of a sync, the fate of
unsynced bytes is unknown, because the system may have dropped them and report the next sync as a success; the
error then ends the process (I11 of the reliability rules).
"""

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from adam_async.errors import DiskFailed
from adam_async.persistence.contents import Location
from adam_async.persistence.frames import HEAD_BYTES, frame_head
from adam_async.persistence.identity import Identity
from adam_async.persistence.keys import Part
from adam_async.persistence.records import (
    EntryRecord,
    SegmentRecord,
    StateRecord,
    encode_record,
    encode_start,
)
from adam_async.persistence.scan import SegmentName, salt_of
from adam_async.runtime.disk import Disk

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a disk without room."""


class DiskFull(Exception):
    """The disk has no room for an append; none of it is in the file."""


def disk_failed(path: Path, error: OSError) -> DiskFailed:
    """Return the error of a write with an unknown fate."""
    return DiskFailed(
        f"{path} cannot be written: {error.strerror or error}; repair the disk, or give the server another "
        "folder, then start it again: other copies and the states on disk go on"
    )


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """A record and its content, to be appended."""

    record: SegmentRecord
    parts: Sequence[Part]

    @property
    def nbytes(self) -> int:
        """Size of the payload, in bytes."""
        return sum([memoryview(part).nbytes for part in self.parts])


def payload_of(record: SegmentRecord, content: Sequence[Part] = ()) -> Payload:
    """Return the payload of a record."""
    return Payload(record, encode_record(record, content))


def _frames_of(payloads: Sequence[Payload], position: int, durable: int, salt: bytes) -> list[Part]:
    """Return the bytes of frames that follow one another, with their checksums; on the disk's thread."""
    parts: list[Part] = []
    for payload in payloads:
        parts += [
            frame_head(payload.parts, position=position, durable=durable, salt=salt),
            *payload.parts,
        ]
        position += HEAD_BYTES + payload.nbytes
    return parts


class SegmentWriter:
    """The files of one kind in one folder.

    Args:
        kind: `records.STATES` or `records.ENTRIES`.
        number: Number of its first file, which is made with the first append.
        segment_bytes: Size from which on another file follows, in bytes.
        durable_sizes: Size on disk of each file of the folder, in bytes; the writer keeps it up to date.
    """

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        identity: Identity,
        kind: str,
        *,
        number: int,
        segment_bytes: int,
        durable_sizes: dict[str, int],
    ) -> None:
        self._disk = disk
        self._folder = folder
        self._identity = identity
        self._kind = kind
        self._number = number - 1
        self._segment_bytes = segment_bytes
        self._durable_sizes = durable_sizes
        self.beginning: Callable[[], Sequence[Payload]] = tuple
        """Callback that returns the records for the beginning of a new file."""
        self._is_new = False
        """Whether the records for the beginning of the file are still to be appended, perhaps after a full
        disk."""
        self._position = 0
        self._durable = 0
        self.written_bytes = 0
        """Number of bytes written, without bytes cut off again."""
        self.syncs = 0
        """Number of calls of ``fdatasync``."""

    @property
    def segment(self) -> str:
        """Name of the file that grows; empty before the first append."""
        return str(SegmentName(self._kind, self._number)) if self._position else ""

    @property
    def position(self) -> int:
        """Size of the file that grows, in bytes."""
        return self._position

    @property
    def is_synced(self) -> bool:
        """Whether all appends are on disk."""
        return self._durable == self._position

    async def append(self, payloads: Sequence[Payload]) -> list[Location]:
        """Append records in one write, to a new file if the last one is large enough; return their places.

        Raises:
            DiskFull: The disk is full; nothing is appended.
            DiskFailed: The write failed.
        """
        if not self._position or self._position >= self._segment_bytes:
            await self._begin_file()
            self._is_new = True
        before = self.beginning() if self._is_new else ()
        try:
            locations = await self._append([*before, *payloads])
        except DiskFull:
            if not before:
                raise
            return await self._append(payloads)  # this may make the room that the beginning needs
        self._is_new = False
        return locations[len(before) :]

    async def _append(self, payloads: Sequence[Payload]) -> list[Location]:
        path, begin = self._folder / self.segment, self._position
        salt = salt_of(self._identity.run, self.segment)
        make = partial(_frames_of, payloads, begin, self._durable, salt)
        try:
            written = await self._disk.append_made(path, begin, make)
        except OSError as error:
            if error.errno not in FULL:
                raise disk_failed(path, error) from error
            await self._cut_off(path, begin)
            raise DiskFull(str(error)) from error
        self._position += written
        self.written_bytes += written
        return self._locations(payloads, begin)

    def _locations(self, payloads: Sequence[Payload], position: int) -> list[Location]:
        found = []
        for payload in payloads:
            record = payload.record
            sizes = record.sizes if isinstance(record, StateRecord | EntryRecord) else ()
            end = position + HEAD_BYTES + payload.nbytes
            found.append(Location(self.segment, position, end - sum(sizes), end, sizes))
            position = end
        return found

    async def _begin_file(self) -> None:
        """Sync the last file, then make the next one with its start on disk."""
        if self._position:
            await self.sync()
        self._number += 1
        path = self._folder / str(SegmentName(self._kind, self._number))
        start = encode_start(self._kind, self._number, self._identity)
        frame = frame_head([start], position=0, durable=0) + start
        self._position = self._durable = 0
        try:
            await self._disk.write_from(path, 0, frame)
        except OSError as error:
            if error.errno not in FULL:
                raise disk_failed(path, error) from error
            await self._remove(path)
            raise DiskFull(str(error)) from error
        try:
            await self._disk.sync_file(path)
            await self._disk.sync_folder(self._folder)
        except OSError as error:
            raise disk_failed(path, error) from error
        self.syncs += 1
        self.written_bytes += len(frame)
        self._position = self._durable = len(frame)
        self._durable_sizes[path.name] = self._durable

    async def sync(self) -> None:
        """Make all appends durable, if any is not.

        Raises:
            DiskFailed: The sync failed, so it is unknown which appends are on disk.
        """
        if self.is_synced:  # also if there is no file, after a full disk
            return
        path, position = self._folder / self.segment, self._position
        try:
            await self._disk.sync_file(path)
        except OSError as error:
            raise disk_failed(path, error) from error
        self.syncs += 1
        self._durable = max(self._durable, position)
        self._durable_sizes[path.name] = self._durable

    async def _cut_off(self, path: Path, size: int) -> None:
        """Cut off the part of an append that the full disk took; this makes the rest of the file durable."""
        try:
            await self._disk.truncate_durably(path, size)
        except OSError as error:
            raise disk_failed(path, error) from error
        self.syncs += 1
        self._durable = size
        self._durable_sizes[path.name] = size

    async def _remove(self, path: Path) -> None:
        try:
            await self._disk.remove_file(path)
        except OSError as error:
            raise disk_failed(path, error) from error

    def __repr__(self) -> str:
        return f"<SegmentWriter {self.segment or self._kind} {self._position} bytes>"
