"""A queue from threads to the loop: many items, one wake-up.

Waking a loop from a thread costs a system call, more than an empty job. An item therefore wakes the loop only
if no wake-up is pending, and one wake-up takes all items posted until then.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Collects items posted by any thread and passes them to `receive` on the loop, in lists, in order.

    Args:
        loop: Loop that calls `receive`.
        receive: Function of a list with at least one item. The function must not raise.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, receive: Callable[[list[T]], None]) -> None:
        self._wake = loop.call_soon_threadsafe
        self._receive = receive
        self._items: deque[T] = deque()
        self._waking = False
        self.num_wakes = 0

    def post(self, item: T) -> None:
        """Add an item, from any thread. Raises RuntimeError if the loop is closed."""
        self._items.append(item)
        # Two threads may both see False and wake the loop twice, which is harmless. No item is lost: the loop
        # clears the flag before it takes the items, so it still takes an item whose thread saw True.
        if not self._waking:
            self._waking = True
            self._wake(self.empty)

    def empty(self) -> None:
        """Pass all posted items on. Call the method only on the loop."""
        self._waking = False
        items = self._items
        count = len(items)
        if count:
            self.num_wakes += 1
            self._receive([items.popleft() for _ in range(count)])
