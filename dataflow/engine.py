"""The engine runs a scheduler: light nodes on the loop, heavy nodes in a pool.

Theory of operation
-------------------
The engine reports every event (an admission, a delivery, completed jobs) to the scheduler. Then one *turn*
carries out effects until none are left. Light nodes run at once and cause further effects; heavy calls
collect in a backlog, which the pool gets in one call at the end. So light nodes that follow a heavy node fire
in the same iteration of the loop in which it completes, and a wake-up with eight completed jobs costs one
submission. Callbacks and light nodes may call the engine again; that only adds effects to the current turn.

The engine itself never waits. The engine's one task watches for the failure that stops it. So the failure
cancels the body of the `async with` like a failure in a task group.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from inspect import iscoroutinefunction
from types import TracebackType
from typing import Any, Literal, Self, cast

from dataflow.errors import (
    EngineClosed,
    GraphError,
    NodeFailed,
    NoRoom,
    PoolClosed,
    TagInFlight,
    WaitTimedOut,
)
from dataflow.graph import Graph
from dataflow.jobs import Job, JobPool, Mailbox, Tag
from dataflow.scheduler import Scheduler
from dataflow.tokens import BatchCall, Call, Firing, Output, Token, TraceRecord
from dataflow.waiters import Waiters

OnOutput = Callable[[str, Tag, Any], None]
Trace = Callable[[TraceRecord], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """Counts since the engine was entered, and its current state."""

    admitted: int
    """Number of admitted tags."""
    finished: int
    """Number of tags whose nodes have all fired and whose inputs have all arrived."""
    abandoned: int
    """Number of tags abandoned after their admission, failed tags included."""
    failed: int
    """Number of tags abandoned because a node raised."""
    firings: int
    """Number of completed firings of live tags."""
    dropped_tokens: int
    """Number of late tokens for settled tags, and of early tokens whose tags were abandoned."""
    live: int
    """Number of live tags."""
    still_running: int
    """Number of abandoned tags whose context a thread may still use."""
    waiting: int
    """Number of callers that wait in `admit`."""
    early_tokens: int
    """Number of tokens kept for tags not yet admitted."""
    backlog: int
    """Number of ready calls for which the pool has no room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Limits of an engine.

    Attributes:
        early_limit: Maximum number of tokens kept for tags not admitted yet.
        keep_epochs: Number of epochs kept tag by tag; all tags of older epochs count as settled.
        wait_timeout_s: Default time limit of `admit`, `wait_room` and `drain`, in seconds.
        close_timeout_s: Maximum wait for running jobs at the end of the block, in seconds.
    """

    early_limit: int = 1024
    keep_epochs: int = 2
    wait_timeout_s: float = 60.0
    close_timeout_s: float = 30.0


SETTINGS = EngineSettings()
"""Default settings of an engine."""


class Engine:
    """Runs one graph for many tags at once. An asynchronous context manager.

    Leaving the block abandons all live tags and waits until no thread runs their calls. The block then raises
    the error that stopped the engine, such as a `NodeFailed` or a callback's error. Call `drain` first to
    finish all admitted tags. Cancelling does not shorten the wait for threads: the caller may reuse the
    contexts afterwards. If a job takes longer than `EngineSettings.close_timeout_s`, the exit raises
    WaitTimedOut, or adds it as a note to the error that it raises anyway.

    Args:
        pool: Pool of the heavy nodes. The pool must stay open as long as the engine.
        contexts: Training contexts, at least `in_flight`; see `Scheduler`.
        on_output: Callback on the loop, ``on_output(port, tag, value)``, for each value of a graph output.
        on_room: Callback on the loop, in each turn that leaves room for a tag. The callback may call
            `admit_nowait`, which costs less than a task that waits in `admit` for every tag.
        trace: Callback on the loop with the record of every ended firing. None leaves out the measurements.
        settings: Limits of the engine.
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
        trace: Trace | None = None,
        settings: EngineSettings = SETTINGS,
    ) -> None:
        for name, callback in (("on_output", on_output), ("on_room", on_room), ("trace", trace)):
            if iscoroutinefunction(callback):
                raise GraphError(f"{name} is a coroutine function; callbacks are plain functions")
        self._scheduler = Scheduler(
            graph,
            in_flight=in_flight,
            contexts=contexts,
            early_limit=settings.early_limit,
            keep_epochs=settings.keep_epochs,
        )
        self._pool = pool
        self._on_output = on_output
        self._on_room = on_room
        self._trace = trace
        self._settings = settings
        self._state: Literal["new", "running", "stopped"] = "new"
        self._sink = self._jobs_done  # one bound method, by which the pool can group
        self._turning = False
        self._backlog: deque[Call] = deque()
        self._asked_for_room = False
        self._waiters = Waiters(self._scheduler, settings.wait_timeout_s, self._describe)
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
        failure = error
        try:
            await self._end_tasks(kind, error, trace)
        except BaseException as raised:
            failure = raised
            raise
        finally:
            await self._wait_for_threads(failure)

    async def _end_tasks(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the task group; raise the errors of engine and body, unless the body's is the only one."""
        try:
            await self._task_group.__aexit__(kind, error, trace)
        except asyncio.CancelledError as cancelled:
            # Raised again, `error` would become its own context in an exit stack; an outer stack would hang.
            if cancelled is not error:
                raise
        except BaseExceptionGroup as group:
            # An EngineClosed of the body follows from the error that stopped the engine, so it is not a
            # second error. If no error stopped the engine, the end of the watch has cancelled the future.
            failed = self._failure.done() and not self._failure.cancelled()
            failure = self._failure.exception() if failed else None
            errors = group if failure is None else group.split(EngineClosed)[1]
            found = [] if errors is None else list(errors.exceptions)
            if failure is not None and failure not in found:
                # The body raised before the task that watches for failures ran.
                found.insert(0, failure)
            if len(found) > 1:
                raise BaseExceptionGroup(group.message, found) from None
            # Raise a single error alone: a group would only show that an engine has a task inside.
            only = found[0]
            if only is not error:
                raise only from only.__cause__

    async def _raise_failure(self) -> None:
        await self._failure

    # Tags

    async def admit(self, tag: Tag, *, timeout_s: float | None = None) -> Any:
        """Wait for a slot and a free context, make `tag` live, and return the context.

        Callers are served in order. Cancelling admits no tag.

        Raises:
            TagInFlight, TagSettled: The tag is or was in use.
            EngineClosed: The engine is not running, or stopped during the wait.
            WaitTimedOut: No slot was free within `timeout_s`.
        """
        self._check_running()
        self._check_admissible(tag)
        waiters = self._waiters
        if not waiters.admissions and self._scheduler.room > waiters.reserved:
            return self._admit(tag)
        try:
            await waiters.wait_admission(tag, timeout_s=timeout_s)
            self._check_running()
            return self._scheduler.admit(tag)
        finally:
            self._turn()  # runs the early tokens, or passes the reserved slot on

    def admit_nowait(self, tag: Tag) -> Any:
        """Admit `tag` as `admit` does, but raise NoRoom instead of waiting."""
        self._check_running()
        self._check_admissible(tag)
        waiters = self._waiters
        if waiters.admissions or self._scheduler.room <= waiters.reserved:
            raise NoRoom(f"{tag} not admitted: {self._describe()}")
        return self._admit(tag)

    @property
    def has_room(self) -> bool:
        """Whether `admit_nowait` has a slot and a context."""
        waiters = self._waiters
        return not waiters.admissions and self._scheduler.room > waiters.reserved

    async def wait_room(self, *, timeout_s: float | None = None) -> None:
        """Wait until a turn leaves room after its call of `on_room`. Another caller may take the room first.

        Cancelling is harmless.

        Raises:
            EngineClosed: The engine is not running, or stopped during the wait.
            WaitTimedOut: No slot was free within `timeout_s`.
        """
        self._check_running()
        if not self.has_room:
            await self._waiters.wait_room(timeout_s=timeout_s)
            self._check_running()

    def abandon(self, tag: Tag) -> bool:
        """Abandon `tag`; return False if it was settled.

        The tag's slot is free at once. The tag's context is free once no thread runs a call of the tag. Calls
        that have not started never start. A tag that was not admitted can no longer be admitted.
        """
        self._check_running()
        known = self._scheduler.abandon(tag)
        self._turn()
        return known

    async def drain(self, *, timeout_s: float | None = None) -> None:
        """Wait until no tag is live and no thread runs a call. Cancelling is harmless.

        Raises:
            EngineClosed: The engine is not running, or stopped during the wait.
            WaitTimedOut: The wait took longer than `timeout_s`; the message lists the missing inputs per tag.
        """
        self._check_running()
        await self._waiters.wait_idle("draining the engine", timeout_s=timeout_s)

    # Tokens

    def deliver(self, port: str, tag: Tag, value: Any) -> None:
        """Give external input `port` its value for `tag`, and start the nodes that are now ready.

        Tokens may arrive in any order. A token that arrives before its tag is admitted is kept; a token for a
        settled tag is dropped and counted.

        Raises:
            UnknownPort, DuplicateToken, TooManyEarlyTokens: See `Scheduler.deliver`.
            EngineClosed: The engine is not running.
        """
        if self._state != "running":
            self._check_running()
        self._scheduler.deliver(port, tag, value)
        if not self._turning:
            self._turn()

    def deliver_all(self, tokens: Iterable[tuple[str, Tag, Any]]) -> None:
        """Deliver several ``(port, tag, value)`` in one turn: nodes start after the last token.

        Raises:
            UnknownPort, DuplicateToken, TooManyEarlyTokens, EngineClosed: See `deliver`; the tokens before
                the error are delivered.
        """
        self._check_running()
        try:
            for port, tag, value in tokens:
                self._scheduler.deliver(port, tag, value)
        finally:
            self._turn()

    def deliver_threadsafe(self, port: str, tag: Tag, value: Any) -> None:
        """Deliver a token from any thread: the loop calls `deliver` in a later iteration.

        The caller has returned by then, so an error of `deliver` stops the engine. A stopped engine drops
        tokens without an error. Raises EngineClosed if the engine was never entered.
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
        """Carry out effects until none are left, then submit the heavy calls to the pool."""
        if self._turning:
            return
        self._turning = True
        effects, waiters = self._scheduler.effects, self._waiters
        try:
            while effects or self._has_more_effects():
                effect = effects.popleft()
                if isinstance(effect, (Firing, BatchCall)):
                    if effect.node.heavy:
                        self._backlog.append(effect)
                    else:
                        self._run_light(effect)
                elif isinstance(effect, Output):
                    self._report_output(effect)
                elif waiters.idle:
                    waiters.wake_idle()
        finally:
            self._turning = False
        if self._backlog:
            self._submit()
        if waiters.admissions:
            waiters.grant_admissions()
        if waiters.room and self.has_room:
            waiters.wake_room()

    def _has_more_effects(self) -> bool:
        """Open the gates; without an effect but with room, call `on_room`. Returns whether one follows."""
        scheduler = self._scheduler
        if scheduler.gates:
            scheduler.open_gates()
        if not scheduler.effects and self._on_room is not None and self.has_room and self._state == "running":
            try:
                self._on_room()
            except Exception as error:
                self._fail(error)
            scheduler.open_gates()
        return bool(scheduler.effects)

    def _run_light(self, call: Call) -> None:
        """Run a light node on the loop, at once; its effects join the current turn."""
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
        """Submit the backlog in one call; calls that the pool does not accept wait until it has room."""
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
        except Exception as error:  # called by the pool, which cannot handle an error
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
        except Exception as error:  # called by the pool, which must report jobs of other users
            self._fail(error)

    def _call_failed(self, call: Call, error: BaseException) -> None:
        tags = self._scheduler.failed(call)
        if not tags:  # abandoned during the call, so no caller waits for the result
            return
        self._num_failed += len(tags)
        self._fail(NodeFailed(node=call.node.name, tags=tags, cause=error))

    def _report_output(self, output: Output) -> None:
        if self._on_output is not None:
            try:
                self._on_output(output.port, output.tag, output.value)
            except Exception as error:
                self._fail(error)

    def _record(self, call: Call) -> None:
        """Trace the firings of `call`, except those skipped because their tag was abandoned."""
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

    # Waiting

    def _admit(self, tag: Tag) -> Any:
        context = self._scheduler.admit(tag)
        self._turn()
        return context

    async def _wait_for_threads(self, failure: BaseException | None) -> None:
        """Wait until the scheduler is idle; a cancellation takes effect after the wait.

        If the wait takes too long, the method adds a note to the failure that ends the block, or raises.
        """
        cancelled: asyncio.CancelledError | None = None
        ends_at = self._loop.time() + self._settings.close_timeout_s
        while not self._scheduler.idle:
            left_s = max(0.0, ends_at - self._loop.time())
            try:
                await self._waiters.wait_idle("closing the engine", timeout_s=left_s)
            except asyncio.CancelledError as error:
                cancelled = error
            except WaitTimedOut as late:
                if not isinstance(failure, Exception):
                    raise
                failure.add_note(str(late))
                break
        if cancelled is not None:
            raise cancelled

    # State

    def _check_running(self) -> None:
        if self._state != "running":
            raise EngineClosed(f"the engine is {self._state}: it works only inside its `async with`")

    def _check_admissible(self, tag: Tag) -> None:
        if tag in self._waiters.admitting:
            raise TagInFlight(tag=tag)
        self._scheduler.check_admissible(tag)

    def _fail(self, error: Exception) -> None:
        """Stop because of `error`: cancel the body of the `async with`, and raise the error there."""
        if self._state == "running":
            self._failure.set_exception(error)
            self._stop()
        else:  # an earlier error stopped the engine and is raised, so report this error to the loop
            self._loop.call_exception_handler({"message": f"{self!r} failed again", "exception": error})

    def _stop(self) -> None:
        """Abandon all tags, and end all waits with an error."""
        self._state = "stopped"
        self._waiters.close()
        self._scheduler.abandon_all()
        self._turn()

    def _describe(self) -> str:
        return f"{self._scheduler.describe()}; {len(self._backlog)} calls wait for the pool"

    def statistics(self) -> EngineStatistics:
        """Return the counts so far and the current state."""
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
            waiting=len(self._waiters.admitting),
            early_tokens=scheduler.num_early,
            backlog=len(self._backlog),
        )

    def __repr__(self) -> str:
        s = self._scheduler
        return f"<Engine {self._state} {s.num_live}/{s.in_flight} tags in flight {s.num_finished} finished>"
