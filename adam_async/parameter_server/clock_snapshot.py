"""Pure: the shards of a bundle in bsp at one clock, for a reader during the training.

Theory of operation
-------------------
The driver reads all shards at the same clock, some at a time, and training goes on meanwhile. The driver
names a clock that no shard has passed, and reads the shards as they reach it. The disk of a server does the
same for a cut (`store_cuts.py`). If the sum of a later clock is
due on a shard that has not been read, the server copies the shard first, and the reader gets the copy.

The copies have bounded memory. If another copy has no room, the sum waits until the reader has taken some
copies. The snapshot ends if the reader takes no shard before a deadline, or its link closes. A sum of many
shards is split, so that a round of the loop makes few copies.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from adam_async.parameter_server.events import ApplySum
from adam_async.parameter_server.shard import Shard
from adam_async.parameter_server.shard_transfer import ShardCopy, copy_shard
from adam_async.run.ids import ShardId
from adam_async.run.shard_table import ShardSpec

COPIES_BYTES = 64 << 20
"""Maximum size of the copies of a snapshot in bytes, unless a single shard is larger."""

ROUND_BYTES = 4 << 20
"""Maximum size of the copies for one piece of a sum in bytes, unless a single shard is larger."""


class ClockSnapshot:
    """The shards of one bundle at a clock.

    Args:
        clock: A clock that no shard has passed.
        link: Link of the reader; None for the disk of the server, which has deadlines of its own.
        shards: All shards of the bundle.

    Attributes:
        until: Time at which the snapshot ends, unless the reader asks for more shards before; in seconds of
            the caller's clock.
        lacks_memory: Whether it has ended because a copy had no memory.
    """

    def __init__(self, clock: int, link: Any, shards: Iterable[ShardId]) -> None:
        self.clock = clock
        self.link = link
        self.until = 0.0
        self.lacks_memory = False
        self._has_taken = True
        """Whether a shard was taken since `until` was set."""
        self._left = set(shards)
        """Shards that are not read yet."""
        self._copies: dict[ShardId, ShardCopy] = {}
        """Copies of shards that have passed the clock and are not read yet."""
        self.copied_bytes = 0

    @property
    def over(self) -> bool:
        """Whether all shards are read."""
        return not self._left

    def room_for(self, due: ApplySum) -> int:
        """Return the number of leading shards of a sum that may be changed now."""
        if due.clock <= self.clock:
            return len(due.shards)
        return leading_room(due.shards, self._lacks_copy, self.copied_bytes)

    def keep(self, due: ApplySum) -> None:
        """Copy the unread shards that a sum is about to move past the clock."""
        if due.clock <= self.clock:
            return
        for shard in due.shards:
            if self._lacks_copy(shard):
                try:
                    self._copies[shard.spec.id] = copy_shard(shard, clock=self.clock)
                except MemoryError:  # the sum goes on without the snapshot
                    self.end()
                    self.lacks_memory = True
                    return
                self.copied_bytes += bytes_of(shard)

    def _lacks_copy(self, shard: Shard) -> bool:
        return shard.spec.id in self._left and shard.spec.id not in self._copies

    def take(self, shard: Shard) -> ShardCopy | None:
        """Return a copy of a shard as it was at the clock, which it has reached.

        Returns None if the shard was read before.
        """
        if shard.spec.id not in self._left:
            return None
        self._left.remove(shard.spec.id)
        self._has_taken = True
        copy = self._copies.pop(shard.spec.id, None)
        if copy is None:
            return copy_shard(shard, clock=self.clock)
        self.copied_bytes -= bytes_of(shard)
        return copy

    def next_of(self, pieces: Mapping[int, Sequence[ShardSpec]]) -> int:
        """Return the number of the piece to take next: one with copies, if there is any."""
        with_copies = (at for at, specs in pieces.items() if any(spec.id in self._copies for spec in specs))
        return next(with_copies, next(iter(pieces)))

    def asked(self, until: float) -> None:
        """Keep the copies until a time.

        While there are copies, a reader that takes no shard cannot extend the time by asking again.
        """
        if self._has_taken or not self._copies:
            self.until, self._has_taken = until, False

    def end(self) -> None:
        """Drop all copies; `take` returns None from now on."""
        self._left.clear()
        self._copies.clear()
        self.copied_bytes = 0

    def __repr__(self) -> str:
        return f"<ClockSnapshot {self.clock} {len(self._left)} shards left, {len(self._copies)} copied>"


def leading_room(shards: Sequence[Shard], lacks_copy: Callable[[Shard], bool], copied_bytes: int) -> int:
    """Return the number of leading shards of a sum for whose copies there is room now.

    Args:
        lacks_copy: Whether a shard must be copied before it changes.
        copied_bytes: Size of the copies that no reader has taken, in bytes.
    """
    new = 0
    for at, shard in enumerate(shards):
        if not lacks_copy(shard):
            continue
        size = bytes_of(shard)
        is_full = copied_bytes + new + size > COPIES_BYTES and (copied_bytes or new)
        if is_full or (new and new + size > ROUND_BYTES):
            return at
        new += size
    return len(shards)


def bytes_of(shard: Shard) -> int:
    """Return the size of a shard with the arrays of its rule, in bytes."""
    return sum([array.nbytes for array in (shard.values, *shard.rule_state.values())])
