"""Pure: the client side of exactly-once pushes: questions to one bundle that are sent and not yet answered.

An *exchange* is one push, pull, tick or report of steps on its way to the primary of a bundle. Exchanges stay
in the order in which they were first sent. Every failure has one remedy: drop the link, dial again, and send
all open exchanges again, in order, under the same numbers. The primary applies the pushes that the bundle has
not seen, and answers the others again. So a push is applied once, however often it is sent and however often
the primary moves, and a pull behind a push on the link still contains it.

An answer may leave part of a push open: shards with a gap (an earlier push has not arrived), or whose primary
has moved. Such an exchange stays open and needs the remedy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from numpy.typing import NDArray

from adam_async.messages import DUPLICATE, REFUSED, Pushed
from adam_async.run.ids import ShardId
from transport import Message


class Exchange(msgspec.Struct, kw_only=True, eq=False):
    """One question to a bundle, from its first sending until an answer settles it."""

    message: Message
    on_answer: Callable[[Message], bool]
    """Callback for an answer: True settles the exchange, False lets the client send it again."""
    on_free: Callable[[], None] | None = None
    """Callback that is called once, when the exchange is settled and no sending reads its tensors any
    more."""
    into: Sequence[NDArray[Any]] | None = None
    """Memory for the tensors of the answer."""
    is_push: bool = False
    sent: int = 0
    """Number of times that the exchange was sent."""
    _reading: int = 0
    _settled: bool = False

    def sending(self) -> Callable[[], None] | None:
        """Count one more sending.

        Returns the function for the transport to call when it no longer reads the tensors.
        """
        self.sent += 1
        if self.on_free is None:
            return None
        self._reading += 1
        return self._released

    def not_sent(self) -> None:
        """Take back the last sending: the transport did not take it, and will not release it."""
        self.sent -= 1
        self._reading -= self.on_free is not None

    def _released(self) -> None:
        self._reading -= 1
        self._free_if_done()

    def settle(self) -> None:
        """Settle the exchange: its answer has arrived."""
        self._settled = True
        self._free_if_done()

    def _free_if_done(self) -> None:
        if self._settled and not self._reading and self.on_free is not None:
            free, self.on_free = self.on_free, None
            free()


@dataclass(slots=True)
class PushCounts:
    """Outcomes of the client's pushes, counted per shard; `resent` counts exchanges."""

    acknowledged: int = 0
    duplicates: int = 0
    refused: int = 0
    resent: int = 0


@dataclass(slots=True)
class Session:
    """Numbers and open exchanges of one client with one bundle.

    `limit` is the number of unacknowledged pushes after which admission waits.
    """

    limit: int = 8
    _last: dict[ShardId, int] = field(default_factory=dict)
    """Last number of each shard that is in no group of `_together`."""
    _together: dict[tuple[ShardId, ...], int] = field(default_factory=dict)
    """Last number of groups of shards that were pushed with the same numbers, in the same messages."""
    _group_of: dict[ShardId, tuple[ShardId, ...]] = field(default_factory=dict)
    open: dict[Exchange, None] = field(default_factory=dict)
    open_pushes: int = 0
    counts: PushCounts = field(default_factory=PushCounts)

    def next_numbers(self, shards: Sequence[ShardId]) -> tuple[int, ...]:
        """Give the next number on each shard, from 1 without gaps."""
        shards = tuple(shards)
        last = self._together.get(shards)
        if last is not None:
            self._together[shards] = last + 1
            return (last + 1,) * len(shards)
        self._separate(shards)
        numbers = tuple([self._last.get(shard, 0) + 1 for shard in shards])
        if len(shards) > 1 and numbers.count(numbers[0]) == len(numbers) == len(set(shards)):
            self._together[shards] = numbers[0]
            self._group_of.update(dict.fromkeys(shards, shards))
        else:
            self._last.update(zip(shards, numbers, strict=True))
        return numbers

    def _separate(self, shards: Sequence[ShardId]) -> None:
        """Dissolve the groups of some shards."""
        for shard in shards if self._together else ():
            group = self._group_of.get(shard)
            if group is not None:
                self._last.update(dict.fromkeys(group, self._together.pop(group)))
                for member in group:
                    del self._group_of[member]

    def last_numbers(self, shards: Sequence[ShardId]) -> tuple[int, ...]:
        """Return the last number given on each of some shards; 0 for a shard without a number."""
        shards = tuple(shards)
        last = self._together.get(shards)
        if last is not None:
            return (last,) * len(shards)
        groups = [self._group_of.get(shard) for shard in shards]
        return tuple(
            [
                self._last.get(shard, 0) if group is None else self._together[group]
                for shard, group in zip(shards, groups, strict=True)
            ]
        )

    def numbers(self) -> dict[ShardId, int]:
        """Return the last number given on each shard that was pushed."""
        together = {shard: number for shards, number in self._together.items() for shard in shards}
        return {**self._last, **together}

    def next_steps(self, shards: Sequence[ShardId], steps: int) -> int:
        """Give numbers to several steps, each on all of these shards; returns the first number."""
        self._separate(shards)
        first = self._last.get(shards[0], 0) + 1
        self._last.update(dict.fromkeys(shards, first + steps - 1))
        return first

    @property
    def may_push(self) -> bool:
        """Whether the number of open pushes is below `limit`."""
        return self.open_pushes < self.limit

    def opened(self, exchange: Exchange) -> None:
        """Add an exchange, before its first sending."""
        self.open[exchange] = None
        self.open_pushes += exchange.is_push

    def answered(self, exchange: Exchange, answer: Message) -> bool:
        """Take an answer. Returns False if all open exchanges must be sent again."""
        if exchange not in self.open:
            return True
        if not exchange.on_answer(answer):
            return False
        del self.open[exchange]
        self.open_pushes -= exchange.is_push
        exchange.settle()
        return True

    def to_send_again(self) -> list[Exchange]:
        """Return all open exchanges, in the order of their first sending."""
        self.counts.resent += sum(exchange.sent > 0 for exchange in self.open)
        return list(self.open)

    def settle_push(self, answer: Pushed, shards: int) -> bool:
        """Count an acknowledgement. Returns whether it settled every shard of the push."""
        settled = True
        for problem in answer.problems:
            if problem.status == DUPLICATE:
                self.counts.duplicates += 1
            elif problem.status == REFUSED:
                self.counts.refused += 1
            else:
                settled = False
        if settled:
            self.counts.acknowledged += shards
        return settled
