"""The commands of `checkpoint`: list and verify checkpoints, and write the model of one as a file."""

from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from adam_async.checkpoint.checkpoint import CheckpointError, Manifest
from adam_async.checkpoint.export import export_of
from adam_async.checkpoint.files import open_checkpoint
from adam_async.checkpoint.model_head import read_head
from adam_async.checkpoint.trained_model import check_finite, check_model, metadata_of
from adam_async.checkpoint.verification import Verification, checkpoints_in, summary_of, verify_checkpoint
from adam_async.cli.files import announce_existing, check_target, write_file
from adam_async.cli.options import JsonOptions, LayerOptions
from adam_async.cli.terminal import Terminal, new_table, print_json, printable
from adam_async.errors import ConfigError, DataError
from adam_async.model.network import Network
from adam_async.model.spec import ModelSpec
from adam_async.run.store_record import ArrayRecord
from adam_async.run.train_step import StepSpec
from adam_async.run.user_code import add_import_folder, import_layers, read_layers
from adam_async.runtime.disk import Disk

MOST_LISTED = 1000
"""Maximum number of rows in a list of checkpoints: the newest ones, and the latest one."""


async def list_checkpoints(path: Path, options: JsonOptions, terminal: Terminal) -> int:
    """Print a row for each checkpoint; the first row is the checkpoint that a resumed run reads first.

    Raises:
        CheckpointError: The folder is unreadable, or has no checkpoint.
    """
    async with Disk() as disk:
        folder, names, problems = await checkpoints_in(path, disk, most=MOST_LISTED)
        newest = names[0] if folder == path else ""
        found = [await summary_of(folder / name, disk, latest=name == newest) for name in names]
        summaries = [each for each in found if each.whole or await _is_there(folder / each.name, disk)]
    if options.json:
        print_json({"folder": str(folder), "checkpoints": summaries, "problems": problems}, terminal)
        return 0
    table = new_table("checkpoint", "files", ">epoch", ">groups", "run", "mode", "model", "written", ">bytes")
    for each in summaries:
        table.add_row(
            each.name,
            "whole" if each.whole else "damaged",
            f"{each.epoch:,}",
            f"{each.groups:,}",
            *map(printable, (each.run, each.mode, each.model)),  # texts of a file may have line breaks
            each.written,
            f"{each.bytes:,}",
        )
    terminal.table(table)
    for problem in (*problems, *(each.problem for each in summaries if each.problem)):
        terminal.print(problem)
    return 0


async def verify_checkpoints(path: Path, options: JsonOptions, terminal: Terminal) -> int:
    """Read every byte of checkpoints, and print a line for each, with its problems.

    Raises:
        CheckpointError: The folder is unreadable, or has no checkpoint.
        DataError: A checkpoint, or the file `latest`, is damaged.
    """
    found: list[Verification] = []
    async with Disk() as disk:
        folder, names, problems = await checkpoints_in(path, disk)
        for name in names:
            each = await verify_checkpoint(folder / name, disk)
            if not each.whole and not await _is_there(folder / name, disk):
                terminal.notice(f"{name}: a run has removed it meanwhile")
                continue
            found.append(each)
            if options.json:
                continue
            state = f"whole, {each.files} files, {each.bytes:,} bytes" if each.whole else "damaged"
            terminal.print(f"{name}: {state}")
            for problem in each.problems:
                terminal.print(f"  {problem.text}")
    if options.json:
        print_json({"folder": str(folder), "checkpoints": found, "problems": problems}, terminal)
    damaged = [each.name for each in found if not each.whole]
    if not damaged and not problems:
        return 0
    what = [f"damaged: {', '.join(damaged)}"] if damaged else []
    whole = next((each.name for each in found if each.whole), None)
    remedy = f"--resume {folder / whole} continues from a whole one" if whole else "none is whole"
    raise DataError("; ".join([*what, *problems, remedy]))


async def export_checkpoint(path: Path, file: Path, options: LayerOptions, terminal: Terminal) -> int:
    """Write the model of a checkpoint as a file.

    Raises:
        ConfigError: No checkpoint is whole, its model cannot be built, or the file is not writable.
    """
    for code in options.step_path:
        add_import_folder(code)
    layers = import_layers(read_layers(options.layers))
    async with Disk() as disk:
        folder, _, _ = await checkpoints_in(path, disk)
        await disk.run(_check_outside, file, folder)
        await check_target(file, "checkpoint export", disk)
        found = await open_checkpoint(path, disk)
        for problem in (*found.problems, *found.remarks):
            terminal.notice(f"an older checkpoint is exported: {problem}")
        arrays = {each.name: each for each in found.pieces.catalogue.arrays}
        metadata = await disk.run(_metadata, found.manifest, arrays, layers)
        record = found.pieces.catalogue.record
        export = await export_of(found.source, arrays.values(), record.rules, metadata, check=check_finite)
        if metadata:  # the names of a forged manifest may be anything
            read_head(export.head, export.nbytes, found.manifest.name)
        await announce_existing(file, disk, terminal)
        async with aclosing(export.parts()) as parts:
            await write_file(file, "the model", parts, disk)
    terminal.print(f"{file}: {len(arrays)} arrays of {found.manifest.name}, {export.nbytes:,} bytes")
    return 0


async def _is_there(folder: Path, disk: Disk) -> bool:
    """Return whether a checkpoint still has its name.

    A run renames a checkpoint before it removes the files.
    """
    try:
        await disk.names(folder)
    except OSError:
        return False
    return True


def _check_outside(file: Path, folder: Path) -> None:
    """Raise ConfigError if a file would be in the folder of the checkpoints."""
    if file.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{file} is in the folder of the checkpoints: name a file elsewhere")


def _metadata(
    manifest: Manifest, arrays: Mapping[str, ArrayRecord], layers: Mapping[str, Any]
) -> dict[str, str]:
    """Return the texts in the head of a checkpoint's model file, as `train --out` writes it.

    A step's file (`train --step`) has none, and lacks derived tensors, because only the step's code can
    compute them.

    Raises:
        ConfigError: The model of a network cannot be built, or has other arrays.
    """
    if StepSpec.from_dict(manifest.spec) is not None:
        return {}
    spec = ModelSpec.from_dict(manifest.spec)
    dtype = next(iter(arrays.values())).dtype if arrays else "float32"
    names = manifest.data.get("class_names", [])
    if not isinstance(names, list):
        raise CheckpointError(f"{manifest.name} has class_names that are not a list: take an earlier one")
    network = Network(spec, dtype, layers=layers)
    check_model(network, arrays, names, manifest.name)
    return metadata_of(network, names)
