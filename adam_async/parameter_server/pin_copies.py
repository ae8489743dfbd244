"""Pure: the shards of a bundle at a pin, while the disk takes them one piece after the other.

The tables of all shards are copied at once, because every entry may change them. The values and the state of
the rules are copied when the disk asks for their piece, or before work changes them, whichever comes first.
The copies that the disk has not taken have bounded memory: without room the work waits.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from adam_async.messages import ShardState
from adam_async.parameter_server.clock_snapshot import COPIES_BYTES, bytes_of, leading_room
from adam_async.parameter_server.shard import Shard
from adam_async.parameter_server.shard_transfer import set_state, state_of
from adam_async.run.ids import ShardId
from adam_async.run.shard_table import ShardSpec

Arrays = tuple[NDArray[Any], Mapping[str, NDArray[Any]]]
"""Values of a shard, and the arrays of its rule by name."""


class PinCopies:
    """The shards of one bundle at a pin, which has just been applied.

    Args:
        pin: The pin (`events.Pin`).
        shards: All shards of the bundle.

    Attributes:
        copied_bytes: Size of the copies that the disk has not taken, in bytes.
        is_given_up: Whether `end` was called.
        lacks_memory: Whether a copy failed for lack of memory, which gave the pin up.
    """

    def __init__(self, pin: Any, shards: Iterable[Shard]) -> None:
        self.pin = pin
        self.copied_bytes = 0
        self.is_given_up = self.lacks_memory = False
        self._left: dict[ShardId, tuple[Shard, ShardState]] = {}
        """Shards that the disk has not taken, with their tables at the pin."""
        self._copies: dict[ShardId, Arrays] = {}
        """Copies of those that work has changed since."""
        for shard in shards:
            clock = shard.applied_clock() if shard.pending is not None else None
            self._left[shard.spec.id] = shard, state_of(shard, clock=clock)

    def room_for(self, shards: Sequence[Shard]) -> int:
        """Return the number of leading shards of a sum that may be changed now."""
        return leading_room(shards, self._lacks_copy, self.copied_bytes)

    def has_room(self, shards: Iterable[Shard]) -> bool:
        """Return whether all shards of a batch may be changed now; without other copies they always may."""
        new = sum([bytes_of(shard) for shard in shards if self._lacks_copy(shard)])
        return not new or not self.copied_bytes or self.copied_bytes + new <= COPIES_BYTES

    def keep(self, shards: Iterable[Shard]) -> None:
        """Copy the shards that work is about to change, and that the disk has not taken."""
        for shard in shards:
            if self._lacks_copy(shard):
                try:
                    self._copies[shard.spec.id] = _arrays(shard)
                except MemoryError:  # the work goes on without the pin
                    self.end()
                    self.lacks_memory = True
                    return
                self.copied_bytes += bytes_of(shard)

    def _lacks_copy(self, shard: Shard) -> bool:
        return shard.spec.id in self._left and shard.spec.id not in self._copies

    def next_of(self, pieces: Mapping[int, Sequence[ShardSpec]]) -> int:
        """Return the number of the piece to take next: one with copies, if there is any."""
        with_copies = (at for at, specs in pieces.items() if any(spec.id in self._copies for spec in specs))
        return next(with_copies, next(iter(pieces)))

    def take(self, specs: Sequence[ShardSpec]) -> list[Shard]:
        """Return new shards as some shards were at the pin, each once; none after `end`."""
        taken = []
        for spec in specs if not self.is_given_up else ():
            shard, state = self._left.pop(spec.id)
            copies = self._copies.pop(spec.id, None)
            if copies is not None:
                self.copied_bytes -= bytes_of(shard)
            values, rule_state = copies if copies is not None else _arrays(shard)
            new = Shard(spec=spec, values=values, rule_state=dict(rule_state))
            set_state(new, state)
            taken.append(new)
        return taken

    def end(self) -> None:
        """Drop all copies: the pin is given up, or its shards leave the server."""
        self.is_given_up, self.lacks_memory = True, False
        self._left.clear()
        self._copies.clear()
        self.copied_bytes = 0

    def __repr__(self) -> str:
        return f"<PinCopies {self.pin.name} {len(self._left)} shards left, {len(self._copies)} copied>"


def _arrays(shard: Shard) -> Arrays:
    return shard.values.copy(), {name: array.copy() for name, array in shard.rule_state.items()}
