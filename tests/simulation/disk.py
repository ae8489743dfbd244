"""The disk interface over a disk model: each step takes its time, in order of the calls, and may fail.

A begun step runs to its end even if its caller is cancelled, as on the real disk's thread. A step that waits
while the machine crashes never happens. A durable change is made when its step begins, and synced when the
step ends. After a crash in between, the disk model decides whether it survives. A call may be slow, fail with
EIO, or get stuck.
"""

import asyncio
import errno
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from adam_async.runtime.disk import Disk, FileFacts, Part, check_size, each_part
from adam_async.runtime.ordinary_files import MOST_READ_BYTES
from tests.simulation.disk_model import DiskModel, Inode
from tests.simulation.host import HOST
from tests.simulation.loop import SimulatedLoop
from tests.simulation.random_streams import RandomStream

CLOSE_S = 10.0
"""Time limit for earlier steps when a disk is closed, in seconds, as for a real disk."""

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


@dataclass(kw_only=True)
class DiskConditions:
    """Behaviour of a disk, which may change at any time.

    Attributes:
        step_s: Least duration of a step, in seconds.
        jitter_s: Maximum additional duration of a step, drawn at random, in seconds.
        sync_s: Additional duration of a step with a sync, in seconds.
        bytes_per_s: Speed of reads and writes, in bytes per second.
        fail: Share of steps that fail with EIO; a failed sync makes nothing durable.
        fail_syncs: Share of syncs, and of writes with a sync, that fail with EIO.
        stuck: Whether steps wait until this field is False.
    """

    step_s: float = 0.0001
    jitter_s: float = 0.0002
    sync_s: float = 0.002
    bytes_per_s: float = 200e6
    fail: float = 0.0
    fail_syncs: float = 0.0
    stuck: bool = False


class _Job:
    """A step in the queue, or in progress.

    Attributes:
        call: Function to call at the end of the step. The function of a durable change is called at the
            beginning of the step, and returns the files and folders to sync at its end.
        error: Error decided at the beginning, raised at the end.
    """

    __slots__ = ("call", "done", "error", "forces", "took_s")

    def __init__(
        self, call: Callable[[], Any], took_s: float, forces: bool, done: "asyncio.Future[Any]"
    ) -> None:
        self.call = call
        self.took_s = took_s
        self.forces = forces
        self.done = done
        self.error: OSError | None = None


class SimulatedDisk(Disk):
    """The disk interface of one machine's incarnation.

    Args:
        disk_model: Content of the disk, which survives crashes.
    """

    def __init__(
        self, loop: SimulatedLoop, disk_model: DiskModel, conditions: DiskConditions, dice: RandomStream
    ) -> None:
        # The base class would start a thread.
        self._loop = loop
        self._disk_model = disk_model
        self._conditions = conditions
        self._dice = dice
        self._host = HOST.get(loop.outside)
        self._queue: deque[_Job] = deque()
        self._working = False
        self._closed = False
        self._asides = 0
        self._reads = self._read_bytes = self._writes = self._written_bytes = 0

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            with suppress(OSError):  # TimeoutError is an OSError
                async with asyncio.timeout(CLOSE_S):
                    await self._ask(_nothing)

    def __repr__(self) -> str:
        return f"<SimulatedDisk of {self._host.name}, {len(self._queue)} steps wait>"

    # --- the queue ---------------------------------------------------------------------------

    def _ask(self, step: Callable[[], Result], *, moved_bytes: int = 0) -> "asyncio.Future[Result]":
        """Queue a step."""
        return self._queued(step, moved_bytes, forces=False)

    def _force(
        self, change: Callable[[], Sequence[Inode]], *, moved_bytes: int = 0
    ) -> "asyncio.Future[None]":
        """Queue a durable change; the files and folders that it returns are synced."""
        return self._queued(change, moved_bytes, forces=True)

    def _queued(self, call: Callable[[], Any], moved_bytes: int, *, forces: bool) -> "asyncio.Future[Any]":
        conditions = self._conditions
        took_s = conditions.step_s + conditions.jitter_s * self._dice.random()
        job = _Job(call, took_s + moved_bytes / conditions.bytes_per_s, forces, self._loop.create_future())
        self._queue.append(job)
        self._work()
        return job.done

    def _work(self) -> None:
        if self._queue and not self._working:
            self._working = True
            job = self._queue[0]
            if job.forces:
                try:
                    self._may_fail(self._conditions.fail_syncs)
                    inodes = job.call()
                except OSError as error:
                    job.error = error
                else:
                    job.call = partial(_sync, inodes)
                    job.took_s += self._conditions.sync_s * len(inodes)
            self._loop.at(self._loop.now + job.took_s, self._finish)

    def _finish(self) -> None:
        if not self._host.up:
            return
        if self._conditions.stuck:
            self._loop.at(self._loop.now + self._queue[0].took_s, self._finish)
            return
        job = self._queue.popleft()
        self._working = False
        try:
            if job.error is not None:
                raise job.error
            self._may_fail()
            result = job.call()
        except OSError as error:
            if not job.done.done():
                job.done.set_exception(error)
        else:
            if not job.done.done():
                job.done.set_result(result)
        self._work()

    def _may_fail(self, share: float = 0.0) -> None:
        if self._dice.chance(max(share, self._conditions.fail)):
            raise OSError(errno.EIO, "Input/output error")

    # --- the port ----------------------------------------------------------------------------

    async def run(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Run a function as a step.

        The function must not touch real files, because the disk model does not have them.
        """
        return await self._ask(lambda: function(*arguments))

    async def read_bytes(self, path: Path, most: int = MOST_READ_BYTES) -> bytes:
        data = await self._read(path, 0, most + 1)
        if len(data) > most:
            raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
        return data

    async def file_facts(self, path: Path) -> FileFacts:
        return await self._ask(lambda: FileFacts(len(self._disk_model.file(path).data), 0.0))

    async def read_part(self, path: Path, start: int, stop: int) -> bytes:
        return await self._read(path, start, stop)

    async def _read(self, path: Path, start: int, stop: int) -> bytes:
        data = await self._ask(lambda: bytes(self._disk_model.file(path).data[start:stop]))
        await self._ask(_nothing, moved_bytes=len(data))
        return data

    async def read_pieces(self, path: Path, piece_bytes: int) -> AsyncGenerator[bytes, None]:
        inode = await self._ask(lambda: self._disk_model.file(path))
        start = 0
        while data := await self._ask(partial(_piece, inode, start, piece_bytes), moved_bytes=piece_bytes):
            start += len(data)
            yield data

    @asynccontextmanager
    async def hold(self, path: Path) -> AsyncIterator[None]:
        holders = self._disk_model.holders

        def alive() -> bool:
            return self._host.up

        def take() -> None:
            """Lock the file for this host, unless a live host has it."""
            if path in holders and holders[path]():
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable", str(path))
            try:
                self._disk_model.file(path)
            except FileNotFoundError:
                self._disk_model.create(path)
            holders[path] = alive

        await self._ask(take)
        try:
            yield
        finally:
            if holders.get(path) is alive:
                del holders[path]

    async def size(self, path: Path) -> int:
        return await self._ask(lambda: len(self._disk_model.file(path).data))

    async def names(self, folder: Path) -> list[str]:
        return await self._ask(lambda: sorted(self._disk_model.folder(folder)[1]))

    async def folders(self, folder: Path) -> list[str]:
        def find() -> list[str]:
            _, inodes = self._disk_model.folder(folder)
            return sorted(name for name, inode in inodes.items() if inode.names is not None)

        return await self._ask(find)

    async def make_folder(self, folder: Path) -> None:
        await self._force(lambda: self._disk_model.make_folder(folder))

    async def rename(self, path: Path, target: Path) -> None:
        def rename() -> list[Inode]:
            self._disk_model.rename(path, target)
            return [self._disk_model.folder(target.parent)[0]]

        await self._force(rename)

    async def remove_folder(self, folder: Path) -> None:
        def remove() -> None:
            try:
                self._disk_model.folder(folder)
            except FileNotFoundError:
                return
            self._disk_model.remove(folder)

        await self._ask(remove)

    async def remove_file(self, path: Path) -> None:
        await self._ask(partial(self._remove_if_there, path))

    async def write_from(self, path: Path, offset: int, data: Part) -> None:
        content = bytes(data)

        def write() -> None:
            try:
                inode = self._disk_model.file(path)
            except FileNotFoundError:
                inode = self._disk_model.create(path)
            if offset == 0:
                self._disk_model.truncate(inode, 0)
            check_size(path, len(inode.data), offset)
            self._disk_model.append(inode, content)

        await self._ask(write, moved_bytes=len(content))

    async def append_made(self, path: Path, offset: int, make: Callable[[], Sequence[Part]]) -> int:
        content = b"".join([bytes(part) for part in make()])
        await self.write_from(path, offset, content)
        return len(content)

    async def append_durably(self, path: Path, offset: int, data: Part) -> None:
        content = bytes(data)

        def write() -> list[Inode]:
            inode = self._disk_model.file(path) if offset else self._disk_model.create(path)
            check_size(path, len(inode.data), offset)
            self._disk_model.append(inode, content)
            return [inode] if offset else [inode, self._disk_model.folder(path.parent)[0]]

        await self._force(write, moved_bytes=len(content))

    async def read_secret(self, path: Path) -> bytes:
        """Return the bytes of a file. A simulated machine has one user: files have no modes."""
        return await self.read_bytes(path)

    async def write_private(self, path: Path, data: bytes) -> None:
        """Write a new file.

        Raises:
            FileExistsError: A file of this name exists.
        """
        if path.name in await self.names(path.parent):
            raise FileExistsError(f"{path} exists")
        await self._write(path, [data])

    async def keep_private(self, path: Path) -> str:
        return ""  # a simulated machine has one user

    async def truncate_durably(self, path: Path, size: int) -> None:
        def cut() -> list[Inode]:
            inode = self._disk_model.file(path)
            if len(inode.data) < size:
                raise OSError(f"{path} holds {len(inode.data)} bytes and cannot be cut off behind {size}")
            self._disk_model.truncate(inode, size)
            return [inode]

        await self._force(cut)

    async def sync_file(self, path: Path) -> None:
        await self._force(lambda: [self._disk_model.file(path)])

    async def sync_folder(self, folder: Path) -> None:
        await self._force(lambda: [self._disk_model.folder(folder)[0]])

    async def write_atomic(self, path: Path, parts: Iterable[Part] | AsyncIterable[Part]) -> None:
        self._asides += 1
        aside = path.with_name(f"{path.name}.{self._asides}.aside")
        await self.make_folder(path.parent)
        try:
            await self._write(aside, parts)
            await self.rename(aside, path)
        except BaseException:
            # Queue the removal without awaiting it: a cancelled task must not wait again.
            self._ask(lambda: self._remove_if_there(aside)).add_done_callback(_retrieve)
            raise

    async def _write(self, path: Path, parts: Iterable[Part] | AsyncIterable[Part]) -> None:
        """Write a file and sync it."""
        content = b"".join([bytes(part) async for part in each_part(parts)])

        def write() -> list[Inode]:
            inode = self._disk_model.create(path)
            self._disk_model.append(inode, content)
            return [inode]

        await self._force(write, moved_bytes=len(content))

    def _remove_if_there(self, path: Path) -> None:
        try:
            self._disk_model.remove(path)
        except FileNotFoundError:
            return


def _piece(inode: Inode, start: int, count: int) -> bytes:
    return bytes(inode.data[start : start + count])


def _sync(inodes: Sequence[Inode]) -> None:
    for inode in inodes:
        inode.sync()


def _nothing() -> None:
    """Do nothing: the function of a step that only takes time."""


def _retrieve(done: "asyncio.Future[None]") -> None:
    """Retrieve the error of a removal that no task awaits; the caller gets the earlier error of the write."""
    if not done.cancelled():
        done.exception()
