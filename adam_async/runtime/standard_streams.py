"""Closed standard streams, and streams that cannot write every character.

A file that is opened while a standard stream is closed gets its descriptor. libuv then ends the process,
because it takes a pipe or socket of descriptor 0, 1 or 2 for a mistake, and text for the terminal goes into
that file.
"""

import io
import os
import sys
from typing import Any

from adam_async.errors import ConfigError

STANDARD = (0, 1, 2)
"""Descriptors of the standard streams."""


def hold_descriptors() -> None:
    """Open the null device on each closed standard descriptor, before a loop or a file gets it."""
    for descriptor in STANDARD:
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the system gives the lowest free descriptor
            if opened == descriptor:
                os.set_inheritable(descriptor, True)  # as a child expects
            else:  # another thread has closed or opened one meanwhile
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
    """Standard output, whose first error names it; later text is dropped, because the interpreter writes the
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
    """Give the process all standard streams, as a command expects them.

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
