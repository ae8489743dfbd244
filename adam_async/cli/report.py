"""The command `report`: a comparison of runs, as a table and a plot."""

from pathlib import Path

import msgspec
from rich.table import Table

from adam_async.cli.files import check_target, write_file
from adam_async.cli.terminal import Terminal
from adam_async.errors import ConfigError
from adam_async.report.compare import compare
from adam_async.report.plot import draw, encode
from adam_async.report.report import SCHEMA, Report
from adam_async.runtime.disk import Disk

MOST_REPORT_BYTES = 1 << 26
"""Maximum size of a report's file, in bytes; its objects take several times as much memory."""


async def run_report(files: tuple[Path, ...], plot: Path | None, terminal: Terminal) -> int:
    """Print a table of reports, and plot them if `plot` names a file.

    Raises:
        ConfigError: A file cannot be read or is no report, the plot cannot be written, or matplotlib is not
            installed.
    """
    async with Disk() as disk:
        runs = [(name, await read_report(file, disk)) for name, file in name_runs(files).items()]
        if plot is not None:
            await check_target(plot, "--plot", disk)
            await write_file(plot, "--plot", [encode(draw(runs), "png")], disk)
    terminal.table(_table(runs))
    return 0


class _Schema(msgspec.Struct):
    schema: str


async def read_report(file: Path, disk: Disk) -> Report:
    """Read a report that `train --report` wrote.

    Raises:
        ConfigError: The file cannot be read, or is no report of this schema.
    """
    try:
        data = await disk.read_bytes(file, MOST_REPORT_BYTES)
        schema = msgspec.json.decode(data, type=_Schema).schema
        # Another version may have other fields: name the version rather than the first such field.
        if schema != SCHEMA:
            raise ConfigError(
                f"{file} has the format {schema!r}; this version reads {SCHEMA!r}: read it with the version "
                "that wrote it, or write a new one with train --report"
            )
        return msgspec.json.decode(data, type=Report)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is no report of this version ({SCHEMA}): {error}") from None


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


def _table(runs: list[tuple[str, Report]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name, _ in runs:
        table.add_column(name, justify="right", overflow="fold")
    for row in compare([report for _, report in runs]):
        table.add_row(*row)
    return table
