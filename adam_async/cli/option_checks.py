"""Checks of the options of single commands; the checks of `train` are in `train_checks.py`.

A command makes them before it imports the modules of its work, which takes longer than the checks.
"""

from pathlib import Path

from adam_async.checkpoint.names import FILE_NAME
from adam_async.cli.files import text_of
from adam_async.cli.options import ExportOptions, InspectOptions
from adam_async.data_server.sources.kinds import check_source
from adam_async.data_server.transforms.steps import check_steps
from adam_async.errors import ConfigError, failing_as
from adam_async.report.schema import check_schema
from adam_async.runtime.ordinary_files import read_ordinary

MOST_REPORT_BYTES = 1 << 26
"""Maximum size of a report's file, in bytes; its objects take several times as much memory."""


def check_export(model: Path, options: ExportOptions) -> None:
    """Check that `export` has a file to write, writes none twice, and does not overwrite the model.

    Raises:
        ConfigError: There is no target, or one is the model or is named twice.
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
    """Check the files of `report`. Raises ConfigError: there is none, or one is no report."""
    for file in name_runs(files).values():
        read_checked(file)


def read_checked(file: Path) -> bytes:
    """Return the file of a report, after a check of its format. Blocks.

    Raises:
        ConfigError: The file cannot be read, or is no report of this version.
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
