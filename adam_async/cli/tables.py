"""Tables and JSON text of the commands that show a cluster."""

import json
from typing import Any

import msgspec
from rich.table import Table

from adam_async.cli.terminal import Terminal


def new_table(*columns: str) -> Table:
    """Return a table with these heads; columns whose head begins with ``>`` are aligned right."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold")
    return table


def print_json(value: Any, terminal: Terminal) -> None:
    """Print a value as indented JSON text."""
    for line in json.dumps(msgspec.to_builtins(value), indent=2).splitlines():
        terminal.print(line)
