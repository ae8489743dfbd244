"""Ranges of files for compute threads, and a scratch file for images that do not fit into memory.

These functions block the calling thread, which has no other work. Code on an event loop reads by
`runtime.disk.Disk`.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from numpy.typing import NDArray

from adam_async.runtime.ordinary_files import ordinary_files


def read_piece(path: Path, offset: int, size: int) -> bytes:
    """Return up to `size` bytes of a file from `offset` on; fewer only at the file's end.

    Raises:
        OSError: The system's own.
    """
    with open(path, "rb", buffering=0, opener=ordinary_files) as file:
        file.seek(offset)
        pieces = []
        while size > 0 and (piece := file.read(size)):
            pieces.append(piece)
            size -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reads at any offset. Raises OSError: the system's own."""
    with open(path, "rb", opener=ordinary_files) as file:
        yield file


class Scratch:
    """A file without a name: no other process can open it, and the end of the process deletes it.

    Raises:
        OSError: No file can be made in the folder.
    """

    def __init__(self, folder: Path) -> None:
        os.makedirs(folder, exist_ok=True)
        self._descriptor, name = tempfile.mkstemp(prefix="adam-async-", suffix=".spill", dir=folder)
        os.unlink(name)

    def write(self, offset: int, array: NDArray[Any]) -> None:
        """Write a contiguous array to an offset. Raises OSError: for example, the disk is full."""
        data = array.data.cast("B")
        while data:
            written = os.pwrite(self._descriptor, data, offset)
            data, offset = data[written:], offset + written

    def read(self, offset: int, array: NDArray[Any]) -> None:
        """Fill a contiguous array with the bytes at an offset. Raises OSError: the bytes cannot be read."""
        data = array.data.cast("B")
        while data:
            count = os.preadv(self._descriptor, [data], offset)
            if not count:
                raise OSError(f"the scratch file ends at byte {offset}, which was written")
            data, offset = data[count:], offset + count

    def close(self) -> None:
        """Delete the file. Safe to call twice; no read or write may follow."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1
