"""Futures and tasks of the simulated loop.

asyncio's own futures and tasks hash by address, so a set of them has another order in each process. These
classes hash by the number that the loop gave them.
"""

import asyncio
from contextvars import Context
from types import CodeType
from typing import Any

from adam_async.simulation.host import Host


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
