"""The timer wakes at its deadline and not before; loop lag is measured; entropy does not repeat."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from adam_async.errors import DeadlineExceeded
from adam_async.runtime.clock import INTERVAL_S, LoopLag, Timer, Within, system_entropy, utc_time


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


async def test_a_passed_deadline_fires_once():
    watched = Watched()
    watched.deadline = now() - 1.0
    async with running(watched):
        await watched.called.wait()
        await asyncio.sleep(0)
        assert watched.calls == 1


async def test_a_timer_without_a_deadline_sleeps_until_rearmed():
    watched = Watched()
    async with running(watched) as timer:
        for _ in range(5):
            await asyncio.sleep(0)
        assert watched.calls == 0
        watched.deadline = now()
        timer.rearm()
        await watched.called.wait()
        assert watched.calls == 1


async def test_a_deadline_that_moves_nearer_fires_in_time_after_rearming():
    watched = Watched()
    watched.deadline = now() + 1000.0
    async with running(watched) as timer:
        watched.deadline = now() + 0.01
        begin = now()
        timer.rearm()
        await watched.called.wait()
        assert now() - begin < 100.0


async def test_a_deadline_that_moves_away_in_the_iteration_in_which_it_passes_does_not_fire():
    watched = Watched()
    watched.deadline = now() - 1.0
    async with running(watched) as timer:  # the timer is about to find that it is late
        watched.deadline = now() + 1000.0
        timer.rearm()
        for _ in range(5):
            await asyncio.sleep(0)
        assert watched.calls == 0


async def test_a_deadline_that_moves_away_does_not_fire_early():
    watched = Watched()
    watched.deadline = now() + 0.001
    async with running(watched) as timer:
        watched.deadline = now() + 1000.0
        timer.rearm()
        probe = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.01, probe.set_result, None)
        await probe
        assert watched.calls == 0


def test_without_samples_there_is_no_lag():
    assert LoopLag().percentiles() == {"p50": 0.0, "p99": 0.0, "max": 0.0}


async def test_a_blocked_loop_lags():
    lag = LoopLag()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(lag.run(), name="lag")
        await asyncio.sleep(0)
        until = time.perf_counter() + 4 * INTERVAL_S
        while time.perf_counter() < until:
            sum(range(1000))  # no other callback runs
        for _ in range(3):  # the timer that is late runs, then the sampler
            await asyncio.sleep(0)
        task.cancel()
    found = lag.percentiles()
    assert found["max"] >= found["p99"] >= found["p50"] >= 0.0
    assert found["max"] >= INTERVAL_S


def test_entropy_has_the_length_asked_for_and_does_not_repeat():
    assert len(system_entropy(16)) == 16
    assert system_entropy(16) != system_entropy(16)


def test_any_time_of_a_file_has_a_date():
    assert utc_time(86_400.9) == "1970-01-02T00:00:00Z"
    assert (utc_time(-1e30), utc_time(1e30)) == ("1970-01-01T00:00:00Z", "9999-12-31T23:59:59Z")


# --- deadlines ---------------------------------------------------------------------------------


async def test_a_block_beyond_its_deadline_ends_with_the_name_of_the_wait_at_that_moment():
    late = ["worker-1"]
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.01 s for worker-2"):
        async with Within(0.01, lambda: ", ".join(late)):
            late[:] = ["worker-2"]
            await asyncio.Event().wait()


async def test_a_timeout_of_the_block_itself_is_not_taken_for_the_deadline():
    with pytest.raises(TimeoutError, match="a disk"):
        async with Within(50.0, "nothing"):
            raise TimeoutError("a disk")


async def test_a_block_may_move_its_deadline():
    passed = asyncio.Event()
    async with Within(0.01, "nothing") as limit:
        limit.reschedule(None)
        asyncio.get_running_loop().call_later(0.03, passed.set)
        await passed.wait()
