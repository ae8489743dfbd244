"""Checkpoints on the disk: written under a temporary name and renamed, checked when they are read.

The writer writes a checkpoint into a hidden folder, syncs every file, and gives the folder its name. The
writer then renames a new file over ``latest``, which names the newest checkpoint. So `latest` always names a
whole checkpoint. A crash leaves a hidden folder, which the next start removes, or a whole checkpoint that
`latest` does not name yet. The folder keeps a fixed number of the newest checkpoints. The writer removes an
older checkpoint only after `latest` names the new one, so the named checkpoint is there after any crash. If
the newest checkpoint is damaged, a reader takes the checkpoint before it. A run that continues an older
checkpoint removes the newer ones only after its own first checkpoint is durable.

**One run writes to a folder at a time.** The system releases the lock when the process of a run ends in any
way. A reader needs no lock.

**A run removes only its own checkpoints**: those that it wrote, and those of the runs that it continues. The
record of a run names these runs. Other checkpoints stay, even those with an unreadable head; if a new
checkpoint needs such a checkpoint's name, the writer renames the existing one. **A reader prefers the
training of `latest`**, because the folder may have checkpoints of other trainings. If the checkpoint that
`latest` names is damaged, the reader takes the previous one of the same training.
"""

import errno
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from adam_async.checkpoint.checkpoint import Checkpoint, CheckpointError, Manifest, StoredCheckpoint
from adam_async.checkpoint.names import age_order, is_folder_name
from adam_async.checkpoint.new_checkpoint import NewCheckpoint
from adam_async.checkpoint.reader import checkpoint_manifest, in_memory, read_checkpoint
from adam_async.errors import failing_as
from adam_async.parameter_server.piece_states import CONTENTS
from adam_async.parameter_server.store_disk import PREFIX
from adam_async.persistence.opening import LOCK
from adam_async.persistence.records import Identity
from adam_async.persistence.scan import segment_name
from adam_async.persistence.written_once import ShortMemory, write_once
from adam_async.runtime.disk import Disk

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

LATEST_FILE = "latest"
"""Name of the file with the name of the newest checkpoint."""

NOTE_BYTES = 4096
"""Maximum size of this file, in bytes."""

ASIDE = ".aside"
"""Suffix of the names of unfinished files and folders, as in `Disk.write_atomic`."""

NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""Error numbers of a file system without locks."""

KEPT = 2
"""Default number of checkpoints that a folder keeps: if the newest is damaged, another one is left."""


class CheckpointFolder:
    """The folder of a run's checkpoints, for its only writer."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path = path
        self._disk = disk
        self.latest = ""
        """Name of the newest checkpoint; empty without one."""
        self._left: set[str] = set()
        """Names of the checkpoints in the folder that are newer than the one that the run continues."""
        self._known: set[str] = set()
        """Names of the checkpoints that the run may remove: its own, and those of the runs that it
        continues."""
        self._unsure: set[str] = set()
        """Names of checkpoints from before the run whose heads could not be read yet."""
        self._runs: set[str] = set()
        """Ids of the run and of the runs that it continues."""
        self.renamed = ""
        """New name of another run's checkpoint that the last write renamed; empty if it renamed none."""

    async def take_up(self, resumed: Manifest | None, *, runs: Collection[str] = ()) -> Manifest | None:
        """Prepare the folder for a run. If the folder has checkpoints, the run must continue such a
        checkpoint.

        Args:
            resumed: Manifest of the resumed checkpoint, from this folder or another.
            runs: Ids of the runs whose checkpoints the run may continue although it does not resume one of
                them.

        Returns:
            Manifest of the checkpoint in the folder that the run continues; None if the folder is empty.

        Raises:
            CheckpointError: The folder has checkpoints, but none that the run continues; or it is not
                writable.
        """
        self.latest, self._left, self._known, self._unsure, self._runs = "", set(), set(), set(), set()
        continued = None
        with failing_as(CheckpointError, f"checkpoints cannot be written to {self.path}"):
            await self._disk.make_folder(self.path)
            names = await self._disk.names(self.path)
            if any(map(is_folder_name, names)):
                continued = await self._continued(resumed, runs)
            # Not before: a run that continues another checkpoint may write into the folder.
            for name in filter(_is_stray, names):
                await self._remove(name)
            if continued is not None:
                self.latest = continued.name
                self._runs = {*continued.training, *runs}
                self._unsure = set(filter(is_folder_name, names))
                self._left = set(_newer(names, self.latest))
                await self._sort_out()
                await self._disk.write_atomic(self.path / LATEST_FILE, [self.latest.encode()])
        return continued

    async def _continued(self, resumed: Manifest | None, runs: Collection[str]) -> Manifest:
        """Return the manifest of the checkpoint in this folder that the run continues."""
        if runs:
            newest = await newest_manifest(self.path, self._disk)
            if newest.run in runs:
                return newest
        if resumed is not None:
            try:
                there = await checkpoint_manifest(self.path / resumed.name, self._disk)
            except CheckpointError:
                there = None
            if there is not None and there == resumed.at_clock_of(()):
                return resumed
        raise CheckpointError(
            f"{self.path} has checkpoints of another run: continue that one with --resume {self.path}, "
            "or give another folder"
        )

    async def write(self, checkpoint: NewCheckpoint, *, keep: int = KEPT) -> int:
        """Write a checkpoint as it arrives, durable on return, and then remove the oldest ones.

        Args:
            checkpoint: The checkpoint.
            keep: Number of the run's checkpoints that stay, including this one; at least 1.

        Returns:
            Size of the checkpoint's files in bytes; 0 if it was dropped.

        Raises:
            OSError: The checkpoint could not be written; the newest earlier one is unchanged.
        """
        self.renamed = ""
        aside = self.path / f".checkpoint-new{ASIDE}"
        try:
            await self._disk.make_folder(self.path)
            with suppress(OSError):  # the next write tries again
                await self._remove_leftovers()
            await self._disk.remove_folder(aside)
            await self._disk.make_folder(aside)
            identity = Identity(run=checkpoint.catalogue.record.id, contents=CONTENTS)
            async with aclosing(checkpoint.pieces()) as pieces:
                size = await write_once(self._disk, aside, identity, pieces, checkpoint.head)
            if (manifest := checkpoint.manifest) is None:
                await self._disk.remove_folder(aside)
                return 0
            name = manifest.name
            await self._disk.sync_folder(aside)
            if name in await self._disk.names(self.path):
                await self._make_room(name)  # never the latest: see `Checkpointer`
            self._known.add(name)  # a later write removes it, even if the present one fails
            await self._disk.rename(aside, self.path / name)
            await self._disk.write_atomic(self.path / LATEST_FILE, [name.encode()])
        except OSError:
            await self._disk.remove_folder(aside)
            raise
        self.latest = name
        self._unsure.discard(name)
        self._left.discard(name)
        self._runs.add(manifest.run)
        with suppress(OSError):  # the checkpoint is written; the next write tries the removal again
            await self._remove_old(keep)
        return size

    async def _remove_leftovers(self) -> None:
        """Remove the files of unfinished writes and removals of checkpoints."""
        for name in await self._disk.names(self.path):
            if name.startswith(".checkpoint-") and _is_stray(name):
                await self._remove(name)

    async def _remove_old(self, keep: int) -> None:
        """Remove the run's checkpoints that are newer than the one it continues, and then its oldest ones."""
        await self._sort_out()
        # A run writes only folders under such names, so links and files are not its own.
        names = self._known.intersection(await self._disk.folders(self.path))
        # A run that goes on from the disks of its servers may be behind its last checkpoint.
        left = self._left.union(_newer(names, self.latest))
        there = sorted(names, key=age_order)
        own = [name for name in there if name not in left]
        over = [*filter(left.__contains__, there), *own[: max(len(own) - keep, 0)]]
        for name in over:
            await self._put_away(name)
        self._left.intersection_update(self._unsure)

    async def _sort_out(self) -> None:
        """Read the run ids of checkpoints whose heads could not be read before."""
        # A head may be unreadable for a moment only: memory was short, or the disk was busy.
        there = self._unsure.intersection(await self._disk.names(self.path))
        runs = await _runs_by_name(self.path, sorted(there, key=age_order), self._disk)
        self._known.update(name for name, each in runs.items() if not self._runs.isdisjoint(each))
        self._unsure = there.difference(runs)

    async def _make_room(self, name: str) -> None:
        """Free a checkpoint's name: remove a checkpoint of this run, rename one of another run."""
        await self._sort_out()
        if name in self._known:
            await self._put_away(name)
            return
        names = await self._disk.names(self.path)
        free = (f"{name}.kept{number or ''}" for number in range(len(names) + 1))
        kept = next(each for each in free if each not in names)
        await self._disk.rename(self.path / name, self.path / kept)
        self.renamed = kept

    async def _put_away(self, name: str) -> None:
        """Remove a checkpoint; the first step, a rename, hides it from readers."""
        gone = self.path / f".{name}.gone{ASIDE}"
        await self._disk.remove_folder(gone)
        await self._disk.rename(self.path / name, gone)
        await self._disk.remove_folder(gone)

    async def _remove(self, name: str) -> None:
        path = self.path / name
        if name in await self._disk.folders(self.path):
            await self._disk.remove_folder(path)
        else:
            await self._disk.run(path.unlink)


def named_checkpoint(path: Path) -> tuple[Path, str]:
    """Return folder and name of a checkpoint; an empty name if the path is a folder of checkpoints."""
    return (path.parent, path.name) if is_folder_name(path.name) else (path, "")


def written_folder(checkpoint: Path | None, resume: Path | None) -> Path | None:
    """Return the folder for a run's checkpoints according to its options; None without checkpoints."""
    return checkpoint or (named_checkpoint(resume)[0] if resume is not None else None)


def check_resumes_newest(resume: Path | None, what: str) -> None:
    """Refuse `--resume` with a single checkpoint for a command that must resume the newest one at each start.

    Args:
        what: The command or option.

    Raises:
        CheckpointError: `resume` names one checkpoint.
    """
    if resume is not None and is_folder_name(resume.name):
        raise CheckpointError(
            f"{what} continues from the newest checkpoint at each start, and --resume {resume} names one: "
            "copy it into a folder of its own, and give that folder to --resume"
        )


async def open_checkpoints(
    stack: AsyncExitStack, checkpoint: Path | None, resume: Path | None
) -> tuple[CheckpointFolder | None, StoredCheckpoint | None]:
    """Open the folder into which a cluster writes checkpoints, and read the one that it continues.

    Args:
        checkpoint: The folder; None: the folder of `resume`.
        resume: The folder, or one checkpoint in it.

    The folder is locked until the stack ends.

    Raises:
        CheckpointError: The folder has no whole checkpoint, `resume` is a damaged checkpoint, the folder has
            a checkpoint's name, or another run writes to it.
    """
    path = written_folder(checkpoint, resume)
    if path is None:
        return None, None
    if is_folder_name(path.name):
        raise CheckpointError(f"--checkpoint {path} has the name of one checkpoint: choose another name")
    disk = await stack.enter_async_context(Disk(name="checkpoints"))
    found = await open_checkpoint(resume, disk, path) if resume is not None else None
    await _lock(stack, path, disk)  # after the choice, so that a wrong name makes no folder
    return CheckpointFolder(path, disk), found


async def _lock(stack: AsyncExitStack, path: Path, disk: Disk) -> None:
    """Lock a folder: a second run would remove the unfinished checkpoint and the old ones of the first."""
    try:
        await disk.make_folder(path)
        await stack.enter_async_context(disk.hold(path / LOCK))
    except BlockingIOError:
        raise CheckpointError(
            f"another run writes checkpoints to {path}: end that run, or give each run a folder of its own "
            "with --checkpoint"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise CheckpointError(
                f"checkpoints cannot be written to {path}: {error.strerror or error}"
            ) from None
        # Some parallel file systems are mounted without locks, and their users need checkpoints, too.
        logger.warning("%s cannot be locked: let no other run write checkpoints there", path)


async def load_checkpoint(folder: Path, disk: Disk) -> Checkpoint:
    """Read the newest whole checkpoint of a folder, or one checkpoint in it, into memory.

    Raises:
        CheckpointError, ShortMemory: See `open_checkpoint`.
    """
    return await in_memory(await open_checkpoint(folder, disk))


async def open_checkpoint(folder: Path, disk: Disk, written: Path | None = None) -> StoredCheckpoint:
    """Choose the newest whole checkpoint of a folder, and check its every byte.

    Args:
        folder: A folder of checkpoints, or one checkpoint in it; the function then reads only this one.
        written: Folder into which a run that continues writes; a remark names the checkpoints that the run
            removes there.

    Raises:
        CheckpointError: The folder has no whole checkpoint; the error names the damage of each.
        ShortMemory: A file of the newest checkpoint does not fit into the available memory; no older one
            replaces it.
    """
    found, problems, remarks = await _newest(folder, disk, read_checkpoint)
    above, _ = named_checkpoint(folder)
    newer = _newer(await _names(above, disk), found.manifest.name)
    training, runs = {*found.manifest.training}, await _runs_by_name(above, newer, disk)
    own = [each for each in newer if not training.isdisjoint(runs.get(each, ()))]
    if own and written is not None and _is_same(written, above):
        there = ", ".join(own)
        remarks.append(f"newer checkpoints in {above} ({there}) are removed after the run's first checkpoint")
    if others := [each for each in newer if each not in own]:
        there = ", ".join(others)
        remarks.append(f"newer checkpoints in {above} ({there}) are of another run or damaged, and stay")
    return replace(found, problems=tuple(problems), remarks=tuple(remarks))


async def has_checkpoints(folder: Path, disk: Disk) -> bool:
    """Return whether a folder exists and has a checkpoint, whole or damaged.

    Raises:
        CheckpointError: The folder cannot be read.
    """
    with failing_as(CheckpointError, f"{folder} cannot be read"), suppress(FileNotFoundError):
        return any(map(is_folder_name, await disk.names(folder)))
    return False


async def newest_manifest(folder: Path, disk: Disk) -> Manifest:
    """Read the manifest of a folder's newest checkpoint, without tensors.

    Args:
        folder: As for `open_checkpoint`.

    Raises:
        CheckpointError: The folder has no readable head; the error names the damage of each.
    """
    return (await _newest(folder, disk, checkpoint_manifest))[0]


async def _newest(
    folder: Path, disk: Disk, read: Callable[[Path, Disk], Awaitable[_T]]
) -> tuple[_T, list[str], list[str]]:
    """Read the newest checkpoint that `read` accepts; return it, the damage of newer ones, and remarks."""
    above, name = named_checkpoint(folder)
    if name:
        try:
            return await read(folder, disk), [], []
        except CheckpointError as error:
            raise CheckpointError(f"{error}; --resume {above} continues from the newest whole one") from None
    names = list(filter(is_folder_name, await _names(folder, disk)))
    latest, problems = await _latest_of(folder, disk)
    if latest in names:
        try:
            return await read(folder / latest, disk), problems, []
        except CheckpointError as error:
            problems.append(str(error))
    for name, remark in await _others(folder, names, latest, disk):
        try:
            return await read(folder / name, disk), problems, [remark] if remark else []
        except CheckpointError as error:
            problems.append(str(error))
    if not problems:
        raise CheckpointError(await without_checkpoints(folder, disk))
    raise CheckpointError(f"no checkpoint in {folder} can be read: {'; '.join(problems)}")


async def without_checkpoints(folder: Path, disk: Disk) -> str:
    """Return the error of a folder without checkpoints, which may have the shards of a store."""
    names = [*await disk.names(folder)]
    if any(map(segment_name, names)) and not _is_of_store(folder):
        return (
            f"{folder} has the files of one checkpoint, and not its name: move it to a folder of its own, as "
            "checkpoint-EEEE-NNNNNN (docs/how-to/checkpoints.md)"
        )
    for each in await disk.folders(folder):
        names += await disk.folders(folder / each)
    if any(name.startswith(PREFIX) or segment_name(name) is not None for name in names):
        return (
            f"{folder} has the shards of a store, not checkpoints: the same train --store command goes on "
            "from them, and adam-async store save writes the values of a store that runs "
            "(docs/how-to/keep-a-store-on-disk.md)"
        )
    return f"no checkpoint in {folder} can be read: train --checkpoint writes them"


async def candidates_in(folder: Path, disk: Disk, *, most: int | None = None) -> tuple[list[str], list[str]]:
    """Return a folder's checkpoints in reading order, and problems with the folder itself.

    Args:
        most: Maximum number of checkpoints in addition to the latest; None: all. The head of each is read.

    Raises:
        CheckpointError: The folder cannot be read.
    """
    names = sorted(filter(is_folder_name, await _names(folder, disk)), key=age_order)
    latest, problems = await _latest_of(folder, disk)
    if most is not None and len(names) > most:
        problems.append(f"{len(names) - most:,} older checkpoints in {folder} are not listed")
        names = [*filter(latest.__eq__, names[:-most]), *names[-most:]]
    others = [name for name, _ in await _others(folder, names, latest, disk)]
    return [latest, *others] if latest in names else others, problems


async def _latest_of(folder: Path, disk: Disk) -> tuple[str, list[str]]:
    """Return the name in `latest`, empty if it is not valid, and problems with that file."""
    names = await _names(folder, disk)
    if LATEST_FILE not in names:
        return "", []
    try:
        await disk.file_facts(folder / LATEST_FILE)  # refuses a link, which may name any file of this machine
        latest = (await disk.read_bytes(folder / LATEST_FILE, NOTE_BYTES)).decode(errors="replace").strip()
    except OSError as error:
        return "", [f"{folder / LATEST_FILE} cannot be read: {error.strerror or error}"]
    there = is_folder_name(latest) and latest in names
    problems = [] if there else [f"{folder / LATEST_FILE} names {latest[:40]!r}, which is not there"]
    return latest if is_folder_name(latest) else "", problems


async def _others(folder: Path, names: Iterable[str], latest: str, disk: Disk) -> list[tuple[str, str]]:
    """Return the checkpoints other than `latest` in reading order, each with a remark if needed.

    The order is: older checkpoints of `latest`'s training, other older checkpoints, newer checkpoints. Newer
    checkpoints come last, because the training goes on from `latest`, not from newer ones.
    """
    runs = await _runs_by_name(folder, names, disk)
    newer = set(_newer(names, latest)) if latest else set[str]()
    newest = max((name for name in runs if latest and name not in newer), key=age_order, default="")
    training = runs.get(latest, runs.get(newest, ()))

    def is_own(name: str) -> bool:
        return name in runs and runs[name][0] in training

    def order(name: str) -> tuple[bool, bool, tuple[int, ...]]:
        return name not in newer, is_own(name), age_order(name)

    def remark(name: str) -> str:
        if training and not is_own(name):
            return f"{folder / name} is of another run than the newest one, perhaps of another training"
        return f"{folder / name} is newer than {latest}, which `latest` names" if name in newer else ""

    others = sorted((name for name in names if name != latest), key=order, reverse=True)
    return [(name, remark(name)) for name in others]


async def _names(folder: Path, disk: Disk) -> list[str]:
    with failing_as(CheckpointError, f"no checkpoint in {folder}"):
        return await disk.names(folder)


def _newer(names: Iterable[str], name: str) -> list[str]:
    """Return the names of the checkpoints that are newer than the one called `name`, the oldest first."""
    newer = [each for each in names if is_folder_name(each) and age_order(each) > age_order(name)]
    return sorted(newer, key=age_order)


async def _runs_by_name(folder: Path, names: Iterable[str], disk: Disk) -> dict[str, tuple[str, ...]]:
    """Return each checkpoint's run and the runs that it continues; leave out unreadable checkpoints."""
    runs: dict[str, tuple[str, ...]] = {}
    for name in names:
        with suppress(CheckpointError, ShortMemory):
            runs[name] = (await checkpoint_manifest(folder / name, disk)).training
    return runs


def _is_same(folder: Path, other: Path) -> bool:
    return folder.resolve() == other.resolve()


def _is_of_store(folder: Path) -> bool:
    return folder.resolve().name.startswith(PREFIX)


def _is_stray(name: str) -> bool:
    """Return whether a name is that of an unfinished write or removal of an earlier process."""
    return name.endswith(ASIDE) and name.startswith((".checkpoint-", f"{LATEST_FILE}."))
