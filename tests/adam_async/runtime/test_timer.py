"""The timer looks when the deadline has come, and only then."""

import asyncio
from contextlib import asynccontextmanager

from adam_async.runtime.timer import Timer


class Watched:
    """A deadline that tests move."""

    def __init__(self):
        self.deadline = None
        self.calls = 0
        self.called = asyncio.Event()

    def next_deadline(self):
        return self.deadline

    def due(self):
        self.calls += 1
        self.deadline = None
        self.called.set()


@asynccontextmanager
async def running(watched):
    timer = Timer(watched.next_deadline, watched.due)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(timer.run(), name="timer")
        await asyncio.sleep(0)
        yield timer
        task.cancel()


def now():
    return asyncio.get_running_loop().time()


async def test_a_deadline_that_has_come_is_noticed_once():
    watched = Watched()
    watched.deadline = now() - 1.0
    async with running(watched):
        await watched.called.wait()
        await asyncio.sleep(0)
        assert watched.calls == 1


async def test_without_a_deadline_it_sleeps_until_rearmed():
    watched = Watched()
    async with running(watched) as timer:
        for _ in range(5):
            await asyncio.sleep(0)
        assert watched.calls == 0
        watched.deadline = now()
        timer.rearm()
        await watched.called.wait()
        assert watched.calls == 1


async def test_a_deadline_that_moves_nearer_is_met_after_rearming():
    watched = Watched()
    watched.deadline = now() + 1000.0
    async with running(watched) as timer:
        watched.deadline = now() + 0.01
        begin = now()
        timer.rearm()
        await watched.called.wait()
        assert now() - begin < 100.0


async def test_a_deadline_that_moves_away_in_the_turn_in_which_it_comes_is_not_met():
    watched = Watched()
    watched.deadline = now() - 1.0
    async with running(watched) as timer:  # the timer is about to find that it is late
        watched.deadline = now() + 1000.0
        timer.rearm()
        for _ in range(5):
            await asyncio.sleep(0)
        assert watched.calls == 0


async def test_a_deadline_that_moves_away_is_not_met_early():
    watched = Watched()
    watched.deadline = now() + 0.001
    async with running(watched) as timer:
        watched.deadline = now() + 1000.0
        timer.rearm()
        probe = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.01, probe.set_result, None)
        await probe
        assert watched.calls == 0
