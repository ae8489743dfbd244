"""Reads the files of one checkpoint.

**The reader trusts no file**, because a folder may come from elsewhere. The reader opens regular files only,
under names that a checkpoint can have; it compares the size on the disk with the manifest before it reads,
and the sum of the sizes with the available memory.
"""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors

from adam_async.checkpoint.manifest import (
    INDEX_FILE,
    MANIFEST_BYTES,
    MANIFEST_FILE,
    MODEL,
    STATE,
    CheckpointError,
    FileRecord,
    Manifest,
    read_manifest,
)
from adam_async.runtime.disk import Disk, FileFacts, Part
from adam_async.runtime.machine import available_bytes

NOTE_BYTES = 4096
"""Maximum size of `latest`, in bytes."""

DECODED = 26
"""Maximum memory of a decoded manifest, as a multiple of the size of its text: empty objects need most."""


async def read_checkpoint(
    folder: Path, disk: Disk
) -> tuple[Manifest, dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Read a checkpoint; returns its manifest, and the tensors of the model and of the rules by name."""
    manifest = await checkpoint_manifest(folder, disk)
    tensors = await _read_tensors(folder, disk, manifest.files)
    return manifest, tensors[MODEL], tensors[STATE]


async def read_weights(folder: Path, disk: Disk) -> tuple[Manifest, dict[str, NDArray[Any]]]:
    """Read the parameters of a checkpoint, without the arrays of the rule."""
    manifest = await checkpoint_manifest(folder, disk)
    files = [record for record in manifest.files if not record.name.startswith(f"{STATE}-")]
    return manifest, (await _read_tensors(folder, disk, files))[MODEL]


async def _read_tensors(
    folder: Path, disk: Disk, files: Sequence[FileRecord]
) -> dict[str, dict[str, NDArray[Any]]]:
    """Read files of a checkpoint; returns their tensors by kind and name.

    Raises:
        CheckpointError: A file is missing, has another size or checksum, or cannot be read; or the available
            memory does not suffice.
    """
    for record in files:
        await check_size(folder / record.name, record, disk)
    # The bytes of one file are in memory beside all tensors.
    sizes = [record.bytes for record in files]
    _check_memory(folder, sum(sizes) + max(sizes, default=0))
    tensors: dict[str, dict[str, NDArray[Any]]] = {MODEL: {}, STATE: {}}
    for record in files:
        path = folder / record.name
        data = await read_small(path, disk, record.bytes)
        check_digest(path, await disk.run(digest_of, [data]), record)
        if record.name == INDEX_FILE:
            continue
        try:
            found = await disk.run(load_tensors, data)
        except (SafetensorError, ValueError, KeyError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
        tensors[record.name.partition("-")[0]].update(found)
    return tensors


def _check_memory(path: Path, need: int) -> None:
    """Check that so many bytes of memory are available. Raises CheckpointError: they are not."""
    if need > (free := available_bytes()):
        raise CheckpointError(
            f"{path} needs {need:,} bytes of memory, and {free:,} are available: end other programs, or "
            "take a machine with more"
        )


async def check_size(path: Path, record: FileRecord, disk: Disk) -> None:
    """Check a file without reading it.

    Raises:
        CheckpointError: The file is missing, is no regular file, or has another size than in the manifest.
    """
    size = (await file_facts(path, disk)).size
    if size != record.bytes:
        raise CheckpointError(f"{path} is damaged: it has {size} bytes of {record.bytes}")


def check_digest(path: Path, digest: str, record: FileRecord) -> None:
    """Check the SHA-256 of a whole file. Raises CheckpointError: the manifest has another one."""
    if digest != record.sha256:
        raise CheckpointError(f"{path} is damaged: its checksum is wrong")


async def checkpoint_manifest(folder: Path, disk: Disk) -> Manifest:
    """Read the manifest of one checkpoint.

    Raises:
        CheckpointError: The manifest is missing or damaged, or is that of a checkpoint with another name or
            format; or the available memory does not suffice.
    """
    path = folder / MANIFEST_FILE
    text = await read_small(path, disk, MANIFEST_BYTES)
    _check_memory(path, DECODED * len(text))
    manifest = await disk.run(read_manifest, text, str(path))
    if manifest.name != folder.name:
        raise CheckpointError(f"{folder} holds {manifest.name[:80]}: it was renamed")
    return manifest


async def file_facts(path: Path, disk: Disk) -> FileFacts:
    """Return size and time of a regular file of a checkpoint.

    Raises:
        CheckpointError: The file is missing, or is no regular file.
    """
    try:
        return await disk.file_facts(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None


async def read_small(path: Path, disk: Disk, most: int) -> bytes:
    """Read a regular file of at most `most` bytes. Raises CheckpointError: it is larger or unreadable."""
    size = (await file_facts(path, disk)).size
    if size > most:
        raise CheckpointError(f"{path} is damaged: it has {size} bytes of at most {most}")
    try:
        return await disk.read_part(path, 0, size)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None


def digest_of(parts: Iterable[Part]) -> str:
    """Return the SHA-256 of a file in parts, in hexadecimal digits."""
    digest = sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
