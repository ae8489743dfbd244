"""An event loop on virtual time that runs the same program in the same way whenever it has the same seed.

Theory of operation
-------------------
Whatever asyncio does, it does through `call_soon` and `call_at`; who owns those owns the order of things.
This loop keeps a list of steps that are ready and a heap of timers with ties broken by their order. When
nothing is ready the clock jumps to the next timer. So hours pass in milliseconds, a wait that could never
end is seen at once, and nothing depends on the machine.

Steps run first in, first out, as asyncio documents; then only the network and the disk are random. With
`shuffled` the next step is drawn from all that are ready, which is stricter than asyncio: what fails only
then relies on an order that nobody promises.

Several hosts share the loop. Each step belongs to one (see `Host`), and reads that host's clock. What
belongs to none is the world itself: bytes that arrive, disks that are done. It runs at its time, before
anything else.

The replay hash covers every step with its time, host and label. Labels are names; tasks and futures hash by
their number, so that sets of them have the same order in every run; garbage is collected at the same steps.
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

from adam_async.runtime.random_streams import Dice
from adam_async.simulation.host import HOST, Host, Step, label_of
from adam_async.simulation.tasks import SimulatedFuture, SimulatedTask, place_of

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TICK_S = 1e-6
"""No timer rings sooner than this after it was set, as real time passes meanwhile. Code that sets one again
because its deadline, rounded, has not quite come would otherwise never get there."""

INSTANT_STEPS = 200_000
"""So many steps without time passing are taken for a loop that never ends."""

COLLECT_STEPS = 100_000
"""Garbage with cycles is collected when time passes after so many steps, and at no other moment."""

TRACE_LINES = 8192

UNWIND_STEPS = 1000
"""So often a coroutine that is ended, with those that it awaits, may go on to wait for something else."""


class SimulationFailed(Exception):
    """A simulated run cannot go on, or something in it failed that nobody waits for."""


class Deadlock(SimulationFailed):
    """Nothing can ever run again, and somebody waits. The text says who and where."""


class Endless(SimulationFailed):
    """A run took more steps in one instant, or more time, than it may."""


class Connector(Protocol):
    """What the loop needs of a network; see `SimulatedNetwork`."""

    async def connect(
        self, caller: Host, make_protocol: Callable[[], asyncio.BaseProtocol], host: str, port: int
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Reach a listener."""

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
    """The loop. Make one for each run, and `close` it.

    Args:
        seed: What every random decision follows from.
        shuffled: Draw the next step from all that are ready, instead of taking the oldest.
        limit_s: Time of the simulation after which a run is given up.
        keep_trace: Keep every line that the replay hash covers in `trace`, to compare two runs by.

    Attributes:
        now: Seconds of the simulation, which no host need agree with.
        steps: How many were made.
        outside: The host of whatever belongs to none of the simulated machines: the test that watches them.
        network: What `create_connection` and `create_server` lead to.
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

    def dice(self, concern: str) -> Dice:
        """Return the stream of one concern: schedule, network, disk, workload, buggify."""
        return Dice(f"{self.seed}/{concern}")

    # --- the order of things -----------------------------------------------------------------

    def time(self) -> float:
        """What the clock of the running host shows, in seconds."""
        host = HOST.get(None)
        return self.now if host is None else host.time_at(self.now)

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> Step:
        if context is None:
            context = copy_context()
        step = Step(context.get(HOST, self.outside), 0.0, callback, args, context)
        if not self._closed:  # coroutines that `close` ends may still call
            self._ready.append(step)
        return step

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> Step:
        if events._get_running_loop() is not self:
            raise RuntimeError(f"{label_of(callback)} comes from a thread: a simulated run may have none")
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> Step:
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
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def at(self, when: float, callback: Callable[[*Ts], object], *args: *Ts) -> Step:
        """Let something happen in the world, on no host, at a time of the simulation."""
        step = Step(None, when, callback, args, None)
        heappush(self._timers, (when, next(self._numbers), step))
        return step

    def call_next(self, host: Host, callback: Callable[[], object], context: Context) -> None:
        """As `call_soon`, but at once if nothing else would run before it. From the world, not from code."""
        timers = self._timers
        others = self._ready or (self._schedule is not None and timers and timers[0][0] <= self.now)
        if others or host.frozen or host.busy or host.step_s:
            self.call_soon(callback, context=context)
        elif host.up:
            self._run(host.name, callback, (), context)

    def _advance(self) -> bool:
        """Let time pass until something is ready or the loop is stopped; False if neither ever will be."""
        timers, ready = self._timers, self._ready
        while timers and not ready and not self._stopping:
            due, _, step = heappop(timers)
            if step.gone or (step.host is not None and not step.host.up):
                continue
            if due > self.now:
                if due > self._limit_s:
                    raise Endless(f"{self._limit_s:g} s have passed, and the run goes on: {self.waiting()}")
                self._begin_instant(due)
            self._ring(step)
            while timers and timers[0][0] <= self.now:
                self._ring(heappop(timers)[2])
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

    def _ring(self, step: Step) -> None:
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
                raise Deadlock(f"nothing can ever run again, and these wait: {self.waiting()}")
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
                host.held.append(step)
                continue
            assert step.call is not None
            self._run(host.name, step.call, step.args, step.context)
            if host.step_s:
                host.busy = True
                self.at(self.now + host.step_s, self._rested, host)
            if self.steps > self._steps_at_most:
                raise Endless(f"{INSTANT_STEPS} steps at {self.now} s, the last {step!r}: {self.waiting()}")

    def note(self, what: str) -> None:
        """Add a line to what the replay hash covers."""
        self._lines.append(what)

    def _take_lines(self) -> None:
        self._digest.update("\n".join([*self._lines, ""]).encode())
        if self.trace is not None:
            self.trace += self._lines
        self._lines.clear()

    @property
    def replay_hash(self) -> str:
        """A digest of all steps so far: two runs that have the same did the same."""
        self._take_lines()
        return self._digest.hexdigest()

    # --- hosts -------------------------------------------------------------------------------

    def crash(self, host: Host) -> None:
        """End a host: none of its code ever runs again, not even what a program does when it is ended.

        The step that is being made, if it is the host's own, runs to its next wait.
        """
        host.up = False
        host.held.clear()
        # Kept: a task that is dropped runs its finalizers, which no crash does.
        self._lost += self._tasks_of(host)

    def freeze(self, host: Host) -> None:
        """Let nothing run on a host until `thaw`; its sockets stay, and take what fits."""
        host.frozen = True

    def thaw(self, host: Host) -> None:
        """Let a frozen host go on."""
        host.frozen = False
        self._release(host)

    def set_clock(self, host: Host, *, time: float | None = None, rate: float = 1.0) -> None:
        """Set what a host's clock shows (None: what it does) and how fast it runs; its timers follow it."""
        time = host.time_at(self.now) if time is None else time
        host.set_clock(now=self.now, time=time, rate=rate)
        self._timers[:] = [
            (host.when_shows(step.due) if step.host is host else due, number, step)
            for due, number, step in self._timers
        ]
        heapify(self._timers)

    def _rested(self, host: Host) -> None:
        host.busy = False
        self._release(host)

    def _release(self, host: Host) -> None:
        if host.up and not host.held_up:
            self._ready.extendleft(reversed(host.held))
            host.held.clear()

    def _tasks_of(self, host: Host | None = None) -> list[SimulatedTask]:
        """The tasks of a host, or of all, that have not ended, oldest first."""
        tasks = [task for task in asyncio.all_tasks(self) if isinstance(task, SimulatedTask)]
        return sorted((t for t in tasks if host is None or t.host is host), key=lambda task: task.number)

    def waiting(self) -> str:
        """Say which tasks wait, and where."""
        return "; ".join(
            f"{task.host!r} {task.get_name()} at {place_of(task)}"
            for task in self._tasks_of()
            if task.host.up
        )

    # --- tasks -------------------------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
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
        """There is none."""

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> Any:
        raise RuntimeError(f"{label_of(func)} wants a thread: a simulated run has none, give it a port")

    # --- running -----------------------------------------------------------------------------

    def run_forever(self) -> None:
        """Run until `stop`.

        Raises:
            SimulationFailed: The run cannot go on, or something failed that nobody waits for.
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
                task.exception()  # whoever is told of another failure need not hear of this one
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
        """End everything that is left as a crash would, and let go of it."""
        if self._closed:
            return
        lost = [*self._lost, *self._tasks_of()]
        self._closed = True
        self._ready.clear()
        self._timers.clear()
        self._lost.clear()
        running = events._get_running_loop()
        events._set_running_loop(self)
        # What a generator awaits is not seen from who awaits the generator.
        awaited = [getattr(generator, "ag_await", None) for generator in self._generators]
        for coroutine in filter(asyncio.iscoroutine, awaited):
            _end(coroutine)
        for task in lost:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            _end(task.get_coro())
        events._set_running_loop(running)

    # --- what goes wrong ---------------------------------------------------------------------

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Fail the run, unless a handler was set: what nobody waits for must not pass unseen."""
        if self._closed:
            return
        if self._handler is not None:
            self._handler(self, context)
        else:
            self.default_exception_handler(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if self._failure is None:
            self._failure = SimulationFailed(f"at {self.now} s: {context['message']}: {error!r}")
            self._failure.__cause__ = error
        self.stop()

    def set_exception_handler(
        self, handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None
    ) -> None:
        self._handler = handler

    def get_exception_handler(
        self,
    ) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None:
        return self._handler

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        """Debugging shows addresses and reads real clocks; it stays off."""

    # --- the network -------------------------------------------------------------------------

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], host: str, port: int
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        return await self._connector().connect(HOST.get(self.outside), protocol_factory, host, port)

    async def create_server(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str,
        port: int,
        *,
        start_serving: bool = True,
    ) -> asyncio.AbstractServer:
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
    """Unwind a coroutine of a host that is no more. Whatever it wants to wait for or raises meets nobody.

    The innermost first: one that waits while it is closed would otherwise be left to the garbage collector.
    """
    for _ in range(UNWIND_STEPS):
        innermost = coroutine
        while getattr(awaited := getattr(innermost, "cr_await", None), "cr_frame", None) is not None:
            innermost = awaited
        with suppress(Exception, BaseExceptionGroup, asyncio.CancelledError):
            innermost.close()
        if coroutine.cr_frame is None:
            return
