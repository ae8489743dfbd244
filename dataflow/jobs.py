"""The tag of a unit of work; a job; the interface of a pool of compute threads, and its mailbox to the loop.

`ComputePool` implements the interface with threads. A job cannot be cancelled: the pool executes an accepted
job exactly once, and passes it to its sink exactly once.

Waking a loop from a thread costs a system call, more than an empty job. So an item in the mailbox wakes the
loop only if no wake-up is pending, and one wake-up takes all items posted until then.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar


class Tag(NamedTuple):
    """Name of one unit of work. `attempt` grows when the unit is repeated."""

    epoch: int
    number: int
    attempt: int = 1


Sink = Callable[[list["Job"]], None]


class Job:
    """One call to make in a compute thread. Subclasses implement the call as `execute`.

    The submitter sets `sink`, `cost` and `paced`; the pool sets the rest. A job is mutable and belongs to one
    side at a time: to the thread once accepted, and to the loop again when its sink is called.

    Attributes:
        cost: Label of the call, for simulated time and statistics.
        sink: Function that the loop calls with all jobs of one wake-up that have it as their sink, in order
            of completion. The sink must not raise.
        result: Result of `execute`.
        error: Error of `execute`, or None.
        queued: Time of acceptance, in seconds of the pool's clock.
        started: Time at which a thread took the job, in seconds of the same clock.
        finished: Time at which the job ended, in seconds of the same clock.
        thread: Name of the thread that took the job.
        paced: Whether the pace of a thread applies to the job; False for preparation, which need not be slow.
    """

    __slots__ = ("cost", "error", "finished", "queued", "result", "sink", "started", "thread")

    cost: str
    sink: Sink
    result: Any
    error: BaseException | None
    queued: float
    started: float
    finished: float
    thread: str
    paced: bool = True

    def execute(self, context: Any) -> Any:
        """Do the work, with the context object of the executing thread."""
        raise NotImplementedError


class JobPool(Protocol):
    """Interface of a pool for an engine. Call all methods on the loop's thread."""

    def clock(self) -> float:
        """Return the current time of the clock that stamps jobs, in seconds."""

    def submit_jobs(self, jobs: Sequence[Job]) -> int:
        """Accept jobs in order while there is room; return how many. Raises PoolClosed."""

    def call_when_room(self, callback: Callable[[], None]) -> None:
        """Call back once, on the loop, when at least one job fits again."""


T = TypeVar("T")


class Mailbox(Generic[T]):
    """Collects items posted by any thread and passes them to `receive` on the loop, in lists, in order.

    Args:
        loop: Loop that calls `receive`.
        receive: Function of a list with at least one item. The function must not raise.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, receive: Callable[[list[T]], None]) -> None:
        self._wake = loop.call_soon_threadsafe
        self._receive = receive
        self._items: deque[T] = deque()
        self._waking = False
        self.num_wakes = 0

    def post(self, item: T) -> None:
        """Add an item, from any thread. Raises RuntimeError if the loop is closed."""
        self._items.append(item)
        # Two threads may see False and wake the loop twice, without harm. No item is lost: the loop clears
        # the flag before it takes the items, so it also takes the item of a thread that saw True.
        if not self._waking:
            self._waking = True
            self._wake(self.empty)

    def empty(self) -> None:
        """Pass all posted items on. Call the method only on the loop."""
        self._waking = False
        items = self._items
        count = len(items)
        if count:
            self.num_wakes += 1
            self._receive([items.popleft() for _ in range(count)])
