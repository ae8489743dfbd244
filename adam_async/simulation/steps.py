"""Calls that the simulated loop shall make, its futures and tasks, and what all of them are called.

asyncio's own futures and tasks hash by address, and so a set of them has another order in each process.
These hash by the number that the loop gave them.
"""

import asyncio
from collections.abc import Callable
from contextvars import Context
from types import CodeType
from typing import Any

from adam_async.simulation.host import Host


class Step(asyncio.TimerHandle):
    """One call that the loop shall make. The base class is only its type: asyncio's own fields stay empty."""

    __slots__ = ("args", "call", "context", "due", "gone", "host")

    def __init__(
        self,
        host: Host | None,
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


class SimulatedFuture(asyncio.Future[Any]):
    """A future that hashes by its number, which the loop sets."""

    __slots__ = ("number",)

    number: int

    def __hash__(self) -> int:
        return self.number


class SimulatedTask(asyncio.Task[Any]):
    """A task that hashes by its number and knows its host."""

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


def label_of(call: Callable[..., object]) -> str:
    """Name a callback without its address: the task it drives, or its own name."""
    owner = getattr(call, "__self__", None)
    if type(owner) is SimulatedTask:
        return owner.get_name()
    label: str = getattr(call, "__qualname__", "") or label_of(getattr(call, "func", type(call)))
    return label


def place_of(task: asyncio.Task[Any]) -> str:
    """Say where a task waits: the innermost line of the coroutines that await one another."""
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
