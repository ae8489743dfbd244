"""Pure: what a shard holds in bsp: contributions to the sums of steps that are not complete.

Theory of operation
-------------------
In bsp the pushes of a step are not applied as they come. Each is *held* as its replica's contribution to
the sum of its clock. When every live replica has contributed to a clock or ticked past it, the clock is
*reached*: what is held for it becomes *due*, ordered by replica, and is applied as one sum. What is due is
applied in the order of clocks, and never before it is due, so the values of a shard are those of one clock
after the other, however pushes, ticks and deaths interleave.

`Held.clock` is the clock that the values are of: all up to it that was contributed has been applied. It
never goes back, and a contribution to a clock that has been reached comes too late for it.

A session contributes to a clock once. The shard refuses a second contribution, because its push is
acknowledged at once and its gradients stay in memory until the clock is reached.
"""

from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from adam_async.run.ids import Replica


@dataclass(frozen=True, slots=True, eq=False)
class Contribution:
    """A replica's part in the sum of one clock, on one shard."""

    replica: Replica
    push: Any
    """The push that it came in, as it waits."""
    place: int
    """Where in that push the shard is."""
    session: tuple[int, int]
    """Session that pushed it, and its incarnation."""


@dataclass(slots=True, eq=False)
class Held:
    """What is held for one shard."""

    reached: int = 0
    """No live replica will contribute to this clock, or to an earlier one, any more."""
    waiting: dict[int, list[Contribution]] = field(default_factory=dict)
    """By clock: what has come for clocks that are not reached."""
    due: deque[int] = field(default_factory=deque)
    """Clocks whose sums are on their way to the values, in order."""

    @property
    def clock(self) -> int:
        """The clock that the values are of."""
        return self.due[0] - 1 if self.due else self.reached

    @property
    def settled(self) -> bool:
        """Whether nothing is held, so that the values are all there is."""
        return not self.waiting and not self.due

    def contribute(self, clock: int, contribution: Contribution) -> bool:
        """Hold a contribution. Returns False if it is too late or the second one of its session."""
        if clock <= self.reached:
            return False
        held = self.waiting.setdefault(clock, [])
        if any(other.session == contribution.session for other in held):
            return False
        held.append(contribution)
        return True

    def reach(self, slowest: int) -> list[tuple[int, list[Contribution]]]:
        """The slowest live replica has this clock now: return the sums that became due, in order."""
        if slowest <= self.reached:
            return []
        self.reached = slowest
        clocks = sorted(clock for clock in self.waiting if clock <= slowest)
        self.due.extend(clocks)
        # Sorting is stable: two lives of one replica stay in the order in which they came.
        return [(clock, sorted(self.waiting.pop(clock), key=attrgetter("replica"))) for clock in clocks]

    def applied(self, clock: int) -> None:
        """The sum of a clock is in the values."""
        assert self.due, f"the sum of clock {clock} was applied, but none was due"
        assert self.due[0] == clock, f"the sum of clock {clock} was applied before that of {self.due[0]}"
        self.due.popleft()

    def check_invariants(self) -> None:
        """Assert what must hold between two events."""
        assert all(clock > self.reached for clock in self.waiting), (self.reached, list(self.waiting))
        assert list(self.due) == sorted(set(self.due)), self.due
        assert all(self.clock < clock <= self.reached for clock in self.due), (self.reached, self.due)
