"""Pure: where the replicas' clocks stand, and where all of them meet, as far as a data server can know.

With `ssp` and `bsp` nobody may be waited for who has nothing to do. So all clocks *meet*: at the end of an
epoch, and before a checkpoint, every replica ticks up to the same clock, the *end*. A data server knows how
many steps the groups that it gives out make, so it says where that is; when a lost replica's groups are dealt
out the end moves on, and those that have heard of an earlier one hear of it.

A step is `turn` groups in the order in which they were leased; fewer where the replica is told that no more
wait for it. After that its clock stands at the end that it was told, which is where its next groups begin.
What is known here is never too low: a worker whose clock is lower ticks up, one whose clock was higher would
wait for all the others. A report of a higher clock (the worker was told what we forgot) moves the end there.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from adam_async.run.ids import Replica


@dataclass(slots=True)
class _Course:
    """What one replica was told."""

    clock: int
    """Its groups since then begin no earlier than here."""
    given: int = 0
    """Groups that it was given from there on."""


class ClockTargets:
    """Clocks of the replicas of one epoch.

    Args:
        turn: Groups of a step; at least 1.
        clock: Where all clocks stand when the epoch begins.
    """

    def __init__(self, *, round_groups: int, clock: int) -> None:
        self._round_groups = round_groups
        self.end = clock
        """Where all meet, as far as is known. Never goes back."""
        self._courses: dict[Replica, _Course] = {}

    def join(self, replica: Replica) -> None:
        """A life of the replica begins."""
        self._courses[replica] = _Course(self.end)

    def leave(self, replica: Replica) -> None:
        """The replica is lost."""
        self._courses.pop(replica, None)

    def begin_stretch(self) -> None:
        """All have met, or will before they begin what they are given from now on."""
        for course in self._courses.values():
            course.clock, course.given = self.end, 0

    def reach(self, replica: Replica, waiting: int) -> int:
        """The clock of the replica when it has trained all it was given, and as many groups that wait."""
        course = self._courses.get(replica)
        if course is None:
            return self.end
        return course.clock - (-(course.given + waiting) // self._round_groups)

    def grow(self, waiting: Iterable[tuple[Replica, int]]) -> None:
        """Move the end to where everybody gets with what waits for them."""
        self.end = max([self.end, *(self.reach(replica, count) for replica, count in waiting)])

    def seen(self, clock: int) -> None:
        """A replica's clock stands here."""
        self.end = max(self.end, clock)

    def give(self, replica: Replica, groups: int) -> int:
        """A live replica is given so many groups; returns the clock that they begin at."""
        course = self._courses[replica]
        course.given += groups
        return course.clock

    def tell(self, replica: Replica) -> int:
        """A live replica is told that nothing more waits for it, and where all meet; returns that."""
        course = self._courses[replica]
        course.clock, course.given = self.end, 0
        return self.end
