"""The changed pieces of one bundle, their copies for the disk, and steps that wait for an entry on the disk.

A server marks the pieces that an entry changes. The disk asks for one piece at a time. The bundle copies this
piece (about 1 MiB) on the loop between two entries, at most one piece per iteration. No entry waits for these
writes.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.events import Apply, Contribute, Entry, QueuedPin, QueuedTick
from adam_async.parameter_server.log_entries import Part, entry_bytes
from adam_async.parameter_server.piece_states import piece_state
from adam_async.persistence.records import EntryKey, FlushSettings, Order, State, StateName
from adam_async.run.ids import ShardId
from adam_async.run.shard_table import ShardSpec
from adam_async.run.user_rules import RuleSource
from adam_async.runtime.clock import Clock
from adam_async.runtime.disk import Disk
from transport import RemoteProtocolError

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class DiskPorts:
    """The services of a process that the disk of a store needs.

    Attributes:
        states: Disk of the states.
        entries: Disk of log entries, which has its own thread.
        clock: Clock of the loop.
        wall_clock: Returns the time in seconds since 1970.
        settings: Times and sizes.
        observe: Called with each state that goes to the disk, and its store's id.
        notice: Reports a text to the operator.
        rules: The rules of users that the server may apply.
    """

    states: Disk
    entries: Disk
    clock: Clock
    wall_clock: Clock
    settings: FlushSettings
    observe: Callable[[State, str], None] | None = None
    notice: Callable[[str], None] = lambda text: logger.warning("%s", text)
    rules: RuleSource = field(default_factory=RuleSource)

    def notice_left(self, folder: Path, error: OSError) -> None:
        """Report an unused folder that the server cannot remove; the server goes on."""
        self.notice(
            f"{folder} is no longer needed and cannot be removed: {error.strerror or error}; remove it by "
            "hand, or the next start reads it again"
        )


Mark = Callable[[int, int, int], None]
"""Callback that marks a piece, given its number, its size in bytes and its update count."""


class BundleDisk(Protocol):
    """The disk of a store, as seen by its bundles; see `StoreDisk`."""

    async def append(self, key: EntryKey, parts: Sequence[Part], *, of_primary: bool) -> None:
        """Append an entry and return once it is on the disk. Calls return in the order of their begin."""
        ...

    def applied(self, home: str, position: int) -> None:
        """Note that all entries of a bundle up to a position are applied, and their pieces marked."""
        ...

    def position_of(self, name: StateName) -> int | None:
        """Return the position of a piece's last entry; None if the disk lacks the piece."""
        ...

    async def read_arrays(self, name: StateName, arrays: int) -> tuple[Part, bytes]:
        """Read the arrays of a piece, and return them with their SHA-256 digest.

        Args:
            arrays: Number of arrays that the piece must have.

        Raises:
            DataError: The disk lacks the piece, the piece is damaged, or its number of arrays is wrong.
        """
        ...


class BundleSaver:
    """The pieces of one bundle.

    Args:
        home: Name of the bundle.
        pieces: Its shards, cut into pieces.
        state_arrays: Maximum number of state arrays per array of values.
        mark: Marks a changed piece.
        disk: The disk of the store.
        is_durable: Whether pushes are acknowledged only from the disk.

    Attributes:
        entry: Position of the last entry that the shards have received.
    """

    def __init__(
        self,
        home: str,
        pieces: Sequence[Sequence[ShardSpec]],
        *,
        state_arrays: int,
        mark: Mark,
        disk: BundleDisk,
        is_durable: bool = False,
    ) -> None:
        self.home = home
        self.disk = disk
        self.is_durable = is_durable
        self.pieces = pieces
        self._mark = mark
        self._piece_of: dict[ShardId, int] = {
            spec.id: number for number, specs in enumerate(pieces) for spec in specs
        }
        self._sizes = [sum([spec.nbytes for spec in specs]) * (1 + state_arrays) for specs in pieces]
        self.changes = 0
        """Number of changes so far: the position of a bundle without a log."""
        self.entry = 0
        self.pinned_at: dict[int, Order] = {}
        """Generation and position of each pin that the shards have received and not applied yet."""
        self._changed_at = [0] * len(pieces)
        self._asked: tuple[int, asyncio.Future[State | None]] | None = None
        self.wake: Callable[[], None] = _nothing
        """Callback that reports a request for a piece. The owner calls `copy_requested` once the bundle is
        between two entries."""
        self.is_ready: Callable[[], bool] = bool
        """Callback that returns whether the bundle has all its values."""
        self.bundle: Callable[[], Bundle]
        """Callback that returns the bundle, for the store's cuts; the owner sets it."""
        self.resume: Callable[[], None] = _nothing
        """Callback that continues the sums which waited until a cut's copies had room."""
        self.moved: Callable[[], None] = _nothing
        """Callback that reports newly applied entries or moved shards while the bundle has a cut."""

    # --- changes -----------------------------------------------------------------------------

    def touched(self, shards: Iterable[ShardId], updates: int) -> None:
        """Mark the pieces of some shards, each of which had the same number of updates.

        The entry with these updates has ended, so a requested piece may be copied.
        """
        for piece in self._mark_pieces(shards, updates):
            self._changed_at[piece] = self.entry  # perhaps the position of a later entry, which is harmless

    def _mark_pieces(self, shards: Iterable[ShardId], updates: int) -> set[int]:
        self.changes += 1
        found = {self._piece_of[shard] for shard in shards if shard in self._piece_of}
        for piece in found:
            self._mark(piece, self._sizes[piece], updates)
        if self._asked is not None:
            self.wake()
        return found

    def changed_at(self, piece: int) -> int:
        """Return a position not before the last entry that changed an array of the piece."""
        return self._changed_at[piece]

    def arrived(self, piece: int, changed: int) -> None:
        """Note that a piece came from the primary. `changed` is the primary's `changed_at` of this piece."""
        self._changed_at[piece] = changed

    def entered(self, entry: Entry) -> None:
        """Mark the pieces with arrays or tables that an entry of the log changes."""
        match entry:
            case Apply():
                changed = [number for queued in entry.pushes for number in queued.push.shards]
            case Contribute():
                changed = list(entry.queued.push.shards)
            case QueuedTick():
                changed = list(entry.tick.shards)
            case QueuedPin():
                self.replicas_changed()
                return
            case _:
                self.all_touched()
                return
        self._mark_pieces(map(ShardId, changed), 0)

    def all_touched(self) -> None:
        """Mark all pieces, for example after the load of the values."""
        self.changes += 1
        for piece, size in enumerate(self._sizes):
            self._mark(piece, size, 0)

    def replicas_changed(self) -> None:
        """Mark the piece with the replicas and the epoch."""
        self.changes += 1
        self._mark(0, self._sizes[0], 0)

    # --- copies ------------------------------------------------------------------------------

    @property
    def has_request(self) -> bool:
        """Whether a piece is to be copied at the next moment between two entries."""
        return self._asked is not None

    async def take(self, piece: int) -> State | None:
        """Copy a piece at the next moment between two entries.

        Returns None if the bundle has no values or ends.
        """
        if not self.is_ready():
            return None
        future: asyncio.Future[State | None] = asyncio.get_running_loop().create_future()
        self._asked = piece, future
        try:
            self.wake()
            return await future
        finally:
            self._asked = None

    def copy_requested(self, bundle: Bundle, order: Callable[[int], Order]) -> None:
        """Copy the requested piece, if any. The bundle must be between two entries.

        Args:
            order: Returns the generation and the position of the last entry in a piece.
        """
        if self._asked is None:
            return
        (piece, future), self._asked = self._asked, None
        if not future.done():
            specs = self.pieces[piece]
            future.set_result(piece_state(bundle, self.home, piece, specs, order=order(piece)))

    def drop(self) -> None:
        """Answer a request for a piece with None: the shards are replaced, or leave the server."""
        if self._asked is not None:
            (_, future), self._asked = self._asked, None
            if not future.done():
                future.set_result(None)


def _nothing() -> None:
    """Do nothing: the request waits for the next moment between two entries."""


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
        """Call a function after all steps so far; at once if there are none."""
        self._steps.append(_Step(None, action, is_done=True))
        self._advance()

    def append(
        self, position: int, generation: int, parts: Sequence[Part], action: Callable[[], None], item: Any
    ) -> None:
        """Append an entry to the log on the disk, and then call a function.

        Args:
            item: An entry that this server orders, which `drop_own` then returns; None for another server's
                entry.

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
