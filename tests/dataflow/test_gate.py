"""A closed gate stops threads between two units of their work, and an open one lets them go on."""

import asyncio
from contextlib import AsyncExitStack
from queue import SimpleQueue
from threading import Thread

import pytest

from dataflow import Gate


class Worker:
    """A thread that does units of work one after the other, as the test orders them."""

    def __init__(self, gate: Gate, loop: asyncio.AbstractEventLoop) -> None:
        self.gate, self._loop = gate, loop
        self._orders: SimpleQueue[bool] = SimpleQueue()
        self.done: asyncio.Queue[int] = asyncio.Queue()
        self._thread = Thread(target=self._work, name="units")
        self._thread.start()

    def _work(self) -> None:
        units = 0
        with self.gate:
            self._report(units)
            while self._orders.get():
                units += 1
                self.gate.pass_through()
                self._report(units)

    def _report(self, units: int) -> None:
        self._loop.call_soon_threadsafe(self.done.put_nowait, units)

    def order(self, *, more: bool = True) -> None:
        """Let the thread end its unit; the last one ends the thread."""
        self._orders.put(more)

    def join(self) -> None:
        self.order(more=False)
        self._thread.join()


@pytest.fixture
async def worker():
    worker = Worker(Gate(), asyncio.get_running_loop())
    assert await worker.done.get() == 0
    yield worker
    worker.join()


async def test_a_closing_waits_for_the_unit_in_progress_and_the_next_one_waits_for_the_opening(worker):
    async def close() -> None:
        async with worker.gate.closed():
            is_closed.set()
            await may_open.wait()

    is_closed, may_open = asyncio.Event(), asyncio.Event()
    closing = asyncio.create_task(close(), name="closing")
    await asyncio.sleep(0)
    assert not is_closed.is_set(), "the thread is within a unit"
    worker.order()
    await is_closed.wait()
    assert worker.done.empty(), "the thread waits at the gate"
    may_open.set()
    assert await worker.done.get() == 1
    await closing


async def test_a_gate_opens_once_the_last_of_its_closers_has_ended(worker):
    closers = AsyncExitStack(), AsyncExitStack()
    closings = [asyncio.create_task(each.enter_async_context(worker.gate.closed())) for each in closers]
    await asyncio.sleep(0)
    worker.order()
    await asyncio.gather(*closings)
    await closers[0].aclose()
    assert worker.gate._closers == 1
    assert worker.done.empty(), "the other closer goes on"
    await closers[1].aclose()
    assert await worker.done.get() == 1


async def test_a_cancelled_closing_leaves_the_gate_open(worker):
    async def close() -> None:
        async with worker.gate.closed():
            raise AssertionError("the thread is within a unit")

    closing = asyncio.create_task(close(), name="closing")
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    for units in (1, 2):
        worker.order()
        assert await worker.done.get() == units


async def test_a_gate_without_threads_closes_at_once():
    gate = Gate()
    async with gate.closed(), gate.closed():
        pass
    with gate:
        gate.pass_through()
