"""The notes of a run whose servers keep their shards on disks: the points from which the run can go on.

The shards are on the disks of the servers, and the notes in a file of the driver. A note is a manifest
without tensors: the options and the model of the run, and its trained groups at one moment. The driver writes
the first note of a run before its shards are on the disks. Until the shards are there, the file also keeps a
note of the run that the new run continues. The driver writes a later note once all updates of its moment are
on the disks, so a run that goes on from this note has the updates of all its groups, and trains only later
groups again.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec

from adam_async.checkpoint.files import CheckpointFolder
from adam_async.checkpoint.manifest import (
    MOST_RUNS,
    Checkpoint,
    CheckpointError,
    Manifest,
    ProgressNote,
    trained_again,
)
from adam_async.persistence.keys import WallTime
from adam_async.runtime.disk import Disk

FORMAT = "adam-async/run/1"
"""Name and version of the format."""

NAME = "run.json"
"""Name of the file."""


class RunNote(msgspec.Struct, frozen=True, kw_only=True):
    """A point from which a run can go on."""

    manifest: Manifest
    at: WallTime
    """Time of this point, in seconds since 1970."""
    is_on_disk: bool
    """Whether all updates of this point were on the disks of the servers when the note was written."""
    runs: Annotated[tuple[str, ...], msgspec.Meta(max_length=MOST_RUNS)] = ()
    """Ids of the run and of the runs that it continues, the newest first."""


class _Format(msgspec.Struct):
    format: str


class RunNotes(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file."""

    format: str = FORMAT
    notes: tuple[RunNote, ...]
    """Points from which the run can go on, the newest first."""
    seen: ProgressNote
    """Progress of training at the last poll."""
    seen_at: WallTime
    """Time of the last poll, in seconds since 1970."""
    checksum: str = ""
    """SHA-256 of the notes with an empty checksum, as compact JSON."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedRun:
    """A run that can go on from the disks of its servers.

    Attributes:
        notes: Notes of the run.
        problems: Always empty; in `Checkpoint` this attribute has the damage of newer checkpoints.
    """

    notes: RunNotes
    problems: tuple[str, ...] = ()

    @property
    def manifest(self) -> Manifest:
        """The options and the model of the run."""
        return self.notes.notes[0].manifest

    @property
    def trained_again(self) -> int:
        """Number of groups trained again because of resumes, if the run goes on from the newest note."""
        return self.trained_again_from(self.notes.notes[0])

    def trained_again_from(self, note: RunNote) -> int:
        """Return the number of groups trained again because of resumes, if the run goes on from a note."""
        return trained_again(note.manifest, self.notes.seen)

    def __repr__(self) -> str:
        return f"<SavedRun {self.manifest.run} {len(self.notes.notes)} notes>"


class RunNotesFile:
    """The file of one driver.

    Args:
        folder: Folder of the file; it is made if absent.
    """

    def __init__(self, folder: Path, disk: Disk) -> None:
        self.folder = folder
        self._disk = disk
        self.found: RunNotes | None = None
        """The notes at the opening, or the last ones written."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator["RunNotesFile"]:
        """Lock and read the file, for as long as the block lasts.

        Raises:
            CheckpointError: Another driver has the folder, or the file cannot be read.
        """
        async with AsyncExitStack() as stack:
            try:
                await self._disk.make_folder(self.folder)
                await stack.enter_async_context(self._disk.hold(self.folder / "driver.lock"))
                self.found = await read_run_notes(self.folder, self._disk)
            except BlockingIOError:
                raise CheckpointError(
                    f"{self.folder} is that of a run that is in progress: end it, or give another folder"
                ) from None
            except OSError as error:
                raise CheckpointError(f"{self.folder} cannot be used: {error.strerror or error}") from None
            yield self

    async def write(self, notes: Sequence[RunNote], seen: ProgressNote, seen_at: float) -> None:
        """Replace the notes; durable on return.

        Raises:
            OSError: The notes could not be written; the earlier ones are unchanged.
        """
        content = RunNotes(notes=tuple(notes), seen=seen, seen_at=seen_at)
        sealed = msgspec.structs.replace(content, checksum=_checksum(content))
        await self._disk.write_atomic(self.folder / NAME, [msgspec.json.encode(sealed)])
        self.found = content


async def read_run_notes(folder: Path, disk: Disk) -> RunNotes | None:
    """Read the notes of a folder; None if it has none.

    Raises:
        CheckpointError: The file is damaged, cannot be read, or has another version.
    """
    path = folder / NAME
    try:
        text = await disk.read_bytes(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    remedy = "move it away to begin a new run, without the shards on the disks"
    try:
        # Another version may have other fields, which are no damage.
        if (form := msgspec.json.decode(text, type=_Format).format) != FORMAT:
            raise CheckpointError(
                f"{path} has the format {form!r}; this version reads {FORMAT!r}: finish the run with the "
                f"version that wrote it, or {remedy}"
            )
        found = msgspec.json.decode(text, type=RunNotes)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; {remedy}") from None
    if found.checksum != _checksum(found) or not found.notes:
        raise CheckpointError(f"{path} is damaged: its checksum is wrong; {remedy}")
    return found


async def open_run_notes(
    stack: AsyncExitStack, folder: Path | None, resume: Checkpoint | None
) -> tuple[RunNotesFile | None, SavedRun | None]:
    """Open the file of a driver's notes until a stack ends; returns it, and the run that goes on from it.

    Args:
        folder: Folder of the file; None: there are no notes.
        resume: Checkpoint that the run continues, if any.

    Raises:
        CheckpointError: See `RunNotesFile.opened`; or the file and the checkpoint both name a run.
    """
    if folder is None:
        return None, None
    disk = await stack.enter_async_context(Disk(name="run-notes"))
    file = await stack.enter_async_context(RunNotesFile(folder, disk).opened())
    if file.found is None:
        return file, None
    if resume is not None:
        raise CheckpointError(
            f"{folder} has a run of its own, and --resume names another one: leave --resume out to continue "
            "that run, or give another folder for the shards"
        )
    return file, SavedRun(notes=file.found)


async def take_up(folder: CheckpointFolder, resumed: Checkpoint | SavedRun | None) -> None:
    """Prepare a folder of checkpoints for a run; see `CheckpointFolder.take_up`.

    A run that goes on from the disks of its servers continues the checkpoints that it has taken before.
    """
    if isinstance(resumed, SavedRun):
        await folder.take_up(resumed.manifest, runs=resumed.notes.notes[0].runs)
    else:
        await folder.take_up(resumed.manifest if resumed is not None else None)


def _checksum(notes: RunNotes) -> str:
    return sha256(msgspec.json.encode(msgspec.structs.replace(notes, checksum=""))).hexdigest()
