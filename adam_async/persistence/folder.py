"""One folder of segment files, as shared by its rounds of states and its log of entries.

A `SegmentWriter` appends frames to the files of one kind, one file after the other. A file begins with its
start frame, durable before any other frame, so that each file of a folder has an owner. Appends are not
durable before `sync`. A full disk costs only the append in progress: its bytes are cut off, and later appends
go on from there. After any other failure, and any failed sync, the fate of unsynced bytes is unknown: the
system may have dropped them and report the next sync as a success. The error then ends the process (I11 of
the reliability rules).
"""

import asyncio
import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from adam_async.errors import DataError, DiskFailed
from adam_async.persistence.contents import Contents, Damage, Location
from adam_async.persistence.frames import HEAD_BYTES, Part, frame_at, frame_head
from adam_async.persistence.records import (
    ENTRIES,
    STATES,
    EntryRecord,
    Identity,
    RoundRecord,
    SegmentRecord,
    StateKey,
    StateRecord,
    encode_record,
    encode_start,
    split_content,
)
from adam_async.persistence.scan import SegmentName, salt_of
from adam_async.persistence.usage import Usage
from adam_async.runtime.clock import time_of_day
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
    return Payload(record, encode_record(record, content))


def _frames_of(payloads: Sequence[Payload], position: int, durable: int, salt: bytes) -> list[Part]:
    """On the disk's thread, return the bytes of consecutive frames, with their checksums."""
    parts: list[Part] = []
    for payload in payloads:
        parts += [frame_head(payload.parts, position=position, durable=durable, salt=salt), *payload.parts]
        position += HEAD_BYTES + payload.nbytes
    return parts


class SegmentWriter:
    """The files of one kind in one folder.

    Args:
        kind: `records.STATES` or `records.ENTRIES`.
        number: Number of its first file, which is made with the first append.
        segment_bytes: Size at which a file ends and the next one begins, in bytes.
        durable_sizes: Size on disk of each file in the folder, in bytes; the writer keeps it up to date.
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
        self.position = 0
        """Size of the file that grows, in bytes."""
        self._durable = 0
        self.written_bytes = 0
        """Number of bytes written, without bytes cut off again."""
        self.syncs = 0
        """Number of calls of ``fdatasync``."""

    @property
    def segment(self) -> str:
        """Name of the file that grows; empty before the first append."""
        return str(SegmentName(self._kind, self._number)) if self.position else ""

    @property
    def is_synced(self) -> bool:
        """Whether all appends are on disk."""
        return self._durable == self.position

    async def append(self, payloads: Sequence[Payload]) -> list[Location]:
        """Append records in one write, to a new file if the last one is large enough; return their places.

        Raises:
            DiskFull: The disk is full; nothing is appended.
            DiskFailed: The write failed.
        """
        if not self.position or self.position >= self._segment_bytes:
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
        path, begin = self._folder / self.segment, self.position
        salt = salt_of(self._identity.run, self.segment)
        make = partial(_frames_of, payloads, begin, self._durable, salt)
        try:
            written = await self._disk.append_made(path, begin, make)
        except OSError as error:
            if error.errno not in FULL:
                raise disk_failed(path, error) from error
            await self._cut_off(path, begin)
            raise DiskFull(str(error)) from error
        self.position += written
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
        """Sync the last file; then make the next one, with its header on disk."""
        if self.position:
            await self.sync()
        self._number += 1
        path = self._folder / str(SegmentName(self._kind, self._number))
        start = encode_start(self._kind, self._number, self._identity)
        frame = frame_head([start], position=0, durable=0) + start
        self.position = self._durable = 0
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
        self.position = self._durable = len(frame)
        self._durable_sizes[path.name] = self._durable

    async def sync(self) -> None:
        """Make all appends durable, if any is not.

        Raises:
            DiskFailed: The sync failed, so it is unknown which appends are on disk.
        """
        if self.is_synced:  # also if there is no file, after a full disk
            return
        path, position = self._folder / self.segment, self.position
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
        return f"<SegmentWriter {self.segment or self._kind} {self.position} bytes>"


STUCK_S = 10.0
"""Duration of a write after which a notice reports it, in seconds."""


class DamagedState(DataError):
    """A state or an entry that was whole on disk is damaged now. The state must be fetched from a copy."""


class Folder:
    """One opened folder.

    Args:
        disk: Disk of the states.
        entries_disk: Disk of the entries.
        contents: The contents at the opening, after repairs.
        notice: Reports a text to the operator.
        segment_bytes: See `FlushSettings`.
    """

    def __init__(
        self,
        disk: Disk,
        entries_disk: Disk,
        path: Path,
        identity: Identity,
        contents: Contents,
        *,
        notice: Callable[[str], None],
        segment_bytes: int,
    ) -> None:
        self._disk = disk
        self.path = path
        """Path of the folder."""
        self._run = identity.run
        self._notice = notice
        self._durable_sizes = dict(contents.files)
        self.usage = Usage(contents)
        self._number = contents.number
        self._previous = contents.number, contents.number
        """Numbers of the last two rounds on disk; see `RoundRecord.previous`."""
        self._lost = {each.name: each.order for each in contents.lost}
        """Generation and position of states that damage has cost."""
        self._full: set[str] = set()
        self.floors: dict[str, int] = dict(contents.floors)
        """Position up to which entries are not needed, by home, as in the last round on disk."""
        self.forgotten: dict[str, int] = dict(contents.forgotten)
        """Number up to which records do not count, by the home of each forgotten bundle."""
        self.as_of = contents.as_of
        """Wall-clock time up to which all updates are on disk, in seconds since 1970; None if unknown."""
        self.states, self.entries = (
            SegmentWriter(
                each,
                path,
                identity,
                kind,
                number=contents.next_files.get(kind, 1),
                segment_bytes=segment_bytes,
                durable_sizes=self._durable_sizes,
            )
            for each, kind in ((disk, STATES), (entries_disk, ENTRIES))
        )

    @property
    def is_full(self) -> bool:
        """Whether the last write of states or entries found no room on the disk."""
        return bool(self._full)

    def next_number(self) -> int:
        """Return the number of the next record."""
        self._number += 1
        return self._number

    async def append_states(self, payloads: Sequence[Payload]) -> list[Location]:
        """Append states or a round; errors as in `SegmentWriter.append`."""
        return await self._append(self.states, payloads)

    async def append_entries(self, payloads: Sequence[Payload]) -> list[Location]:
        """Append entries; errors as in `SegmentWriter.append`."""
        return await self._append(self.entries, payloads)

    async def _append(self, writer: SegmentWriter, payloads: Sequence[Payload]) -> list[Location]:
        locations = await writer.append(payloads)
        self.usage.grew(writer.segment, writer.position)
        return locations

    def check_order(self, key: StateKey) -> None:
        """Raise ValueError if a state is older than the one on disk: recovery would prefer the newer one."""
        known = self.usage.states.get(key.name)
        if known is not None and key.order < known[0].order:
            raise ValueError(
                f"state {key} is older than {known[0]} on disk; forget the bundle before it begins again"
            )

    def counts(self, payload: Payload) -> bool:
        """Return whether the bundle was not forgotten since the record of a state or an entry was made."""
        record = payload.record
        assert isinstance(record, StateRecord | EntryRecord)
        return record.number > self.forgotten.get(record.key.home, 0)

    def put(self, payload: Payload, location: Location) -> None:
        """Note that a state or an entry is in a file."""
        record = payload.record
        assert isinstance(record, StateRecord | EntryRecord)
        if not self.counts(payload):
            return
        if isinstance(record, StateRecord):
            self.usage.put(record.key, location)
        else:
            self.usage.put_entry(record.key, record.number, location.segment)

    def forget(self, home: str) -> None:
        """Forget the states and entries of a bundle."""
        self.usage.forget(home)
        self._lost = {name: order for name, order in self._lost.items() if name.home != home}
        self.floors = {each: position for each, position in self.floors.items() if each != home}
        self.forgotten[home] = self._number

    def newest(self, keys: Sequence[StateKey]) -> list[StateKey]:
        """Return the newest keys of the same names, without forgotten bundles' keys."""
        states = self.usage.states
        return [states[name][0] for name in dict.fromkeys([key.name for key in keys]) if name in states]

    def round_of(self, keys: Sequence[StateKey], floors: dict[str, int], as_of: float | None) -> RoundRecord:
        """Return the record of a round, with the facts of the folder."""
        gone = self.superfluous(floors)
        return RoundRecord(
            number=self.next_number(),
            as_of=as_of,
            states=tuple(keys),
            floors=floors,
            forgotten=dict(self.forgotten),
            files={name: size for name, size in self._durable_sizes.items() if name not in gone},
            previous=self._previous,
        )

    def ended(self, record: RoundRecord) -> None:
        """Note that a round is on disk."""
        floors = record.floors.items()
        self.floors = {home: floor for home, floor in floors if record.number > self.forgotten.get(home, 0)}
        self._previous = self._previous[1], record.number

    def losses(self, damages: Sequence[Damage]) -> Payload:
        """Return the list of all states with a record of damage, with which the rounds begin anew.

        Later openings report this damage, even if its files are renamed by then.
        """
        record = self._list_of_states()
        self._previous = record.number, record.number  # rounds before it may be hidden
        damaged = {each.segment: each.position + 1 for each in damages}
        return payload_of(msgspec.structs.replace(record, files={**record.files, **damaged}))

    def directory(self) -> Payload:
        """Return the list of all states, for the beginning of a new file.

        The list includes states lost by damage, so later openings name them until newer ones are on disk.
        """
        return payload_of(self._list_of_states())

    def _list_of_states(self) -> RoundRecord:
        keys = {name: key for name, (key, _) in self.usage.states.items()}
        for name, order in self._lost.items():
            if name not in keys or keys[name].order < order:
                keys[name] = StateKey(*name, *order, 0)
        record = self.round_of(list(keys.values()), self.floors, self.as_of)
        return msgspec.structs.replace(record, is_directory=True)

    @property
    def growing(self) -> frozenset[str]:
        """Files that still grow."""
        return frozenset({self.states.segment, self.entries.segment})

    def superfluous(self, floors: dict[str, int]) -> list[str]:
        """Return the files that become superfluous once a round with these floors is on disk."""
        return self.usage.superfluous(self.growing, floors, self.forgotten)

    async def remove(self, segments: list[str]) -> None:
        """Remove superfluous files, after a round without them is on disk. Raises DiskFailed."""
        for segment in segments:
            try:
                await self._disk.remove_file(self.path / segment)
            except OSError as error:
                raise disk_failed(self.path / segment, error) from error
            self.usage.removed(segment)
            self._durable_sizes.pop(segment, None)

    def note_room(self, kind: str, has_room: bool) -> None:
        """Note whether the disk had room for the last write of a kind, and report a change."""
        was_full = self.is_full
        if has_room:
            self._full.discard(kind)
        else:
            self._full.add(kind)
        if self.is_full and not was_full:
            self._notice(f"the disk of {self.path} is full: {self.as_of_text()}; make room on it")
        elif was_full and not self.is_full:
            self._notice(f"the disk of {self.path} has room again: {self.as_of_text()}")

    @contextmanager
    def reporting_if_stuck(self, work: str) -> Iterator[None]:
        """Report once if the block takes longer than `STUCK_S`."""
        alarm = asyncio.get_running_loop().call_later(STUCK_S, self._report_stuck, work)
        try:
            yield
        finally:
            alarm.cancel()

    def _report_stuck(self, work: str) -> None:
        self._notice(f"{work} in {self.path} takes more than {STUCK_S:g} s; {self.as_of_text()}")

    def as_of_text(self) -> str:
        """Return a text on the time up to which all updates are on disk."""
        return "no round is on it yet" if self.as_of is None else f"on disk as of {time_of_day(self.as_of)}"

    async def read(self, location: Location) -> list[memoryview]:
        """Read the content of a record.

        Raises:
            DamagedState: The record's bytes have changed, or cannot be read.
        """
        return split_content(await self.read_content(location), location.sizes)

    async def read_content(self, location: Location) -> bytes:
        """Read a record's content as one piece; errors as in `read`."""
        path = self.path / location.segment
        try:
            data = await self._disk.read_part(path, location.position, location.end)
        except OSError as error:
            raise DamagedState(f"{path} cannot be read: {error.strerror or error}") from error
        salt = salt_of(self._run, location.segment)
        frame = frame_at(data, location.position, salt, offset=location.position)
        if frame is None or frame.end != location.end:
            raise DamagedState(f"{path} is damaged at byte {location.position}; another copy has to fill in")
        return data[location.content - location.position :]

    def __repr__(self) -> str:
        return f"<Folder {self.path} {len(self.usage.sizes)} files>"
