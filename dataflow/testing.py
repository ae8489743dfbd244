"""Fakes and helpers for those who test with graphs: run one step at a time, in any order, without threads.

`drive` runs a pure `Scheduler`. `ManualPool` stands in for a `ComputePool` under a real `Engine`: jobs run
when and in the order the test says. `FiringRecorder` is a trace hook that answers questions.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from dataflow.graph import Graph
from dataflow.jobs import Job
from dataflow.scheduler import Scheduler
from dataflow.tags import Tag
from dataflow.tokens import BatchCall, Call, Effect, Firing, TraceRecord


def first(calls: Sequence[Call]) -> int:
    """Choose the call that became ready first."""
    return 0


def disk_model(scheduler: Scheduler, *, choose: Callable[[Sequence[Call]], int] = first) -> Iterator[Effect]:
    """Execute calls one by one until none is ready, and yield every effect.

    A call is yielded when it is about to be executed; what it causes is seen from the next step on. Between
    steps the caller may deliver, admit and abandon. Invariants are checked at each step.

    Args:
        scheduler: Its ready calls are executed with None for a thread's context.
        choose: Picks the next of the ready calls, by index: the order in which threads would finish.

    Raises:
        Exception: What a node raises, after its tags were failed.
    """
    ready: list[Call] = []
    while True:
        for effect in scheduler.take_effects():
            if isinstance(effect, (Firing, BatchCall)):
                ready.append(effect)
            else:
                yield effect
        scheduler.check_invariants()
        if not ready:
            return
        call = ready.pop(choose(ready))
        yield call
        try:
            result = call.execute(None)
        except Exception:
            scheduler.failed(call)
            raise
        scheduler.fired(call, result)


class ManualPool:
    """A pool whose jobs run when the test says so.

    A job is *queued* when it is submitted, *executed* when `execute` has run it, and gone when `deliver`
    has given it to its sink. Between the two it is what a job in a thread is: no longer to be stopped, not
    yet known.

    Args:
        context: Handed to jobs as the context of their thread.
        intake: Most jobs queued or executed at once.
    """

    def __init__(self, *, context: Any = None, intake: int = 1024) -> None:
        self.queued: list[Job] = []
        self.executed: list[Job] = []
        self.now = 0.0
        self._context = context
        self._intake = intake
        self._wants_room: deque[Callable[[], None]] = deque()

    def clock(self) -> float:
        """The attribute `now`, which only the test changes."""
        return self.now

    def submit_jobs(self, jobs: Sequence[Job]) -> int:
        """Queue as many as there is room for; returns how many."""
        accepted = jobs[: self._intake - len(self.queued) - len(self.executed)]
        for job in accepted:
            job.queued = self.now
        self.queued += accepted
        return len(accepted)

    def call_when_room(self, callback: Callable[[], None]) -> None:
        """Call back once when a job has been delivered."""
        self._wants_room.append(callback)

    def execute(self, index: int = 0) -> Job:
        """Run one of the queued jobs; its sink does not hear of it yet."""
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
        """Give one of the executed jobs to its sink."""
        job = self.executed.pop(index)
        job.sink([job])
        for _ in range(len(self._wants_room)):
            self._wants_room.popleft()()

    def step(self, index: int = 0) -> None:
        """Run one of the queued jobs and deliver it."""
        self.execute(index)
        self.deliver(len(self.executed) - 1)

    def run_all(self) -> None:
        """Run and deliver jobs, in order, until there are none, those caused meanwhile included."""
        while self.executed:
            self.deliver()
        while self.queued:
            self.step()

    def __repr__(self) -> str:
        return f"<ManualPool {len(self.queued)} queued {len(self.executed)} executed>"


class FiringRecorder:
    """A trace hook that remembers: ``Engine(..., trace=recorder)``."""

    def __init__(self) -> None:
        self.records: list[TraceRecord] = []

    def __call__(self, record: TraceRecord) -> None:
        self.records.append(record)

    def nodes(self, tag: Tag) -> list[str]:
        """The nodes that fired for `tag`, in order."""
        return [record.node for record in self.records if record.tag == tag]

    def check_exactly_once(
        self, graph: Graph, *, finished: Iterable[Tag], abandoned: Iterable[Tag] = ()
    ) -> None:
        """Raise AssertionError unless every node fired once per finished, at most once per abandoned tag."""
        counts = Counter((record.node, record.tag) for record in self.records)
        finished, abandoned = set(finished), set(abandoned)
        for name, tag in counts:
            assert tag in finished | abandoned, f"{name!r} fired for {tag}, which was not expected"
        for node in graph.nodes:
            for tag in finished | abandoned:
                count = counts[node.name, tag]
                right = count == 1 or (count == 0 and tag in abandoned)
                assert right, f"{node.name!r} fired {count} times for {tag}"
