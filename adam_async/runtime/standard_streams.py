"""Handles closed standard streams, streams that cannot write every character, and readers that do not read.

A file opened while a standard stream is closed gets that stream's descriptor, and text for the terminal goes
into it. If a pipe or socket gets descriptor 0, 1 or 2, libuv takes it for a mistake and ends the process.

A pipe blocks its writer until the reader reads, and a role whose loop is blocked counts as dead.
"""

import io
import os
import select
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import RLock
from typing import Any, TextIO

from adam_async.errors import ConfigError
from adam_async.runtime.blocking_thread import BlockingThread

STANDARD = (0, 1, 2)
"""Descriptors of the standard streams."""

MOST_UNREAD_BYTES = 1 << 20
"""Maximum size in bytes of the text that waits for a standard stream's reader; the oldest text is lost."""

LAST_S = 2.0
"""Time of a reader for the last text of an interrupted command, in seconds."""


def hold_descriptors() -> None:
    """Open the null device on each closed standard descriptor, before a loop or a file gets it."""
    for descriptor in STANDARD:
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the system gives the lowest free descriptor
            if opened == descriptor:
                os.set_inheritable(descriptor, True)  # as a child expects
            else:  # another thread has meanwhile closed or opened a descriptor
                os.dup2(opened, descriptor)
                os.close(opened)


def drop_standard_error() -> None:
    """Lead standard error to the null device, because its reader has left.

    The stream keeps text that it could not write: the interpreter's flush at the end would fail, and change
    the exit code.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


class StandardOutput(io.FileIO):
    """Standard output whose first error names it. Later text is dropped, because the interpreter writes the
    rest at its end."""

    _failed = False

    def write(self, data: Any, /) -> int:
        """Write bytes.

        Raises:
            BrokenPipeError: The reader has left.
            ConfigError: The bytes cannot be written.
        """
        if self._failed:
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except (BrokenPipeError, BlockingIOError):
            raise
        except OSError as error:
            self._failed = True
            raise ConfigError(
                f"standard output cannot be written: {error.strerror}; send it to another place"
            ) from None


def hold_streams() -> None:
    """Give the process all standard streams, as a command expects.

    A stream that was closed leads to the null device. Characters that a terminal cannot show are written as
    escapes, such as with ``LC_ALL=C`` and ``PYTHONIOENCODING=ascii``.
    """
    hold_descriptors()
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.fileno() == 1:
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(StandardOutput(1, "w", closefd=False)),
            encoding=sys.stdout.encoding,
            line_buffering=sys.stdout.line_buffering,
        )
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a test's stream may lack it
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def unblocked_streams(is_interrupted: Callable[[], bool]) -> Iterator[None]:
    """Let writes to standard output and error return at once within the block; threads wait for the readers.

    The end of the block waits for the readers: for `LAST_S` at most if the command was interrupted.

    Raises:
        BrokenPipeError: The reader of standard output has left.
        ConfigError: Standard output cannot be written.
    """
    before = sys.stdout, sys.stderr
    out = _Unread()
    error = out if os.path.sameopenfile(1, 2) else _Unread()  # text for one file keeps its order
    sys.stdout, sys.stderr = _unblocked(sys.stdout, 1, out), _unblocked(sys.stderr, 2, error)
    try:
        yield
        sys.stdout.flush()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ConfigError):
                stream.flush()
        sys.stdout, sys.stderr = before
        for unread in {out, error}:
            unread.end(LAST_S if is_interrupted() else None)
    out.check(1)


def _unblocked(stream: TextIO, descriptor: int, unread: "_Unread") -> TextIO:
    """Return a stream that replaces a standard one; a stream of a test or host program stays."""
    try:
        if not isinstance(stream, io.TextIOWrapper) or stream.fileno() != descriptor:
            return stream
    except OSError:
        return stream
    stream.flush()
    raw: Any = getattr(stream.buffer, "raw", stream.buffer)  # an unbuffered stream's buffer is raw
    return io.TextIOWrapper(
        io.BufferedWriter(_UnblockedFile(raw, unread), MOST_UNREAD_BYTES),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
    )


class _UnblockedFile(io.RawIOBase):
    """A standard stream whose text is written later."""

    def __init__(self, file: io.RawIOBase, unread: "_Unread") -> None:
        self._file = file
        self._unread = unread

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def isatty(self) -> bool:
        return self._file.isatty()

    def write(self, data: Any, /) -> int:
        """Add text. Raises OSError or ConfigError: earlier text could not be written."""
        self._unread.put(self._file, bytes(data))
        return memoryview(data).nbytes


class _Unread:
    """The text on its way to one file, or to several descriptors of the file."""

    def __init__(self) -> None:
        self._thread = BlockingThread("standard-streams")
        self._lock = RLock()  # a handler of a signal may write
        self._pieces: deque[tuple[io.RawIOBase, bytes]] = deque()
        self._bytes = 0
        self._lost = 0
        """Number of lost lines that no line mentions yet."""
        self._is_writing = self._is_over = False
        self._errors: dict[int, OSError | ConfigError] = {}

    def put(self, file: io.RawIOBase, text: bytes) -> None:
        """Add text. Raises OSError or ConfigError: earlier text could not be written."""
        if self._is_over:  # a last word of the interpreter
            _write_whole(file, text)
            return
        with self._lock:
            self.check(file.fileno())
            self._pieces.append((file, text))
            self._bytes += len(text)
            while self._bytes > MOST_UNREAD_BYTES and len(self._pieces) > 1:
                _, lost = self._pieces.popleft()
                self._bytes -= len(lost)
                self._lost += lost.count(b"\n")
            if not self._is_writing:
                self._is_writing = True
                self._thread.submit(self._write)

    def check(self, descriptor: int) -> None:
        """Raise the error of text that could not be written, once."""
        if (error := self._errors.pop(descriptor, None)) is not None:
            raise error

    def end(self, within_s: float | None) -> None:
        """Wait until all text is written; for at most some seconds, or without a limit."""
        self._is_over = True
        with suppress(TimeoutError):
            self._thread.submit(bool).result(within_s)
        self._thread.end()

    def _write(self) -> None:
        while (piece := self._next()) is not None:
            try:
                _write_whole(*piece)
            except (OSError, ConfigError) as error:
                self._errors[piece[0].fileno()] = error

    def _next(self) -> tuple[io.RawIOBase, bytes] | None:
        with self._lock:
            self._is_writing = bool(self._pieces)
            if not self._is_writing:
                return None
            file, text = self._pieces.popleft()
            self._bytes -= len(text)
            lost, self._lost = self._lost, 0
        return file, b"(%d lines were not read in time, and are lost)\n" % lost + text if lost else text


def _write_whole(file: io.RawIOBase, text: bytes) -> None:
    """Write to a file that may block, or that another program has made non-blocking."""
    left = memoryview(text)
    while left:
        written = file.write(left)
        if written is None:
            select.select([], [file], [])
        left = left[written or 0 :]
