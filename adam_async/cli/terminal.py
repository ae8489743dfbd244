"""What the user reads: results on stdout, news and errors on stderr."""

import logging
import select
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TextIO

from rich.table import Table
from rich.text import Text

from adam_async.cli.log import OneLine
from adam_async.cli.printable import EscapingConsole, printable
from adam_async.errors import AdamError, first_cause
from transport.errors import BindRefused, HandshakeRejected, RemoteProtocolError, TransportError

USAGE, HANDSHAKE, ADDRESS, PEER = 2, 6, 7, 5

LESS = "lower --images-per-group, --in-flight, --threads or --replicas, or take a smaller model"

WIDE = 1000
"""Maximum width of a table in a file or pipe, in characters."""

Aside = Callable[[], AbstractContextManager[None]]
"""Makes room on the terminal within a block, see `LiveTable.aside`."""


class Terminal:
    """Plain lines, in colour where a person reads them.

    Printed text may come from peers and files: the terminal escapes its controls, ends of lines included.

    Args:
        quiet: Drop what `say` is told; errors and news of deaths still show.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.out = EscapingConsole(soft_wrap=True)
        self.err = EscapingConsole(stderr=True, soft_wrap=True)
        self._quiet = quiet
        self._aside: Aside = nullcontext

    def give_way(self, aside: Aside) -> None:
        """Write from now on in blocks of `aside`, what is logged too: something else is drawn there."""
        self._aside = aside
        for handler in logging.getLogger().handlers:
            if isinstance(handler, _LogLines):
                handler.aside = aside

    def say(self, text: str) -> None:
        """Print a line of the result, unless quiet."""
        if not self._quiet:
            with self._aside():
                self.out.print(printable(text))

    def table(self, table: Table) -> None:
        """Print a table of the result; a file or pipe gets lines as long as the table needs."""
        out = self.out if self.out.is_terminal else EscapingConsole(file=self.out.file, width=WIDE)
        out.print(table, soft_wrap=False)

    def news(self, text: str) -> None:
        """Print a line on stderr, at once."""
        with self._aside():
            self.err.print(printable(text))

    def error(self, text: str) -> None:
        """Print the one line that an error comes to."""
        with self._aside():
            self.err.print(Text(f"adam-async: {printable(' '.join(text.split()))}", style="red"))


class _LogLines(logging.StreamHandler[TextIO]):
    """Writes what is logged to stderr."""

    aside: Aside = nullcontext

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record as a line."""
        with self.aside():
            super().emit(record)


def reader_left(stream: TextIO) -> bool:
    """Whether the stream goes into a pipe that nobody reads any more."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)  # errors are told without being asked for
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError):  # it is no file
        return False


def log_to_stderr(*, verbose: bool, level: str | None = None, lines: OneLine | None = None) -> None:
    """Let the libraries' loggers speak.

    Args:
        verbose: Whether to write what the roles do, too: level ``info`` instead of ``warning``.
        level: Least level to write, if another than these.
        lines: How a line looks; None is the message alone.
    """
    handler = _LogLines()
    handler.setFormatter(lines or OneLine())
    least = (level or ("info" if verbose else "warning")).upper()
    logging.basicConfig(level=least, handlers=[handler], force=True)
    # Errors in callbacks reach `ending_on_errors`; asyncio's own warnings are about sockets that closed.
    logging.getLogger("asyncio").setLevel(logging.ERROR)


def explain(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the sentence for an error, or for the first cause within a group."""
    cause = first_cause(error)
    match cause:
        case AdamError():
            return cause.exit_code, str(cause)
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
