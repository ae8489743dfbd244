"""The steps of a bundle in order; some steps wait until an entry is on the disk."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from adam_async.parameter_server.bundle_saver import BundleDisk
from adam_async.parameter_server.log_entries import Part, entry_bytes
from adam_async.persistence.keys import EntryKey
from transport import RemoteProtocolError

MOST_BYTES = 512 << 20
"""Maximum size of another server's entries that wait for the disk, in bytes: twice `LOG_BYTES`, at which a
primary strikes out a member that acknowledges no entries."""


class _Step:
    def __init__(self, item: Any, action: Callable[[], None], *, is_done: bool, nbytes: int = 0) -> None:
        self.item = item
        self.nbytes = nbytes
        self.action = action
        self.is_done = is_done


class OrderedAppends:
    """Steps in order. The step of an entry waits for the disk, and later steps wait for that step.

    Args:
        disk: Disk of the store.
        home: Name of the bundle.
        spawn: Starts a task of the server, by name.
    """

    def __init__(
        self,
        disk: BundleDisk,
        home: str,
        spawn: Callable[[str, Coroutine[Any, Any, None]], "asyncio.Task[None]"],
    ) -> None:
        self._disk = disk
        self._home = home
        self._spawn = spawn
        self._steps: deque[_Step] = deque()
        self._nbytes = 0
        """Size of the entries in the steps, in bytes."""

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def ordered_here(self) -> int:
        """Number of steps with an entry that this server orders."""
        return sum([step.item is not None for step in self._steps])

    def add(self, action: Callable[[], None]) -> None:
        """Call a function after all steps so far, or at once if there are none."""
        self._steps.append(_Step(None, action, is_done=True))
        self._advance()

    def append(
        self, position: int, generation: int, parts: Sequence[Part], action: Callable[[], None], item: Any
    ) -> None:
        """Append an entry to the log on the disk, and then call a function.

        Args:
            item: The entry if this server orders it, which `drop_own` then returns; None for an entry of
                another server.

        Raises:
            RemoteProtocolError: The entries of another server exceed `MOST_BYTES`.
        """
        nbytes = entry_bytes(list(parts))
        if item is None and self._nbytes + nbytes > MOST_BYTES:
            raise RemoteProtocolError(
                "replication", f"{self._nbytes + nbytes} bytes of entries wait for the disk, of {MOST_BYTES}"
            )
        step = _Step(item, action, is_done=False, nbytes=nbytes)
        self._steps.append(step)
        self._nbytes += nbytes
        self._spawn(f"appends-{position}", self._append(step, position, generation, parts))

    async def _append(self, step: _Step, position: int, generation: int, parts: Sequence[Part]) -> None:
        key = EntryKey(self._home, position, generation)
        await self._disk.append(key, parts, of_primary=step.item is not None)
        step.is_done = True
        self._advance()

    def _advance(self) -> None:
        while self._steps and self._steps[0].is_done:
            step = self._steps.popleft()
            self._nbytes -= step.nbytes
            step.action()

    def drop_own(self) -> list[Any]:
        """Drop the steps with an entry that this server orders, and return these entries."""
        items = [step.item for step in self._steps if step.item is not None]
        self._nbytes -= sum([step.nbytes for step in self._steps if step.item is not None])
        self._steps = deque([step for step in self._steps if step.item is None])
        self._advance()
        return items
