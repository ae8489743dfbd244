"""A gate that threads pass between two units of their work, and that the loop closes for a while.

Theory of operation
-------------------
A thread enters the gate before its first unit of work, passes it between two units, and leaves it after the
last one. The loop closes the gate, and waits until no thread is between two gates: each thread ends its unit,
and then waits at the gate. While no gate is closed, a pass reads one number without a lock, so units may be
short.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from threading import Condition


class Gate:
    """A gate of any number of threads. Use it as a context manager on a thread, for several units of work."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._closers = 0
        """Number of blocks of `closed` in progress."""
        self._inside = 0
        """Number of threads within a unit of work."""
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        """Blocks of `closed` that wait until no thread is within a unit, each with its loop."""

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
