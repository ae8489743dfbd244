"""The compute pool: named threads that run jobs. This file starts all threads of the package.

Jobs enter through one `SimpleQueue` (in C, one lock) and return through one `Mailbox`. The loop alone counts
accepted and completed jobs, so the limit of the intake needs no lock. Each thread writes its own statistics,
and the loop only reads them.

A thread runs a job to its end; a job cannot be stopped. A submitter that no longer needs a job must still
expect its result. Numerical code must release the interpreter's lock to run in parallel, as numpy and numba
`nogil` do.

A pool may be slowed on purpose: each thread then keeps to a `Pace`. The thread sleeps between the end of a
job and its report, so results are as late as from a slower core. During the sleep the thread holds no lock
and takes no job.

A thread enters a `Gate` before its first unit of work, passes it between two units, and leaves it after the
last. The loop closes the gate, and waits until no thread is within a unit: each thread ends its unit, and
then waits at the gate. While no gate is closed, a pass reads one number without a lock, so units may be
short.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Condition, Event, Thread
from types import TracebackType
from typing import Any, Self, TypeVar

from dataflow.errors import PoolClosed, WaitTimedOut
from dataflow.jobs import Job, Mailbox

R = TypeVar("R")

CREDIT_S = 0.005
"""Maximum time in seconds by which a sleep that was too long shortens the next sleeps. Without this limit, a
thread that slept a second too long would run at full speed for a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """Counts since the pool was entered, and its current state."""

    threads: int
    accepted: int
    """Number of accepted jobs."""
    finished: int
    """Number of jobs whose sink has been called."""
    outstanding: int
    """Number of accepted jobs that have not finished: queued, running, or on the way back to the loop."""
    wakes: int
    """Number of times that threads woke the loop; finished / wakes is the mean number of jobs per wake-up."""
    elapsed_s: float
    """Seconds since the pool was entered."""
    busy_s: float
    """Seconds in jobs that have ended, summed over threads."""
    busy_share: float
    """Share of the threads' time spent in jobs: busy_s / (elapsed_s * threads)."""
    paced_s: float
    """Seconds of rest to keep to the pace, summed over threads."""
    queue_wait_s: float
    """Mean seconds from acceptance to start, over jobs that have ended; 0 before the end of the first job."""


class Pace:
    """The pace of one thread: computes its rests from its jobs.

    A job with c seconds of the thread's CPU time must take c / share seconds. The thread rests for the
    difference; the missing part of a rest that was cut short is added to the next rest. Time that a job waits
    counts towards the job's length, and does not shorten the rests after later jobs.

    Args:
        share: Share of a core's time, above 0 and up to 1.

    Raises:
        ValueError: ``share`` is out of range.
    """

    __slots__ = ("_owed_s", "share")

    def __init__(self, share: float) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"pace is a share of a core's time, above 0 and up to 1, not {share}")
        self.share = share
        self._owed_s = 0.0

    def worked(self, *, cpu_s: float, wall_s: float) -> float:
        """Note a job and return the seconds to rest now, 0 for none."""
        self._owed_s += max(cpu_s / self.share - wall_s, 0.0)
        return max(self._owed_s, 0.0)

    def rested(self, rest_s: float) -> None:
        """Note the actual length of a rest, in seconds."""
        self._owed_s = max(self._owed_s - rest_s, -CREDIT_S)


class _FunctionJob(Job):
    """A plain function from `submit` or `run`, with its own callback."""

    __slots__ = ("args", "fn", "on_done", "paced", "with_context")

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        on_done: Callable[[Job], None],
        cost: str,
        with_context: bool,
        paced: bool,
    ) -> None:
        self.paced = paced
        self.fn = fn
        self.args = args
        self.on_done = on_done
        self.cost = cost
        self.with_context = with_context
        self.sink = _report_each
        self.result = None
        self.error = None

    def execute(self, context: Any) -> Any:
        return self.fn(context, *self.args) if self.with_context else self.fn(*self.args)


def _report_each(jobs: list[Job]) -> None:
    for job in jobs:
        assert isinstance(job, _FunctionJob)
        try:
            job.on_done(job)
        except Exception as error:  # an error of one callback must not lose the other callbacks
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"callback of pool job {job.cost!r} raised", "exception": error}
            )


def _settle(future: asyncio.Future[Any], job: Job) -> None:
    """Set a future to the outcome of a job, unless the future is done."""
    if future.done():
        return
    if job.error is None:
        future.set_result(job.result)
    elif isinstance(job.error, (StopIteration, SystemExit, asyncio.CancelledError)):
        # A future cannot hold a StopIteration; the other errors would end the process, or the task that
        # waits.
        error = RuntimeError(f"{job.cost} raised {type(job.error).__name__}")
        error.__cause__ = job.error
        future.set_exception(error)
    else:
        future.set_exception(job.error)


def function_job(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    on_done: Callable[[Job], None],
    cost: str | None,
    with_context: bool = False,
    paced: bool = True,
) -> Job:
    """Return a job that calls `fn(*args)`, or `fn(context, *args)`; for implementations of a pool."""
    label = getattr(fn, "__name__", "job") if cost is None else cost
    return _FunctionJob(fn, args, on_done=on_done, cost=label, with_context=with_context, paced=paced)


class _Worker:
    """One thread, and the values that only it writes."""

    __slots__ = (
        "busy_s",
        "context",
        "cpus",
        "current",
        "first",
        "hurry",
        "jobs",
        "name",
        "pace",
        "paced_s",
        "thread",
        "wait_s",
    )

    def __init__(
        self, *, name: str, context: Any, cpus: frozenset[int] | None, pace: Pace | None, hurry: Event
    ) -> None:
        self.name = name
        self.context = context
        self.first: Job | None = None
        self.cpus = cpus
        self.pace = pace
        self.hurry = hurry
        self.busy_s = 0.0
        self.wait_s = 0.0
        self.paced_s = 0.0
        self.jobs = 0
        self.current: str | None = None
        self.thread: Thread | None = None

    def work(self, take: Callable[[], Job | None], post: Callable[[Job], None]) -> None:
        """Run jobs until `take` returns None."""
        if self.cpus is not None:
            os.sched_setaffinity(0, self.cpus)  # 0 is the calling thread
        clock = time.monotonic
        while True:
            job, self.first = self.first or take(), None
            if job is None:
                return
            self.current = job.cost
            job.thread = self.name
            cpu_before = 0.0 if self.pace is None else time.thread_time()
            job.started = started = clock()
            try:
                job.result = job.execute(self.context)
            except BaseException as error:  # a thread has no caller; the sink decides
                job.error = error
            job.finished = finished = clock()
            self.busy_s += finished - started
            self.wait_s += started - job.queued
            self.jobs += 1
            if self.pace is not None and job.paced:
                self._rest(self.pace, cpu_s=time.thread_time() - cpu_before, wall_s=finished - started)
            self.current = None
            try:
                post(job)
            except RuntimeError:  # the loop was closed during the job
                return
            del job  # an idle thread keeps no arrays alive

    def _rest(self, pace: Pace, *, cpu_s: float, wall_s: float) -> None:
        """Sleep until the job has taken as long as the pace requires, or until the pool closes."""
        rest_s = pace.worked(cpu_s=cpu_s, wall_s=wall_s)
        if rest_s and not self.hurry.is_set():
            begin = time.monotonic()
            self.hurry.wait(rest_s)
            rested_s = time.monotonic() - begin
            pace.rested(rested_s)
            self.paced_s += rested_s


def _make_for(worker: _Worker, make: Callable[[], Any]) -> None:
    worker.context = make()


class ComputePool:
    """Threads for heavy work, shared by any number of engines and other users of one loop.

    An asynchronous context manager. When the block ends, the pool accepts no new jobs, runs all accepted
    ones, delivers their results, and ends the threads. Cancelling this wait returns at once, and the threads
    end as soon as the accepted jobs are done.

    Args:
        threads: Number of threads.
        name: Prefix of the threads' names: "name/0", "name/1" and so on.
        contexts: One object per thread, passed to `Job.execute` of the thread's jobs; or a function that
            each thread calls at its start for its own object, whose memory is then near the thread. With None
            the jobs get None.
        affinity: CPUs that each thread may run on; None leaves the choice to the system.
        intake: Maximum number of accepted jobs that have not finished.
        close_timeout_s: Maximum wait in seconds for accepted jobs at the end of the block. After this time
            the exit raises WaitTimedOut, or adds it as a note to the block's error.
        pace: Share of a core's time that each thread may use, for an intentionally slow pool: a job of c
            seconds of CPU time takes c / pace. A closing pool no longer rests.

    Raises:
        ValueError: A number is below 1, a pace is not within (0, 1], a sequence has another length than the
            number of threads, or affinity is not supported here or has a CPU that the process may not use.
    """

    def __init__(
        self,
        *,
        threads: int,
        name: str = "pool",
        contexts: Sequence[Any] | Callable[[], Any] | None = None,
        affinity: Sequence[Sequence[int]] | None = None,
        intake: int = 1024,
        close_timeout_s: float = 30.0,
        pace: float = 1.0,
    ) -> None:
        if threads < 1 or intake < 1:
            raise ValueError(f"threads and intake must be at least 1, they are {threads} and {intake}")
        self._make_context = contexts if callable(contexts) else None
        contexts = None if callable(contexts) else contexts
        for label, given in (("contexts", contexts), ("affinity", affinity)):
            if given is not None and len(given) != threads:
                raise ValueError(f"{label} has {len(given)} entries for {threads} threads")
        if affinity is not None and not hasattr(os, "sched_setaffinity"):
            raise ValueError("affinity is not supported on this system; leave it None")
        for cpus in affinity or ():
            missing = sorted(set(cpus) - os.sched_getaffinity(0))
            if missing or not cpus:
                raise ValueError(f"affinity {tuple(cpus)}: CPUs {missing} may not be used by this process")
        self.name = name
        self._hurry = Event()
        paces = [Pace(pace) for _ in range(threads)]
        self._workers = [
            _Worker(
                name=f"{name}/{index}",
                context=None if contexts is None else contexts[index],
                cpus=None if affinity is None else frozenset(affinity[index]),
                pace=own if pace < 1 else None,
                hurry=self._hurry,
            )
            for index, own in enumerate(paces)
        ]
        self._intake = intake
        self._close_timeout_s = close_timeout_s
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._mailbox: Mailbox[Job] | None = None
        self._open = False
        self._accepted = 0
        self._finished = 0
        self._opened_at = 0.0
        self._wants_room: deque[Callable[[], None]] = deque()
        self._drained: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        if self._mailbox is not None:
            raise PoolClosed(f"pool {self.name!r} can be entered only once")
        self._mailbox = Mailbox(asyncio.get_running_loop(), self._completed)
        self._opened_at = self.clock()
        self._open = True
        makings = [] if self._make_context is None else self._first_jobs(self._make_context)
        for worker in self._workers:
            # A daemon: a job that never ends must not keep a second Ctrl-C from ending the process.
            worker.thread = Thread(
                target=worker.work, args=(self._queue.get, self._mailbox.post), name=worker.name, daemon=True
            )
            worker.thread.start()
        try:
            for making in makings:
                await making
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    def _first_jobs(self, make: Callable[[], Any]) -> list[asyncio.Future[None]]:
        """Give each thread a first job, which makes its context; return the futures of these jobs."""
        loop = asyncio.get_running_loop()
        self._accepted += len(self._workers)
        makings = []
        for worker in self._workers:
            made: asyncio.Future[None] = loop.create_future()
            worker.first = function_job(
                partial(_make_for, worker, make), (), on_done=partial(_settle, made), cost="context"
            )
            worker.first.queued = self.clock()
            makings.append(made)
        return makings

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hurry.set()
        try:
            is_drained = await self._drain(error)
        finally:
            for _ in self._workers:
                self._queue.put(None)
        if not is_drained:
            return
        for worker in self._workers:  # no job is queued or running, so the threads end at once
            assert worker.thread is not None
            worker.thread.join()

    async def _drain(self, error: BaseException | None) -> bool:
        """Take no more jobs, and wait for the outstanding ones. Returns False if the block's error has to be
        raised before all have ended.

        Raises:
            WaitTimedOut: Jobs take longer than the pool's time to close.
        """
        self._open = False
        try:
            if self.outstanding:
                self._drained = asyncio.get_running_loop().create_future()
                async with asyncio.timeout(self._close_timeout_s):
                    await self._drained
        except TimeoutError:
            running = [f"{worker.name} runs {worker.current!r}" for worker in self._workers if worker.current]
            late = WaitTimedOut(
                name=f"closing pool {self.name!r}",
                timeout_s=self._close_timeout_s,
                details=f"{self.outstanding} jobs outstanding, {', '.join(running)}",
            )
            if not isinstance(error, Exception):
                raise late from None
            error.add_note(str(late))  # the first error is the one to raise
            return False
        return True

    def clock(self) -> float:
        """Return the current time of asyncio's clock, which stamps jobs, in seconds."""
        return time.monotonic()

    @property
    def outstanding(self) -> int:
        """Number of accepted jobs that have not been passed to their sinks."""
        return self._accepted - self._finished

    def submit_jobs(self, jobs: Sequence[Job]) -> int:
        """Accept jobs in order up to the intake's limit; return how many.

        Raises:
            PoolClosed: The pool is not open.
        """
        if not self._open:
            raise PoolClosed(f"pool {self.name!r} is not open: it takes jobs only inside its `async with`")
        room = self._intake - self._accepted + self._finished
        if room < len(jobs):
            jobs = jobs[:room]
        now = time.monotonic()
        put = self._queue.put
        for job in jobs:
            job.queued = now
            put(job)
        self._accepted += len(jobs)
        return len(jobs)

    def call_when_room(self, callback: Callable[[], None]) -> None:
        """Call back once, on the loop, when a completed job leaves room; earlier requests come first."""
        self._wants_room.append(callback)

    def submit(
        self, fn: Callable[..., Any], *args: Any, on_done: Callable[[Job], None], cost: str | None = None
    ) -> bool:
        """Run `fn(*args)` in a thread, then call `on_done(job)` on the loop.

        Returns False, and does nothing, if the pool has no room. `job.error` is the error of `fn`, or None;
        `job.result` is its result. `cost` defaults to the function's name. Raises PoolClosed.
        """
        job = function_job(fn, args, on_done=on_done, cost=cost)
        return bool(self.submit_jobs((job,)))

    async def run(
        self,
        fn: Callable[..., R],
        *args: Any,
        cost: str | None = None,
        with_context: bool = False,
        paced: bool = True,
    ) -> R:
        """Run `fn(*args)`, or `fn(context, *args)`, in a thread and return its result or raise its error.

        Waits for room first. Cancelling the wait for room submits nothing; a later cancellation does not stop
        the function, but drops its result. Limit the wait with `asyncio.timeout`. Raises PoolClosed. After a
        job with `paced=False` the thread does not sleep, at any pace of the pool.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[R] = loop.create_future()

        settle = partial(_settle, result)
        job = function_job(fn, args, on_done=settle, cost=cost, with_context=with_context, paced=paced)
        while not self.submit_jobs((job,)):
            room: asyncio.Future[None] = loop.create_future()
            self.call_when_room(lambda room=room: room.done() or room.set_result(None))  # type: ignore[misc]
            await room
        return await result

    def _completed(self, jobs: list[Job]) -> None:
        """Pass completed jobs to their sinks, one call per sink, then call the waiting callbacks."""
        self._finished += len(jobs)
        by_sink: dict[Callable[[list[Job]], None], list[Job]] = {}
        for job in jobs:
            by_sink.setdefault(job.sink, []).append(job)
        for sink, mine in by_sink.items():
            sink(mine)
        # A callback without room queues itself again, so call only those queued now.
        for _ in range(len(self._wants_room)):
            if self.outstanding >= self._intake:
                break
            self._wants_room.popleft()()
        if self._drained is not None and not self.outstanding and not self._drained.done():
            self._drained.set_result(None)

    def statistics(self) -> PoolStatistics:
        """Return the counts so far. Running jobs do not count yet."""
        elapsed_s = self.clock() - self._opened_at if self._mailbox is not None else 0.0
        busy_s = sum(worker.busy_s for worker in self._workers)
        num_jobs = sum(worker.jobs for worker in self._workers)
        available_s = elapsed_s * len(self._workers)
        return PoolStatistics(
            threads=len(self._workers),
            accepted=self._accepted,
            finished=self._finished,
            outstanding=self.outstanding,
            wakes=0 if self._mailbox is None else self._mailbox.num_wakes,
            elapsed_s=elapsed_s,
            busy_s=busy_s,
            busy_share=busy_s / available_s if available_s else 0.0,
            paced_s=sum(worker.paced_s for worker in self._workers),
            queue_wait_s=sum(worker.wait_s for worker in self._workers) / num_jobs if num_jobs else 0.0,
        )

    def __repr__(self) -> str:
        state = "open" if self._open else "closed"
        return f"<ComputePool {self.name!r} {len(self._workers)} threads {self.outstanding} jobs {state}>"


MakePool = Callable[..., ComputePool]
"""Constructor of a pool with the arguments of `ComputePool`: that class, or one that simulates threads."""


class Gate:
    """A gate of any number of threads. As a context manager on a thread it serves several units of work."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._closers = 0
        """Number of `closed` blocks in progress."""
        self._inside = 0
        """Number of threads within a unit of work."""
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        """`closed` blocks that wait until no thread is within a unit, each with its loop."""
        self.turn = asyncio.Lock()
        """Lock for users whose `closed` blocks must not overlap, in one loop."""

    def __enter__(self) -> None:
        with self._changed:
            while self._closers:
                self._changed.wait()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            if not self._inside:
                waiting, self._waiting = self._waiting, []
                for loop, is_empty in waiting:
                    with suppress(RuntimeError):  # the loop was closed meanwhile
                        loop.call_soon_threadsafe(is_empty.set)

    def pass_through(self) -> None:
        """Wait between two units of work while the gate is closed; on a thread within the gate."""
        if self._closers:
            self.__exit__()
            self.__enter__()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Close the gate for as long as the block lasts, which begins once no thread is within a unit."""
        is_empty = asyncio.Event()
        with self._changed:
            self._closers += 1
            if self._inside:
                self._waiting.append((asyncio.get_running_loop(), is_empty))
            else:
                is_empty.set()
        try:
            await is_empty.wait()
            yield
        finally:
            with self._changed:
                self._closers -= 1
                self._changed.notify_all()
