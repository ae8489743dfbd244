"""A folder of segment files that is written once and read whole, such as a checkpoint.

The last file is the *head*. The head has the states that a reader needs first, and a round with the keys of
all states and the sizes of all other files. So a reader of the head alone knows the folder, and names each
file that is missing or has another size. Nothing is appended later: each byte outside of a whole frame is
damage. The format is that of a server's folder; only the order of the states differs.

The reader trusts no file, because a folder may come from elsewhere. The reader opens only regular files,
under the names of segment files, and reads no more bytes than the available memory has room for.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from adam_async.errors import ConfigError, DataError, DiskFailed
from adam_async.persistence.folder import DiskFull, Payload, SegmentWriter, payload_of
from adam_async.persistence.frames import frame_at
from adam_async.persistence.records import (
    STATES,
    FlushSettings,
    Identity,
    RoundRecord,
    State,
    StateKey,
    StateName,
    StateRecord,
    split_content,
)
from adam_async.persistence.scan import Scan, salt_of, scan, segment_name
from adam_async.runtime.disk import Disk
from adam_async.runtime.machine import available_bytes

HEAD_BYTES = 64 << 20
"""Maximum size of a head, in bytes; 100,000 pieces and their records need a quarter of it."""


MOST_PARTS = 1 << 16
"""Maximum number of parts of a state. A part may be empty, and then takes 200 times its bytes in the file."""


class DamagedFile(DataError):
    """A file is missing, or differs from the file that was written.

    Attributes:
        file: Name of the file.
        offset: Position of the first damaged byte; None if the whole file is missing or wrong.
    """

    def __init__(self, path: Path, what: str, offset: int | None = None) -> None:
        super().__init__(f"{path} {what}")
        self.file = path.name
        self.offset = offset


class ShortMemory(ConfigError):
    """The available memory has no room for a folder or a file, which may be whole."""

    def __init__(self, path: Path, need: int, free: int) -> None:
        super().__init__(
            f"{path} needs {need:,} bytes of memory, and {free:,} are available: end other programs, or take "
            "a machine with more"
        )


@dataclass(frozen=True, slots=True)
class FoundState:
    """A state in a file."""

    key: StateKey
    content: memoryview
    sizes: Sequence[int]
    position: int
    """First byte of its frame in the file."""
    end: int
    """Position after its frame."""

    @property
    def parts(self) -> list[memoryview]:
        """Parts of the content. Each call makes the parts anew, because the parts of all states take much
        memory."""
        return split_content(self.content, self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The head of a folder.

    Attributes:
        identity: Owner of the folder.
        states: States of the head itself, by name.
        keys: Keys of all states in the folder.
        file: Name of the file with the head.
        nbytes: Size of this file, in bytes.
        files: Size of each other file in bytes, by name.
    """

    identity: Identity
    states: Mapping[StateName, FoundState]
    keys: frozenset[StateKey]
    file: str
    nbytes: int
    files: Mapping[str, int]


async def write_once(
    disk: Disk,
    folder: Path,
    identity: Identity,
    states: AsyncIterator[State],
    head: Callable[[], Sequence[State]],
) -> int:
    """Write all states of a new folder; they are durable on return.

    Args:
        states: The states, as they arrive.
        head: Once all states are read, returns the head's states; none if the folder is given up.

    Returns:
        Size of all files, in bytes; 0 if the folder is given up, and must be removed.

    Raises:
        OSError: The disk has no room, or a write failed; the caller must remove the folder.
    """
    sizes: dict[str, int] = {}

    def writer() -> SegmentWriter:
        """Return a writer of the next file."""
        return SegmentWriter(
            disk,
            folder,
            identity,
            STATES,
            number=len(sizes) + 1,
            segment_bytes=FlushSettings().segment_bytes,
            durable_sizes=sizes,
        )

    keys: list[StateKey] = []

    def payload(state: State) -> Payload:
        keys.append(state.key)
        parts = tuple([memoryview(part).nbytes for part in state.parts])
        return payload_of(StateRecord(len(keys), state.key, parts), state.parts)

    try:
        first = writer()
        async for state in states:
            await first.append([payload(state)])
        if not (payloads := [payload(state) for state in head()]):
            return 0
        await first.sync()
        last, files = writer(), dict(sizes)
        whole = RoundRecord(len(keys) + 1, None, tuple(keys), {}, {}, files, is_directory=True)
        await last.append([*payloads, payload_of(whole)])
        await last.sync()
    except (DiskFull, DiskFailed) as error:
        raise error.__cause__ or error from None
    return sum(sizes.values())


async def read_head(disk: Disk, folder: Path, *, contents: int) -> Head:
    """Read the head of a folder.

    Args:
        contents: Encoding of the states that the caller reads.

    Raises:
        DamagedFile: The head is missing or damaged, or has another format or encoding.
        ShortMemory: The head is larger than the available memory.
        OSError: The folder cannot be read.
    """
    found = [segment_name(name) for name in await disk.names(folder)]
    newest = max([each for each in found if each and each[::2] == (STATES, False)], default=None)
    if newest is None:
        raise DamagedFile(folder, "has no files of shards")
    path = folder / str(newest)
    if (size := await _size(disk, path, None)) > HEAD_BYTES:
        what = f"it has {size:,} bytes, and a head has at most {HEAD_BYTES:,}"
        raise DamagedFile(path, f"is no head: {what}; the file after it is missing, or it is damaged")
    data, read = await _read(disk, path, None, size)
    start, last = read.start, read.records[-1].record if read.records else None
    if start is None or not isinstance(last, RoundRecord):
        raise DamagedFile(folder / str(newest._replace(number=newest.number + 1)), "is missing")
    if start.contents != contents:
        what = f"has states in encoding {start.contents}, and this release reads {contents}"
        raise DamagedFile(path, f"{what}: use the release that wrote it")
    for name in last.files:
        if (segment := segment_name(name)) is None or segment.kind != STATES or name == path.name:
            raise DamagedFile(path, f"names the file {name[:80]!r}, which is none of its folder")
    return Head(
        identity=start.identity,
        states={each.key.name: each for each in _states_of(path, data, read)},
        keys=frozenset(last.states),
        file=path.name,
        nbytes=len(data),
        files=last.files,
    )


async def check_sizes(disk: Disk, folder: Path, head: Head) -> None:
    """Check the files without reading them. Raises DamagedFile: one is missing or has another size."""
    for name, nbytes in head.files.items():
        await _size(disk, folder / name, nbytes)


async def read_states(disk: Disk, folder: Path, head: Head, name: str) -> list[FoundState]:
    """Read all states of one file.

    Raises:
        DamagedFile: The file is missing, damaged, or of another folder.
        ShortMemory: The file is larger than the available memory.
    """
    data, found = await _read(disk, folder / name, head.identity.run, head.files[name])
    states = _states_of(folder / name, data, found)
    if (
        found.start is None
        or found.start.identity != head.identity
        or not head.keys.issuperset([each.key for each in states])
    ):
        raise DamagedFile(folder / name, f"is a file of another folder than {head.file}")
    return states


async def read_state(disk: Disk, folder: Path, head: Head, name: str, state: FoundState) -> FoundState:
    """Read one state of a file again.

    Args:
        state: The state as `read_states` found it, perhaps without its content.

    Raises:
        DamagedFile: The file or the state has changed.
    """
    path, size = folder / name, state.end - state.position
    await _size(disk, path, head.files[name])
    try:
        data = await disk.read_part(path, state.position, state.end)
    except OSError as error:
        raise DamagedFile(path, f"cannot be read: {error.strerror or error}") from None
    salt = salt_of(head.identity.run, name)
    frame = await disk.run(partial(frame_at, data, state.position, salt, offset=state.position))
    if frame is None or frame.end != state.end:
        raise DamagedFile(path, f"is damaged at byte {state.position}", state.position)
    content = memoryview(data)[size - sum(state.sizes) :]
    return FoundState(state.key, content, state.sizes, state.position, state.end)


def _states_of(path: Path, data: bytes, found: Scan) -> list[FoundState]:
    """Return the states of a file. Raises DamagedFile: one has too many parts."""
    view, states = memoryview(data), []
    for each in found.records:
        if isinstance(record := each.record, StateRecord):
            if len(record.sizes) > MOST_PARTS:
                raise DamagedFile(path, f"has a state of {len(record.sizes):,} parts", each.frame.position)
            content = view[each.content : each.frame.end]
            states.append(FoundState(record.key, content, record.sizes, each.frame.position, each.frame.end))
    return states


async def _read(disk: Disk, path: Path, run: str | None, expected: int) -> tuple[bytes, Scan]:
    size = await _size(disk, path, expected)
    if size > (free := available_bytes()):
        raise ShortMemory(path, size, free)
    try:
        data = await disk.read_part(path, 0, size)
    except OSError as error:
        raise DamagedFile(path, f"cannot be read: {error.strerror or error}") from None
    found = await disk.run(scan, path.name, data, run)
    if found.unknown:
        raise DamagedFile(path, f"is of another release: {found.unknown}; use the release that wrote it")
    if found.end != size or found.start is None:
        raise DamagedFile(path, f"is damaged at byte {found.end}", found.end)
    return data, found


async def _size(disk: Disk, path: Path, expected: int | None) -> int:
    """Return the size of a regular file. Raises DamagedFile: the file is absent, or has another size."""
    try:
        size = (await disk.file_facts(path)).size
    except FileNotFoundError:
        raise DamagedFile(path, "is missing") from None
    except OSError as error:
        raise DamagedFile(path, f"cannot be read: {error.strerror or error}") from None
    if expected is not None and size != expected:
        raise DamagedFile(
            path, f"is damaged: it has {size:,} bytes, and was written with {expected:,}", min(size, expected)
        )
    return size
