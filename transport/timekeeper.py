"""Timers on an event loop with a resolution below a millisecond.

Event loops wait in whole milliseconds: asyncio rounds the time-out of `epoll` up, as does libuv. A thread can
sleep for shorter times. The thread sleeps until the next timer, and wakes the loop once for all timers due
then. docs/how-to/stragglers.md has the measured lateness; if other threads hold the interpreter's lock, the
lateness grows by up to `sys.getswitchinterval`. No timer fires early, except at the end of the block.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from threading import Condition, Thread
from types import TracebackType
from typing import Self


class Timekeeper:
    """Calls functions on the loop at given times; functions for one time run in the order of `call_at` calls.

    An asynchronous context manager. The end of the block calls all waiting functions at once, in order, and
    ends the thread; later functions are called at once.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = Condition()
        # Under the condition's lock, which both threads hold for only a few instructions:
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._asked = 0
        self.is_open = False
        # Between thread and loop, without a lock:
        self._due: deque[tuple[float, int, Callable[[], None]]] = deque()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self.is_open = True
        # A daemon, because the thread must not prevent a second Ctrl-C from ending the process.
        self._thread = Thread(target=self._watch, name=self._name, daemon=True)
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self.is_open = False
            self._changed.notify()
        self._thread.join()  # short, because the thread only waits for this notification
        while self._waiting:
            self._due.append(heappop(self._waiting))
        self._call_due()

    def clock(self) -> float:
        """Return the time on the clock of `call_at`, in seconds."""
        return time.monotonic()

    def call_at(self, due: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` on the loop at ``due``; callable on the loop only."""
        with self._changed:
            if self.is_open:
                self._asked += 1
                heappush(self._waiting, (due, self._asked, callback))
                if self._waiting[0][1] == self._asked:  # due before the end of the thread's sleep
                    self._changed.notify()
                return
        callback()

    def _watch(self) -> None:
        """Sleep until a timer is due, repeatedly. Body of the thread."""
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
            except RuntimeError:  # the loop was closed
                return

    def _left_s(self) -> float:
        if not self._waiting:
            return MOST_SLEEP_S
        return min(self._waiting[0][0] - WAKE_UP_S - self.clock(), MOST_SLEEP_S)

    def _call_due(self) -> None:
        while self._due:
            if self.is_open and self._due[0][0] > self.clock():
                self._loop.call_soon(self._call_due)  # due in a few iterations
                return
            callback = self._due.popleft()[2]
            try:
                callback()
            except Exception as error:  # an error of one callback must not lose the other callbacks
                self._loop.call_exception_handler(
                    {"message": f"a callback of {self._name} raised", "exception": error}
                )


MOST_SLEEP_S = 3600.0
"""Length of the thread's sleep without a timer, and maximum length of any sleep, in seconds."""

WAKE_UP_S = 0.00015
"""Time for waking the loop, in seconds; the thread wakes the loop this much before a timer is due. A loop
that wakes too early iterates until the timer is due."""

NAP_S = 0.0005
"""Length of the last part of a sleep, in seconds. A long sleep has two parts, because a core that slept
longer wakes up more slowly."""
