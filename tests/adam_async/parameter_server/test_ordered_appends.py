"""The steps of a bundle in order; some steps wait until an entry is on the disk."""

import asyncio

import numpy as np
import pytest

from adam_async.parameter_server import ordered_appends
from adam_async.parameter_server.ordered_appends import OrderedAppends
from transport import RemoteProtocolError


class HeldJournal:
    """A journal whose appends end when the test says so."""

    def __init__(self):
        self.may_end = asyncio.Event()

    async def append(self, position, generation, parts, *, of_primary):
        await self.may_end.wait()

    def applied(self, position):
        raise AssertionError("no entry is applied here")


def steps_of(journal):
    tasks = []

    def spawn(name, work):
        tasks.append(asyncio.get_running_loop().create_task(work, name=name))
        return tasks[-1]

    return OrderedAppends(journal, spawn), tasks


async def test_a_step_waits_until_its_entry_is_on_the_disk():
    journal, done = HeldJournal(), []
    steps, tasks = steps_of(journal)
    steps.append(1, 1, [], lambda: done.append("entry"), "entry")
    steps.add(lambda: done.append("message behind it"))
    await asyncio.sleep(0)
    assert done == []
    journal.may_end.set()
    await asyncio.gather(*tasks)
    assert done == ["entry", "message behind it"]


async def test_only_entries_of_this_server_count_for_their_positions():
    journal = HeldJournal()
    steps, tasks = steps_of(journal)
    steps.append(1, 1, [], lambda: None, None)
    steps.append(2, 1, [], lambda: None, "own")
    steps.add(lambda: None)
    assert (len(steps), steps.ordered_here) == (3, 1)
    journal.may_end.set()
    await asyncio.gather(*tasks)
    assert steps.ordered_here == 0


async def test_the_entries_of_another_server_that_wait_for_the_disk_are_bounded(monkeypatch):
    monkeypatch.setattr(ordered_appends, "MOST_BYTES", 100)
    journal = HeldJournal()
    steps, tasks = steps_of(journal)
    content = [[np.zeros(40, np.uint8)]]
    for position in (1, 2):
        steps.append(position, 1, content, lambda: None, None)
    with pytest.raises(RemoteProtocolError, match="120 bytes of entries wait for the disk"):
        steps.append(3, 1, content, lambda: None, None)
    journal.may_end.set()
    await asyncio.gather(*tasks)
    steps.append(3, 1, content, lambda: None, None)
    await asyncio.gather(*tasks)
