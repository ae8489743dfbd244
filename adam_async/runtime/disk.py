"""The system's side of the ports: disk, clock and dice as product code receives them.

Every other file gets these as arguments, so that a simulation can hand over its own. This file and the
few others named in tests/test_import_rules.py are the only ones that touch the operating system.

**Disk.** All blocking file work of one `Disk` runs on one thread of its own, in the order asked for. One
thread, because ordinary disks gain little from more, and because order then needs no further thought.
`write_atomic` writes beside the target, forces the bytes down with ``fdatasync``, renames, and forces the
folder down: after a crash the target is the old file or the new one, whole. What is made of several files
is written into a folder aside, file by file with `write_down`, and then renamed as a whole. A `Disk` belongs
to whoever opened it (``async with Disk() as disk``).
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import stat
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar, TypeVarTuple

import aiofiles.os
import aiofiles.threadpool

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")
Part = bytes | bytearray | memoryview

Opener = Callable[[str, int], int]
"""Opens a file by its path and flags, and returns its descriptor."""

Clock = Callable[[], float]
"""Seconds from an arbitrary start; only differences mean something. In a loop this is ``loop.time``."""

Entropy = Callable[[int], bytes]
"""Return that many unpredictable bytes: nonces, session ids, incarnations. Never used for training."""

SECRET_BYTES = 65536
"""Maximum size of a secret, in bytes; a larger file is no secret."""

OTHERS = stat.S_IRWXG | stat.S_IRWXO
"""Permission bits of a file for all users except its owner."""


def system_clock() -> Clock:
    """Return the clock of the running loop. Raises RuntimeError outside one."""
    return asyncio.get_running_loop().time


def fine_clock() -> float:
    """Seconds of the system's monotonic clock, in any thread and the same in all processes of a machine.

    The clock of a loop may be this one rounded to milliseconds, as uvloop's is; that of the compute pool is
    exactly this one.
    """
    return time.monotonic()


def system_entropy(size_bytes: int) -> bytes:
    """Return `size_bytes` bytes from the operating system's generator."""
    return os.urandom(size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStatistics:
    """What a disk has done since it was opened."""

    reads: int
    read_bytes: int
    writes: int
    written_bytes: int


class Disk:
    """Files, on one thread of their own.

    Paths are `pathlib.Path`. Errors are the system's own (`FileNotFoundError`, `PermissionError`, ...).
    Cancelling any method lets go of the answer; the step that has begun on the thread runs to its end
    there, so a cancelled `write_atomic` leaves the old file or the new one, whole.

    Args:
        name: What the thread and the repr are called.
        close_timeout_s: How long `aclose` waits for work that was asked for before it.
        private: Makes files and folders that only their owner can access (0600 and 0700). Without it the
            process's umask decides.
    """

    def __init__(self, *, name: str = "disk", close_timeout_s: float = 10.0, private: bool = False) -> None:
        self._opener = _open_private if private else None
        self._folder_mode = 0o700 if private else 0o777
        self._name = name
        self._close_timeout_s = close_timeout_s
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._closed = False
        # One write at a time: two writes of one path would otherwise share their aside file.
        self._writing = asyncio.Lock()
        self._reads = self._read_bytes = self._writes = self._written_bytes = 0

    async def __aenter__(self) -> "Disk":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Finish what was asked for, then end the thread. Safe to call twice.

        Cancelling it, or its deadline, drops what is queued; the thread ends with the job it is in. The
        deadline is a line in the log and no error: whoever wants to know that his work was done waits for it.
        """
        if self._closed:
            return
        self._closed = True
        try:
            async with asyncio.timeout(self._close_timeout_s):
                await self.run(_nothing)
        except TimeoutError:
            logger.warning("%s: not done after %g s; it is closed", self._name, self._close_timeout_s)
        finally:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def statistics(self) -> DiskStatistics:
        """Count what was read and written."""
        return DiskStatistics(
            reads=self._reads,
            read_bytes=self._read_bytes,
            writes=self._writes,
            written_bytes=self._written_bytes,
        )

    def __repr__(self) -> str:
        return f"<Disk {self._name} {self._reads} reads {self._writes} writes>"

    async def run(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Run a blocking function on the disk's thread, in turn; for decoding what was read."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    async def read_bytes(self, path: Path) -> bytes:
        """Return the whole file."""
        async with self._open(path, "rb") as file:
            data: bytes = await file.read()
        self._reads += 1
        self._read_bytes += len(data)
        return data

    async def read_secret(self, path: Path) -> bytes:
        """Return the secret in a file, or in a pipe such as that of ``<(command)``.

        Raises:
            PermissionError: Other users may read or change the file, or its owner is neither this user nor
                root; the text names the remedy.
            OSError: The file is larger than `SECRET_BYTES`, or the system cannot read it.
        """
        data = await self.run(_read_secret, path)
        self._reads += 1
        self._read_bytes += len(data)
        return data

    async def keep_private(self, path: Path) -> str:
        """Revoke the access of all users except the owner of a file.

        Returns:
            The previous mode, such as ``0644``; empty if other users had no access.

        Raises:
            OSError: The file is missing, or belongs to another user.
        """
        return await self.run(_keep_private, path)

    async def read_part(self, path: Path, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop` of a file, or fewer if it ends before."""
        async with self._open(path, "rb") as file:
            await file.seek(start)
            data: bytes = await file.read(stop - start)
        self._reads += 1
        self._read_bytes += len(data)
        return data

    async def read_pieces(self, path: Path, piece_bytes: int) -> AsyncGenerator[bytes, None]:
        """Yield a file piece by piece; it is opened once. Close the generator (`contextlib.aclosing`)."""
        self._reads += 1
        async with self._open(path, "rb") as file:
            while data := await file.read(piece_bytes):
                self._read_bytes += len(data)
                yield data

    @contextlib.asynccontextmanager
    async def _open(self, path: Path, mode: str) -> AsyncIterator[Any]:
        """Open a file so that it is closed whatever is cancelled, which aiofiles does not promise.

        A cancelled wait for `open` loses the file that the thread is about to return, and a cancelled wait
        for `close` may never begin it. So closing is queued on the thread and not waited for; writers
        flush before they leave, so that nothing can fail in it.
        """
        opening: Future[IO[bytes]] = self._executor.submit(self._open_now, path, mode)
        try:
            yield aiofiles.threadpool.wrap(await asyncio.wrap_future(opening), executor=self._executor)
        finally:
            opening.add_done_callback(self._close_later)

    def _open_now(self, path: Path, mode: str) -> IO[bytes]:
        file: IO[bytes] = open(path, mode, opener=self._opener)
        return file

    def _close_later(self, opening: "Future[IO[bytes]]") -> None:
        if not opening.cancelled() and opening.exception() is None:
            file = opening.result()
            try:
                self._executor.submit(file.close)
            except RuntimeError:  # the disk was closed meanwhile
                file.close()

    @contextlib.asynccontextmanager
    async def hold(self, path: Path) -> AsyncIterator[None]:
        """Hold the lock of a file, made if it is not there, for as long as the block lasts.

        The system lets go of it when the process ends, in whatever way; the file stays. Leaving the block
        lets go in turn on the disk's thread, behind all that was asked for in it.

        Raises:
            BlockingIOError: Somebody holds it, in this process or another.
            OSError: The file cannot be made, or its file system has no locks.
        """
        # For writing: a network file system gives this lock to nobody who only reads.
        async with self._open(path, "ab") as file:
            await self.run(fcntl.flock, file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield

    async def names(self, folder: Path) -> list[str]:
        """Return the names in a folder, sorted."""
        return sorted(await aiofiles.os.listdir(folder, executor=self._executor))

    async def make_folder(self, folder: Path) -> None:
        """Make a folder and those on the way to it, unless they are there. The names of new ones are durable.

        Raises:
            OSError: One cannot be made, or is a file.
        """
        await self.run(_make_folder, folder, self._folder_mode)

    async def rename(self, path: Path, target: Path) -> None:
        """Rename a file or folder, durably. It replaces a file and an empty folder, and nothing else."""
        await self.run(_rename_durably, path, target)

    async def remove_folder(self, folder: Path) -> None:
        """Remove a folder with all that is in it, if it is there."""
        await self.run(_remove_folder, folder)

    async def write_down(self, path: Path, parts: Iterable[Part]) -> int:
        """Write a new file into a folder that nobody reads yet; its bytes are durable on return.

        Returns its size in bytes. A write that fails or is cancelled leaves what it had written: the folder
        is to be removed.
        """
        async with self._writing:
            written = await self._write(path, parts)
        self._writes += 1
        self._written_bytes += written
        return written

    async def write_from(self, path: Path, offset: int, data: Part) -> None:
        """Continue a file that holds `offset` bytes, or begin it anew with offset 0. Not forced down.

        Raises:
            OSError: It holds more or fewer bytes than that: somebody else writes it too.
        """
        await self.run(_write_from, path, offset, data, self._opener)
        self._writes += 1
        self._written_bytes += memoryview(data).nbytes

    async def append_durably(self, path: Path, offset: int, data: Part) -> None:
        """Write `data` behind the `offset` bytes that a file holds; durable on return. For logs.

        Offset 0 begins the file anew, and its name is durable too. It is one job of the disk's thread: what
        others ask for comes before it or after it. One that fails, or a crash in it, may leave some of the
        data there or other bytes in its place: the next is refused until `truncate_durably` has cut it off.

        Raises:
            OSError: It holds more or fewer bytes than that, is not there, or the system's own reasons.
        """
        await self.run(_append_durably, path, offset, data, self._opener)
        self._writes += 1
        self._written_bytes += memoryview(data).nbytes

    async def truncate_durably(self, path: Path, size: int) -> None:
        """Cut a file off behind `size` bytes; durable on return.

        Raises:
            OSError: It holds fewer bytes than that, or is not there.
        """
        await self.run(_truncate_durably, path, size)

    async def sync_file(self, path: Path) -> None:
        """Force down what was written to a file with `write_from`."""
        await self.run(_force_file, path)

    async def sync_folder(self, folder: Path) -> None:
        """Force down which files a folder holds."""
        await self.run(_force_folder, folder)

    async def write_atomic(self, path: Path, parts: Iterable[Part]) -> None:
        """Replace the file by the concatenation of `parts`, all or nothing, and durable on return.

        Folders on the way are made, as `make_folder` does. A failed write removes what it had written aside.
        """
        aside = path.with_name(f"{path.name}.{os.getpid()}.aside")
        async with self._writing:
            await self.run(_make_folder, path.parent, self._folder_mode)
            try:
                written = await self._write(aside, parts)
                await self.run(_rename_durably, aside, path)
            except BaseException:
                # Queued, not awaited: a cancelled task must not wait again, and the thread keeps order.
                self._executor.submit(_remove_if_there, aside)
                raise
        self._writes += 1
        self._written_bytes += written

    async def write_private(self, path: Path, data: bytes) -> None:
        """Write a new file that only its owner can read (mode 0600).

        Raises:
            FileExistsError: A file of this name exists.
            OSError: The system cannot write the file.
        """
        await self.run(_write_private, path, data)

    async def _write(self, path: Path, parts: Iterable[Part]) -> int:
        """Write a file and force its bytes down. Returns how many they are."""
        written = 0
        async with self._open(path, "wb") as file:
            for part in parts:
                written += await file.write(part)
            await file.flush()
            await self.run(_force_data, file.fileno())
        return written


def _nothing() -> None:
    """Take a turn on the disk's thread."""


def _force_data(descriptor: int) -> None:
    # macOS has no fdatasync; fsync is the stronger of the two.
    getattr(os, "fdatasync", os.fsync)(descriptor)


def _force_file(path: Path) -> None:
    with open(path, "rb") as file:
        _force_data(file.fileno())


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _read_secret(path: Path) -> bytes:
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())
        # The terminal's own device, where a person types the secret, is open to its group.
        if not stat.S_ISCHR(found.st_mode) and found.st_mode & OTHERS:
            mode = f"{stat.S_IMODE(found.st_mode):04o}"
            raise PermissionError(f"others can read or change it, its mode is {mode}: run chmod 600 {path}")
        if stat.S_ISREG(found.st_mode) and found.st_uid not in (0, os.geteuid()):
            raise PermissionError(
                f"it belongs to user {found.st_uid}, who can change it: copy it to a file of your own"
            )
        data = file.read(SECRET_BYTES + 1)
    if len(data) > SECRET_BYTES:
        raise OSError(f"it holds more than {SECRET_BYTES} bytes")
    return data


def _keep_private(path: Path) -> str:
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if not mode & OTHERS:
        return ""
    os.chmod(path, mode & ~OTHERS)
    return f"{mode:04o}"


def _write_private(path: Path, data: bytes) -> None:
    # Set the mode at creation, so that other users can never open the file.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def _make_folder(folder: Path, mode: int) -> None:
    if folder != folder.parent and not os.path.exists(folder.parent):
        _make_folder(folder.parent, mode)
    try:
        os.mkdir(folder, mode)
    except OSError:  # some systems name another reason for a folder that is there
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
    finally:
        os.close(descriptor)


def _write_from(path: Path, offset: int, data: Part, opener: Opener | None) -> None:
    with open(path, "ab", opener=opener) as file:
        if offset == 0:
            file.truncate(0)
        held = file.seek(0, os.SEEK_END)
        if held != offset:
            raise OSError(f"{path} holds {held} bytes instead of {offset}; does another program write it?")
        file.write(data)


def _append_durably(path: Path, offset: int, data: Part, opener: Opener | None) -> None:
    with open(path, "r+b" if offset else "wb", opener=opener) as file:
        held = file.seek(0, os.SEEK_END)
        if held != offset:
            raise OSError(f"{path} holds {held} bytes instead of {offset}; does another program write it?")
        file.write(data)
        file.flush()
        _force_data(file.fileno())
    if offset == 0:
        _force_folder(path.parent)


def _truncate_durably(path: Path, size: int) -> None:
    with open(path, "r+b") as file:
        held = file.seek(0, os.SEEK_END)
        if held < size:
            raise OSError(f"{path} holds {held} bytes and cannot be cut off behind {size}")
        file.truncate(size)
        _force_data(file.fileno())


def _remove_folder(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def _remove_if_there(path: Path) -> None:
    path.unlink(missing_ok=True)
