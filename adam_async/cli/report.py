"""The command `report`: a comparison of runs, as a table and a plot."""

from pathlib import Path

import msgspec
from rich.table import Table

from adam_async.cli.files import check_target, write_file
from adam_async.cli.option_checks import name_runs, read_checked
from adam_async.cli.terminal import Terminal
from adam_async.report.compare import compare
from adam_async.report.plot import draw, encode
from adam_async.report.report import Report
from adam_async.report.schema import no_report
from adam_async.runtime.disk import Disk


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


async def read_report(file: Path, disk: Disk) -> Report:
    """Read a report that `train --report` wrote.

    Raises:
        ConfigError: The file cannot be read, or is no report of this schema.
    """
    data = await disk.run(read_checked, file)
    try:
        return msgspec.json.decode(data, type=Report)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise no_report(str(file), error) from None


def _table(runs: list[tuple[str, Report]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name, _ in runs:
        table.add_column(name, justify="right", overflow="fold")
    for row in compare([report for _, report in runs]):
        table.add_row(*row)
    return table
