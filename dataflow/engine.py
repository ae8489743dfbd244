"""The shell that runs a scheduler: light nodes on the loop, heavy ones in a pool.

Theory of operation
-------------------
Whatever happens (an admission, a delivery, jobs coming back) is told to the scheduler, then one *turn*
carries out its effects until there are none: light nodes run at once and cause further effects, heavy calls
collect in a backlog that is handed to the pool in one go at the end. So light nodes that follow a heavy one
fire in the same loop turn as its completion, and a wake-up that brings eight jobs back costs one
submission. Callbacks and light nodes may call the engine again; that only adds effects to the turn under
way.

The engine waits for nothing itself. Its one task watches for the failure that stops it, so that the failure
cancels the body of the `async with` like that of any task group.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, Self, cast

from dataflow.errors import (
    EngineClosed,
    NodeFailed,
    NoRoom,
    PoolClosed,
    TagAbandoned,
    TagInFlight,
    TagUnknown,
    WaitTimedOut,
)
from dataflow.graph import Graph
from dataflow.jobs import Job, JobPool
from dataflow.mailbox import Mailbox
from dataflow.scheduler import Scheduler
from dataflow.stats import EngineStatistics
from dataflow.tags import Tag
from dataflow.tokens import (
    Abandoned,
    BatchCall,
    Call,
    ContextFreed,
    Effect,
    Finished,
    Firing,
    Output,
    Token,
    TraceRecord,
)

OnOutput = Callable[[str, Tag, Any], None]
Trace = Callable[[TraceRecord], None]


class Engine:
    """Runs one graph for many tags at once. An asynchronous context manager.

    Leaving it abandons what is live, waits until no thread runs a call of it, and raises what stopped it: a
    `NodeFailed`, or what a callback raised. Call `drain` first if everything admitted is to finish.
    Cancelling the leaving does not shorten that wait, for the contexts are the caller's to reuse
    afterwards; a job that outlasts `close_timeout_s` is reported by WaitTimedOut.

    Args:
        graph: What to run.
        pool: Where heavy nodes run. It must stay open for as long as the engine.
        in_flight: Most tags live at once.
        contexts: Training contexts, at least `in_flight` of them; see `Scheduler`.
        on_output: Called on the loop as ``on_output(port, tag, value)`` when a graph output has its value.
        on_room: Called on the loop, within a turn that leaves room, to `admit_nowait` what is there: cheaper
            than a task that waits in `admit` for every tag.
        on_failure: What a failing node does: "stop" the engine, or "drop" its tag and count it.
        trace: Called on the loop with the record of every firing that ended. None costs nothing.
        early_limit: Most tokens held for tags not admitted yet.
        keep_epochs: Epochs whose tags are remembered one by one; tags of older ones count as over.
        wait_timeout_s: Deadline of `admit`, `wait_room`, `wait_finished` and `drain` unless a call gives one.
        close_timeout_s: Seconds that leaving waits for running jobs.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        pool: JobPool,
        in_flight: int,
        contexts: Sequence[Any] | None = None,
        on_output: OnOutput | None = None,
        on_room: Callable[[], None] | None = None,
        on_failure: Literal["stop", "drop"] = "stop",
        trace: Trace | None = None,
        early_limit: int = 1024,
        keep_epochs: int = 2,
        wait_timeout_s: float = 60.0,
        close_timeout_s: float = 30.0,
    ) -> None:
        if on_failure not in ("stop", "drop"):
            raise ValueError(f"on_failure must be 'stop' or 'drop', not {on_failure!r}")
        self._scheduler = Scheduler(
            graph, in_flight=in_flight, contexts=contexts, early_limit=early_limit, keep_epochs=keep_epochs
        )
        self._pool = pool
        self._on_output = on_output
        self._on_room = on_room
        self._on_failure = on_failure
        self._trace = trace
        self._wait_timeout_s = wait_timeout_s
        self._close_timeout_s = close_timeout_s
        self._state: Literal["new", "running", "stopped"] = "new"
        self._sink = self._jobs_done  # one bound method, so that the pool can group by it
        self._turning = False
        self._backlog: deque[Call] = deque()
        self._asked_for_room = False
        # In order of arrival. `_reserved` counts waiters told to go ahead that have not run yet.
        self._admissions: deque[asyncio.Future[None]] = deque()
        self._admitting: set[Tag] = set()
        self._reserved = 0
        self._room_waiters: list[asyncio.Future[None]] = []
        self._finish_waiters: dict[Tag, list[asyncio.Future[None]]] = {}
        self._idle_waiters: list[asyncio.Future[None]] = []
        self._num_failed = 0

    async def __aenter__(self) -> Self:
        if self._state != "new":
            raise EngineClosed("an engine can be entered only once")
        self._loop = asyncio.get_running_loop()
        self._mailbox: Mailbox[Token] = Mailbox(self._loop, self._deliver_posted)
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._task_group = asyncio.TaskGroup()
        await self._task_group.__aenter__()
        self._watch = self._task_group.create_task(self._raise_failure(), name="engine/watch")
        self._state = "running"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        if not self._failure.done():
            self._watch.cancel()
        try:
            await self._task_group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            # That the body was refused is the consequence of what stopped the engine, not a second error.
            # Cancelling the watch has cancelled what it waited for.
            failed = self._failure.done() and not self._failure.cancelled()
            failure = self._failure.exception() if failed else None
            errors = group if failure is None else group.split(EngineClosed)[1]
            found = [] if errors is None else list(errors.exceptions)
            if failure is not None and failure not in found:
                # The body raised before the task that watches for failures had its turn.
                found.insert(0, failure)
            if len(found) > 1:
                raise BaseExceptionGroup(group.message, found) from None
            # One error is raised as itself: the group only says that an engine has a task inside.
            only = found[0]
            if only is not error:
                raise only from only.__cause__
        finally:
            await self._wait_for_threads()

    async def _raise_failure(self) -> None:
        await self._failure

    # Tags

    async def admit(self, tag: Tag, *, timeout_s: float | None = None) -> Any:
        """Wait for a slot and a free context, make `tag` live, and return the context.

        Callers are served in order. Cancelling admits nothing.

        Raises:
            TagInFlight, TagSettled: The tag is or was in use.
            EngineClosed: The engine is not running, or stopped meanwhile.
            WaitTimedOut: No slot came free in `timeout_s`.
        """
        self._check_running()
        self._check_admissible(tag)
        if not self._admissions and self._scheduler.room > self._reserved:
            return self._admit(tag)
        turn: asyncio.Future[None] = self._loop.create_future()
        self._admissions.append(turn)
        self._admitting.add(tag)
        try:
            await self._wait(turn, "admission of", tag, timeout_s=timeout_s)
            self._check_running()
            return self._scheduler.admit(tag)
        finally:
            self._admitting.discard(tag)
            if turn.cancelled() or turn.exception() is not None:
                turn.cancel()
            else:
                self._reserved -= 1
            self._turn()  # starts what came early; or passes on the place that was kept for us

    def admit_nowait(self, tag: Tag) -> Any:
        """Like `admit`, but raises NoRoom where that would wait."""
        self._check_running()
        self._check_admissible(tag)
        if self._admissions or self._scheduler.room <= self._reserved:
            raise NoRoom(f"{tag} not admitted: {self._describe()}")
        return self._admit(tag)

    @property
    def has_room(self) -> bool:
        """Whether `admit_nowait` may go on."""
        return not self._admissions and self._scheduler.room > self._reserved

    async def wait_room(self, *, timeout_s: float | None = None) -> None:
        """Wait until a turn, with its `on_room`, leaves room. Others may take it first. Cancel it at will.

        Raises:
            EngineClosed: The engine is not running, or stopped meanwhile.
            WaitTimedOut: No slot came free in `timeout_s`.
        """
        self._check_running()
        if not self.has_room:
            room: asyncio.Future[None] = self._loop.create_future()
            self._room_waiters.append(room)
            await self._wait(room, "room in the engine", timeout_s=timeout_s)
            self._check_running()

    def abandon(self, tag: Tag) -> bool:
        """Give `tag` up; returns False if it was over already.

        Its slot is free at once. Its context is free when no thread runs a call of it any more; calls that
        have not started never will. A tag that was not admitted can no longer be.
        """
        self._check_running()
        known = self._scheduler.abandon(tag)
        self._turn()
        return known

    async def wait_finished(self, tag: Tag, *, timeout_s: float | None = None) -> None:
        """Wait until all nodes have fired for `tag`; returns at once if the tag is over. Cancelling is
        harmless.

        Raises:
            TagUnknown: It was never admitted.
            TagAbandoned: It was abandoned while we waited.
            EngineClosed: The engine is not running.
            WaitTimedOut: It took longer than `timeout_s`.
        """
        self._check_running()
        if not self._scheduler.is_live(tag):
            if self._scheduler.is_settled(tag):
                return
            raise TagUnknown(tag=tag)
        over: asyncio.Future[None] = self._loop.create_future()
        self._finish_waiters.setdefault(tag, []).append(over)
        await self._wait(over, "finish of", tag, timeout_s=timeout_s)

    async def drain(self, *, timeout_s: float | None = None) -> None:
        """Wait until no tag is live and no thread runs a call. Cancelling is harmless.

        Raises:
            EngineClosed: The engine is not running.
            WaitTimedOut: It took longer than `timeout_s`; the message says which tags lack what.
        """
        self._check_running()
        if not self._scheduler.idle:
            idle: asyncio.Future[None] = self._loop.create_future()
            self._idle_waiters.append(idle)
            await self._wait(idle, "draining the engine", timeout_s=timeout_s)

    # Tokens

    def deliver(self, port: str, tag: Tag, value: Any) -> None:
        """Give external input `port` its value for `tag`; nodes that are now ready start.

        Any order will do. A token that comes before its tag is admitted is held; one for a tag that is over
        is dropped and counted.

        Raises:
            UnknownPort, DuplicateToken, TooManyEarlyTokens: See `Scheduler.deliver`.
            EngineClosed: The engine is not running.
        """
        self._check_running()
        self._scheduler.deliver(port, tag, value)
        if not self._turning:
            self._turn()

    def deliver_all(self, tokens: Iterable[tuple[str, Tag, Any]]) -> None:
        """Like `deliver` for several ``(port, tag, value)``, in one turn: nodes start when all are there.

        Raises:
            UnknownPort, DuplicateToken, TooManyEarlyTokens: See `Scheduler.deliver`; what came before counts.
            EngineClosed: The engine is not running.
        """
        self._check_running()
        try:
            for port, tag, value in tokens:
                self._scheduler.deliver(port, tag, value)
        finally:
            self._turn()

    def deliver_threadsafe(self, port: str, tag: Tag, value: Any) -> None:
        """Like `deliver`, from any thread, soon.

        There is no caller left when it happens, so what `deliver` would raise stops the engine. After the
        engine has stopped, tokens are dropped in silence. Raises EngineClosed if the engine was never
        entered.
        """
        if self._state == "new":
            raise EngineClosed("the engine has not been entered")
        if self._state == "running":
            self._mailbox.post(Token(port, tag, value))

    def _deliver_posted(self, tokens: list[Token]) -> None:
        if self._state != "running":
            return
        try:
            for port, tag, value in tokens:
                self._scheduler.deliver(port, tag, value)
        except Exception as error:
            self._fail(error)
        self._turn()

    # The turn

    def _turn(self) -> None:
        """Carry out effects until there are none, then hand the heavy calls to the pool."""
        if self._turning:
            return
        self._turning = True
        try:
            while effects := self._scheduler.take_effects() or self._fill_room():
                for effect in effects:
                    if isinstance(effect, (Firing, BatchCall)):
                        if effect.node.heavy:
                            self._backlog.append(effect)
                        else:
                            self._run_light(effect)
                    elif isinstance(effect, Output):
                        self._tell_output(effect)
                    else:
                        self._settle(effect)
        finally:
            self._turning = False
        if self._backlog:
            self._submit()
        if self._admissions:
            self._call_admissions()
        if self._room_waiters and self.has_room:
            self._wake_room_waiters()

    def _fill_room(self) -> list[Effect]:
        """Let the owner admit, if there is room; returns what follows from it."""
        if self._on_room is None or not self.has_room or self._state != "running":
            return []
        try:
            self._on_room()
        except Exception as error:
            self._fail(error)
        return self._scheduler.take_effects()

    def _run_light(self, call: Call) -> None:
        clock = None if self._trace is None else self._pool.clock
        if clock is not None:
            call.queued = call.started = clock()
            call.thread = "loop"
        try:
            call.result = result = call.execute(None)
        except Exception as error:
            call.error = error
            self._call_failed(call, error)
        else:
            self._scheduler.fired(call, result)
        if clock is not None:
            call.finished = clock()
            self._record(call)

    def _submit(self) -> None:
        backlog = self._backlog
        sink = self._sink
        for call in backlog:
            call.sink = sink
        try:
            accepted = self._pool.submit_jobs(tuple(backlog))
        except PoolClosed as error:
            lost = list(backlog)
            backlog.clear()
            for call in lost:
                self._scheduler.failed(call)
            self._fail(error)
            return
        if accepted == len(backlog):
            backlog.clear()
            return
        for _ in range(accepted):
            backlog.popleft()
        if not self._asked_for_room:
            self._asked_for_room = True
            self._pool.call_when_room(self._room)

    def _room(self) -> None:
        self._asked_for_room = False
        try:
            if self._backlog:
                self._submit()
        except Exception as error:  # the pool calls this, and can do nothing about it
            self._fail(error)

    def _jobs_done(self, jobs: list[Job]) -> None:
        fired = self._scheduler.fired
        try:
            for call in cast("list[Call]", jobs):
                if call.error is None:
                    fired(call, call.result)
                else:
                    self._call_failed(call, call.error)
                if self._trace is not None:
                    self._record(call)
            self._turn()
        except Exception as error:  # the pool calls this, and the jobs of others come after it
            self._fail(error)

    def _call_failed(self, call: Call, error: BaseException) -> None:
        tags = self._scheduler.failed(call)
        if not tags:  # abandoned while it ran: nobody waits for it, so nothing is lost
            return
        self._num_failed += len(tags)
        if self._on_failure == "stop":
            self._fail(NodeFailed(node=call.node.name, tags=tags, cause=error))

    def _tell_output(self, output: Output) -> None:
        if self._on_output is not None:
            try:
                self._on_output(output.port, output.tag, output.value)
            except Exception as error:
                self._fail(error)

    def _record(self, call: Call) -> None:
        """Trace the firings of `call`, those that were skipped because their tag was abandoned left out."""
        assert self._trace is not None
        results = call.result if isinstance(call, BatchCall) and call.error is None else None
        try:
            for place, firing in enumerate(call.firings):
                if call.error is None and (call.result if results is None else results[place]) is None:
                    continue
                timed = firing if results is not None and firing.finished else call
                self._trace(
                    TraceRecord(
                        call.node.name, firing.tag, call.queued, timed.started, timed.finished, call.thread
                    )
                )
        except Exception as error:
            self._fail(error)

    def _settle(self, effect: Finished | Abandoned | ContextFreed) -> None:
        if self._finish_waiters and type(effect) is not ContextFreed:
            for over in self._finish_waiters.pop(effect.tag, ()):
                if type(effect) is Abandoned:
                    _refuse(over, TagAbandoned(tag=effect.tag))
                elif not over.done():
                    over.set_result(None)
        if self._idle_waiters and self._scheduler.idle:
            for idle in self._idle_waiters:
                if not idle.done():
                    idle.set_result(None)
            self._idle_waiters.clear()

    # Waiting

    def _admit(self, tag: Tag) -> Any:
        context = self._scheduler.admit(tag)
        self._turn()
        return context

    def _call_admissions(self) -> None:
        """Tell as many waiters to go ahead as there is room for."""
        admissions = self._admissions
        while admissions and (admissions[0].done() or self._reserved < self._scheduler.room):
            turn = admissions.popleft()
            if not turn.done():
                self._reserved += 1
                turn.set_result(None)

    def _wake_room_waiters(self) -> None:
        waiters, self._room_waiters = self._room_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _wait(
        self, future: asyncio.Future[None], what: str, tag: Tag | None = None, *, timeout_s: float | None
    ) -> None:
        timeout_s = self._wait_timeout_s if timeout_s is None else timeout_s
        deadline = self._loop.call_later(timeout_s, self._time_out, future, what, tag, timeout_s)
        try:
            await future
        finally:
            deadline.cancel()

    def _time_out(self, future: asyncio.Future[None], what: str, tag: Tag | None, timeout_s: float) -> None:
        name = what if tag is None else f"{what} {tag}"
        _refuse(future, WaitTimedOut(name=name, timeout_s=timeout_s, details=self._describe()))

    async def _wait_for_threads(self) -> None:
        """Wait until the scheduler is idle; keep on when cancelled, and be cancelled afterwards."""
        cancelled: asyncio.CancelledError | None = None
        ends_at = self._loop.time() + self._close_timeout_s
        while not self._scheduler.idle:
            idle: asyncio.Future[None] = self._loop.create_future()
            self._idle_waiters.append(idle)
            try:
                await self._wait(idle, "closing the engine", timeout_s=max(0.0, ends_at - self._loop.time()))
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    # State

    def _check_running(self) -> None:
        if self._state != "running":
            raise EngineClosed(f"the engine is {self._state}: it works only inside its `async with`")

    def _check_admissible(self, tag: Tag) -> None:
        if tag in self._admitting:
            raise TagInFlight(tag=tag)
        self._scheduler.check_admissible(tag)

    def _fail(self, error: Exception) -> None:
        """Stop because of `error`; the body of the `async with` is cancelled and the error raised there."""
        if self._state == "running":
            self._failure.set_exception(error)
            self._stop()
        else:  # something stopped the engine before: this is not what is raised, but must be heard of
            self._loop.call_exception_handler({"message": f"{self!r} failed again", "exception": error})

    def _stop(self) -> None:
        """Abandon everything and refuse all who wait."""
        self._state = "stopped"
        waiting = [*self._admissions, *self._idle_waiters, *self._room_waiters]
        for futures in self._finish_waiters.values():
            waiting += futures
        self._admissions.clear()
        self._room_waiters.clear()
        self._idle_waiters.clear()
        self._finish_waiters.clear()
        for future in waiting:
            _refuse(future, EngineClosed("the engine stopped meanwhile"))
        self._scheduler.abandon_all()
        self._turn()

    def _describe(self) -> str:
        return f"{self._scheduler.describe()}; {len(self._backlog)} calls wait for the pool"

    def statistics(self) -> EngineStatistics:
        """Counts so far and what is held now."""
        scheduler = self._scheduler
        return EngineStatistics(
            admitted=scheduler.num_admitted,
            finished=scheduler.num_finished,
            abandoned=scheduler.num_abandoned,
            failed=self._num_failed,
            firings=scheduler.num_firings,
            dropped_tokens=scheduler.num_dropped,
            live=scheduler.num_live,
            still_running=scheduler.num_still_running,
            waiting=len(self._admitting),
            early_tokens=scheduler.num_early,
            backlog=len(self._backlog),
        )

    def __repr__(self) -> str:
        s = self._scheduler
        return f"<Engine {self._state} {s.num_live}/{s.in_flight} tags in flight {s.num_finished} finished>"


def _refuse(future: asyncio.Future[None], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        # If its waiter is cancelled in this very turn nobody will ask, and that is no reason to complain.
        future.exception()
