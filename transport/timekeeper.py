"""A clock that rings on an event loop to a fraction of a millisecond.

Event loops wait in whole milliseconds: asyncio rounds up what it hands to `epoll`, and so does libuv. A
thread has no such grain. It sleeps until the next time that somebody asked for, and wakes the loop once for
all that is due then. How late that is stands in docs/stragglers.md; where other threads hold the
interpreter's lock it may be later, by up to `sys.getswitchinterval`. It is never early.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from threading import Condition, Thread
from types import TracebackType
from typing import Self

__all__ = ["Timekeeper"]


class Timekeeper:
    """Calls functions on the loop when their time has come; those of one time in the order asked for.

    An asynchronous context manager. Leaving it calls at once whatever still waits, in its order, and ends the
    thread; what is asked for later is called at once.

    Args:
        name: Of its thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = Condition()
        # Under the condition's lock, which is held for a few instructions and never while anybody sleeps:
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._asked = 0
        self.is_open = False
        # Between thread and loop, without a lock:
        self._due: deque[tuple[float, int, Callable[[], None]]] = deque()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self.is_open = True
        # A daemon: it must not keep a second Ctrl-C from ending the process.
        self._thread = Thread(target=self._watch, name=self._name, daemon=True)
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self.is_open = False
            self._changed.notify()
        self._thread.join()  # it holds nothing and waits for nothing but this
        while self._waiting:
            self._due.append(heappop(self._waiting))
        self._call_due()

    def clock(self) -> float:
        """The time that `call_at` goes by, in seconds."""
        return time.monotonic()

    def call_at(self, due: float, callback: Callable[[], None]) -> None:
        """Call back on the loop at that time; on the loop only."""
        with self._changed:
            if self.is_open:
                self._asked += 1
                heappush(self._waiting, (due, self._asked, callback))
                if self._waiting[0][1] == self._asked:  # sooner than what the thread sleeps for
                    self._changed.notify()
                return
        callback()

    def _watch(self) -> None:
        """Sleep until something is due, over and over. This is the thread."""
        while True:
            with self._changed:
                while self.is_open and (left_s := self._left_s()) > 0:
                    self._changed.wait(left_s - NAP_S if left_s > 2 * NAP_S else left_s)
                if not self.is_open:
                    return
                while self._waiting and self._left_s() <= 0:
                    self._due.append(heappop(self._waiting))
            try:
                self._loop.call_soon_threadsafe(self._call_due)
            except RuntimeError:  # the loop was closed: nobody is left to call
                return

    def _left_s(self) -> float:
        if not self._waiting:
            return MOST_SLEEP_S
        return min(self._waiting[0][0] - WAKE_UP_S - self.clock(), MOST_SLEEP_S)

    def _call_due(self) -> None:
        while self._due:
            if self.is_open and self._due[0][0] > self.clock():
                self._loop.call_soon(self._call_due)  # in a few turns it will be time
                return
            callback = self._due.popleft()[2]
            try:
                callback()
            except Exception as error:  # the others must not lose theirs
                self._loop.call_exception_handler(
                    {"message": f"a callback of {self._name} raised", "exception": error}
                )


MOST_SLEEP_S = 3600.0
"""What a wait is given where nothing is waited for."""

WAKE_UP_S = 0.00015
"""How much earlier the loop is woken, for it takes about so long; if less, it turns until it is time."""

NAP_S = 0.0005
"""The last part of a sleep, slept apart: the longer a core has slept, the longer it takes to wake up."""
