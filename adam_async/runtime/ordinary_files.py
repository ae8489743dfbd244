"""Opens files of users and other programs: ordinary files only, and never with a wait.

Opening a pipe waits for its other end, and a device may have no end. Both checks and the read use the opened
file, because a path may lead to another file a moment later.
"""

import errno
import os
import select
import stat
from collections.abc import Callable
from pathlib import Path

Opener = Callable[[str, int], int]
"""Function that opens a file by its path and flags, and returns its descriptor."""

SECRET_BYTES = 65536
"""Maximum size of a secret in bytes; a larger file is not a secret."""

SECRET_S = 60.0
"""Longest wait in seconds for the writer of a secret's pipe, or for a person who types the secret."""

MOST_READ_BYTES = 1 << 31
"""Maximum size in bytes of a file that is read as a whole, unless its reader has another limit."""

OTHERS = stat.S_IRWXG | stat.S_IRWXO
"""Permission bits of a file for all users except its owner."""


def ordinary_files(path: str, flags: int, mode: int = 0o666) -> int:
    """As an `Opener`, open an ordinary file; never wait for a pipe's other end.

    Raises:
        IsADirectoryError: The path is that of a folder.
        OSError: The path leads to a pipe, socket or device, or the system cannot open it.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, mode)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a pipe without a reader
            raise _not_ordinary(path) from None
        raise
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise _not_ordinary(path)


def _not_ordinary(path: str) -> OSError:
    # With its name, because some errors of callers name only the folder.
    name = os.path.basename(path)
    return OSError(errno.EINVAL, f"{name!r} is a pipe, a socket or a device, and no ordinary file", path)


def read_ordinary(path: Path, most: int = MOST_READ_BYTES) -> bytes:
    """Return an ordinary file as a whole. Blocks. For errors see `Disk.read_bytes`."""
    with open(path, "rb", buffering=0, opener=ordinary_files) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"{path.name!r} has {size} bytes, expected at most {most}", str(path))
        pieces = []
        # One read returns at most 2 GiB. Read a file that grows meanwhile up to its size at the opening.
        while size > 0 and (piece := file.read(size)):
            pieces.append(piece)
            size -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def read_start(path: Path, most: int) -> tuple[bytes, int]:
    """Return the first bytes of an ordinary file, and the size of the file. Blocks. See `ordinary_files`."""
    with open(path, "rb", buffering=0, opener=ordinary_files) as file:
        return file.read(most), os.fstat(file.fileno()).st_size


def read_secret_file(path: Path) -> bytes:
    """Return the secret in a file, a pipe or a terminal. Blocks. For errors see `Disk.read_secret`."""
    # Without waiting for the other end of a pipe.
    with open(path, "rb", buffering=0, opener=_open_now_or_never) as file:
        found = os.fstat(file.fileno())
        # A terminal's device, for a secret typed by a person, is open to its group.
        if not stat.S_ISCHR(found.st_mode) and found.st_mode & OTHERS:
            mode = f"{stat.S_IMODE(found.st_mode):04o}"
            raise PermissionError(f"others can read or change it, its mode is {mode}: run chmod 600 {path}")
        if stat.S_ISREG(found.st_mode) and found.st_uid not in (0, os.geteuid()):
            raise PermissionError(
                f"it belongs to user {found.st_uid}, who can change it: copy it to a file of your own"
            )
        data = b""
        readable = select.poll()
        readable.register(file, select.POLLIN)
        while len(data) <= SECRET_BYTES:
            if not readable.poll(SECRET_S * 1000):
                raise TimeoutError(f"it had nothing to read for {SECRET_S:g} s")
            piece = file.read(SECRET_BYTES + 1 - len(data))
            if piece == b"":
                return data
            data += piece or b""
    raise OSError(f"it holds more than {SECRET_BYTES} bytes")


def _open_now_or_never(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
