"""Reads one checkpoint: either only its head, by which a reader chooses, or all of it.

A reading checks each byte, one file in memory at a time, and keeps the places of the pieces. When the shards
are needed, they are read again, one piece at a time.
"""

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from adam_async.checkpoint.checkpoint import (
    Checkpoint,
    CheckpointError,
    Manifest,
    StoredCheckpoint,
    StoredPieces,
    saved_manifest,
)
from adam_async.checkpoint.names import age_order
from adam_async.errors import ConfigError, DataError, RunFailed
from adam_async.messages import ShardState
from adam_async.parameter_server.piece_states import CATALOGUE, CONTENTS, RUN, read_catalogue, read_run
from adam_async.parameter_server.shard import Shard
from adam_async.parameter_server.shard_transfer import state_of
from adam_async.persistence.records import StateName
from adam_async.persistence.written_once import (
    DamagedFile,
    FoundState,
    Head,
    ShortMemory,
    check_sizes,
    read_head,
    read_state,
    read_states,
)
from adam_async.run.run_record import RunRecord
from adam_async.run.shard_table import ShardSpec, ShardTable
from adam_async.runtime.disk import Disk
from adam_async.runtime.machine import available_bytes

OLD_MANIFEST = "manifest.json"
"""Name of a file in checkpoints of format 2 and older, which had files of whole tensors."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckpointHead:
    """A checkpoint whose shards are not read.

    Attributes:
        files: Its files.
    """

    manifest: Manifest
    record: RunRecord
    pieces: StoredPieces
    files: Head

    @property
    def nbytes(self) -> int:
        """Size of all files, in bytes."""
        return self.files.nbytes + sum(self.files.files.values())


async def checkpoint_head(folder: Path, disk: Disk) -> CheckpointHead:
    """Read the head of a checkpoint.

    Raises:
        DamagedFile: The head is missing or damaged, or belongs to a checkpoint with another name or format.
        ShortMemory: The head is larger than the available memory.
    """
    try:
        files = await read_head(disk, folder, contents=CONTENTS)
    except DamagedFile as error:
        if error.file == folder.name and OLD_MANIFEST in await disk.names(folder):
            raise DamagedFile(
                folder / OLD_MANIFEST,
                "has the format of an earlier release: finish the run with the version that wrote it, or "
                "begin a new run from its model with --init",
            ) from None
        raise
    except OSError as error:
        raise DamagedFile(folder, f"cannot be read: {error.strerror or error}") from None
    path, states = folder / files.file, files.states
    if lacking := {CATALOGUE, RUN} - states.keys():
        raise DamagedFile(path, f"is damaged: it lacks {len(lacking)} of its records")
    epoch, groups = age_order(folder.name)

    def head() -> CheckpointHead:
        record = read_run(states[RUN].parts, folder.name)
        pieces = StoredPieces(read_catalogue(states[CATALOGUE].parts, folder.name))
        manifest = saved_manifest(record, (epoch, groups))
        return CheckpointHead(manifest=manifest, record=record, pieces=pieces, files=files)

    found = _readable(path, head)
    if epoch - found.record.ended not in (0, 1):
        raise DamagedFile(path, f"is of an epoch after {found.record.ended}: {folder.name} was renamed")
    if found.record.program.id != found.pieces.catalogue.record.program:
        raise DamagedFile(path, "is damaged: its records are of different runs")
    names = {key.name for key in files.keys}
    if names != {*found.pieces.specs, CATALOGUE, RUN} or found.pieces.nbytes > found.nbytes:
        raise DamagedFile(path, "is damaged: the folder has not the pieces of its run")
    return found


def _readable(path: Path, read: Callable[[], _T]) -> _T:
    try:
        return read()
    except (ConfigError, DataError, RunFailed) as error:
        raise DamagedFile(path, f"cannot be read: {error}") from None


async def checkpoint_manifest(folder: Path, disk: Disk) -> Manifest:
    """Read the manifest of one checkpoint. Raises CheckpointError, ShortMemory: see `checkpoint_head`."""
    try:
        return (await checkpoint_head(folder, disk)).manifest
    except DamagedFile as error:
        raise CheckpointError(str(error)) from None


class FolderShards:
    """The shards in the folder of a checkpoint; see `ShardSource`.

    Args:
        places: File of each piece, and the piece without its content.
    """

    def __init__(
        self,
        folder: Path,
        disk: Disk,
        head: CheckpointHead,
        places: Mapping[StateName, tuple[str, FoundState]],
    ) -> None:
        self._folder = folder
        self._disk = disk
        self._head = head
        self._places = places
        self._piece_of = head.pieces.piece_of()

    @property
    def table(self) -> ShardTable:
        return self._head.pieces.table

    async def shards_of(self, specs: Sequence[ShardSpec]) -> AsyncGenerator[Sequence[Shard], None]:
        """Yield some shards, those of one piece at a time. Raises CheckpointError: a file has changed."""
        wanted, folder = {spec.id for spec in specs}, self._folder
        for name in dict.fromkeys([self._piece_of[spec.id] for spec in specs]):
            file, place = self._places[name]
            try:
                found = await read_state(self._disk, folder, self._head.files, file, place)
                shards = _shards_of(folder / file, self._head, found)
            except DamagedFile as error:
                raise CheckpointError(str(error)) from None
            yield [shard for shard in shards if shard.spec.id in wanted]


async def read_checkpoint(folder: Path, disk: Disk) -> StoredCheckpoint:
    """Read and check each byte of a checkpoint.

    Raises:
        CheckpointError: A file is missing, damaged or unreadable.
        ShortMemory: A file of the checkpoint does not fit into the available memory.
    """
    states: dict[int, ShardState] = {}
    places: dict[StateName, tuple[str, FoundState]] = {}
    try:
        head = await checkpoint_head(folder, disk)
        await check_sizes(disk, folder, head.files)
        for file in head.files.files:
            for piece, shards in await read_shards(folder, disk, head, file):
                states.update((int(shard.spec.id), state_of(shard)) for shard in shards)
                places[piece.key.name] = file, replace(piece, content=memoryview(b""))
    except DamagedFile as error:
        raise CheckpointError(str(error)) from None
    if lacking := len(head.pieces.table.shards) - len(states):
        raise CheckpointError(f"{folder} is damaged: it lacks {lacking} shards of its run")
    ordered = tuple(states[int(spec.id)] for spec in head.pieces.table.shards)
    return StoredCheckpoint(
        manifest=head.manifest.at_clock_of(ordered),
        record=head.record,
        pieces=head.pieces,
        states=ordered,
        source=FolderShards(folder, disk, head, places),
    )


async def in_memory(stored: StoredCheckpoint) -> Checkpoint:
    """Return a checkpoint with all its values and its rules' state.

    Raises:
        CheckpointError: A file has changed.
        ShortMemory: The available memory does not suffice.
    """
    need = stored.pieces.nbytes
    if need > (free := available_bytes()):
        raise ShortMemory(Path(stored.manifest.name), need, free)
    tensors = stored.pieces.new_tensors()
    async with aclosing(stored.source.shards_of(tensors.table.shards)) as parts:
        async for shards in parts:
            for shard in shards:
                tensors.take(shard)
    known = {field.name: getattr(stored, field.name) for field in fields(stored)}
    return Checkpoint(**known, tensors=tensors)


async def read_shards(
    folder: Path, disk: Disk, head: CheckpointHead, file: str
) -> Iterator[tuple[FoundState, list[Shard]]]:
    """Read one file; return its pieces, each with its shards.

    Raises:
        DamagedFile: The file is missing or damaged. The iterator raises the error for a piece that cannot be
            read.
        ShortMemory: The file is larger than the available memory.
    """
    states = await read_states(disk, folder, head.files, file)
    return ((state, _shards_of(folder / file, head, state)) for state in states)


def _shards_of(path: Path, head: CheckpointHead, state: FoundState) -> list[Shard]:
    origin = f"piece {state.key.shard} of {state.key.home}"
    return _readable(path, partial(head.pieces.shards, state.key.name, state.parts, origin))
