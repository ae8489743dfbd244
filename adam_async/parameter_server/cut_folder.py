"""The folders of cuts in a store's folder: each has one bundle at one clock, and is written once.

A folder has the files of a checkpoint (`persistence/written_once.py`). An unfinished folder has the prefix of
removed folders, so the next opening after a crash removes it. The folder gets its final name once all its
files are synced. A damaged folder costs the cut of this bundle on this server alone.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from adam_async.errors import ConfigError, DataError
from adam_async.parameter_server.piece_states import (
    CATALOGUE,
    CONTENTS,
    Catalogue,
    catalogue_state,
    read_catalogue,
)
from adam_async.persistence import written_once
from adam_async.persistence.records import LEADING, Identity, Order, State
from adam_async.persistence.written_once import FoundState, Head, read_head, write_once
from adam_async.runtime.disk import Disk

PREFIX, REMOVED = "cut-", "removed-"
"""Prefixes of the names of cut folders, and of folders that are being written or removed."""


@dataclass(frozen=True, slots=True, eq=False)
class CutFolder:
    """A bundle at a clock on the disk.

    Attributes:
        nbytes: Size of the folder's files, in bytes.
        head: Head of the cut; None if this process has written it and not read it back.
        places: File and place of each piece, by number.
    """

    path: Path
    home: str
    clock: int
    nbytes: int
    head: Head | None = None
    places: Mapping[int, tuple[str, FoundState]] | None = None


def order_of(clock: int) -> Order:
    """Return the order of a cut's pieces: their clock is the position."""
    return 0, clock


def cut_path(folder: Path, home: str, clock: int) -> Path:
    """Return the folder of a bundle at a clock."""
    digest = blake2b(home.encode(), digest_size=8).hexdigest()
    return folder / f"{PREFIX}{digest}-{clock:015d}"


def unfinished_path(folder: Path, home: str, clock: int) -> Path:
    """Return the folder of a bundle at a clock that is being written."""
    path = cut_path(folder, home, clock)
    return path.with_name(REMOVED + path.name)


async def write_cut(
    disk: Disk,
    folder: Path,
    catalogue: Catalogue,
    home: str,
    clock: int,
    states: AsyncIterator[State],
    is_whole: Callable[[], bool],
) -> CutFolder | None:
    """Write a bundle at a clock, and return once it is durable. Returns None if the cut was given up.

    Args:
        folder: Folder of the store.
        states: Pieces of the bundle, in the order in which they are copied.
        is_whole: Returns, after the last piece, whether all pieces were there.

    Raises:
        OSError: The disk is full, or a write failed; the caller must remove the unfinished folder.
    """
    path, aside = cut_path(folder, home, clock), unfinished_path(folder, home, clock)
    identity = Identity(run=catalogue.record.id, contents=CONTENTS)
    await disk.remove_folder(aside)
    await disk.make_folder(aside)
    nbytes = await write_once(
        disk, aside, identity, states, lambda: [catalogue_state(catalogue)] if is_whole() else []
    )
    if not nbytes:
        await disk.remove_folder(aside)
        return None
    await disk.rename(aside, path)
    return CutFolder(path, home, clock, nbytes)


async def remove_cut(disk: Disk, path: Path) -> None:
    """Remove a folder; a crash in the middle leaves no cut that looks damaged. Raises OSError."""
    aside = path.with_name(REMOVED + path.name)
    await disk.remove_folder(aside)
    await disk.rename(path, aside)
    await disk.remove_folder(aside)


async def read_cut_head(disk: Disk, path: Path, generation: int) -> CutFolder:
    """Read the head of a folder, and check the sizes of its files.

    Raises:
        ConfigError, DataError, OSError: The head is damaged, a file is missing, or the cut is of another
            placement of the store.
    """
    head = await read_head(disk, path, contents=CONTENTS)
    await written_once.check_sizes(disk, path, head)
    if CATALOGUE not in head.states:
        raise DataError(f"{path} has no record of its store")
    catalogue = read_catalogue(head.states[CATALOGUE].parts, str(path))
    named = {(key.home, key.position) for key in head.keys if key.home != LEADING}
    if len(named) != 1 or catalogue.record.generation != generation:
        raise DataError(f"{path} is no cut of placement {generation} of its store")
    ((home, clock),) = named
    if path != cut_path(path.parent, home, clock):
        raise DataError(f"{path} has another name than clock {clock} of bundle {home} gives it")
    return CutFolder(path, home, clock, head.nbytes + sum(head.files.values()), head)


async def read_cut(disk: Disk, path: Path, generation: int) -> CutFolder:
    """Read a whole folder; errors as in `read_cut_head`, also for a damaged piece."""
    found = await read_cut_head(disk, path, generation)
    head = found.head
    assert head is not None
    places: dict[int, tuple[str, FoundState]] = {}
    for file in head.files:
        for each in await written_once.read_states(disk, path, head, file):
            # Without the piece's content, so that only one file at a time is in memory.
            places[each.key.shard] = (
                file,
                FoundState(each.key, memoryview(b""), each.sizes, each.position, each.end),
            )
    if {key.shard for key in head.keys if key.home != LEADING} != places.keys():
        raise DataError(f"{path} lacks pieces that its head lists")
    return CutFolder(path, found.home, found.clock, found.nbytes, head, places)


async def read_cut_piece(disk: Disk, cut: CutFolder, piece: int) -> list[memoryview]:
    """Read the parts of a piece. Raises DataError: the cut lacks it, or it has changed."""
    if cut.head is None or piece not in (cut.places or {}):
        raise DataError(f"{cut.path} has no piece {piece}")
    assert cut.places is not None
    file, place = cut.places[piece]
    try:
        return (await written_once.read_state(disk, cut.path, cut.head, file, place)).parts
    except OSError as error:
        raise DataError(f"{cut.path} cannot be read: {error.strerror or error}") from None


async def cut_folders(disk: Disk, folder: Path) -> list[Path]:
    """Return the folders of a store's cuts. Raises OSError."""
    return [folder / name for name in await disk.folders(folder) if name.startswith(PREFIX)]


UNREADABLE_CUT = (ConfigError, DataError, OSError)
"""Errors of a damaged folder."""
