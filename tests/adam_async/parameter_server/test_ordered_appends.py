"""The steps of a bundle in order; some steps wait until an entry is on the disk."""

import asyncio

import numpy as np
import pytest

from adam_async.parameter_server import bundle_saver
from adam_async.parameter_server.bundle_saver import OrderedAppends
from transport import RemoteProtocolError


class HeldDisk:
    """A disk whose appends end when the test says so."""

    def __init__(self):
        self.may_end = asyncio.Event()

    async def append(self, key, parts, *, of_primary):
        await self.may_end.wait()


def steps_of(disk):
    tasks = []

    def spawn(name, work):
        tasks.append(asyncio.get_running_loop().create_task(work, name=name))
        return tasks[-1]

    return OrderedAppends(disk, "ps-0", spawn), tasks


async def test_a_step_waits_until_its_entry_is_on_the_disk():
    disk, done = HeldDisk(), []
    steps, tasks = steps_of(disk)
    steps.append(1, 1, [], lambda: done.append("entry"), "entry")
    steps.add(lambda: done.append("message behind it"))
    await asyncio.sleep(0)
    assert done == []
    disk.may_end.set()
    await asyncio.gather(*tasks)
    assert done == ["entry", "message behind it"]


async def test_only_entries_of_this_server_count_for_their_positions():
    disk = HeldDisk()
    steps, tasks = steps_of(disk)
    steps.append(1, 1, [], lambda: None, None)
    steps.append(2, 1, [], lambda: None, "own")
    steps.add(lambda: None)
    assert (len(steps), steps.ordered_here) == (3, 1)
    disk.may_end.set()
    await asyncio.gather(*tasks)
    assert steps.ordered_here == 0


async def test_the_entries_of_another_server_that_wait_for_the_disk_are_bounded(monkeypatch):
    monkeypatch.setattr(bundle_saver, "MOST_BYTES", 100)
    disk = HeldDisk()
    steps, tasks = steps_of(disk)
    content = [[np.zeros(40, np.uint8)]]
    for position in (1, 2):
        steps.append(position, 1, content, lambda: None, None)
    with pytest.raises(RemoteProtocolError, match="120 bytes of entries wait for the disk"):
        steps.append(3, 1, content, lambda: None, None)
    disk.may_end.set()
    await asyncio.gather(*tasks)
    steps.append(3, 1, content, lambda: None, None)
    await asyncio.gather(*tasks)
