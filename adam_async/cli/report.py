"""The command `report`: a comparison of runs, as a table."""

from pathlib import Path

import msgspec
from rich.table import Table

from adam_async.cli.option_checks import name_runs, read_checked
from adam_async.cli.terminal import Terminal
from adam_async.errors import ConfigError
from adam_async.report.report import Report, compare
from adam_async.report.schema import no_report
from adam_async.run.config import FIELDS
from adam_async.run.option_sources import make_config
from adam_async.runtime.disk import Disk


async def run_report(files: tuple[Path, ...], terminal: Terminal) -> int:
    """Print a table of reports.

    Raises:
        ConfigError: A file is unreadable or is not a report.
    """
    async with Disk() as disk:
        runs = [(name, await read_report(file, disk)) for name, file in name_runs(files).items()]
    terminal.table(_table(runs))
    return 0


async def read_report(file: Path, disk: Disk) -> Report:
    """Read a report that `train --report` wrote.

    Raises:
        ConfigError: The file is unreadable, or is not a report of this schema.
    """
    data = await disk.run(read_checked, file)
    try:
        report = msgspec.json.decode(data, type=Report)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise no_report(str(file), error) from None
    if missing := [name for name in FIELDS if name not in report.config]:
        raise no_report(str(file), ValueError(f"its config lacks {', '.join(missing)}"))
    try:
        make_config(report.config)
    except ConfigError as error:
        raise no_report(str(file), error) from None
    return report


def _table(runs: list[tuple[str, Report]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name, _ in runs:
        table.add_column(name, justify="right", overflow="fold")
    for row in compare([report for _, report in runs]):
        table.add_row(*row)
    return table
