"""One machine of a simulated run, as the loop sees it: clock, state, and its code's steps; the loop's futures
and tasks.

Every task and callback belongs to the host that made it; a context variable passes the host to every task
that a task starts. A host that is down never runs again: a restarted machine gets a new host with the same
name. Steps of a frozen or busy host wait in `waiting`, in order.

asyncio's own futures and tasks hash by address, so a set of them has a different order in each process. These
classes hash by the number that the loop gave them.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from types import CodeType
from typing import Any

HOST: ContextVar["Host"] = ContextVar("simulated host")


class Host:
    """A machine that runs code.

    Args:
        name: Name in the network, the trace and errors.
        now: Start time, in seconds of the simulation.
        time: Time of the host's clock at the start, in seconds.
        rate: Seconds of the host's clock per second of the simulation.
        step_s: Duration of each step of the host's code, in simulated seconds.

    Attributes:
        up: Whether the host has power and its program was not killed.
        waiting: Steps delayed while the host is frozen or busy.
    """

    def __init__(
        self, name: str, *, now: float = 0.0, time: float = 0.0, rate: float = 1.0, step_s: float = 0.0
    ) -> None:
        self.name = name
        self.up = True
        self.frozen = False
        self.busy = False
        self.step_s = step_s
        self.waiting: deque[Step] = deque()
        self.context: Context = copy_context()
        self.context.run(HOST.set, self)
        self.set_clock(now=now, time=time, rate=rate)

    def set_clock(self, *, now: float, time: float, rate: float) -> None:
        """Set the time and the rate of the host's clock from now on.

        Raises:
            ValueError: The rate is not positive.
        """
        if not 0 < rate < math.inf:
            raise ValueError(f"the clock of {self.name} cannot run at rate {rate}: use a positive number")
        self._since, self._time_then, self.rate = now, time, rate

    def time_at(self, now: float) -> float:
        """Return the time of the host's clock at a time of the simulation."""
        return self._time_then + (now - self._since) * self.rate

    def when_shows(self, time: float) -> float:
        """Return the first time of the simulation at which the host's clock shows `time` or more."""
        now = self._since + (time - self._time_then) / self.rate
        if self.time_at(now) >= time:
            return now
        nudge = math.ulp(max(abs(now), abs(time), abs(self._time_then))) / self.rate
        while self.time_at(now) < time:  # rounding must not let a timer fire early
            now += nudge
            nudge *= 2
        return now

    @property
    def stopped(self) -> bool:
        """Whether the host's steps must wait."""
        return self.frozen or self.busy

    def __repr__(self) -> str:
        state = "down" if not self.up else "frozen" if self.frozen else "up"
        return f"<Host {self.name} {state}>"


class Step(asyncio.TimerHandle):
    """One scheduled call. The base class only gives the type: asyncio's own fields stay empty."""

    __slots__ = ("args", "call", "context", "due", "gone", "host")

    def __init__(
        self,
        host: "Host | None",
        due: float,
        call: Callable[..., object],
        args: tuple[Any, ...],
        context: Context | None,
    ) -> None:
        self.host = host
        self.due = due  # by the host's clock
        self.call: Callable[..., object] | None = call
        self.args: tuple[Any, ...] = args
        self.context = context
        self.gone = False

    def cancel(self) -> None:
        """Drop the call and its arguments at once; the loop later skips the cancelled step in its heap."""
        self.gone = True
        self.call, self.args, self.context = None, (), None

    def cancelled(self) -> bool:
        """Return whether `cancel` was called."""
        return self.gone

    def when(self) -> float:
        """Due time by the host's clock, in seconds."""
        return self.due

    def __repr__(self) -> str:
        return f"<Step {'cancelled' if self.call is None else label_of(self.call)}>"


def label_of(call: Callable[..., object]) -> str:
    """Name a callback without its address: by the task that it resumes, or by its own name."""
    owner = getattr(call, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return owner.get_name()
    label: str = getattr(call, "__qualname__", "") or label_of(getattr(call, "func", type(call)))
    return label


class SimulatedFuture(asyncio.Future[Any]):
    """A future that hashes by a number from the loop."""

    __slots__ = ("number",)

    number: int

    def __hash__(self) -> int:
        return self.number


class SimulatedTask(asyncio.Task[Any]):
    """A task that hashes by its number and has a host."""

    __slots__ = ("host", "number")

    def __init__(
        self,
        coro: Any,
        number: int,
        host: Host,
        *,
        loop: asyncio.AbstractEventLoop,
        name: str,
        context: Context,
    ) -> None:
        self.number = number
        self.host = host
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self.number


def place_of(task: asyncio.Task[Any]) -> str:
    """Return the place of a task's wait: the innermost line of the coroutines that await one another."""
    awaited: Any = task.get_coro()
    place = "its beginning"
    while awaited is not None:
        kind = next((kind for kind in ("cr", "gi", "ag") if hasattr(awaited, f"{kind}_code")), None)
        if kind is None:
            break
        code: CodeType = getattr(awaited, f"{kind}_code")
        frame = getattr(awaited, f"{kind}_frame")
        if frame is not None:
            place = f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
        awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
    return place
