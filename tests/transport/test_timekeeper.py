"""A timekeeper is never early, keeps the order, and leaves no thread behind."""

import asyncio
from functools import partial
from typing import Any

import pytest

from transport.slow import Timekeeper


async def test_no_callback_runs_early_and_all_run_in_the_order_of_their_times() -> None:
    called: list[tuple[int, float]] = []
    over = asyncio.Event()
    async with Timekeeper("timer") as timekeeper:
        begin = timekeeper.clock()

        def ring(ms: int) -> None:
            called.append((ms, timekeeper.clock() - begin))
            if ms == 9:
                over.set()

        for ms in (5, 1, 9, 3, 7, 0):  # some are due before the end of the thread's sleep
            timekeeper.call_at(begin + ms / 1000, partial(ring, ms))
        await over.wait()

    assert [ms for ms, _ in called] == [0, 1, 3, 5, 7, 9]
    assert all(at >= ms / 1000 for ms, at in called)


async def test_callbacks_due_at_once_run_in_the_order_of_their_calls() -> None:
    called: list[int] = []
    over = asyncio.Event()
    async with Timekeeper("timer") as timekeeper:
        due = timekeeper.clock() + 0.002
        for number in range(100):
            timekeeper.call_at(due, partial(called.append, number))
        timekeeper.call_at(due, over.set)
        await over.wait()

    assert called == list(range(100))


async def test_leaving_runs_waiting_callbacks_in_order_and_later_ones_at_once() -> None:
    called: list[str] = []
    async with Timekeeper("timer") as timekeeper:
        assert timekeeper.is_open
        now = timekeeper.clock()
        timekeeper.call_at(now + 2000, partial(called.append, "last"))
        timekeeper.call_at(now + 1000, partial(called.append, "first"))

    assert called == ["first", "last"]
    timekeeper.call_at(now + 3000, partial(called.append, "late"))
    assert called == ["first", "last", "late"]
    # A fixture checks for every test that no thread is left.


async def test_one_callback_that_raises_spares_the_others() -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    called: list[int] = []

    def fail() -> None:
        raise ValueError("one of them")

    async with Timekeeper("timer") as timekeeper:
        timekeeper.call_at(timekeeper.clock() + 1000, fail)
        timekeeper.call_at(timekeeper.clock() + 1001, partial(called.append, 1))

    assert called == [1]
    assert [str(complaint["exception"]) for complaint in complaints] == ["one of them"]


@pytest.mark.parametrize("count", [1, 50])
async def test_the_loop_goes_on_while_time_passes(count: int) -> None:
    turns = 0
    over = asyncio.Event()
    async with Timekeeper("timer") as timekeeper:
        for _ in range(count):
            timekeeper.call_at(timekeeper.clock() + 0.003, over.set)
        while not over.is_set():
            turns += 1
            await asyncio.sleep(0)

    assert turns > 1
