"""Checks of the options of roles, made before the modules of a role are imported, which takes longer."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from adam_async.cli.files import check_folder
from adam_async.cli.options import ControllerOptions, DataServerOptions, ServerOptions, WorkerOptions
from adam_async.cli.printable import printable
from adam_async.data_server.sources.kinds import check_source
from adam_async.errors import ConfigError
from adam_async.run.addresses import check_address, own_peer, read_peers
from adam_async.run.config import MAX_THREADS_PER_CORE, MOST
from adam_async.run.user_code import (
    StepSource,
    add_import_folder,
    allow_functions,
    allow_steps,
    import_named,
    read_layers,
)
from adam_async.runtime.machine import usable_cores

LEAST_FLUSH_S = 0.01
"""Minimum of `--flush-s`, in seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Allowed:
    """User code that a worker may run, imported.

    Attributes:
        layers: Import paths of layers by kind.
    """

    layers: Mapping[str, str]
    steps: StepSource


def check_controller(options: ControllerOptions) -> None:
    """Check the options of a controller. Raises ConfigError: one is wrong."""
    if options.peers:
        own_peer(read_peers(options.peers), options.id)
    if options.dir is not None:
        check_folder(options.dir, "--dir")


def check_server(options: ServerOptions) -> None:
    """Check the options of a parameter server. Raises ConfigError: one is wrong."""
    if not LEAST_FLUSH_S <= options.flush_s <= MOST["flush_s"]:
        raise ConfigError(
            f"--flush-s must be within {LEAST_FLUSH_S} and {MOST['flush_s']:g} seconds, not {options.flush_s}"
        )
    if options.copies_bind:
        check_address(options.copies_bind, "--copies-bind")
    if options.dir is not None:
        check_folder(options.dir, "--dir")


def check_data_server(options: DataServerOptions, source: str | None) -> None:
    """Check source and folders of a data server, and import the functions that its command line allows.

    Args:
        source: Source of the images; None for one that is copied first.

    Raises:
        ConfigError: A folder or function does not exist, or fails in its import.
        DataError: The source holds no data set.
    """
    if source is not None:
        check_source(source)
    if options.spill:
        check_folder(Path(options.spill), "--spill")
    _add_folders(options)
    allow_functions(options.allow_transform)


def check_worker(options: WorkerOptions, threads: int, in_flight: int) -> Allowed:
    """Import the layers and the modules of steps that a worker's command line names.

    Raises:
        ConfigError: A number is out of bounds; or a folder, module or layer does not exist, or fails in its
            import.
    """
    cores = usable_cores()
    if not 0 <= threads <= cores * MAX_THREADS_PER_CORE or not 0 <= in_flight <= MOST["in_flight"]:
        raise ConfigError(
            f"--threads must be within 0 and {cores * MAX_THREADS_PER_CORE} on {cores} cores and --in-flight "
            f"within 0 and {MOST['in_flight']}, not {threads} and {in_flight}"
        )
    _add_folders(options)
    layers = read_layers(options.layers)
    for kind, path in layers.items():
        import_named(path, f"layer {kind!r}")
    return Allowed(layers, allow_steps(options.allow_step))


def _add_folders(options: DataServerOptions | WorkerOptions) -> None:
    """Let imports find the modules of the folders that a command line names.

    Raises:
        ConfigError: A folder does not exist.
    """
    for folder in options.step_path:
        add_import_folder(folder)
        if not options.supervised:  # the parent has printed the line
            sys.stderr.write(f"imports also find modules in {printable(str(folder.resolve()))}\n")
