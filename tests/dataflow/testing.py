"""Fakes and helpers for tests with graphs: run one step at a time, in any order, without threads.

`run_calls` runs a pure `Scheduler`. `ManualPool` replaces a `ComputePool` under a real `Engine`: the test
runs its jobs one by one, in any order. `FiringRecorder` is a trace hook with queries and checks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from dataflow.graph import Graph
from dataflow.jobs import Job, Tag
from dataflow.scheduler import Scheduler
from dataflow.tokens import BatchCall, Call, Effect, Firing, TraceRecord


def take_effects(scheduler: Scheduler) -> list[Effect]:
    """Take all effects, and open the gates, as an engine does in a turn."""
    scheduler.open_gates()
    effects = [*scheduler.effects]
    scheduler.effects.clear()
    return effects


def run_calls(scheduler: Scheduler) -> Iterator[Effect]:
    """Execute calls one by one, the first that became ready first, until none is; yield every effect.

    A call is yielded before its execution; its effects follow from the next step on. Between steps the caller
    may deliver, admit and abandon. Each step checks the invariants.

    Args:
        scheduler: Scheduler whose ready calls are executed, with None for a thread's context.

    Raises:
        Exception: The error of a node, after its tags were failed.
    """
    ready: list[Call] = []
    while True:
        for effect in take_effects(scheduler):
            if isinstance(effect, (Firing, BatchCall)):
                ready.append(effect)
            else:
                yield effect
        scheduler.check_invariants()
        if not ready:
            return
        call = ready.pop(0)
        yield call
        try:
            result = call.execute(None)
        except Exception:
            scheduler.failed(call)
            raise
        scheduler.fired(call, result)


class ManualPool:
    """A pool whose jobs the test runs.

    A job is *queued* after its submission, *executed* after `execute`, and gone after `deliver` has passed it
    to its sink. An executed job is like a running one in a thread: beyond a stop, and not yet reported.

    Args:
        context: Object passed to jobs as the context of their thread.
        intake: Maximum number of jobs queued or executed at once.
    """

    def __init__(self, *, context: Any = None, intake: int = 1024) -> None:
        self.queued: list[Job] = []
        self.executed: list[Job] = []
        self.now = 0.0
        self._context = context
        self._intake = intake
        self._wants_room: deque[Callable[[], None]] = deque()

    def clock(self) -> float:
        """Return the attribute `now`, which only the test changes."""
        return self.now

    def submit_jobs(self, jobs: Sequence[Job]) -> int:
        """Queue jobs while there is room; return their number."""
        accepted = jobs[: self._intake - len(self.queued) - len(self.executed)]
        for job in accepted:
            job.queued = self.now
        self.queued += accepted
        return len(accepted)

    def call_when_room(self, callback: Callable[[], None]) -> None:
        """Call back once after the next delivery of a job."""
        self._wants_room.append(callback)

    def execute(self, index: int = 0) -> Job:
        """Run one of the queued jobs, without calling its sink."""
        job = self.queued.pop(index)
        job.thread = "manual"
        job.started = self.now
        try:
            job.result = job.execute(self._context)
        except Exception as error:
            job.error = error
        job.finished = self.now
        self.executed.append(job)
        return job

    def deliver(self, index: int = 0) -> None:
        """Pass one of the executed jobs to its sink."""
        job = self.executed.pop(index)
        job.sink([job])
        for _ in range(len(self._wants_room)):
            self._wants_room.popleft()()

    def step(self, index: int = 0) -> None:
        """Run one of the queued jobs and deliver it."""
        self.execute(index)
        self.deliver(len(self.executed) - 1)

    def run_all(self) -> None:
        """Run and deliver jobs in order, with those that they cause, until none is left."""
        while self.executed:
            self.deliver()
        while self.queued:
            self.step()


class FiringRecorder:
    """A trace hook that keeps all records: ``Engine(..., trace=recorder)``."""

    def __init__(self) -> None:
        self.records: list[TraceRecord] = []

    def __call__(self, record: TraceRecord) -> None:
        self.records.append(record)

    def check_exactly_once(
        self, graph: Graph, *, finished: Iterable[Tag], abandoned: Iterable[Tag] = ()
    ) -> None:
        """Raise AssertionError unless every node fired once per finished, at most once per abandoned tag."""
        counts = Counter((record.node, record.tag) for record in self.records)
        finished, abandoned = set(finished), set(abandoned)
        for name, tag in counts:
            assert tag in finished | abandoned, f"{name!r} fired for the unexpected {tag}"
        for node in graph.nodes:
            for tag in finished | abandoned:
                count = counts[node.name, tag]
                right = count == 1 or (count == 0 and tag in abandoned)
                assert right, f"{node.name!r} fired {count} times for {tag}"
