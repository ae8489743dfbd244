"""Formats of log lines: plain for a terminal, with time, level and node for roles, or JSON."""

import json
import logging
from datetime import UTC, datetime

from adam_async.cli.printable import printable, printable_lines


class OneLine(logging.Formatter):
    """Writes a record as one line, escaping text of peers; a traceback follows on its own lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and the traceback if there is one."""
        line = f"{self.head(record)}{printable(self.message(record))}"
        if record.exc_info is None:
            return line
        return f"{line}\n{printable_lines(self.formatException(record.exc_info))}"

    def head(self, record: logging.LogRecord) -> str:
        """Return the text before the message."""
        return ""

    def message(self, record: logging.LogRecord) -> str:
        """Return the text of the record."""
        return record.getMessage()


class NodeLine(OneLine):
    """Leaves out the name of the node at the start of a message, because the parent process writes it.

    Attributes:
        node: Node of this process; ``-`` until it has a name.
    """

    def __init__(self, node: str = "-") -> None:
        super().__init__()
        self.node = node

    def message(self, record: logging.LogRecord) -> str:
        """Return the text of the record without the name of the node before it."""
        text = record.getMessage()
        rest = text.removeprefix(self.node)
        return rest.lstrip(": ") if rest.startswith((": ", " ")) else text


class RoleLine(NodeLine):
    """Begins each line with the time in UTC, the level and the node."""

    def head(self, record: logging.LogRecord) -> str:
        """Return time, level and node."""
        return f"{time_of(record)} {record.levelname:<7} {printable(self.node)} "


class JsonLine(RoleLine):
    """Writes a record, its traceback included, as one line of JSON in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object: time, level, node, logger, message, and traceback if there is one."""
        entry = {
            "time": time_of(record),
            "level": record.levelname.lower(),
            "node": self.node,
            "logger": record.name,
            "message": self.message(record),
        }
        if record.exc_info is not None:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def time_of(record: logging.LogRecord) -> str:
    """Return the time of a record, in UTC, to the millisecond."""
    return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def name_node(node: str) -> None:
    """Set the node that the log lines of this process name."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, NodeLine):
            handler.formatter.node = node
