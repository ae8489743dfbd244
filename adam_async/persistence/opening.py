"""Opens a folder of segment files: reads all files, repairs the folder, and returns it.

Repairs go in this order, so that a crash in between loses nothing and the next opening repeats them:

1. Torn tails are cut off, and all files synced: a killed process may have left bytes only in the page cache,
   and its successor relies on them.
2. States and entries that only damaged files have are appended to new files, with a record of the damage and
   the losses, and synced.
3. Damaged files are renamed. No later opening reads them.
4. A new list of all states is appended, and synced. Until then each opening reports the damage. Lists
   include the lost states, so later openings name them until newer ones are on disk.
"""

from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

from adam_async.errors import ConfigError, DataError
from adam_async.persistence.contents import Contents, Location, contents_of
from adam_async.persistence.folder import DiskFull, Folder, disk_failed, payload_of
from adam_async.persistence.frames import MAGIC, frame_at
from adam_async.persistence.records import (
    EntryKey,
    EntryRecord,
    Identity,
    OtherContents,
    OtherFormat,
    OtherRun,
    Start,
    StateKey,
    StateName,
    StateRecord,
    UnknownRecordError,
    decode_start,
    split_content,
)
from adam_async.persistence.scan import Scan, SegmentName, scan, segment_name
from adam_async.runtime.disk import Disk
from adam_async.runtime.machine import available_bytes

START_BYTES = 4096
"""Maximum size of a file's first frame, in bytes."""

MOST_FILE_BYTES = 8 << 30
"""Maximum size of a segment file, in bytes: a payload has at most 4 GiB, and a file ends with the first
append beyond `FlushSettings.segment_bytes`."""

LOCK = "lock"
"""Name of a folder's locked file."""


@contextmanager
def opening(path: Path) -> Iterator[None]:
    """Raise an error of the system in the block, which opens a server's folder, as ConfigError."""
    try:
        yield
    except BlockingIOError:
        raise ConfigError(
            f"{path} is in use by a running server: end that server, or give another folder"
        ) from None
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(
            f"{path} cannot be used: {why}; give the server a folder that it can write to"
        ) from error


@asynccontextmanager
async def opened(
    disk: Disk,
    entries_disk: Disk,
    path: Path,
    identity: Identity,
    *,
    notice: Callable[[str], None],
    segment_bytes: int,
) -> AsyncIterator[tuple[Folder, Contents]]:
    """Lock, read and repair a folder, for as long as the block lasts.

    Yields the folder and its contents. For errors see `SegmentStore.opened`.
    """
    async with AsyncExitStack() as stack:
        with opening(path):
            await disk.make_folder(path)
            # A killed process may have made the folder without syncing its name.
            await disk.sync_folder(path.parent)
            await stack.enter_async_context(disk.hold(path / LOCK))
            scans, names = await _read(disk, path, identity)
            contents = contents_of(scans, names)
            await _settle(disk, path, scans, contents)
        folder = Folder(
            disk, entries_disk, path, identity, contents, notice=notice, segment_bytes=segment_bytes
        )
        if contents.damages:
            contents = await _repaired(disk, path, folder, contents)
            notice(f"in {path}, {contents.recovery().damage_text()}")
        yield folder, contents


async def read_identity(disk: Disk, path: Path) -> Identity | None:
    """Return the owner of a folder of segment files; None if no file names an owner. Changes nothing.

    Raises:
        DataError: No file names the owner, although a file is in quarantine or has more than a torn start.
        OtherFormat: The files are of another release.
        OSError: The folder cannot be read.
    """
    names = await disk.names(path)
    damaged = [each for each in names if (name := segment_name(each)) is not None and name.is_quarantined]
    for name in _segments(names):
        start = await _start(disk, path / str(name))
        if start is not None:
            return start.identity
        # A file has its start on disk before any other frame.
        data = await disk.read_part(path / str(name), 0, START_BYTES)
        if len(data) == START_BYTES or data.find(MAGIC, 1) >= 0:
            damaged.append(str(name))
    if damaged:
        raise DataError(
            f"{path} is damaged: {', '.join(damaged[:5])} and all other files lack the name of their store; "
            "move the folder away, and other copies go on"
        )
    return None


async def read_newest(
    disk: Disk, path: Path, identity: Identity, names: Collection[StateName]
) -> tuple[tuple[StateKey, ...], dict[StateName, list[memoryview]]]:
    """Read a folder that another process may have open. Changes nothing.

    Returns:
        The keys of the newest states, and the parts of those with some names.

    Raises:
        OtherRun, OtherContents, OtherFormat: The folder is another owner's.
        ConfigError: A file is too large.
        OSError: The folder cannot be read.
    """
    scans, segments = await _read(disk, path, identity)
    states, found = contents_of(scans, segments).states, {}
    for name in names:
        if name in states:
            _, location = states[name]
            data = await disk.read_part(path / location.segment, location.content, location.end)
            found[name] = split_content(data, location.sizes)
    return tuple(key for key, _ in states.values()), found


async def _start(disk: Disk, path: Path) -> Start | None:
    data = await disk.read_part(path, 0, START_BYTES)
    frame = frame_at(data, 0)
    try:
        return None if frame is None else decode_start(memoryview(data)[frame.begin : frame.end])
    except UnknownRecordError as error:
        raise _other(path, str(error)) from None


def _segments(names: list[str]) -> list[SegmentName]:
    """Return the names of segment files that are not in quarantine, oldest first."""
    found = [each for each in map(segment_name, names) if each is not None]
    return sorted([each for each in found if not each.is_quarantined])


def _other(path: Path, what: str) -> OtherFormat:
    return OtherFormat(
        f"{path} is of another release: {what}; start that release again, or give the server another folder"
    )


async def _read(disk: Disk, path: Path, identity: Identity) -> tuple[list[Scan], list[SegmentName]]:
    """Read all files. Raises OtherRun, OtherContents or OtherFormat before anything is changed."""
    names = await disk.names(path)
    scans = []
    for name in _segments(names):
        size = await disk.size(path / str(name))
        if size > MOST_FILE_BYTES:
            raise ConfigError(
                f"{path / str(name)} has {size} bytes, more than any file of shards: move it away, and other "
                "copies go on"
            )
        if size > (free := available_bytes()):  # a sparse file has any size
            raise ConfigError(
                f"{path / str(name)} needs {size} bytes of memory, and {free} are available: end other "
                "programs; or move it away, and other copies go on"
            )
        data = await disk.read_bytes(path / str(name), MOST_FILE_BYTES)  # its server may append
        found = await disk.run(scan, str(name), data, identity.run)
        _check(path / str(name), found, identity)
        scans.append(found)
    return scans, [each for each in map(segment_name, names) if each is not None]


def _check(path: Path, found: Scan, identity: Identity) -> None:
    start = found.start
    if start is not None and start.run != identity.run:
        raise OtherRun(
            f"{path} has states of {start.run!r}, not of {identity.run!r}; go on with that run, or give the "
            "server another folder"
        )
    if found.unknown:
        raise _other(path, found.unknown)
    if start is not None and start.contents != identity.contents:
        raise OtherContents(
            f"{path} has states in encoding {start.contents}, and this release reads {identity.contents}; "
            "start the release that wrote them, or give the server another folder"
        )


async def _settle(disk: Disk, path: Path, scans: list[Scan], contents: Contents) -> None:
    """Cut off torn tails, and make all undamaged files durable."""
    torn = {each.segment for each in contents.torn}
    for each in scans:
        file = path / each.segment
        if each.segment in contents.files:
            if each.segment in torn:
                await disk.truncate_durably(file, each.end)
            else:
                await disk.sync_file(file)
        elif each.segment in torn:  # a crash tore its start
            await disk.remove_file(file)
    await disk.sync_folder(path)


async def _repaired(disk: Disk, path: Path, folder: Folder, contents: Contents) -> Contents:
    """Copy states and entries out of damaged files, and put the damaged files into quarantine."""
    try:
        await _save_states(folder, contents)
        entries = await _save_entries(folder, contents)
        await folder.append_states([folder.losses(contents.damages)])
        await folder.states.sync()
        for damage in contents.damages:
            if damage.quarantined_as:
                await disk.rename(path / damage.segment, path / damage.quarantined_as)
        await folder.append_states([folder.directory()])
        await folder.states.sync()
    except DiskFull:
        raise ConfigError(
            f"the disk of {path} is full, and a damaged file must be copied; make room on it"
        ) from None
    except OSError as error:
        raise disk_failed(path, error) from error
    return replace(contents, entries=entries)


async def _save_states(folder: Folder, contents: Contents) -> None:
    for key, location in contents.states.values():
        if location.segment not in contents.files:
            content = await folder.read(location)
            payload = payload_of(StateRecord(folder.next_number(), key, location.sizes), content)
            (new,) = await folder.append_states([payload])
            folder.put(payload, new)


async def _save_entries(folder: Folder, contents: Contents) -> Mapping[EntryKey, Location]:
    entries = dict(contents.entries)
    for key, location in contents.entries.items():
        if location.segment not in contents.files:
            content = await folder.read(location)
            payload = payload_of(EntryRecord(folder.next_number(), key, location.sizes), content)
            (entries[key],) = await folder.append_entries([payload])
            folder.put(payload, entries[key])
    if folder.entries.segment:
        await folder.entries.sync()
    return entries
