"""The options of `checkpoint`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from adam_async.cli.options import ONLY_ON, options


@options
class CheckpointOptions:
    """Options of `checkpoint list` and `checkpoint verify`."""

    json: Annotated[bool, ONLY_ON] = False
    """Print the result as one JSON object."""


@options
class CheckpointExportOptions:
    """Options of `checkpoint export`."""

    layers: Annotated[tuple[str, ...], Parameter(name="--layer", negative="")] = ()
    """Layer of yours in the model: KIND=package.module:Class; repeatable. The command imports the module and
    runs it."""
    step_path: Annotated[tuple[Path, ...], ONLY_ON] = ()
    """Folder with the modules of --layer, added to Python's sys.path; repeatable."""
