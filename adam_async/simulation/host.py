"""One machine of a simulated run, as the loop sees it: a clock of its own, and whether its code runs.

Every task and callback belongs to the host that made it; a context variable carries that along, as it does
into every task that a task starts. A host that is down runs nothing ever again: whoever restarts a machine
makes a new host of the same name. What was to run on a host that is frozen, or busy with a step that takes
long, waits in `held`, in its order.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from typing import Any

HOST: ContextVar["Host"] = ContextVar("simulated host")


class Host:
    """A machine that runs code.

    Args:
        name: What the network, the trace and errors call it.
        now: The simulation's time at which it starts.
        time: What its clock shows then.
        rate: Seconds of its clock in a second of the simulation.
        step_s: What each step of its code costs, in seconds of the simulation.

    Attributes:
        context: In which its code runs.
        up: Whether it runs at all.
    """

    def __init__(
        self, name: str, *, now: float = 0.0, time: float = 0.0, rate: float = 1.0, step_s: float = 0.0
    ) -> None:
        self.name = name
        self.up = True
        self.frozen = False
        self.busy = False
        self.step_s = step_s
        self.held: deque[Step] = deque()
        self.context: Context = copy_context()
        self.context.run(HOST.set, self)
        self.set_clock(now=now, time=time, rate=rate)

    def set_clock(self, *, now: float, time: float, rate: float) -> None:
        """Let its clock show `time` now and run at `rate` from now on.

        Raises:
            ValueError: The rate is not positive.
        """
        if not 0 < rate < math.inf:
            raise ValueError(f"the clock of {self.name} cannot run at rate {rate}: use a positive number")
        self._since, self._time_then, self.rate = now, time, rate

    def time_at(self, now: float) -> float:
        """What its clock shows at a time of the simulation."""
        return self._time_then + (now - self._since) * self.rate

    def when_shows(self, time: float) -> float:
        """The first time of the simulation at which its clock shows `time`, or more."""
        now = self._since + (time - self._time_then) / self.rate
        if self.time_at(now) >= time:
            return now
        nudge = math.ulp(max(abs(now), abs(time), abs(self._time_then))) / self.rate
        while self.time_at(now) < time:  # rounding must not let a timer ring before its time
            now += nudge
            nudge *= 2
        return now

    @property
    def held_up(self) -> bool:
        """Whether what is to run on it has to wait."""
        return self.frozen or self.busy

    def __repr__(self) -> str:
        state = "down" if not self.up else "frozen" if self.frozen else "up"
        return f"<Host {self.name} {state}>"


class Step(asyncio.TimerHandle):
    """One call that the loop shall make. The base class is only its type: asyncio's own fields stay empty."""

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
        self.gone = True
        self.call, self.args, self.context = None, (), None

    def cancelled(self) -> bool:
        return self.gone

    def when(self) -> float:
        return self.due

    def __repr__(self) -> str:
        return f"<Step {'cancelled' if self.call is None else label_of(self.call)}>"


def label_of(call: Callable[..., object]) -> str:
    """Name a callback without its address: the task it drives, or its own name."""
    owner = getattr(call, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return owner.get_name()
    label: str = getattr(call, "__qualname__", "") or label_of(getattr(call, "func", type(call)))
    return label
