"""The terminal: results on stdout, notices and errors on stderr; and the exit code of an error."""

import logging
import os
import re
import select
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TextIO

from rich.table import Table
from rich.text import Text

from adam_async.cli.log import OneLine
from adam_async.cli.printable import EscapingConsole, printable
from adam_async.errors import AdamError, first_cause
from adam_async.runtime.standard_streams import drop_standard_error

USAGE, HANDSHAKE, ADDRESS, PEER = 2, 6, 7, 5
"""Exit codes; docs/reference/exit-codes.md lists all."""

LESS = "lower --images-per-group, --in-flight, --threads or --replicas, or take a smaller model"
"""Remedy in the error of a process without memory."""

WIDE = 1000
"""Maximum width of a table in a file or pipe, in characters."""

Aside = Callable[[], AbstractContextManager[None]]
"""Function that returns a context manager; other code may write to the terminal within its block (see
`LiveTable.aside`)."""


class Terminal:
    """Prints lines as plain text; a terminal shows errors in red.

    Printed text may come from peers and files, so its control characters, with ends of lines, are escaped.

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
        """Write one record as a line."""
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
