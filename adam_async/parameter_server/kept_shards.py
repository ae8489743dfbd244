"""Pure: the shards of a bundle as they were at one moment, for a reader or a disk, while training goes on.

Theory of operation
-------------------
*At a clock, in bsp.* The driver reads all shards at the same clock, some at a time. The driver names a clock
that no shard has passed, and reads the shards as they reach it. The disk of a server does the same for a cut
(`store_cuts.py`). Tables and values of a shard are copied together.

*At a pin.* The tables of all shards are copied at once, because every entry of the log may change them.

If work is due on a shard that has not been taken, the server copies the values and the state of the rule
first, and the reader gets the copy. The copies have bounded memory. If another copy has no room, the work
waits until some copies are taken. A snapshot for a link ends if its reader takes no shard before a deadline,
or its link closes. A sum of many shards is split, so that a round of the loop makes few copies.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from adam_async.parameter_server.shard import Shard
from adam_async.parameter_server.shard_transfer import ShardCopy, copy_shard, state_of
from adam_async.run.ids import ShardId
from adam_async.run.shard_table import ShardSpec

COPIES_BYTES = 64 << 20
"""Maximum size of the copies for a reader in bytes, unless a single shard is larger."""

ROUND_BYTES = 4 << 20
"""Maximum size of the copies for one piece of a sum in bytes, unless a single shard is larger."""


class KeptShards:
    """The shards of one bundle at one moment.

    Args:
        shards: All shards of the bundle.

    Attributes:
        copied_bytes: Size of the copies that no reader has taken, in bytes.
        lacks_memory: Whether the kept shards have ended because a copy had no memory.
    """

    def __init__(self, shards: Mapping[ShardId, Shard]) -> None:
        self.copied_bytes = 0
        self.lacks_memory = False
        self._left = dict(shards)
        """Shards that are not taken yet."""
        self._copies: dict[ShardId, ShardCopy] = {}
        """Copies of those that work has changed since."""

    @property
    def over(self) -> bool:
        """Whether all shards are taken."""
        return not self._left

    @abstractmethod
    def _copy(self, shard: Shard) -> ShardCopy:
        """Copy a shard that has not changed since the moment."""

    def room_for(self, shards: Sequence[Shard]) -> int:
        """Return the number of leading shards of a sum that may be changed now."""
        new = 0
        for at, shard in enumerate(shards):
            if not self._lacks_copy(shard):
                continue
            size = bytes_of(shard)
            is_full = self.copied_bytes + new + size > COPIES_BYTES and (self.copied_bytes or new)
            if is_full or (new and new + size > ROUND_BYTES):
                return at
            new += size
        return len(shards)

    def keep(self, shards: Iterable[Shard]) -> None:
        """Copy the shards that work is about to change, and that are not taken."""
        for shard in shards:
            if self._lacks_copy(shard):
                try:
                    self._copies[shard.spec.id] = self._copy(shard)
                except MemoryError:  # the work goes on without the reader
                    self.end()
                    self.lacks_memory = True
                    return
                self.copied_bytes += bytes_of(shard)

    def _lacks_copy(self, shard: Shard) -> bool:
        return shard.spec.id in self._left and shard.spec.id not in self._copies

    def take(self, number: ShardId) -> ShardCopy | None:
        """Return a shard as it was at the moment, once; None afterwards, and after `end`."""
        shard = self._left.pop(number, None)
        if shard is None:
            return None
        copy = self._copies.pop(number, None)
        if copy is None:
            return self._copy(shard)
        self.copied_bytes -= bytes_of(shard)
        return copy

    def next_of(self, pieces: Mapping[int, Sequence[ShardSpec]]) -> int:
        """Return the number of the piece to take next: one with copies, if there is any."""
        with_copies = (at for at, specs in pieces.items() if any(spec.id in self._copies for spec in specs))
        return next(with_copies, next(iter(pieces)))

    def end(self) -> None:
        """Drop all copies; `take` returns None from now on."""
        self._left.clear()
        self._copies.clear()
        self.copied_bytes = 0


class ClockSnapshot(KeptShards):
    """The shards of one bundle at a clock.

    Args:
        clock: A clock that no shard has passed.
        link: Link of the reader; None for the disk of the server, which has deadlines of its own.

    Attributes:
        until: Time at which the snapshot ends, unless the reader asks for more shards before; in seconds of
            the caller's clock.
    """

    def __init__(self, clock: int, link: Any, shards: Mapping[ShardId, Shard]) -> None:
        super().__init__(shards)
        self.clock = clock
        self.link = link
        self.until = 0.0
        self._has_taken = True
        """Whether a shard was taken since `until` was set."""

    def _copy(self, shard: Shard) -> ShardCopy:
        return copy_shard(shard, clock=self.clock)

    def take(self, number: ShardId) -> ShardCopy | None:
        copy = super().take(number)
        self._has_taken = self._has_taken or copy is not None
        return copy

    def asked(self, until: float) -> None:
        """Keep the copies until a time.

        While there are copies, a reader that takes no shard cannot extend the time by asking again.
        """
        if self._has_taken or not self._copies:
            self.until, self._has_taken = until, False

    def __repr__(self) -> str:
        return f"<ClockSnapshot {self.clock} {len(self._left)} shards left, {len(self._copies)} copied>"


class PinCopies(KeptShards):
    """The shards of one bundle at a pin, which has just been applied.

    Args:
        pin: The pin (`events.Pin`).
        without: Names of the arrays of the shards' state that the pin does not have.

    Attributes:
        is_given_up: Whether `end` was called.
    """

    def __init__(self, pin: Any, shards: Mapping[ShardId, Shard], without: Set[str] = frozenset()) -> None:
        super().__init__(shards)
        self.pin = pin
        self._without = without
        self.is_given_up = False
        self._tables = {
            number: state_of(shard, clock=shard.applied_clock() if shard.pending is not None else None)
            for number, shard in shards.items()
        }

    def _copy(self, shard: Shard) -> ShardCopy:
        return copy_shard(shard, state=self._tables[shard.spec.id], without=self._without)

    def has_room(self, shards: Iterable[Shard]) -> bool:
        """Return whether all shards of a batch may be changed now; without other copies they always may."""
        new = sum([bytes_of(shard) for shard in shards if self._lacks_copy(shard)])
        return not new or not self.copied_bytes or self.copied_bytes + new <= COPIES_BYTES

    def end(self) -> None:
        """Drop all copies: the pin is given up, or its shards leave the server."""
        super().end()
        self.is_given_up, self.lacks_memory = True, False

    def __repr__(self) -> str:
        return f"<PinCopies {self.pin.name} {len(self._left)} shards left, {len(self._copies)} copied>"


def bytes_of(shard: Shard) -> int:
    """Return the size of a shard with the arrays of its rule, in bytes."""
    return sum([array.nbytes for array in (shard.values, *shard.rule_state.values())])
