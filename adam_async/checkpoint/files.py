"""Checkpoints on the disk: written under a temporary name and renamed, checked when they are read.

A checkpoint is written into a hidden folder, every file is synced, and the folder gets its name; only then
``latest`` names it, a file that is itself replaced by a rename. `latest` therefore always names a whole
checkpoint. A crash leaves a hidden folder, which the next start removes, or a whole checkpoint that `latest`
does not name yet. The newest two checkpoints are kept; if the newest is damaged, the older one is read.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors

from adam_async.checkpoint.manifest import (
    INDEX_FILE,
    LATEST_FILE,
    MANIFEST_FILE,
    MODEL,
    PROGRESS_FILE,
    STATE,
    Checkpoint,
    CheckpointError,
    FileRecord,
    Manifest,
    ProgressNote,
    age_order,
    index_file,
    is_folder_name,
    manifest_file,
    read_manifest,
    split,
    tensor_file,
    trained_again,
)
from adam_async.runtime.disk import Disk, Part

_T = TypeVar("_T")

ASIDE = ".aside"
"""Suffix of the names of unfinished files and folders, as in `Disk.write_atomic`."""


class CheckpointFolder:
    """The folder of a run's checkpoints, for its one writer."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path = path
        self._disk = disk
        self.latest = ""
        """Name of the newest checkpoint; empty without one."""

    async def take_up(self, resumed: Manifest | None, *, runs: Collection[str] = ()) -> None:
        """Prepare the folder for a run: it may have only the checkpoints that the run continues.

        Args:
            resumed: Manifest of the resumed checkpoint, from this folder or another.
            runs: Ids of the runs whose checkpoints the run may continue although it goes on from elsewhere.

        Raises:
            CheckpointError: The folder has checkpoints of another run, or cannot be written to.
        """
        self.latest = ""
        try:
            await self._disk.make_folder(self.path)
            names = await self._disk.names(self.path)
            for name in filter(_is_stray, names):
                await self._remove(name)
            if any(map(is_folder_name, names)):
                self.latest = await self._continued(resumed, runs)
                await self._disk.write_atomic(self.path / LATEST_FILE, [self.latest.encode()])
        except OSError as error:
            raise self._unwritable(error) from None

    async def take_over(self, belongs: Callable[[Manifest], bool]) -> Manifest | None:
        """Prepare the folder for a driver that takes a run over.

        Args:
            belongs: Whether a checkpoint is of the run, or the one that the run continues.

        Returns:
            Manifest of the newest checkpoint; None if the folder has none.

        Raises:
            CheckpointError: The folder has checkpoints of another run, or cannot be written to.
        """
        try:
            await self._disk.make_folder(self.path)
            names = await self._disk.names(self.path)
        except OSError as error:
            raise self._unwritable(error) from None
        newest = await newest_manifest(self.path, self._disk) if any(map(is_folder_name, names)) else None
        if newest is not None and not belongs(newest):
            raise CheckpointError(
                f"{self.path} has checkpoints of run {newest.run}, not of this one: give another folder"
            )
        await self.take_up(newest)
        return newest

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"checkpoints cannot be written to {self.path}: {error.strerror or error}")

    async def _continued(self, resumed: Manifest | None, runs: Collection[str]) -> str:
        """Return the name of the resumed checkpoint in this folder."""
        if runs:
            newest = await newest_manifest(self.path, self._disk)
            if newest.run in runs:
                return newest.name
        if resumed is not None:
            manifest = self.path / resumed.name / MANIFEST_FILE
            try:
                there = read_manifest(await self._disk.read_bytes(manifest), str(manifest))
            except (OSError, CheckpointError):
                there = None
            if there == resumed:
                return resumed.name
        raise CheckpointError(
            f"{self.path} has checkpoints of another run: continue that one with --resume {self.path}, "
            "or give another folder"
        )

    async def write(self, checkpoint: Checkpoint) -> int:
        """Write a checkpoint, durable on return, and remove all but the one before it.

        Args:
            checkpoint: The checkpoint, whose manifest gets files and checksum here.

        Returns:
            Size of the file in bytes.

        Raises:
            OSError: The checkpoint could not be written; the earlier checkpoints are unchanged.
        """
        name = checkpoint.manifest.name
        aside = self.path / f".{name}{ASIDE}"
        try:
            await self._disk.remove_folder(aside)
            await self._disk.make_folder(aside)
            size = await self._write_files(checkpoint, aside)
            await self._disk.sync_folder(aside)
            if name in await self._disk.names(self.path):
                await self._put_away(name)  # never the latest: see `Checkpointer`
            await self._disk.rename(aside, self.path / name)
            await self._disk.write_atomic(self.path / LATEST_FILE, [name.encode()])
        except OSError:
            await self._disk.remove_folder(aside)
            raise
        before, self.latest = self.latest, name
        with suppress(OSError):  # the checkpoint is written; the next write tries the removal again
            for old in await self._disk.names(self.path):
                if is_folder_name(old) and old not in (name, before):
                    await self._put_away(old)
        return size

    async def _write_files(self, checkpoint: Checkpoint, aside: Path) -> int:
        records: list[FileRecord] = []
        for stem, arrays in ((MODEL, checkpoint.weights), (STATE, checkpoint.state)):
            files = split(stem, arrays)
            for file, names in files.items():
                parts = list(tensor_file({name: arrays[name] for name in names}))
                records.append(await self._write_file(aside / file, parts))
            if stem == MODEL:
                records.append(await self._write_file(aside / INDEX_FILE, [index_file(files, arrays)]))
        manifest = msgspec.structs.replace(checkpoint.manifest, files=tuple(records))
        written = await self._disk.write_down(aside / MANIFEST_FILE, [manifest_file(manifest)])
        return written + sum(record.bytes for record in records)

    async def _write_file(self, path: Path, parts: Sequence[Part]) -> FileRecord:
        size = await self._disk.write_down(path, parts)
        return FileRecord(name=path.name, bytes=size, sha256=await self._disk.run(_digest, parts))

    async def _put_away(self, name: str) -> None:
        """Remove a checkpoint; the first step, a rename, hides it from readers."""
        gone = self.path / f".{name}.gone{ASIDE}"
        await self._disk.remove_folder(gone)
        await self._disk.rename(self.path / name, gone)
        await self._disk.remove_folder(gone)

    async def _remove(self, name: str) -> None:
        path = self.path / name
        if is_folder_name(name.removeprefix(".").removesuffix(ASIDE).removesuffix(".gone")):
            await self._disk.remove_folder(path)
        else:
            await self._disk.run(path.unlink)

    async def note_progress(self, note: ProgressNote) -> None:
        """Write the progress of training after the newest checkpoint.

        Raises:
            OSError: The note could not be written.
        """
        await self._disk.write_atomic(self.path / PROGRESS_FILE, [msgspec.json.encode(note)])


async def open_checkpoints(
    stack: AsyncExitStack, checkpoint: Path | None, resume: Path | None
) -> tuple[CheckpointFolder | None, Checkpoint | None]:
    """Open the folder into which a cluster writes checkpoints, and read the checkpoint that it continues.

    Args:
        checkpoint: The folder; None: that of `resume`.

    Raises:
        CheckpointError: The folder has no checkpoint, or a damaged one.
    """
    path = checkpoint or resume
    if path is None:
        return None, None
    disk = await stack.enter_async_context(Disk(name="checkpoints"))
    found = await load_checkpoint(resume, disk) if resume is not None else None
    return CheckpointFolder(path, disk), found


async def load_checkpoint(folder: Path, disk: Disk) -> Checkpoint:
    """Read the newest whole checkpoint of a folder, with its tensors.

    Raises:
        CheckpointError: The folder has no whole checkpoint; the error names the damage of each.
    """
    (manifest, weights, state), problems = await _newest(folder, disk, _read_one)
    return Checkpoint(
        manifest=manifest,
        weights=weights,
        state=state,
        problems=tuple(problems),
        trained_again=trained_again(manifest, await _read_progress(folder, disk)),
    )


async def has_checkpoints(folder: Path, disk: Disk) -> bool:
    """Return whether a folder exists and has a checkpoint, whole or damaged."""
    try:
        return any(map(is_folder_name, await disk.names(folder)))
    except FileNotFoundError:
        return False


async def newest_manifest(folder: Path, disk: Disk) -> Manifest:
    """Read the manifest of the newest checkpoint of a folder, without tensors.

    Raises:
        CheckpointError: The folder has no readable manifest; the error names the damage of each.
    """
    return (await _newest(folder, disk, _read_manifest))[0]


async def _newest(
    folder: Path, disk: Disk, read: Callable[[Path, Disk], Awaitable[_T]]
) -> tuple[_T, list[str]]:
    """Read the newest checkpoint that `read` accepts; return it, and the damage of newer ones."""
    candidates, problems = await _candidates(folder, disk)
    for name in candidates:
        try:
            return await read(folder / name, disk), problems
        except CheckpointError as error:
            problems.append(str(error))
    why = "; ".join(problems) or "train --checkpoint writes them"
    raise CheckpointError(f"no checkpoint in {folder} can be read: {why}")


async def _candidates(folder: Path, disk: Disk) -> tuple[list[str], list[str]]:
    """Return the checkpoints of a folder in reading order, and the problems of the folder itself."""
    try:
        names = await disk.names(folder)
    except OSError as error:
        raise CheckpointError(f"no checkpoint in {folder}: {error.strerror or error}") from None
    candidates = sorted(filter(is_folder_name, names), key=age_order, reverse=True)
    if LATEST_FILE not in names:
        return candidates, []
    latest = (await _read(folder / LATEST_FILE, disk)).decode(errors="replace").strip()
    if latest not in candidates:
        return candidates, [f"{folder / LATEST_FILE} names {latest[:40]!r}, which is not there"]
    candidates.remove(latest)
    return [latest, *candidates], []


async def _read_one(
    folder: Path, disk: Disk
) -> tuple[Manifest, dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Read a checkpoint; returns its manifest, and the tensors of the model and of the rules by name.

    Raises:
        CheckpointError: A file is missing, has another size or checksum, or cannot be read.
    """
    manifest = await _read_manifest(folder, disk)
    tensors: dict[str, dict[str, NDArray[Any]]] = {MODEL: {}, STATE: {}}
    for record in manifest.files:
        path = folder / record.name
        data = await _read(path, disk)
        if len(data) != record.bytes:
            raise CheckpointError(f"{path} is damaged: it has {len(data)} bytes of {record.bytes}")
        if await disk.run(_digest, [data]) != record.sha256:
            raise CheckpointError(f"{path} is damaged: its checksum is wrong")
        if record.name == INDEX_FILE:
            continue
        try:
            found = await disk.run(load_tensors, data)
        except (SafetensorError, ValueError, KeyError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
        tensors[record.name.partition("-")[0]].update(found)
    return manifest, tensors[MODEL], tensors[STATE]


async def _read_manifest(folder: Path, disk: Disk) -> Manifest:
    path = folder / MANIFEST_FILE
    manifest = read_manifest(await _read(path, disk), str(path))
    if manifest.name != folder.name:
        raise CheckpointError(f"{folder} holds {manifest.name}: it was renamed")
    return manifest


async def _read(path: Path, disk: Disk) -> bytes:
    try:
        return await disk.read_bytes(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None


async def _read_progress(folder: Path, disk: Disk) -> ProgressNote | None:
    try:
        return msgspec.json.decode(await disk.read_bytes(folder / PROGRESS_FILE), type=ProgressNote)
    except (OSError, msgspec.DecodeError):
        return None


def _digest(parts: Iterable[Part]) -> str:
    digest = sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _is_stray(name: str) -> bool:
    """Whether a name is that of an unfinished write or removal of an earlier process."""
    return name.endswith(ASIDE) and name.startswith((".checkpoint-", f"{LATEST_FILE}.", f"{PROGRESS_FILE}."))
