"""Pure: a job, and what a pool of compute threads promises to those who submit jobs.

`ComputePool` keeps these promises with threads, `dataflow.testing.ManualPool` by hand. A job cannot be
cancelled: once accepted it is executed exactly once, and its sink hears about it exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Sink = Callable[[list["Job"]], None]


class Job:
    """One call to make in a compute thread. Subclasses say what to call in `execute`.

    The submitter sets `sink` and `cost`; the pool sets the rest. A job is mutable and belongs to one side at
    a time: to the thread from the moment it is accepted, to the loop again when its sink is called.

    Attributes:
        cost: Label of what the call costs, for simulated time and statistics.
        sink: Called on the loop with all jobs of one wake-up that share it, in order of completion.
            It must not raise.
        result: What `execute` returned, if it did.
        error: What `execute` raised, or None.
        queued: When the pool accepted it, in seconds of the pool's clock.
        started: When a thread took it.
        finished: When it ended.
        thread: Name of that thread.
        paced: Whether a thread that keeps to a pace counts it; what prepares for the work need not be slow.
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
        """Do the work, with the context object of the thread it runs in."""
        raise NotImplementedError


class JobPool(Protocol):
    """What an engine needs of a pool. All methods are for the loop's thread."""

    def clock(self) -> float:
        """The clock that stamps jobs, in seconds."""

    def submit_jobs(self, jobs: Sequence[Job]) -> int:
        """Accept as many jobs as there is room for, in order; returns how many. Raises PoolClosed."""

    def call_when_room(self, callback: Callable[[], None]) -> None:
        """Call back once, on the loop, when at least one job fits again."""
