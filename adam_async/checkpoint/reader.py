"""Reads one checkpoint: its head, from which a reader chooses a checkpoint, or all of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from adam_async.checkpoint.checkpoint import Checkpoint, StoredPieces, put_shards
from adam_async.checkpoint.manifest import CheckpointError, Manifest, saved_manifest
from adam_async.checkpoint.names import age_order
from adam_async.errors import ConfigError, DataError, RunFailed
from adam_async.parameter_server.piece_states import CATALOGUE, CONTENTS, RUN, read_catalogue, read_run
from adam_async.parameter_server.shard import Shard
from adam_async.persistence.written_once import (
    DamagedFile,
    FoundState,
    Head,
    check_memory,
    check_sizes,
    read_head,
    read_states,
)
from adam_async.run.run_record import RunRecord
from adam_async.runtime.disk import Disk

OLD_MANIFEST = "manifest.json"
"""Name of a file of checkpoints of format 2 and older ones, which had files of whole tensors."""

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
        DamagedFile: It is missing or damaged, or is that of a checkpoint with another name or format.
        ShortMemory: It is larger than the available memory.
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


async def read_checkpoint(folder: Path, disk: Disk) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        CheckpointError: A file is missing, damaged or unreadable.
        ShortMemory: The available memory does not suffice.
    """
    try:
        head = await checkpoint_head(folder, disk)
        await check_sizes(disk, folder, head.files)
        check_memory(folder, head.files)
        tensors = head.pieces.new_tensors()
        states = {}
        for file in head.files.files:
            for _, shards in await read_shards(folder, disk, head, file):
                states.update(put_shards(tensors, shards))
    except DamagedFile as error:
        raise CheckpointError(str(error)) from None
    if lacking := len(tensors.table.shards) - len(states):
        raise CheckpointError(f"{folder} is damaged: it lacks {lacking} shards of its run")
    ordered = tuple(states[int(spec.id)] for spec in tensors.table.shards)
    return Checkpoint(
        manifest=head.manifest.at_clock_of(ordered),
        catalogue=head.pieces.catalogue,
        record=head.record,
        tensors=tensors,
        states=ordered,
    )


async def read_shards(
    folder: Path, disk: Disk, head: CheckpointHead, file: str
) -> Iterator[tuple[int, list[Shard]]]:
    """Read one file; return its pieces, each with its position in the file and its shards.

    Raises:
        DamagedFile: The file is missing or damaged. The iterator raises it for a piece that cannot be read.
        ShortMemory: The file is larger than the available memory.
    """
    states = await read_states(disk, folder, head.files, file)

    def shards(state: FoundState) -> list[Shard]:
        origin = f"piece {state.key.shard} of {state.key.home}"
        read = partial(head.pieces.shards, state.key.name, state.parts, origin)
        return _readable(folder / file, read)

    return ((state.position, shards(state)) for state in states)
