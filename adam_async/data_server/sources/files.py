"""Reading of folders, and of files after a check of their kind and size."""

import stat
from collections.abc import Iterable
from pathlib import Path
from shlex import quote

from adam_async.data_server.sources import limits
from adam_async.errors import DataError
from adam_async.runtime.disk import Disk

CLUTTER = frozenset({"thumbs.db", "ehthumbs.db", "desktop.ini"})
"""Names of files, in lower case, that are skipped in folders of images."""


async def read_file(
    path: Path, disk: Disk, *, limit: int | None = None, room_bytes: int = limits.MAX_TOTAL_BYTES
) -> bytes:
    """Return a whole file.

    Args:
        room_bytes: Memory for the file; see `limits.check_total`.

    Raises:
        DataError: The path is a folder, a pipe or a device, whose content might never end, or the file is too
            large.
        OSError: The file cannot be read.
    """
    size = await disk.run(check_kind, path, limit or limits.MAX_FILE_BYTES)
    limits.check_total(size, str(path), room_bytes)
    return await disk.read_bytes(path)


IMAGE_SUFFIXES = tuple("png jpg jpeg jpe jfif bmp gif ppm pgm pbm pnm tif tiff webp".split())
"""Endings of the names of images, without the dot."""

ARCHIVES = (".zip", ".7z", ".rar", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
"""Endings of the names of archives that no loader reads."""


def is_image_name(name: str) -> bool:
    """Return whether a visible file has the name of an image."""
    return not is_clutter(name) and name.lower().rpartition(".")[2] in IMAGE_SUFFIXES


def cure_of_archive(names: Iterable[str]) -> str:
    """Return the advice to unpack the first archive among files that hold no data set; empty without one."""
    archives = (name for name in names if name.lower().endswith(ARCHIVES))
    return next((f"; unpack {quote(name)}, and name the folder with its content" for name in archives), "")


def is_clutter(name: str) -> bool:
    """Return whether a file is hidden, or left by a desktop in a folder of images."""
    return name.startswith(".") or name.lower() in CLUTTER


def check_kind(path: Path, limit: int) -> int:
    """Return the size of an ordinary file of at most `limit` bytes. Blocks on the disk."""
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise DataError(f"{path} is a folder, expected a file")
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path} is a pipe, socket or device, expected an ordinary file")
    limits.check_file(status.st_size, limit, str(path))
    return status.st_size
