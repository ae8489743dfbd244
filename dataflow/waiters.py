"""Callers that wait for an engine: to be admitted, for room, or until it is idle.

Every wait has a name and a deadline. Admissions are granted in order of arrival, and each granted slot stays
reserved until its caller runs. The other waits reserve nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from dataflow.errors import EngineClosed, WaitTimedOut
from dataflow.jobs import Tag
from dataflow.scheduler import Scheduler


class Waiters:
    """The waiting callers of one engine.

    Args:
        scheduler: Decides whether there is a slot, and whether the engine is idle.
        timeout_s: Default time limit of a wait, in seconds.
        describe: Returns the engine's state, for the error of a wait that takes too long.

    Attributes:
        admissions: Callers that wait for a slot, in order of arrival.
        admitting: Tags of the callers in `admissions`, and of callers with a reserved slot.
        reserved: Number of slots reserved for callers that are woken and have not run yet.
        room: Callers that wait for room.
        idle: Callers that wait for an idle scheduler.
    """

    def __init__(self, scheduler: Scheduler, timeout_s: float, describe: Callable[[], str]) -> None:
        self.admissions: deque[asyncio.Future[None]] = deque()
        self.admitting: set[Tag] = set()
        self.reserved = 0
        self.room: list[asyncio.Future[None]] = []
        self.idle: list[asyncio.Future[None]] = []
        self._scheduler = scheduler
        self._timeout_s = timeout_s
        self._describe = describe

    async def wait_admission(self, tag: Tag, *, timeout_s: float | None) -> None:
        """Wait for a slot; on return a slot is free, and the caller must take it at once.

        Raises:
            EngineClosed: The engine stopped during the wait, as in all waits here.
            WaitTimedOut: No slot was free in time.
        """
        granted = _future()
        self.admissions.append(granted)
        self.admitting.add(tag)
        try:
            await self._wait(granted, "admission of", tag, timeout_s=timeout_s)
        finally:
            self.admitting.discard(tag)
            if granted.cancelled() or granted.exception() is not None:
                granted.cancel()
            else:
                self.reserved -= 1

    async def wait_room(self, *, timeout_s: float | None) -> None:
        """Wait until `wake_room` is called.

        Raises:
            WaitTimedOut: `wake_room` was not called in time.
        """
        room = _future()
        self.room.append(room)
        await self._wait(room, "room in the engine", timeout_s=timeout_s)

    async def wait_idle(self, name: str, *, timeout_s: float | None) -> None:
        """Wait until the scheduler is idle; return at once if it is.

        Raises:
            WaitTimedOut: The scheduler was not idle in time; the error has the name of the wait.
        """
        if not self._scheduler.idle:
            idle = _future()
            self.idle.append(idle)
            await self._wait(idle, name, timeout_s=timeout_s)

    def grant_admissions(self) -> None:
        """Wake as many callers that wait for a slot as there is room for."""
        admissions = self.admissions
        while admissions and (admissions[0].done() or self.reserved < self._scheduler.room):
            granted = admissions.popleft()
            if not granted.done():
                self.reserved += 1
                granted.set_result(None)

    def wake_room(self) -> None:
        """Wake all callers that wait for room; the first of them to run may take it."""
        _wake(self.room)

    def wake_idle(self) -> None:
        """Wake the callers that wait for an idle scheduler, if it is idle."""
        if self._scheduler.idle:
            _wake(self.idle)

    def close(self) -> None:
        """End all waits with EngineClosed."""
        waiting = [*self.admissions, *self.idle, *self.room]
        self.admissions.clear()
        self.room.clear()
        self.idle.clear()
        for future in waiting:
            _refuse(future, EngineClosed("the engine stopped during the wait"))

    async def _wait(
        self, future: asyncio.Future[None], what: str, tag: Tag | None = None, *, timeout_s: float | None
    ) -> None:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = future.get_loop().call_later(timeout_s, self._time_out, future, what, tag, timeout_s)
        try:
            await future
        finally:
            deadline.cancel()

    def _time_out(self, future: asyncio.Future[None], what: str, tag: Tag | None, timeout_s: float) -> None:
        name = what if tag is None else f"{what} {tag}"
        _refuse(future, WaitTimedOut(name=name, timeout_s=timeout_s, details=self._describe()))


def _future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
    waiters.clear()


def _refuse(future: asyncio.Future[None], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        # The loop would log an error that a just cancelled waiter never retrieves.
        future.exception()
