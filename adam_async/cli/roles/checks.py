"""Checks of the options of roles, made before the modules of a role are imported, which takes longer."""

import sys

from adam_async.cli.files import check_spill
from adam_async.cli.options import DataServerOptions, StageOptions, WorkerOptions, check_threads
from adam_async.cli.terminal import printable
from adam_async.data_server.sources.kinds import check_source
from adam_async.run.user_code import (
    add_import_folder,
    allow_functions,
    allow_steps,
    import_named,
    read_layers,
)


def check_data_server(options: DataServerOptions, stage: StageOptions) -> None:
    """Check the source of a data server, and import the functions that its command line allows.

    Args:
        stage: Copies of the source, whose content is checked after the copy.

    Raises:
        ConfigError: A folder or function does not exist, or fails in its import.
        DataError: The source holds no data set.
    """
    config = options.config()
    check_spill(config)
    if stage.stage is None:
        check_source(config.data)
    _add_folders(options)
    allow_functions(options.allow_transform)


def check_worker(options: WorkerOptions) -> None:
    """Import the layers and the modules of steps that a worker's command line names.

    Raises:
        ConfigError: A folder, module or layer does not exist, or fails in its import.
    """
    check_threads(options.config().threads)
    _add_folders(options)
    for kind, path in read_layers(options.layers).items():
        import_named(path, f"layer {kind!r}")
    allow_steps(options.allow_step)


def _add_folders(options: DataServerOptions | WorkerOptions) -> None:
    """Let imports find the modules of the folders that a command line names.

    Raises:
        ConfigError: A folder does not exist.
    """
    for folder in options.step_path:
        add_import_folder(folder)
        if not options.supervised:  # the parent has printed the line
            sys.stderr.write(f"imports also find modules in {printable(str(folder.resolve()))}\n")
