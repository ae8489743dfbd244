"""The terminal: results on stdout, notices and errors on stderr; and the exit code of an error.

Text of peers and files is made safe for a terminal and a log.
"""

import errno
import json
import logging
import os
import re
import select
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from adam_async.errors import AdamError, first_cause
from adam_async.runtime.standard_streams import drop_standard_error


class OneLine(logging.Formatter):
    """Writes a record as one line, and escapes peers' text; a traceback follows on separate lines."""

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
    """Writes a record, including its traceback, as one line of JSON in ASCII."""

    facts: Callable[[], dict[str, Any]] = dict
    """Function that returns role, run and stores."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object: time, level, node, role, run, stores, logger, message, and traceback if any."""
        entry = {
            "time": time_of(record),
            "level": record.levelname.lower(),
            "node": self.node,
            **self.facts(),
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


def describe_logs(facts: Callable[[], dict[str, Any]]) -> None:
    """Set the function that returns role, run and stores for this process's JSON lines."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonLine):
            handler.formatter.facts = facts


_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters C0 and C1, with the escape character and ends of lines
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that change the text direction
    "\u2028\u2029"  # ends of lines and paragraphs
    "\ud800-\udfff]"  # bytes of file names that are not text, which streams cannot encode
)


def printable(text: str) -> str:
    r"""Return one line without characters that move the cursor, change colours or reorder text.

    Control and direction characters become escapes such as ``\x1b`` and ``\u202e``. Backslashes stay, so a
    second pass changes nothing. A parent process makes a second pass over the lines of its child process.
    """
    return _UNSAFE.sub(lambda found: repr(found[0])[1:-1], text)


def printable_lines(text: str) -> str:
    """Make each line of a text printable, as `printable` does."""
    return "\n".join(printable(line) for line in text.split("\n"))


class EscapingConsole(Console):
    """A console that escapes controls in all text and table cells. Markup and emoji are plain text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError: ``rich`` would end the process with code 1, also in a running loop."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def render_str(self, text: str, **how: Any) -> Text:
        """Return a string as text, escaped before a table measures its width."""
        return super().render_str(printable_lines(text), **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield an object's segments with their text escaped; control segments of ``rich`` pass."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable_lines(segment.text), segment.style)


USAGE, HANDSHAKE, ADDRESS, PEER = 2, 6, 7, 5
"""Exit codes; docs/reference/exit-codes.md lists all."""

LESS = "lower --images-per-group, --in-flight, --threads or --replicas, or take a smaller model"
"""Remedy in the error of a process without memory."""

WIDE = 1000
"""Maximum width of a table in a file or pipe, in characters."""

Aside = Callable[[], AbstractContextManager[None]]
"""Function that returns a context manager; within its block other code may write to the terminal (see
`LiveTable.aside`)."""


class Terminal:
    """Prints lines as plain text; a terminal shows errors in red.

    Printed text may come from peers and files, so its control characters and line ends are escaped.

    Args:
        quiet: Drop lines of results; tables, notices and errors still show.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.out = EscapingConsole(soft_wrap=True)
        self.err = EscapingConsole(stderr=True, soft_wrap=True)
        self._quiet = quiet
        self._aside: Aside = nullcontext

    def give_way(self, aside: Aside) -> None:
        """Write all further text and log lines in blocks of `aside`, because the terminal shows a table."""
        self._aside = aside
        for handler in logging.getLogger().handlers:
            if isinstance(handler, _LogLines):
                handler.aside = aside

    def print(self, text: str) -> None:
        """Print a line of the result, unless quiet."""
        if not self._quiet:
            with self._aside():
                self.out.print(printable(text))

    def table(self, table: Table) -> None:
        """Print a table of the result; a file or pipe gets lines as long as the table needs."""
        out = self.out if self.out.is_terminal else EscapingConsole(file=self.out.file, width=WIDE)
        out.print(table, soft_wrap=False)

    def clear(self) -> None:
        """Clear the screen for the next state of a live view; a file or pipe keeps all states."""
        if self.out.is_terminal:
            self.out.clear()

    def notice(self, text: str) -> None:
        """Print a line on stderr, quiet or not. A pipe without a reader drops the line."""
        with self._aside(), _unless_reader_left():
            self.err.print(printable(text))

    def error(self, text: str) -> None:
        """Print an error as one line. A pipe without a reader drops the line; the exit code stays."""
        with self._aside(), _unless_reader_left():
            # Only ASCII: other spaces belong to names of files.
            line = printable(" ".join(re.split(r"[ \t\r\n]+", text.strip())))
            self.err.print(Text(f"adam-async: {line}", style="red"))


class _LogLines(logging.StreamHandler[TextIO]):
    """Writes log records to stderr."""

    aside: Aside = nullcontext

    def emit(self, record: logging.LogRecord) -> None:
        with self.aside():
            super().emit(record)


@contextmanager
def _unless_reader_left() -> Iterator[None]:
    """Drop the text of the block if standard error goes into a pipe without a reader, and all later text."""
    try:
        yield
    except BrokenPipeError:
        drop_standard_error()


def reader_left(stream: TextIO) -> bool:
    """Return whether the stream goes into a pipe without a reader."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)  # the kernel reports POLLERR and POLLHUP without a request
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError):  # the stream is no file
        return False


def log_to_stderr(*, verbose: bool, level: str | None = None, lines: OneLine | None = None) -> None:
    """Write the log of all libraries to stderr."""
    handler = _LogLines()
    handler.setFormatter(lines or OneLine())
    least = (level or ("info" if verbose else "warning")).upper()
    logging.basicConfig(level=least, handlers=[handler], force=True)
    # `ending_on_errors` logs errors in callbacks; asyncio's own warnings are about closed sockets.
    logging.getLogger("asyncio").setLevel(logging.ERROR)


def _is_folder_gone() -> bool:
    try:
        os.getcwd()
    except OSError:
        return True
    return False


def explain(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the sentence for an error, or for the first cause within a group."""
    cause = first_cause(error)
    if isinstance(cause, AdamError):
        return cause.exit_code, str(cause)
    from transport.errors import BindRefused, HandshakeRejected, RemoteProtocolError, TransportError

    match cause:
        case FileNotFoundError() if _is_folder_gone():
            return USAGE, "the working directory no longer exists: change to another folder"
        case MemoryError():
            return USAGE, f"not enough memory: {cause}; ask for less: {LESS}"
        case HandshakeRejected(code="token"):
            return HANDSHAKE, f"{cause} (--token-file, or ADAM_TOKEN)"
        case HandshakeRejected() | RemoteProtocolError():
            return HANDSHAKE, str(cause)
        case BindRefused():
            return ADDRESS, str(cause)
        case TransportError():
            return PEER, str(cause) or type(cause).__name__
        case _:
            what = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
            return 1, f"unexpected {what} (ADAM_TRACEBACK=1 shows where)"


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


def age_text(seconds: float) -> str:
    """Return a duration with two units at most, such as ``2h 05m``."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours:02}h"
    if hours:
        return f"{hours}h {minutes:02}m"
    return f"{minutes}m {whole % 60:02}s" if minutes else f"{whole}s"
