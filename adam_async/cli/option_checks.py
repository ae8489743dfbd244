"""Checks of single commands' and roles' options; `train_checks.py` has the checks for `train`.

A command checks options before it imports the modules of its work, which takes longer than the checks.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

from adam_async.checkpoint.names import FILE_NAME
from adam_async.cli.files import check_spill, text_of
from adam_async.cli.options import (
    WAIT,
    DashboardOptions,
    DataServerOptions,
    ExportOptions,
    InspectOptions,
    ServerOptions,
    StageOptions,
    WorkerOptions,
    check_threads,
)
from adam_async.cli.terminal import printable
from adam_async.dashboard.access import is_loopback
from adam_async.data_server.sources.kinds import check_source
from adam_async.data_server.transforms.steps import check_steps
from adam_async.errors import ConfigError, failing_as
from adam_async.option_types import Only, dashed
from adam_async.report.schema import check_schema
from adam_async.run.config import ON_DISK, OPTIONS
from adam_async.run.option_sources import variable_of
from adam_async.run.user_code import (
    add_import_folder,
    allow_functions,
    allow_steps,
    import_named,
    read_layers,
)
from adam_async.run.user_rules import allow_rules
from adam_async.runtime.ordinary_files import read_ordinary
from transport.sockets import parse_tcp_address

MOST_REPORT_BYTES = 1 << 26
"""Maximum size of a report file, in bytes; its objects take several times as much memory."""


def check_page(address: str, option: str, token_file: Path | None) -> None:
    """Check the address of a page. Raises ConfigError: other machines reach it, and it has no given token."""
    host, _ = parse_tcp_address(f"tcp://{address}")
    if token_file is None and not is_loopback(host):
        raise ConfigError(
            f"{option} {address} is open to other machines: give the page a token with "
            "--dashboard-token-file, or serve it at 127.0.0.1"
        )


def check_dashboard(options: DashboardOptions) -> None:
    """Check the options of `dashboard`. Raises ConfigError: they show nothing, or are unsafe."""
    check_page(options.bind, "--bind", options.dashboard_token_file)
    if options.controller is None and options.runs is None:
        raise ConfigError("name what to show: --controller tcp://HOST:PORT, --runs FOLDER, or both")
    if options.allow_operations and options.controller is None:
        raise ConfigError("--allow-operations has no effect without --controller: leave it out")


def check_export(model: Path, options: ExportOptions) -> None:
    """Check that `export` has a file to write, writes no file twice, and does not overwrite the model.

    Raises:
        ConfigError: There is no target, or a target is the model or is named twice.
    """
    targets = [file for file in (options.onnx, options.torch) if file is not None]
    if not targets:
        raise ConfigError("export needs a file to write: --onnx FILE, --torch FILE, or both")
    taken = {model.resolve(), (model / FILE_NAME).resolve()}
    for target in targets:
        if target.resolve() in taken:
            raise ConfigError(f"{target} is the model, or is named twice; name another file")
        taken.add(target.resolve())


def check_inspection(source: str, options: InspectOptions) -> None:
    """Check the files of `data inspect`.

    Raises:
        ConfigError: The file of transforms cannot be used.
        DataError: There are no data.
    """
    if options.transforms is not None:
        check_steps(text_of(options.transforms, "--transforms"), str(options.transforms))
    check_source(source)


def check_reports(files: tuple[Path, ...]) -> None:
    """Check the files of `report`. Raises ConfigError: there is no report, or a file is not a report."""
    for file in name_runs(files).values():
        read_checked(file)


def read_checked(file: Path) -> bytes:
    """Return the file of a report, after a check of its format. Blocks.

    Raises:
        ConfigError: The file is unreadable, or is not a report of this version.
    """
    with failing_as(ConfigError, f"{file} cannot be read"):
        data = read_ordinary(file, MOST_REPORT_BYTES)
    check_schema(data, str(file))
    return data


def name_runs(files: tuple[Path, ...]) -> dict[str, Path]:
    """Return a short name for each file: its stem, or its whole path if stems are equal.

    Raises:
        ConfigError: No file is named, or a file is named twice.
    """
    if not files:
        raise ConfigError("name one report or several, as `train --report FILE` wrote them")
    stems = [file.stem for file in files]
    names = {file.stem if stems.count(file.stem) == 1 else str(file): file for file in files}
    if len(names) < len(files):
        twice = next(file for file in files if files.count(file) > 1)
        raise ConfigError(f"{twice} is named twice")
    return names


def check_server(options: ServerOptions, environment: Mapping[str, str]) -> None:
    """Check that a parameter server's options have an effect, and import the rules that it allows.

    A variable may be for other servers too, and a launcher's words are the run's.

    Raises:
        ConfigError: An option has no effect without a folder; or a folder, module or rule does not exist, or
            fails when imported.
    """
    _add_folders(options)
    allow_rules(options.allow_rule)
    if options.dir is not None or options.supervised:
        return
    given = options.config()
    for name, option in OPTIONS.items():
        value = getattr(given, name)
        is_typed = value != option.default and variable_of(name) not in environment
        if "ps" in option.roles and is_typed and any(only.mode is ON_DISK for only in option.all(Only)):
            raise ConfigError(
                f"{dashed(name)} {value} has no effect without {ON_DISK.name}: give --dir DIR, or leave "
                f"{dashed(name)} out"
            )


def check_data_server(options: DataServerOptions, stage: StageOptions) -> None:
    """Check the source of a data server, and import the functions that its command line allows.

    Args:
        stage: Copies of the source, whose content is checked after the copy.

    Raises:
        ConfigError: A folder or function does not exist, or fails in its import.
        DataError: The source holds no data set.
    """
    if options.controller is None and options.wait != WAIT:
        raise ConfigError("--wait has no effect without --controller: give --controller, or leave --wait out")
    if stage.stage is None:
        for name in ("stage_peers", "stage_wait"):
            if (value := getattr(stage, name)) != getattr(StageOptions, name):
                raise ConfigError(
                    f"{dashed(name)} {value} has no effect without a copy: give --stage FOLDER, or leave "
                    f"{dashed(name)} out"
                )
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


def _add_folders(options: DataServerOptions | ServerOptions | WorkerOptions) -> None:
    """Let imports find the modules of the folders that a command line names.

    Raises:
        ConfigError: A folder does not exist.
    """
    for folder in options.step_path:
        add_import_folder(folder)
        if not options.supervised:  # the parent has printed the line
            sys.stderr.write(f"imports also find modules in {printable(str(folder.resolve()))}\n")
