"""Stores on simulated disks, and disks that fail at a chosen call."""

import asyncio
import errno
from collections import Counter
from pathlib import Path

from adam_async.persistence.store import SegmentStore
from tests.adam_async.persistence.owners import HOME
from tests.simulation.disk import SimulatedDisk
from tests.simulation.scenario import simulate

SYNCS = ("sync_file", "sync_folder", "truncate_durably")
"""Calls that make bytes or names durable."""

WRITES = ("append_made", "write_from")
"""Calls that write bytes of segment files."""


class FailingDisk(SimulatedDisk):
    """A disk that counts its calls, and fails some.

    Attributes:
        fails: By name of the call: number of the call that fails, from 1, and its error number.
        calls: Names of the calls so far, of those that are watched.
    """

    watched = (*SYNCS, *WRITES, "remove_file", "rename")

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.fails: dict[str, tuple[int, int]] = {}
        self.calls: list[str] = []
        self._counts: Counter[str] = Counter()

    def _enter(self, call: str) -> None:
        self.calls.append(call)
        self._counts[call] += 1
        number, code = self.fails.get(call, (0, 0))
        if self._counts[call] == number:
            raise OSError(code, errno.errorcode[code])

    def fail_next(self, call: str, code: int = errno.EIO) -> None:
        """Fail the next call of this name."""
        self.fails[call] = self._counts[call] + 1, code


def _watched(name: str):
    async def call(self, *arguments):
        self._enter(name)
        return await getattr(SimulatedDisk, name)(self, *arguments)

    return call


for _name in FailingDisk.watched:
    setattr(FailingDisk, _name, _watched(_name))


def failing_disk(node) -> FailingDisk:
    """Open the disk of a node."""
    plain = node.open_disk()
    return FailingDisk(plain._loop, node.disk_model, node.disk_conditions, plain._dice)


def on_a_node(use, *, seed: int = 1, disk_model=None):
    """Run `use(node)` as the program of a machine with an empty disk, and return its result."""

    async def scenario(world):
        node = world.node("ps-0")
        if disk_model is not None:
            node.disk_model = disk_model

        async def program(node):
            await node.open_disk().make_folder(HOME.parent)
            return await use(node)

        node.start(program)
        return await node.task

    return simulate(scenario, seed=seed).result


class Running:
    """A store that is opened and runs, for a block.

    Attributes:
        ended: The task of `run`, whose error the test reads.
    """

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self.ended: asyncio.Task[None]

    async def __aenter__(self) -> SegmentStore:
        self._block = self._store.opened()
        await self._block.__aenter__()
        self.ended = asyncio.get_running_loop().create_task(self._store.run(), name="store")
        return self._store

    async def __aexit__(self, *exc) -> None:
        self.ended.cancel()
        await asyncio.wait([self.ended])
        if not self.ended.cancelled():
            self.ended.exception()
        await self._block.__aexit__(None, None, None)


def flip(disk_model, path: Path, at: int, bit: int = 0) -> None:
    """Flip a bit of a file, in the cache and on the platter."""
    inode = disk_model.file(path)
    inode.data[at] ^= 1 << bit
    inode.kept[:] = inode.data
