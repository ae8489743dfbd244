"""Summaries of checkpoints, from their manifests and the sizes of their files; no tensor is read."""

from pathlib import Path

import msgspec

from adam_async.checkpoint.files import candidates_in, named_checkpoint
from adam_async.checkpoint.manifest import MANIFEST_FILE, CheckpointError, Manifest
from adam_async.checkpoint.names import age_order
from adam_async.checkpoint.reader import check_size, checkpoint_manifest, file_facts
from adam_async.checkpoint.run_notes import NAME
from adam_async.persistence.scan import segment_name
from adam_async.runtime.clock import utc_time
from adam_async.runtime.disk import Disk

MOST_SHOWN = 80
"""Maximum length of a text of a manifest in a summary, in characters."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint."""

    name: str
    epoch: int
    """Epoch of the checkpoint, taken within the epoch or at its end."""
    groups: int
    """Number of trained groups of `epoch`."""
    whole: bool
    """Whether the manifest is undamaged and every file has the size in the manifest. `verify_checkpoint` also
    reads the files."""
    latest: bool = False
    """Whether a resumed run reads this checkpoint first."""
    run: str = ""
    mode: str = ""
    """Consistency of the run, such as ``bsp``."""
    model: str = ""
    """Name of the model, or ``step package.module:factory``."""
    written: str = ""
    """Time of the last change of the manifest, in UTC."""
    bytes: int = 0
    """Size of all files in bytes."""
    problem: str = ""
    """The damage, in words; empty without any."""


async def checkpoints_in(
    path: Path, disk: Disk, *, most: int | None = None
) -> tuple[Path, list[str], list[str]]:
    """Find the checkpoints that a path names.

    Args:
        path: A folder of checkpoints, or one checkpoint.
        most: See `candidates_in`.

    Returns:
        The folder, the names of its checkpoints in the order in which a resumed run reads them, and the
        problems of the folder itself.

    Raises:
        CheckpointError: The folder cannot be read, or has no checkpoint.
    """
    folder, name = named_checkpoint(path)
    if name:
        try:
            await disk.names(path)
        except OSError as error:
            raise CheckpointError(f"no checkpoint {path}: {error.strerror or error}") from None
        return folder, [name], []
    names, problems = await candidates_in(folder, disk, most=most)
    if names:
        return folder, names, problems
    if await _is_of_store(folder, disk):
        raise CheckpointError(
            f"{folder} has the shards of a store, not checkpoints: the same train --store command goes on "
            "from them, and adam-async store save writes the values of a store that runs "
            "(docs/how-to/keep-a-store-on-disk.md)"
        )
    raise CheckpointError(f"no checkpoint in {folder}: train --checkpoint DIR writes them")


async def _is_of_store(folder: Path, disk: Disk) -> bool:
    """Return whether a folder is that of `train --store`, or of one server."""
    return any(name == NAME or segment_name(name) is not None for name in await disk.names(folder))


async def summary_of(folder: Path, disk: Disk, *, latest: bool) -> Summary:
    """Summarise one checkpoint."""
    epoch, groups = age_order(folder.name)
    place = Summary(name=folder.name, epoch=epoch, groups=groups, whole=False, latest=latest)
    try:
        manifest = await checkpoint_manifest(folder, disk)
        facts = await file_facts(folder / MANIFEST_FILE, disk)
    except CheckpointError as error:
        return msgspec.structs.replace(place, problem=str(error))
    problem = ""
    try:
        for record in manifest.files:
            await check_size(folder / record.name, record, disk)
    except CheckpointError as error:
        problem = str(error)
    return msgspec.structs.replace(
        place,
        whole=not problem,
        run=manifest.run[:MOST_SHOWN],
        mode=str(manifest.config.get("consistency", "asp"))[:MOST_SHOWN],
        model=_model_of(manifest)[:MOST_SHOWN],
        written=utc_time(facts.modified_s),
        bytes=facts.size + sum(record.bytes for record in manifest.files),
        problem=problem,
    )


def _model_of(manifest: Manifest) -> str:
    step = manifest.spec.get("step")
    return f"step {step.get('name')}" if isinstance(step, dict) else str(manifest.spec.get("name", ""))
