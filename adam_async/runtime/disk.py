"""The disk: files, read and written on a separate thread.

Product code receives a `Disk` as an argument, so a simulation can replace it.

**Disk.** All blocking file work of a `Disk` runs on one thread, in the order of its calls. One thread
suffices for ordinary disks, and keeps the order of the calls. A path that is not an ordinary file is an error
(`ordinary_files.py`). `write_atomic` writes a temporary file, makes its bytes durable with ``fdatasync``,
renames it, and syncs the folder. After a crash the target is the whole old or the whole new file. A set of
files is written into a temporary folder, and the folder is then renamed. The code that opens a `Disk` owns it
(``async with Disk() as disk``).
"""

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import shutil
import stat
import zlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeVar, TypeVarTuple

import aiofiles.os
import aiofiles.threadpool

from adam_async.runtime.blocking_thread import BlockingThread
from adam_async.runtime.ordinary_files import (
    MOST_READ_BYTES,
    OTHERS,
    Opener,
    ordinary_files,
    read_ordinary,
    read_secret_file,
)

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")
Part = bytes | bytearray | memoryview

MOST_NAME_BYTES = 255
"""Maximum length of a name in a folder, in bytes, on all usual file systems."""

NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})
"""Errors of file systems that cannot sync a folder, such as CIFS: their names are durable, or never."""

MOST_PARTS = 512
"""Maximum number of parts in one ``writev``; Linux takes 1,024."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Facts of a file that a program learns without reading it."""

    size: int
    """Size in bytes."""
    modified_s: float
    """Time of the last change, in seconds since 1970."""


class Disk:
    """Files, on a separate thread.

    Paths are `pathlib.Path`. Errors are the system's own (`FileNotFoundError`, `PermissionError`, ...).
    Cancelling any method drops its answer, but a step that has begun on the thread runs to its end. So a
    cancelled `write_atomic` leaves the whole old or the whole new file.

    Args:
        name: Name of the thread, for the log.
        close_timeout_s: Time limit of `aclose` for earlier calls, in seconds.
        private: Makes files and folders that only their owner can access (0600 and 0700). Otherwise the
            process's umask decides.
    """

    def __init__(self, *, name: str = "disk", close_timeout_s: float = 10.0, private: bool = False) -> None:
        self._opener = partial(ordinary_files, mode=0o600) if private else ordinary_files
        self._folder_mode = 0o700 if private else 0o777
        self._name = name
        self._close_timeout_s = close_timeout_s
        self._executor = BlockingThread(name)
        self._closed = False
        # One write at a time, because two writes to one path would share their temporary file.
        self._writing = asyncio.Lock()

    async def __aenter__(self) -> "Disk":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Finish earlier calls, then end the thread. Safe to call twice.

        A cancellation of the close, or its deadline, drops the queue; the thread ends with its current job. A
        missed deadline only logs a line, because a caller that needs its result waits for its own call.
        """
        if self._closed:
            return
        self._closed = True
        try:
            async with asyncio.timeout(self._close_timeout_s):
                await self.run(_nothing)
        except TimeoutError:
            logger.warning("%s: work left after %g s is dropped", self._name, self._close_timeout_s)
        finally:
            self._executor.end()

    def __repr__(self) -> str:
        return f"<Disk {self._name}>"

    async def run(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Run a blocking function on the disk's thread, after earlier calls; for decoding files."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    async def read_bytes(self, path: Path, most: int = MOST_READ_BYTES) -> bytes:
        """Return the whole file.

        Args:
            most: Maximum size of the file, in bytes.

        Raises:
            OSError: The file is larger than `most`, or is no ordinary file.
        """
        return await self.run(read_ordinary, path, most)

    async def read_secret(self, path: Path) -> bytes:
        """Return the secret in a file, or in a pipe such as ``<(command)``.

        Raises:
            TimeoutError: A pipe or terminal had nothing to read for `SECRET_S`.
            PermissionError: Other users may read or change the file, or its owner is neither this user nor
                root; the text names the remedy.
            OSError: The file is larger than `SECRET_BYTES`, or the system cannot read it.
        """
        return await self.run(read_secret_file, path)

    async def keep_private(self, path: Path) -> str:
        """Revoke the access of all users except the owner of a file.

        Returns:
            The previous mode, such as ``0644``; empty if other users had no access.

        Raises:
            OSError: The file is missing, or belongs to another user.
        """
        return await self.run(_keep_private, path)

    async def file_facts(self, path: Path) -> FileFacts:
        """Return the facts of a regular file.

        Raises:
            OSError: The path is missing, or is a link, a folder, a pipe or a device.
        """
        return await self.run(_file_facts, path)

    async def read_part(self, path: Path, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop` of a file, or fewer if the file ends before `stop`."""
        async with self._open(path, "rb") as file:
            await file.seek(start)
            data: bytes = await file.read(stop - start)
            return data

    async def read_pieces(self, path: Path, piece_bytes: int) -> AsyncGenerator[bytes, None]:
        """Yield a file piece by piece, opened once. Close the generator (`contextlib.aclosing`)."""
        async with self._open(path, "rb") as file:
            while data := await file.read(piece_bytes):
                yield data

    @contextlib.asynccontextmanager
    async def _open(self, path: Path, mode: str, flags: int = 0) -> AsyncIterator[Any]:
        """Open a file so that any cancellation still closes it, which aiofiles does not promise.

        A cancelled wait for `open` loses the file that the thread is about to return, and a cancelled wait
        for `close` may never begin the close. So the close is queued on the thread and not awaited; writers
        flush first, so the close cannot fail.
        """
        opening: Future[IO[bytes]] = self._executor.submit(self._open_now, path, mode, flags)
        try:
            yield aiofiles.threadpool.wrap(await asyncio.wrap_future(opening), executor=self._executor)
        finally:
            opening.add_done_callback(self._close_later)

    def _open_now(self, path: Path, mode: str, flags: int) -> IO[bytes]:
        file: IO[bytes] = open(path, mode, opener=lambda name, given: self._opener(name, given | flags))
        return file

    def _close_later(self, opening: "Future[IO[bytes]]") -> None:
        if not opening.cancelled() and opening.exception() is None:
            file = opening.result()
            try:
                self._executor.submit(file.close)
            except RuntimeError:  # the disk is closed by now
                file.close()

    @contextlib.asynccontextmanager
    async def hold(self, path: Path) -> AsyncIterator[None]:
        """Lock a file, made if missing, for the duration of the block.

        The system releases the lock when the process ends in any way; the file stays. The end of the block
        releases the lock on the disk's thread, after all calls in the block.

        Raises:
            BlockingIOError: This process or another one has the lock.
            OSError: The file is a link, cannot be made, or is on a file system without locks.
        """
        # Open for writing, because a network file system refuses this lock to a reader. Through a link in a
        # folder from elsewhere, this would make a file anywhere, or lock that of another run.
        async with self._open(path, "ab", os.O_NOFOLLOW) as file:
            await self.run(fcntl.flock, file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield

    async def size(self, path: Path) -> int:
        """Return the size of a file, in bytes."""
        return (await self.run(path.stat)).st_size

    async def names(self, folder: Path) -> list[str]:
        """Return the names in a folder, sorted."""
        return sorted(await aiofiles.os.listdir(folder, executor=self._executor))

    async def folders(self, folder: Path) -> list[str]:
        """Return the names of the folders in a folder, sorted, without links to folders."""
        return await self.run(_folders, folder)

    async def make_folder(self, folder: Path) -> None:
        """Make a folder and its missing parents. The folders' names are durable on return.

        Raises:
            OSError: A folder cannot be made, or its name is taken by a file.
        """
        await self.run(_make_folder, folder, self._folder_mode)

    async def rename(self, path: Path, target: Path) -> None:
        """Rename a file or folder, durably.

        The rename replaces a target that is a file or an empty folder.
        """
        await self.run(_rename_durably, path, target)

    async def remove_folder(self, folder: Path) -> None:
        """Remove a folder with its contents, if it exists."""
        await self.run(_remove_folder, folder)

    async def remove_file(self, path: Path) -> None:
        """Remove a file, if it exists."""
        await self.run(_remove_if_there, path)

    async def write_from(self, path: Path, offset: int, data: Part) -> None:
        """Append to a file of `offset` bytes; with offset 0 replace its content.

        The bytes are not yet durable.

        Raises:
            OSError: The file has another size: another program also writes it.
        """
        await self.run(_write_from, path, offset, data, self._opener)

    async def append_made(self, path: Path, offset: int, make: Callable[[], Sequence[Part]]) -> int:
        """Append the parts that `make` returns, as `write_from` does.

        The bytes are not yet durable. `make` runs on the disk's thread, for checksums; it must not touch
        objects that the loop may change.

        Returns:
            The number of bytes appended.

        Raises:
            OSError: The file has another size, or the system cannot write it. Some of the bytes may be there.
        """
        return await self.run(_append_made, path, offset, make, self._opener)

    async def append_durably(self, path: Path, offset: int, data: Part) -> None:
        """Append `data` to a file of `offset` bytes; durable on return. For logs.

        Offset 0 replaces the file's content, and its name is durable too. The append is one job on the disk's
        thread: other calls run before or after it. A failed append, or a crash in one, may leave some of the
        data, or other bytes in its place. Further appends fail until `truncate_durably` cuts them off.

        Raises:
            OSError: The file has another size or is missing, or the system cannot write it.
        """
        await self.run(_append_durably, path, offset, data, self._opener)

    async def truncate_durably(self, path: Path, size: int) -> None:
        """Cut a file down to `size` bytes; durable on return.

        Raises:
            OSError: The file is smaller, or missing.
        """
        await self.run(_truncate_durably, path, size)

    async def sync_file(self, path: Path) -> None:
        """Make durable the bytes written to a file with `write_from`."""
        await self.run(_force_file, path)

    async def sync_folder(self, folder: Path) -> None:
        """Make durable the names in a folder."""
        await self.run(_force_folder, folder)

    async def write_atomic(self, path: Path, parts: Iterable[Part] | AsyncIterable[Part]) -> None:
        """Replace a file by the concatenation of `parts`, all or nothing; durable on return.

        Missing folders are made, as by `make_folder`. A failed write removes its partial file.

        Raises:
            IsADirectoryError: The path is a folder, or empty.
        """
        if await self.run(path.is_dir):
            raise IsADirectoryError(errno.EISDIR, "a file is needed, and this is a folder", str(path))
        aside = path.with_name(name_beside(path.name, f".{os.getpid()}.aside"))
        async with self._writing:
            await self.run(_make_folder, path.parent, self._folder_mode)
            try:
                await self._write(aside, parts)
                await self.run(_rename_durably, aside, path)
            except BaseException as error:
                # Queued, not awaited: a cancelled task must not wait again, and the thread keeps order.
                self._executor.submit(_remove_if_there, aside)
                if isinstance(error, OSError) and str(error.filename) == str(aside):
                    error.filename = str(path)  # the caller does not know the temporary file
                raise

    async def write_private(self, path: Path, data: bytes) -> None:
        """Write a new file that only its owner can read (mode 0600).

        Raises:
            FileExistsError: A file of this name exists.
            OSError: The system cannot write the file.
        """
        await self.run(_write_private, path, data)

    async def _write(self, path: Path, parts: Iterable[Part] | AsyncIterable[Part]) -> None:
        """Write a file and make its bytes durable."""
        async with self._open(path, "wb") as file:
            async with contextlib.aclosing(each_part(parts)) as arriving:
                async for part in arriving:
                    await file.write(part)
            await file.flush()
            await self.run(_force_data, file.fileno())


async def each_part(parts: Iterable[Part] | AsyncIterable[Part]) -> AsyncGenerator[Part, None]:
    """Yield a file's parts, which may still arrive during the write."""
    if isinstance(parts, AsyncIterable):
        async for part in parts:
            yield part
    else:
        for part in parts:
            yield part


def name_beside(name: str, ending: str) -> str:
    """Return a temporary name in the same folder; a long name is cut and gets its checksum."""
    if len(os.fsencode(name + ending)) <= MOST_NAME_BYTES:
        return name + ending
    ending = f".{zlib.crc32(os.fsencode(name)):08x}{ending}"
    while len(os.fsencode(name + ending)) > MOST_NAME_BYTES:
        name = name[:-1]
    return name + ending


def check_size(path: Path, held: int, expected: int) -> None:
    """Check the size of a file before an append. Raises OSError: the size differs."""
    if held != expected:
        raise OSError(f"{path} holds {held} bytes instead of {expected}; does another program write it?")


def _nothing() -> None:
    """Do nothing: the result shows that earlier jobs of the thread have ended."""


def _force_data(descriptor: int) -> None:
    # macOS has no fdatasync; fsync is the stronger of the two.
    getattr(os, "fdatasync", os.fsync)(descriptor)


def _force_file(path: Path) -> None:
    with open(path, "rb", opener=ordinary_files) as file:
        _force_data(file.fileno())


def _file_facts(path: Path) -> FileFacts:
    # Not on a link's target: a folder from elsewhere may link to any file of this machine.
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is a link, a folder, a pipe or a device, and no file", str(path))
    return FileFacts(found.st_size, found.st_mtime)


def _keep_private(path: Path) -> str:
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if not mode & OTHERS:
        return ""
    os.chmod(path, mode & ~OTHERS)
    return f"{mode:04o}"


def _write_private(path: Path, data: bytes) -> None:
    # Set the mode at creation, so other users can never open the file.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def _make_folder(folder: Path, mode: int) -> None:
    if folder != folder.parent and not os.path.exists(folder.parent):
        _make_folder(folder.parent, mode)
    try:
        os.mkdir(folder, mode)
    except OSError:  # some systems report another error for a folder that exists
        if not os.path.isdir(folder):
            raise
    else:
        _force_folder(folder.parent)


def _rename_durably(aside: Path, path: Path) -> None:
    os.replace(aside, path)
    _force_folder(path.parent)


def _force_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def _write_from(path: Path, offset: int, data: Part, opener: Opener) -> None:
    with open(path, "ab", opener=opener) as file:
        if offset == 0:
            file.truncate(0)
        check_size(path, file.seek(0, os.SEEK_END), offset)
        file.write(data)


def _append_made(path: Path, offset: int, make: Callable[[], Sequence[Part]], opener: Opener) -> int:
    parts = make()
    # Without a buffer: a failed write must not be repeated by the close.
    with open(path, "ab", buffering=0, opener=opener) as file:
        if offset == 0:
            file.truncate(0)
        check_size(path, file.seek(0, os.SEEK_END), offset)
        _write_all(file.fileno(), parts)
    return sum([memoryview(part).nbytes for part in parts])


def _write_all(descriptor: int, parts: Sequence[Part]) -> None:
    """Write parts one after the other, many with one call of the system."""
    waiting = deque([memoryview(part).cast("B") for part in parts if memoryview(part).nbytes])
    while waiting:
        written = os.writev(descriptor, list(islice(waiting, MOST_PARTS)))
        while waiting and written >= waiting[0].nbytes:
            written -= waiting.popleft().nbytes
        if waiting:
            waiting[0] = waiting[0][written:]


def _append_durably(path: Path, offset: int, data: Part, opener: Opener) -> None:
    with open(path, "r+b" if offset else "wb", opener=opener) as file:
        check_size(path, file.seek(0, os.SEEK_END), offset)
        file.write(data)
        file.flush()
        _force_data(file.fileno())
    if offset == 0:
        _force_folder(path.parent)


def _truncate_durably(path: Path, size: int) -> None:
    with open(path, "r+b", opener=ordinary_files) as file:
        held = file.seek(0, os.SEEK_END)
        if held < size:
            raise OSError(f"{path} holds {held} bytes and cannot be cut off behind {size}")
        file.truncate(size)
        _force_data(file.fileno())


def _folders(folder: Path) -> list[str]:
    with os.scandir(folder) as found:
        return sorted(entry.name for entry in found if entry.is_dir(follow_symlinks=False))


def _remove_folder(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def _remove_if_there(path: Path) -> None:
    path.unlink(missing_ok=True)
