"""Pure: the clocks of the replicas, and the sync clock of all, as far as a data server can compute them.

With `ssp` and `bsp` no replica may wait for a replica without work. So there is a *sync clock*: at the end of
an epoch, and of a run that stops, every replica advances to the same clock, the *end*. A data server counts
the steps of its leased groups, so it can report that clock. When other replicas get the groups of a lost
replica, the end may rise, and replicas with a lower end get the new one.

A step is `round_groups` groups in the order of their leases. A group that returned from a lost replica is a
step of its own, and the step before it ends short. If fewer groups wait for the replica, the step has fewer
groups, and the replica's clock after the step is the reported end, at which its next groups begin.
The end must not be too low, because a worker with a higher clock would wait for all others; a worker with a
lower clock advances. A report, or the sets of the shards, may have a higher clock, which raises the end.

If the run stops, `shorten` lowers the end to the highest clock that leased groups lead to.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from adam_async.run.ids import Replica


@dataclass(slots=True)
class _Course:
    """Leases of one replica since the server last reported the end to it."""

    clock: int
    """Earliest clock at which the groups leased after that report begin."""
    given: int = 0


class ClockTargets:
    """Clocks of the replicas of one epoch."""

    def __init__(self, *, round_groups: int, clock: int) -> None:
        self._round_groups = round_groups
        self.end = clock
        """Known sync clock; only `shorten` decreases it."""
        self._reported = clock
        """Highest clock that a replica has received or reported."""
        self._courses: dict[Replica, _Course] = {}

    def join(self, replica: Replica, clock: int | None = None, given: int = 0) -> None:
        """Add a replica, at the sync clock; or one that has received groups since another clock."""
        self._courses[replica] = _Course(self.end if clock is None else clock, given)

    def leave(self, replica: Replica) -> None:
        """Remove a lost replica."""
        self._courses.pop(replica, None)

    def end_warm_start(self) -> None:
        """End the warm start: all replicas reach the sync clock before they begin further groups."""
        self._reported = self.end
        for course in self._courses.values():
            course.clock, course.given = self.end, 0

    def shorten(self) -> None:
        """Lower the end to the highest clock that a replica has, or reaches with its leases."""
        least = max([self._reported, *(self.reach(replica, ()) for replica in self._courses)])
        self.end = min(self.end, least)

    def has_room(self, replica: Replica, attempt: int) -> bool:
        """Return whether a replica may lease a group, under this attempt, without a higher end."""
        return replica in self._courses and self.reach(replica, (attempt,)) <= self.end

    def reach(self, replica: Replica, attempts: Iterable[int]) -> int:
        """Return the clock of a replica after it has trained its leases and some waiting groups.

        Args:
            attempts: Attempt of each waiting group, in their order.
        """
        course = self._courses.get(replica)
        if course is None:
            return self.end
        given = course.given
        for attempt in attempts:
            given = self._after(given, attempt)
        return course.clock - (-given // self._round_groups)

    def _after(self, given: int, attempt: int) -> int:
        """Count one more group, in groups of full steps."""
        return given + 1 if attempt == 1 else given + self._round_groups - given % -self._round_groups

    def grow(self, waiting: Iterable[tuple[Replica, Iterable[int]]]) -> None:
        """Raise the end to the highest clock that replicas reach with their leases and waiting groups."""
        self.end = max([self.end, *(self.reach(replica, attempts) for replica, attempts in waiting)])

    def seen(self, clock: int) -> None:
        """Raise the end to a reported clock, if that is higher."""
        self._reported = max(self._reported, clock)
        self.end = max(self.end, clock)

    def begin_of(self, replica: Replica) -> int:
        """Return the earliest clock of the groups that a live replica gets now."""
        return self._courses[replica].clock

    def give(self, replica: Replica, attempt: int) -> None:
        """Count a group leased to a live replica."""
        course = self._courses[replica]
        course.given = self._after(course.given, attempt)

    def report_end(self, replica: Replica) -> int:
        """Report to a live replica that it has no more groups; return the sync clock."""
        course = self._courses[replica]
        course.clock, course.given = self.end, 0
        self._reported = self.end
        return self.end
