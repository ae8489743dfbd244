"""An event loop on virtual time that repeats a run exactly for the same seed.

Theory of operation
-------------------
asyncio schedules all work through `call_soon` and `call_at`, so the loop decides the order of all steps. The
loop has a queue of ready steps and a heap of timers, with ties in order of creation. If no step is ready, the
clock skips to the next timer. So simulated hours take milliseconds, a deadlock is found at once, and the
machine's speed has no influence.

By default steps run first in, first out, as asyncio documents. With `shuffled` the next step is drawn from
all ready steps, which is stricter than asyncio: code that fails only then relies on an undocumented order.

Several hosts share the loop. Each step of code belongs to one host (see `Host`) and reads that host's clock.
Steps of the world, such as arriving bytes and finished disk operations, belong to no host. Steps of the world
run at their time, before the timers of hosts that are due at the same time.

The replay hash covers every step with its time, host and label. Labels are names. Tasks and futures hash by
their number, so sets of them have the same order in every run. Garbage is collected at the same steps.
"""

import asyncio
import gc
import hashlib
import itertools
import sys
from asyncio import events
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import suppress
from contextvars import Context, copy_context
from heapq import heapify, heappop, heappush
from typing import Any, Protocol, TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary

from tests.simulation.host import HOST, Host, SimulatedFuture, SimulatedTask, Step, label_of, place_of
from tests.simulation.random_streams import RandomStream

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TICK_S = 1e-6
"""Minimum delay of a timer, in seconds: real time passes while code runs. Without this delay, code that sets
a timer again because the clock is slightly before its rounded deadline would never reach it."""

INSTANT_STEPS = 200_000
"""Maximum number of steps in one instant; more are reported as an endless loop."""

COLLECT_STEPS = 100_000
"""Number of steps between two collections of cyclic garbage; each waits until the clock advances."""

TRACE_LINES = 8192
"""Number of trace lines between two updates of the replay hash."""

UNWIND_STEPS = 1000
"""Maximum number of further waits of a coroutine that is being closed, and of the coroutines that it
awaits."""


class SimulationFailed(Exception):
    """A simulated run cannot continue, or a task or callback failed without a waiter."""


class Deadlock(SimulationFailed):
    """No step can ever run again, but tasks wait. The text names the tasks and the places of their waits."""


class Endless(SimulationFailed):
    """A run exceeded its limit of steps in one instant, or of time."""


class Connector(Protocol):
    """The part of `SimulatedNetwork` that the loop uses."""

    async def connect(
        self, caller: Host, make_protocol: Callable[[], asyncio.BaseProtocol], host: str, port: int
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Connect to a listener."""

    async def begin(
        self, end: Any, make_protocol: Callable[[], asyncio.BaseProtocol]
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Connect a new protocol to an end."""

    async def listen(
        self,
        owner: Host,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        host: str,
        port: int,
        *,
        start_serving: bool,
    ) -> asyncio.AbstractServer:
        """Open a listener."""


class SimulatedLoop(asyncio.AbstractEventLoop):
    """The loop. Make one loop for each run, and `close` it.

    Args:
        shuffled: Draw the next step from all ready steps, instead of taking the oldest.
        limit_s: Time limit of a run, in seconds of the simulation.
        keep_trace: Keep every line of the replay hash in `trace`, to compare two runs.

    Attributes:
        now: Time of the simulation in seconds; the clocks of hosts may differ.
        outside: Host of the code outside all simulated machines, such as the test.
        network: Network behind `create_connection` and `create_server`.
    """

    def __init__(
        self, seed: int | str, *, shuffled: bool = False, limit_s: float = 3600.0, keep_trace: bool = False
    ) -> None:
        self.seed = str(seed)
        self.now = 0.0
        self.steps = 0
        self.outside = Host("outside")
        self.network: Connector | None = None
        self.trace: list[str] | None = [] if keep_trace else None
        self._schedule = self.dice("schedule") if shuffled else None
        self._limit_s = limit_s
        self._ready: deque[Step] = deque()
        self._timers: list[tuple[float, int, Step]] = []
        self._numbers = itertools.count()
        self._names = itertools.count(1)
        self._steps_at_most = INSTANT_STEPS
        self._collect_at = COLLECT_STEPS
        self._stopping = False
        self._closed = False
        self._failure: SimulationFailed | None = None
        self._handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None
        self._lines: list[str] = []
        self._digest = hashlib.blake2b(digest_size=16)
        self._generators: WeakKeyDictionary[AsyncGenerator[Any, Any], Host] = WeakKeyDictionary()
        self._lost: list[asyncio.Task[Any]] = []

    def dice(self, concern: str) -> RandomStream:
        """Return the random stream of one concern: schedule, network, disk, workload, fault points."""
        return RandomStream(f"{self.seed}/{concern}")

    # --- the order of steps ------------------------------------------------------------------

    def time(self) -> float:
        """Return the time of the running host's clock, in seconds."""
        host = HOST.get(None)
        return self.now if host is None else host.time_at(self.now)

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> Step:
        """Schedule a step on the host of its context; a closed loop drops it."""
        if context is None:
            context = copy_context()
        step = Step(context.get(HOST, self.outside), 0.0, callback, args, context)
        if not self._closed:  # coroutines that `close` ends may still call
            self._ready.append(step)
        return step

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> Step:
        """Schedule a step as `call_soon` does, for code that may run on any thread.

        Raises:
            RuntimeError: The caller runs on another thread.
        """
        if events._get_running_loop() is not self:
            raise RuntimeError(f"{label_of(callback)} is called by a thread: a simulated run may have none")
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> Step:
        """Schedule a step for the moment at which its host's clock shows `when`, in seconds."""
        if context is None:
            context = copy_context()
        host = context.get(HOST, self.outside)
        step = Step(host, when, callback, args, context)
        due = max(host.when_shows(when), self.now + TICK_S)
        heappush(self._timers, (due, next(self._numbers), step))
        return step

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> Step:
        """Schedule a step `delay` seconds from now, by the clock of the running host."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def at(self, when: float, callback: Callable[[*Ts], object], *args: *Ts) -> Step:
        """Schedule a step of the world, on no host, at a time of the simulation."""
        step = Step(None, when, callback, args, None)
        heappush(self._timers, (when, next(self._numbers), step))
        return step

    def call_next(self, host: Host, callback: Callable[[], object], context: Context) -> None:
        """Call a function at once if no other step would run before it; otherwise use `call_soon`.

        Only steps of the world may use this method.
        """
        timers = self._timers
        others = self._ready or (self._schedule is not None and timers and timers[0][0] <= self.now)
        if others or host.frozen or host.busy or host.step_s:
            self.call_soon(callback, context=context)
        elif host.up:
            self._run(host.name, callback, (), context)

    def _advance(self) -> bool:
        """Advance the clock until a step is ready or the loop is stopped; return False if neither happens."""
        timers, ready = self._timers, self._ready
        while timers and not ready and not self._stopping:
            due, _, step = heappop(timers)
            if step.gone or (step.host is not None and not step.host.up):
                continue
            if due > self.now:
                if due > self._limit_s:
                    raise Endless(f"the run goes on after {self._limit_s:g} s: {self.waiting()}")
                self._begin_instant(due)
            self._fire(step)
            while timers and timers[0][0] <= self.now:
                self._fire(heappop(timers)[2])
        return bool(ready) or self._stopping

    def _begin_instant(self, due: float) -> None:
        lines = self._lines
        self.now = due
        self._steps_at_most = self.steps + INSTANT_STEPS
        if len(lines) > TRACE_LINES:
            self._take_lines()
        if self.steps >= self._collect_at:
            self._collect_at += COLLECT_STEPS
            gc.collect()
        lines.append(repr(due))

    def _fire(self, step: Step) -> None:
        if step.gone:
            return
        if step.host is None:
            assert step.call is not None
            self._run("-", step.call, step.args, None)
        else:
            self._ready.append(step)

    def _run(
        self, name: str, call: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> None:
        """Make a step."""
        lines = self._lines
        lines += (name, label_of(call))
        self.steps += 1
        try:
            if context is None:
                call(*args)
            else:
                context.run(call, *args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            self.call_exception_handler({"message": f"{label_of(call)} raised", "exception": error})

    def _run_steps(self) -> None:
        ready, schedule = self._ready, self._schedule
        while not self._stopping:
            if not ready and not self._advance():
                raise Deadlock(f"no step can ever run again, and these tasks wait: {self.waiting()}")
            if not ready:
                break
            if schedule is not None and len(ready) > 1:
                chosen = schedule.below(len(ready))
                ready[chosen], ready[-1] = ready[-1], ready[chosen]
                step = ready.pop()
            else:
                step = ready.popleft()
            host = step.host
            assert host is not None
            if step.gone or not host.up:
                continue
            if host.frozen or host.busy:
                host.waiting.append(step)
                continue
            assert step.call is not None
            self._run(host.name, step.call, step.args, step.context)
            if host.step_s:
                host.busy = True
                self.at(self.now + host.step_s, self._end_step, host)
            if self.steps > self._steps_at_most:
                raise Endless(f"{INSTANT_STEPS} steps at {self.now} s, the last {step!r}: {self.waiting()}")

    def note(self, what: str) -> None:
        """Add a line to the trace and the replay hash."""
        self._lines.append(what)

    def _take_lines(self) -> None:
        self._digest.update("\n".join([*self._lines, ""]).encode())
        if self.trace is not None:
            self.trace += self._lines
        self._lines.clear()

    @property
    def replay_hash(self) -> str:
        """Digest of all steps so far; equal for two equal runs."""
        self._take_lines()
        return self._digest.hexdigest()

    # --- hosts -------------------------------------------------------------------------------

    def crash(self, host: Host) -> None:
        """End a host: none of its code ever runs again, not even its program's cleanup.

        The current step, if it belongs to the host, runs to its next wait.
        """
        host.up = False
        host.waiting.clear()
        # Keep the tasks: a dropped task runs its finalizers, which a crash never does.
        self._lost += self._tasks_of(host)

    def freeze(self, host: Host) -> None:
        """Stop all code of a host until `thaw`; its sockets stay open and receive as much as fits."""
        host.frozen = True

    def thaw(self, host: Host) -> None:
        """Resume a frozen host."""
        host.frozen = False
        self._release(host)

    def set_clock(self, host: Host, *, time: float | None = None, rate: float = 1.0) -> None:
        """Set the time (None: unchanged) and rate of a host's clock; its timers follow."""
        time = host.time_at(self.now) if time is None else time
        host.set_clock(now=self.now, time=time, rate=rate)
        self._timers[:] = [
            (host.when_shows(step.due) if step.host is host else due, number, step)
            for due, number, step in self._timers
        ]
        heapify(self._timers)

    def _end_step(self, host: Host) -> None:
        host.busy = False
        self._release(host)

    def _release(self, host: Host) -> None:
        if host.up and not host.stopped:
            self._ready.extendleft(reversed(host.waiting))
            host.waiting.clear()

    def _tasks_of(self, host: Host | None = None) -> list[SimulatedTask]:
        """Return the unfinished tasks of a host, or of all hosts, oldest first."""
        tasks = [task for task in asyncio.all_tasks(self) if isinstance(task, SimulatedTask)]
        return sorted((t for t in tasks if host is None or t.host is host), key=lambda task: task.number)

    def waiting(self) -> str:
        """Name the waiting tasks, and the places where they wait."""
        return "; ".join(
            f"{task.host!r} {task.get_name()} at {place_of(task)}"
            for task in self._tasks_of()
            if task.host.up
        )

    # --- tasks -------------------------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future that hashes by a number: a hash of its address would differ between runs."""
        future = SimulatedFuture(loop=self)
        future.number = next(self._numbers)
        return future

    def create_task(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        name: object = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        """Start a task on the host of its context; without a `name`, a count names it."""
        label = f"task-{next(self._names)}" if name is None else str(name)
        return self.spawn(coro, label, context or copy_context())

    def spawn(self, coro: Any, name: str, context: Context) -> asyncio.Task[Any]:
        """Start a task in the context of its host."""
        if self._closed:
            coro.close()
            raise RuntimeError(f"{name} cannot start: the simulated run is over")
        host = context.get(HOST, self.outside)
        return SimulatedTask(coro, next(self._numbers), host, loop=self, name=name, context=context)

    def _first_step(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._generators[generator] = HOST.get(self.outside)

    def _finalize(self, generator: AsyncGenerator[Any, Any]) -> None:
        host = self._generators.pop(generator, self.outside)
        if host.up and not self._closed:
            self.spawn(_close_generator(generator), "end of a generator", host.context.copy())

    async def shutdown_asyncgens(self) -> None:
        for generator in list(self._generators):
            await generator.aclose()

    async def shutdown_default_executor(self) -> None:
        """Do nothing, because the loop has no executor."""

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> Any:
        """Refuse to run a function on a thread.

        Raises:
            RuntimeError: Always; names the function.
        """
        raise RuntimeError(f"{label_of(func)} needs a thread, and a simulated run has none: pass in a port")

    # --- running -----------------------------------------------------------------------------

    def run_forever(self) -> None:
        """Run until `stop`.

        Raises:
            SimulationFailed: The run cannot go on, or a task or callback failed without a waiter.
        """
        if self._closed or events._get_running_loop() is not None:
            raise RuntimeError("the simulated loop is closed, or another loop runs here")
        hooks = sys.get_asyncgen_hooks()
        collecting = gc.isenabled()
        gc.disable()
        sys.set_asyncgen_hooks(firstiter=self._first_step, finalizer=self._finalize)
        events._set_running_loop(self)
        try:
            self._run_steps()
        finally:
            self._stopping = False
            events._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)
            if collecting:
                gc.enable()
        if self._failure is not None:
            raise self._failure

    def run_until_complete(self, future: Any) -> Any:
        return self.run(future)

    def run(self, work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
        """Run until a coroutine or future is done, and return its result or raise its error.

        Raises:
            SimulationFailed: As `run_forever`.
        """
        task: asyncio.Future[T]
        if isinstance(work, asyncio.Future):
            task = work
        else:
            task = self.spawn(work, "main", self.outside.context.copy())
        task.add_done_callback(self._main_ended)
        try:
            self.run_forever()
        finally:
            task.remove_done_callback(self._main_ended)
            if task.done() and not task.cancelled():
                task.exception()  # the run raises its first failure; asyncio must not log the task's
        if not task.done():
            raise RuntimeError("the simulated loop was stopped before its task had ended")
        return task.result()

    def _main_ended(self, task: asyncio.Future[Any]) -> None:
        self.stop()

    def stop(self) -> None:
        self._stopping = True

    def is_running(self) -> bool:
        return events._get_running_loop() is self

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Close the coroutines of all unfinished tasks, and drop all steps."""
        if self._closed:
            return
        lost = [*self._lost, *self._tasks_of()]
        self._closed = True
        self._ready.clear()
        self._timers.clear()
        self._lost.clear()
        running = events._get_running_loop()
        events._set_running_loop(self)
        # The awaiter of a generator does not show what the generator awaits.
        awaited = [getattr(generator, "ag_await", None) for generator in self._generators]
        for coroutine in filter(asyncio.iscoroutine, awaited):
            _end(coroutine)
        for task in lost:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            _end(task.get_coro())
        events._set_running_loop(running)

    # --- failures ----------------------------------------------------------------------------

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Fail the run, unless a handler is set: a failure without a waiter must be reported."""
        if self._closed:
            return
        if self._handler is not None:
            self._handler(self, context)
        else:
            self.default_exception_handler(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Fail and stop the run with the first error that reaches the loop."""
        error = context.get("exception")
        if self._failure is None:
            self._failure = SimulationFailed(f"at {self.now} s: {context['message']}: {error!r}")
            self._failure.__cause__ = error
        self.stop()

    def set_exception_handler(
        self, handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None
    ) -> None:
        """Set the handler of errors without a waiter; None: they fail the run."""
        self._handler = handler

    def get_exception_handler(self) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None:
        """Return the handler of errors without a waiter; None: they fail the run."""
        return self._handler

    def get_debug(self) -> bool:
        """Return False: see `set_debug`."""
        return False

    def set_debug(self, enabled: bool) -> None:
        """Ignore the call: debug mode prints addresses and reads real clocks."""

    # --- the network -------------------------------------------------------------------------

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], host: str, port: int
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Connect the running host to a listener of the simulated network."""
        return await self._connector().connect(HOST.get(self.outside), protocol_factory, host, port)

    async def create_unix_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], *, sock: Any
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Connect a protocol to a connection within the running host."""
        return await self._connector().begin(sock, protocol_factory)

    async def create_server(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str,
        port: int,
        *,
        start_serving: bool = True,
    ) -> asyncio.AbstractServer:
        """Listen on the running host, in the simulated network."""
        owner = HOST.get(self.outside)
        return await self._connector().listen(
            owner, protocol_factory, host, port, start_serving=start_serving
        )

    def _connector(self) -> Connector:
        if self.network is None:
            raise RuntimeError("this simulated run has no network: make a SimulatedNetwork for its loop")
        return self.network

    def __repr__(self) -> str:
        return f"<SimulatedLoop seed {self.seed} at {self.now:g} s, {self.steps} steps>"


async def _close_generator(generator: AsyncGenerator[Any, Any]) -> None:
    await generator.aclose()


def _end(coroutine: Any) -> None:
    """Unwind the coroutine of an unfinished task. Further waits and errors of the coroutine are ignored.

    Close the innermost coroutine first: a coroutine that waits during its close would be left to the garbage
    collector.
    """
    for _ in range(UNWIND_STEPS):
        innermost = coroutine
        while getattr(awaited := getattr(innermost, "cr_await", None), "cr_frame", None) is not None:
            innermost = awaited
        with suppress(Exception, BaseExceptionGroup, asyncio.CancelledError):
            innermost.close()
        if coroutine.cr_frame is None:
            return
