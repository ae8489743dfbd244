"""Pieces of files for compute threads: bytes out of the middle of one, and a file for what does not fit.

Whoever waits in a loop reads by `ports.Disk`. These functions block the thread that calls them, which is the
thread that has nothing to do until the bytes are there.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from numpy.typing import NDArray


def read_piece(path: Path, offset: int, size: int) -> bytes:
    """Return up to `size` bytes of a file from `offset` on: fewer only where it ends.

    Raises:
        OSError: The system's own.
    """
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        pieces = []
        while size > 0 and (piece := file.read(size)):
            pieces.append(piece)
            size -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """A file to be read here and there. Raises OSError: the system's own."""
    with open(path, "rb") as file:
        yield file


class Scratch:
    """A file without a name: nobody else finds it, and it is gone with the process, however that ends.

    Args:
        folder: On whose disk it lies; it must be there.

    Raises:
        OSError: No file can be made there.
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor, name = tempfile.mkstemp(prefix="adam-async-", suffix=".spill", dir=folder)
        os.unlink(name)

    def write(self, offset: int, array: NDArray[Any]) -> None:
        """Write a contiguous array to an offset. Raises OSError: the disk is full, for one."""
        data = array.data.cast("B")
        while data:
            written = os.pwrite(self._descriptor, data, offset)
            data, offset = data[written:], offset + written

    def read(self, offset: int, array: NDArray[Any]) -> None:
        """Fill a contiguous array with what was written there. Raises OSError: it cannot be read."""
        data = array.data.cast("B")
        while data:
            count = os.preadv(self._descriptor, [data], offset)
            if not count:
                raise OSError(f"a file aside ends at byte {offset}, which was written")
            data, offset = data[count:], offset + count

    def close(self) -> None:
        """Give the file's space back. Safe to call twice; nobody reads or writes any more."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1
