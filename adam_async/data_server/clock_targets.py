"""Pure: the clocks of the replicas, and the sync clock of all of them, as far as a data server can know.

With `ssp` and `bsp` no replica may wait for one that has nothing to do. So there is a *sync clock*: at the
end of an epoch, and before a checkpoint, every replica advances to the same clock, the *end*. A data server
knows how many steps its leased groups make, so it reports that clock; when the groups of a lost replica are
dealt out the end moves on, and replicas with an earlier one get the new one.

A step is `round_groups` groups in the order of their leases; fewer if no more wait for the replica. Then its
clock is the reported end, at which its next groups begin. The end known here is never too low: a worker whose
clock is lower advances, one whose clock was higher would wait for all others. A report of a higher clock, of
a worker that has an answer which the ledger lost, moves the end there.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from adam_async.run.ids import Replica


@dataclass(slots=True)
class _Course:
    """Leases of one replica since its last reported end."""

    clock: int
    """Earliest clock of these groups."""
    given: int = 0


class ClockTargets:
    """Clocks of the replicas of one epoch."""

    def __init__(self, *, round_groups: int, clock: int) -> None:
        self._round_groups = round_groups
        self.end = clock
        """Sync clock as far as it is known; it never decreases."""
        self._courses: dict[Replica, _Course] = {}

    def join(self, replica: Replica) -> None:
        """Add a replica, at the sync clock."""
        self._courses[replica] = _Course(self.end)

    def leave(self, replica: Replica) -> None:
        """Remove a lost replica."""
        self._courses.pop(replica, None)

    def begin_phase(self) -> None:
        """Begin a phase: all replicas reach the sync clock before they begin further groups."""
        for course in self._courses.values():
            course.clock, course.given = self.end, 0

    def reach(self, replica: Replica, waiting: int) -> int:
        """Clock of a replica after it has trained its leases and so many waiting groups."""
        course = self._courses.get(replica)
        if course is None:
            return self.end
        return course.clock - (-(course.given + waiting) // self._round_groups)

    def grow(self, waiting: Iterable[tuple[Replica, int]]) -> None:
        """Move the end to the highest clock that waiting groups, by replica, lead to."""
        self.end = max([self.end, *(self.reach(replica, count) for replica, count in waiting)])

    def seen(self, clock: int) -> None:
        """Move the end to a reported clock, if that is higher."""
        self.end = max(self.end, clock)

    def give(self, replica: Replica, groups: int) -> int:
        """Count groups leased to a live replica; return the earliest clock at which they begin."""
        course = self._courses[replica]
        course.given += groups
        return course.clock

    def report_end(self, replica: Replica) -> int:
        """Report to a live replica that nothing more waits for it; return the sync clock."""
        course = self._courses[replica]
        course.clock, course.given = self.end, 0
        return self.end
