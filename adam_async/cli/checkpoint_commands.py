"""The commands of `adam-async checkpoint`.

Like `commands.py`, this file imports only the modules that `--help` needs.
"""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from adam_async.cli.files import check_checkpoints
from adam_async.cli.options import JsonOptions, LayerOptions, to_read
from adam_async.cli.running import run_in_loop

CheckpointsPath = Annotated[
    Path,
    to_read("checkpoint", check_checkpoints),
    Parameter(help="Folder of `train --checkpoint`, or one checkpoint in it."),
]

checkpoint_commands = App(name="checkpoint", help="List, verify and export the checkpoints of a run.")


@checkpoint_commands.command(name="list")
def checkpoint_list(folder: CheckpointsPath, /, *, options: JsonOptions = JsonOptions()) -> int:
    """List checkpoints: epoch, groups, run, mode, model, time, bytes, and whether all files are there."""
    from adam_async.cli.checkpoint import list_checkpoints

    return run_in_loop(lambda terminal: list_checkpoints(folder, options, terminal))


@checkpoint_commands.command(name="verify")
def checkpoint_verify(folder: CheckpointsPath, /, *, options: JsonOptions = JsonOptions()) -> int:
    """Read every byte of checkpoints, and report damage; exit code 3 if one is damaged."""
    from adam_async.cli.checkpoint import verify_checkpoints

    return run_in_loop(lambda terminal: verify_checkpoints(folder, options, terminal))


@checkpoint_commands.command(name="export")
def checkpoint_export(
    folder: CheckpointsPath, file: Path, /, *, options: LayerOptions = LayerOptions()
) -> int:
    """Write the model of the newest whole checkpoint, or of one that you name, as `train --out` does.

    Parameters
    ----------
    file
        File for the model, in the safetensors format; `evaluate`, `predict` and `export` take it.
    """
    from adam_async.cli.checkpoint import export_checkpoint

    return run_in_loop(lambda terminal: export_checkpoint(folder, file, options, terminal))
