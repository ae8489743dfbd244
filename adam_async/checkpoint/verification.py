"""Reads every byte of checkpoints, and reports damage by its file and offset.

A resumed run checks only the checkpoint that it reads; a verification checks all of them, before one is
needed. The verification keeps one file in memory at a time. The verification also checks that all values are
finite, because training does not recover from other values.

Summaries of checkpoints come from their heads and file sizes; no shard is read.
"""

from pathlib import Path

import msgspec
import numpy as np

from adam_async.checkpoint.checkpoint import CheckpointError, Manifest
from adam_async.checkpoint.files import candidates_in, named_checkpoint, without_checkpoints
from adam_async.checkpoint.names import age_order
from adam_async.checkpoint.reader import CheckpointHead, checkpoint_head, read_shards
from adam_async.errors import failing_as
from adam_async.persistence.written_once import DamagedFile, check_sizes
from adam_async.runtime.clock import utc_time
from adam_async.runtime.disk import Disk


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One problem of a checkpoint."""

    file: str
    """Name of the file in the folder of the checkpoint."""
    offset: int | None = None
    """Offset of the problem in the file, in bytes; None if the whole file is missing or wrong."""
    text: str


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint, read to its last byte."""

    name: str
    whole: bool
    files: int
    """Number of files; 0 if the head, the last file, is unreadable."""
    bytes: int
    """Size of all files in bytes, according to the head."""
    problems: tuple[Problem, ...] = ()


async def verify_checkpoint(folder: Path, disk: Disk) -> Verification:
    """Read all files of one checkpoint. Raises ShortMemory: a file is larger than the available memory."""
    try:
        head = await checkpoint_head(folder, disk)
    except DamagedFile as error:
        problem = _problem_of(error)
        return Verification(name=folder.name, whole=False, files=0, bytes=0, problems=(problem,))
    found = [await _verify_file(folder, disk, head, file) for file in head.files.files]
    problems = tuple([each for each in found if each is not None])
    return Verification(
        name=folder.name, whole=not problems, files=len(found) + 1, bytes=head.nbytes, problems=problems
    )


def _problem_of(error: DamagedFile) -> Problem:
    return Problem(file=error.file, offset=error.offset, text=str(error))


async def _verify_file(folder: Path, disk: Disk, head: CheckpointHead, file: str) -> Problem | None:
    """Read one file; return its first problem, or how many values are not finite."""
    bad, first, offset = 0, "", 0
    try:
        for piece, shards in await read_shards(folder, disk, head, file):
            for shard in shards:
                for array in (shard.values, *shard.rule_state.values()):
                    if array.dtype.kind == "f" and (found := int(np.count_nonzero(~np.isfinite(array)))):
                        first, offset = (first, offset) if bad else (shard.spec.tensor, piece.position)
                        bad += found
    except DamagedFile as error:
        return _problem_of(error)
    if not bad:
        return None
    text = (
        f"{folder / file}: {bad:,} values are not finite, the first ones in the piece at byte {offset:,}, in "
        f"{first[:80]}: the training diverged"
    )
    return Problem(file=file, offset=offset, text=text)


MOST_SHOWN = 80
"""Maximum length of a manifest's text in a summary, in characters."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint."""

    name: str
    epoch: int
    """Epoch of the checkpoint, taken within the epoch or at its end."""
    groups: int
    """Number of trained groups of `epoch`."""
    whole: bool
    """Whether the head is undamaged and every file has the size that the head names. `verify_checkpoint` also
    reads the files."""
    latest: bool = False
    """Whether a resumed run reads this checkpoint first."""
    run: str = ""
    mode: str = ""
    """Consistency of the run, such as ``bsp``."""
    model: str = ""
    """Name of the model, or ``step package.module:factory``."""
    written: str = ""
    """Time at which the head last changed, in UTC."""
    bytes: int = 0
    """Size of all files in bytes."""
    problem: str = ""
    """The damage, in words; empty without damage."""


async def checkpoints_in(
    path: Path, disk: Disk, *, most: int | None = None
) -> tuple[Path, list[str], list[str]]:
    """Find the checkpoints that a path names.

    Args:
        path: A folder of checkpoints, or one checkpoint.
        most: See `candidates_in`.

    Returns:
        The folder, its checkpoints' names in the order in which a resumed run reads them, and problems with
            the folder itself.

    Raises:
        CheckpointError: The folder is unreadable, or has no checkpoint.
    """
    folder, name = named_checkpoint(path)
    if name:
        with failing_as(CheckpointError, f"no checkpoint {path}"):
            await disk.names(path)
        return folder, [name], []
    names, problems = await candidates_in(folder, disk, most=most)
    if names:
        return folder, names, problems
    raise CheckpointError(await without_checkpoints(folder, disk))


async def summary_of(folder: Path, disk: Disk, *, latest: bool) -> Summary:
    """Return a checkpoint's summary; a damaged one is not `whole`."""
    epoch, groups = age_order(folder.name)
    place = Summary(name=folder.name, epoch=epoch, groups=groups, whole=False, latest=latest)
    try:
        head = await checkpoint_head(folder, disk)
        modified_s = (await disk.file_facts(folder / head.files.file)).modified_s
    except (DamagedFile, OSError) as error:
        return msgspec.structs.replace(place, problem=str(error))
    problem, manifest = "", head.manifest
    try:
        await check_sizes(disk, folder, head.files)
    except DamagedFile as error:
        problem = str(error)
    return msgspec.structs.replace(
        place,
        whole=not problem,
        run=manifest.run[:MOST_SHOWN],
        mode=str(manifest.config.get("consistency", "asp"))[:MOST_SHOWN],
        model=_model_of(manifest)[:MOST_SHOWN],
        written=utc_time(modified_s),
        bytes=head.nbytes,
        problem=problem,
    )


def _model_of(manifest: Manifest) -> str:
    step = manifest.spec.get("step")
    return f"step {step.get('name')}" if isinstance(step, dict) else str(manifest.spec.get("name", ""))
