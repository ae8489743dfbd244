"""Pure: the leases of one replica generation, in a log from which all its workers get the same answers.

A replica's workers train the same groups, each at its own pace. The leases of the replica are written to its
log, and each worker reads the log from its own *position*, the number of groups that it has received. A
question names the position, so a repeated question gets the same groups. A worker has all groups before its
position; groups that all workers have are dropped.

Between two groups of the log there may be a *mark*: at this position the replica got the sync clock, because
it had no more groups. Every worker that passes the mark must get the sync clock, because the step before the
mark may have fewer groups. The clock of the last mark may rise until a group follows.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logged:
    """One leased group."""

    number: int
    attempt: int
    clock: int
    """Earliest clock at which the group begins."""


class ReplicaLeases:
    """The log of one replica generation."""

    def __init__(self, replica_generation: int, partitions: int) -> None:
        self.replica_generation = replica_generation
        self._first = 0
        self._groups: list[Logged] = []
        self._marks: dict[int, int] = {}
        self._positions = [0] * partitions
        """Number of groups that each worker has received."""

    @property
    def stop(self) -> int:
        """Number of leases of this generation."""
        return self._first + len(self._groups)

    def holds(self, position: int) -> bool:
        """Return whether the log has the group at a position, or ends there."""
        return self._first <= position <= self.stop

    def confirm(self, partition: int, position: int) -> None:
        """Record that a worker has all groups before a position."""
        self._positions[partition] = max(self._positions[partition], position)
        behind = min(min(self._positions), self.stop) - self._first
        if behind > 0:
            del self._groups[:behind]
            self._first += behind
            self._marks = {at: end for at, end in self._marks.items() if at >= self._first}

    def begin_epoch(self) -> None:
        """Drop all groups, which are received and finished at the start of an epoch."""
        self._first, self._groups, self._marks = self.stop, [], {}

    def read(self, position: int, count: int) -> list[Logged]:
        """Return the groups from a position on, `count` at most, up to the next mark."""
        marks = sorted(self._marks)
        following = bisect_right(marks, position)
        stop = marks[following] if following < len(marks) else self.stop
        at = position - self._first
        return self._groups[at : min(at + count, stop - self._first)]

    def append(self, groups: Iterable[tuple[int, int]], clock: int) -> None:
        """Append leased groups (number, attempt)."""
        self._groups += [Logged(number, attempt, clock) for number, attempt in groups]

    def mark(self, end: int) -> None:
        """Mark the end of the log with the sync clock."""
        self._marks[self.stop] = end

    def mark_at(self, position: int) -> int:
        """Return the sync clock of the mark at a position; -1 without a mark."""
        return self._marks.get(position, -1)
