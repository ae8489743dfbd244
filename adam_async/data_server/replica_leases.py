"""Pure: what one replica was leased in its present life, so that all its workers are told the same.

A replica's workers train the same groups, each at its own pace. What the replica is leased is written to its
log, and each worker reads that from its own *position*, the number of groups that it has received. A question
names the position, so what is asked again is answered again, with the same groups. Who asks has all that lies
before its position; what all have is dropped.

Between two groups of the log there may be a *mark*: at this position the replica was told that nothing more
waits, and where all meet then. Whoever comes by hears of it, for there a step ends short. The end that it
names moves on while nothing comes behind it.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logged:
    """One group that was leased."""

    number: int
    attempt: int
    clock: int
    """It begins no earlier than this clock."""


class LeaseLog:
    """The log of one life of a replica.

    Args:
        life: Its number.
        partitions: Workers of the replica.
        stop: Groups that were leased already, and are finished.
        positions: Groups that each worker is known to have.
    """

    def __init__(
        self, replica_generation: int, partitions: int, *, stop: int = 0, positions: Sequence[int] = ()
    ) -> None:
        self.replica_generation = replica_generation
        self._first = stop
        self._groups: list[Logged] = []
        self._marks: dict[int, int] = {}
        self._positions = list(positions) or [0] * partitions

    @property
    def stop(self) -> int:
        """Groups that were leased in this life."""
        return self._first + len(self._groups)

    @property
    def positions(self) -> tuple[int, ...]:
        """Groups that each worker is known to have."""
        return tuple(self._positions)

    def holds(self, position: int) -> bool:
        """Whether the log says what comes at a position, or ends there."""
        return self._first <= position <= self.stop

    def confirm(self, partition: int, position: int) -> None:
        """A worker has all groups before a position."""
        self._positions[partition] = max(self._positions[partition], position)
        behind = min(min(self._positions), self.stop) - self._first
        if behind > 0:
            del self._groups[:behind]
            self._first += behind
            self._marks = {at: end for at, end in self._marks.items() if at >= self._first}

    def begin_epoch(self) -> None:
        """All groups so far are finished: all workers have received them, and nobody asks for them again."""
        self._first, self._groups, self._marks = self.stop, [], {}

    def read(self, position: int, count: int) -> list[Logged]:
        """The groups from a position on, `count` at most, up to the next mark."""
        marks = sorted(self._marks)
        following = bisect_right(marks, position)
        stop = marks[following] if following < len(marks) else self.stop
        at = position - self._first
        return self._groups[at : min(at + count, stop - self._first)]

    def append(self, groups: Iterable[tuple[int, int]], clock: int) -> None:
        """Groups (number, attempt) were leased."""
        self._groups += [Logged(number, attempt, clock) for number, attempt in groups]

    def mark(self, end: int) -> None:
        """The replica is told that nothing more waits for it, and where all meet."""
        self._marks[self.stop] = end

    def mark_at(self, position: int) -> int:
        """The end that was told at a position; -1 if none was."""
        return self._marks.get(position, -1)
