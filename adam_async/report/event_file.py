"""A file of events, one JSON object a line, for `--events`; older lines are in FILE.1, FILE.2 and FILE.3."""

from pathlib import Path
from typing import BinaryIO

import msgspec

from adam_async.errors import DataError, failing_as
from adam_async.report.stream import Callback
from adam_async.run.events import AnyEvent, replaces

MOST_BYTES = 64 << 20
"""Size of a file above which the next lines go to a new one, in bytes."""

KEPT = 3
"""Number of earlier files of one run."""

REPEAT_S = 10.0
"""Least time between two lines with the counts of one role, or with the status, in seconds; they are long."""


class EventFile(Callback):
    """Writes events; a new run of a command replaces the file.

    Args:
        path: The file, in a folder that exists.
        most_bytes: Size at which the file is full.

    Raises:
        DataError: In `on_event`, so that the run goes on without the file, which cannot be written.
    """

    def __init__(self, path: Path, *, most_bytes: int = MOST_BYTES) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._file: BinaryIO | None = None
        self._bytes = 0
        self._written_at: dict[str, float] = {}

    def on_event(self, event: AnyEvent) -> None:
        """Write a line."""
        name = replaces(event)
        if name and event.at < self._written_at.get(name, 0.0) + REPEAT_S:
            return
        self._written_at[name] = event.at
        line = msgspec.json.encode(event) + b"\n"
        with failing_as(DataError, f"{self._path} cannot be written"):
            if self._file is None or self._bytes + len(line) > self._most_bytes:
                self._open_next()
            assert self._file is not None, "the next file is open"
            self._file.write(line)
        self._bytes += len(line)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _open_next(self) -> None:
        """Open the first file of the run, or the one after a full one."""
        if self._file is not None:
            self._file.close()
            for number in range(KEPT, 0, -1):
                earlier = self._numbered(number - 1)
                if earlier.exists():
                    earlier.replace(self._numbered(number))
        else:
            for number in range(1, KEPT + 1):  # those of an earlier run
                self._numbered(number).unlink(missing_ok=True)
        self._file = open(self._path, "wb", buffering=0)
        self._bytes = 0

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}") if number else self._path
