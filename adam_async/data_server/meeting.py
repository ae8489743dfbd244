"""Pure: where the replicas' clocks stand, and where all of them meet, as far as a data server can know.

With `ssp` and `bsp` nobody may be waited for who has nothing to do. So all clocks *meet*: at the end of an
epoch, and before a checkpoint, every replica ticks up to the same clock, the *end*. A data server knows how
many steps the groups that it gives out make, so it says where that is; when a lost replica's groups are dealt
out the end moves on, and those that have heard of an earlier one hear of it.

A step is `turn` groups in the order in which they were leased; fewer where the replica is told that no more
wait for it. After that its clock stands at the end that it was told, which is where its next groups begin.
What is known here is never too low: a worker whose clock is lower ticks up, one whose clock was higher would
wait for all the others. A report of a higher clock (the worker was told what we forgot) moves the end there.

Between two answers to one life of a worker, on one link, the later question says that the earlier answer
arrived. On a new link it names what it holds, and an answer of which it holds nothing is taken back whole.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from adam_async.ids import Replica


@dataclass(slots=True)
class _Course:
    """What one replica was told."""

    clock: int
    """Its groups since then begin no earlier than here."""
    given: int = 0
    """Groups that it was given from there on."""
    told: int = 0
    """The end that it has heard of."""
    latest: frozenset[int] = frozenset()
    """Groups of the latest answer that had some."""
    before: tuple[int, int] = (0, 0)
    """`clock` and `given` before that answer."""


class Meeting:
    """Clocks of the replicas of one epoch.

    Args:
        turn: Groups of a step; at least 1.
        clock: Where all clocks stand when the epoch begins.
    """

    def __init__(self, *, turn: int, clock: int) -> None:
        self._turn = turn
        self.end = clock
        """Where all meet, as far as is known. Never goes back."""
        self._courses: dict[Replica, _Course] = {}

    def join(self, replica: Replica) -> None:
        """A life of the replica begins; it may hear at once that there is nothing for it."""
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
        return course.clock - (-(course.given + waiting) // self._turn)

    def grow(self, waiting: Iterable[tuple[Replica, int]]) -> None:
        """Move the end to where everybody gets with what waits for them."""
        self.end = max([self.end, *(self.reach(replica, count) for replica, count in waiting)])

    def seen(self, clock: int) -> None:
        """A replica's clock stands here."""
        self.end = max(self.end, clock)

    def must_hear(self, replica: Replica) -> bool:
        """Whether the replica, if nothing waits for it, has yet to hear where all meet."""
        course = self._courses.get(replica)
        return course is not None and course.told < self.end

    def give(self, replica: Replica, groups: Collection[int], *, last: bool) -> tuple[int, int]:
        """Answer a replica with these groups; returns the clock that they begin at, and if `last` the end."""
        course = self._courses.get(replica)
        if course is None:
            return 0, 0
        clock = course.clock
        if groups:
            course.latest, course.before = frozenset(groups), (course.clock, course.given)
            course.given += len(groups)
        if last:
            course.clock, course.given, course.told = self.end, 0, self.end
        return clock, self.end if last else 0

    def take_back(self, replica: Replica, groups: Collection[int]) -> None:
        """The replica asks on a new link, and does not hold these groups: no answer with them arrived."""
        course = self._courses.get(replica)
        if course is None:
            return
        course.told = 0
        others = len(groups)
        if course.latest and course.latest.issubset(groups):
            course.clock, course.given = course.before
            others -= len(course.latest)
            course.latest = frozenset()
        course.given = max(course.given - others, 0)
