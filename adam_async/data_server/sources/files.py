"""Reads folders, and files after a check of their kind and size; also a scratch file for images.

Range reads, and the scratch file for images that do not fit into memory, block the calling thread, which has
no other work. Code on an event loop reads by `runtime.disk.Disk`.
"""

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, BinaryIO

from adam_async.data_server.sources import limits
from adam_async.errors import DataError
from adam_async.runtime.disk import Disk
from adam_async.runtime.ordinary_files import ordinary_files

if TYPE_CHECKING:  # a command looks at names of sources before numpy is loaded
    from numpy.typing import NDArray

CLUTTER = frozenset({"thumbs.db", "ehthumbs.db", "desktop.ini"})
"""Names of files, in lower case, that are skipped in folders of images."""


async def read_file(
    path: Path, disk: Disk, *, limit: int | None = None, room_bytes: int = limits.MAX_TOTAL_BYTES
) -> bytes:
    """Return a whole file.

    Args:
        room_bytes: Memory for the file; see `limits.check_total`.

    Raises:
        DataError: The path is a folder, pipe or device, whose content might never end; or the file is too
            large.
        OSError: The file cannot be read.
    """
    size = await disk.run(check_kind, path, limit or limits.MAX_FILE_BYTES)
    limits.check_total(size, str(path), room_bytes)
    return await disk.read_bytes(path)


IMAGE_SUFFIXES = tuple("png jpg jpeg jpe jfif bmp gif ppm pgm pbm pnm tif tiff webp".split())
"""Endings of image file names, without the dot."""

ARCHIVES = (".zip", ".7z", ".rar", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
"""Endings of archive names that no loader reads."""


def is_image_name(name: str) -> bool:
    """Return whether a visible file has the name of an image."""
    return not is_clutter(name) and name.lower().rpartition(".")[2] in IMAGE_SUFFIXES


def cure_of_archive(names: Iterable[str]) -> str:
    """Return the advice to unpack the first archive among files without a data set; empty without one."""
    archives = (name for name in names if name.lower().endswith(ARCHIVES))
    return next((f"; unpack {quote(name)}, and name the folder with its content" for name in archives), "")


def is_clutter(name: str) -> bool:
    """Return whether a file is hidden, or left by a desktop in a folder of images."""
    return name.startswith(".") or name.lower() in CLUTTER


def check_kind(path: Path, limit: int) -> int:
    """Return the size of an ordinary file, which must have at most `limit` bytes. Blocks on the disk."""
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise DataError(f"{path} is a folder, expected a file")
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path} is a pipe, socket or device, expected an ordinary file")
    limits.check_file(status.st_size, limit, str(path))
    return status.st_size


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
    """A nameless file: no other process can open it, and it disappears when the process ends.

    Raises:
        OSError: No file can be made in the folder.
    """

    def __init__(self, folder: Path) -> None:
        os.makedirs(folder, exist_ok=True)
        self._descriptor, name = tempfile.mkstemp(prefix="adam-async-", suffix=".spill", dir=folder)
        os.unlink(name)

    def write(self, offset: int, array: "NDArray[Any]") -> None:
        """Write a contiguous array to an offset. Raises OSError: for example, the disk is full."""
        data = array.data.cast("B")
        while data:
            written = os.pwrite(self._descriptor, data, offset)
            data, offset = data[written:], offset + written

    def read(self, offset: int, array: "NDArray[Any]") -> None:
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
