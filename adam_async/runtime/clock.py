"""The system's clock and entropy, and the timers of an event loop.

Product code receives clock and entropy as arguments, so a simulation can replace both.
"""

import asyncio
import os
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from types import TracebackType

from adam_async.errors import DeadlineExceeded

Clock = Callable[[], float]
"""Function that returns seconds from an arbitrary start, only for differences; in a loop ``loop.time``."""

LAST_S = 253_402_300_799.0
"""End of the year 9999, in seconds since 1970."""

INTERVAL_S = 0.02
"""Time between two samples of a loop's lag, in seconds."""

SAMPLES = 4096
"""Maximum number of lag samples in memory: those of about 80 s."""


class Within:
    """Bounds an `async with` block by a deadline, which the block may move: it gets the `asyncio.Timeout`.

    A TimeoutError of the block itself passes as it is.

    Args:
        timeout_s: Length of the wait, in seconds.
        what: Name of the wait, or a function that names it at the deadline.

    Raises:
        DeadlineExceeded: The block took longer.
    """

    def __init__(self, timeout_s: float, what: str | Callable[[], str]) -> None:
        self._timeout_s = timeout_s
        self._what = what
        self._limit = asyncio.timeout(timeout_s)

    async def __aenter__(self) -> asyncio.Timeout:
        return await self._limit.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError:
            what = self._what if isinstance(self._what, str) else self._what()
            raise DeadlineExceeded(what, self._timeout_s) from None


def fine_clock() -> float:
    """Return the seconds of the system's monotonic clock: the same in all threads and processes of a machine.

    A loop's clock may be this clock rounded to milliseconds, as with uvloop; the compute pool's is exactly
    this clock.
    """
    return time.monotonic()


def wall_clock() -> float:
    """Return the seconds since 1970, for times that people read or that outlive a process; it may step."""
    return time.time()


def time_of_day(wall_s: float) -> str:
    """Return a time of the wall clock in the local zone, such as ``12:03:04``."""
    return time.strftime("%H:%M:%S", time.localtime(wall_s))


def utc_time(wall_s: float) -> str:
    """Return a time of the wall clock in UTC, such as ``2026-11-27T12:03:04Z``.

    A time before 1970 or after the year 9999 becomes the nearest time within these limits, because files may
    have any time.
    """
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(min(max(wall_s, 0.0), LAST_S)))


def system_entropy(size_bytes: int) -> bytes:
    """Return unpredictable bytes of the system, for nonces, ids and incarnations, never for training."""
    return os.urandom(size_bytes)


class Timer:
    """Wakes a pure state machine at its next deadline.

    Args:
        next_deadline: Returns the next deadline in seconds of the loop's clock; None if there is none.
        due: Called at the deadline; the call may move the deadline.
    """

    def __init__(self, next_deadline: Callable[[], float | None], due: Callable[[], None]) -> None:
        self._next_deadline = next_deadline
        self._due = due
        self._rearm = asyncio.Event()
        self._armed: float | None = None
        """Time at which `run` wakes by itself; None for never."""

    def rearm(self) -> None:
        """Read the deadline again; call this after any event that may have moved it.

        A deadline moved later is read again at its old time, because most deadlines move once more before
        then.
        """
        deadline = self._next_deadline()
        if deadline is not None and (self._armed is None or deadline < self._armed):
            self._rearm.set()

    async def run(self) -> None:
        """Run until cancelled. Cancelling loses nothing."""
        loop = asyncio.get_running_loop()
        while True:
            self._rearm.clear()
            self._armed = deadline = self._next_deadline()
            alarm = None if deadline is None else loop.call_at(deadline, self._rearm.set)
            try:
                await self._rearm.wait()
            finally:
                if alarm is not None:
                    alarm.cancel()
            # The deadline may have moved later during the wait.
            deadline = self._next_deadline()
            if deadline is not None and deadline <= loop.time():
                self._due()


DURATIONS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the buckets in `Durations`, in seconds; one more bucket has longer durations."""


class Durations:
    """Counts durations of one kind in buckets.

    Attributes:
        total_s: Sum of the durations, in seconds.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self._buckets = [0] * (len(DURATIONS_S) + 1)

    def add(self, seconds: float) -> None:
        self.total_s += seconds
        self._buckets[bisect_left(DURATIONS_S, seconds)] += 1

    @property
    def buckets(self) -> tuple[int, ...]:
        """Number of durations in each bucket."""
        return tuple(self._buckets)


class LoopLag:
    """Samples the lag of the running loop: the time between the deadline of a timer and its callback.

    A loop that shares the interpreter with compute threads lags behind them.
    """

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self.all = Durations()
        """All samples so far."""

    async def run(self) -> None:
        """Sample every 20 ms until cancelled. Cancelling loses nothing."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + INTERVAL_S
            await asyncio.sleep(INTERVAL_S)
            late_s = max(loop.time() - due, 0.0)
            self._samples.append(late_s)
            self.all.add(late_s)

    def percentiles(self) -> dict[str, float]:
        """Return the median, the 99th percentile and the maximum of the lag samples, in seconds."""
        ordered = sorted(self._samples) or [0.0]
        last = len(ordered) - 1
        return {"p50": ordered[last // 2], "p99": ordered[round(last * 0.99)], "max": ordered[last]}
