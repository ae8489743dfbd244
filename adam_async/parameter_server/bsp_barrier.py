"""Pure: the pending contributions of a shard in bsp: gradients that wait until their sum is complete.

Theory of operation
-------------------
In bsp a push is not applied when it arrives. A pending push is the *contribution* of its replica to the sum
of its clock. A clock is *reached* when every live replica has contributed to it or ended it with a tick. A
reached clock's contributions are then *due*: the server orders them by replica and applies them as one sum.
The server applies sums in the order of their clocks, and only when they are due. So the values of a shard
pass from one clock to the next, however pushes, ticks and losses interleave.

`PendingContributions.clock` is the clock of the values: all contributions up to it have been applied. The
reached clock never goes back, and the server refuses a contribution to it as too late.

A session contributes to a clock once. The shard refuses a second contribution, because its push is
acknowledged at once and its gradients stay in memory until the clock is reached.

The memory budget of a link does not count acknowledged pushes, so `PendingBytes` bounds their memory for each
replica.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any

from adam_async.run.ids import Replica

PENDING_TIMES = 4
"""Maximum memory of a replica's pending contributions, as a multiple of the bundle's values. A correct
replica has those of one step, whose factors are about as large as the values."""

PENDING_BYTES = 64 << 20
"""Memory in bytes for a replica's pending contributions beyond `PENDING_TIMES`: the largest push."""

CONTRIBUTION_BYTES = 256
"""Approximate memory of a contribution to one shard, in bytes, not counting the gradient."""


@dataclass(frozen=True, slots=True, eq=False)
class Contribution:
    """A replica's part in the sum of one clock, on one shard."""

    replica: Replica
    push: Any
    """Queued push with the contribution."""
    place: int
    """Index of the shard in the push."""
    session: tuple[int, int]
    """Identity of the pushing client: session id and incarnation."""


@dataclass(slots=True, eq=False)
class PendingContributions:
    """The pending contributions of one shard."""

    reached: int = 0
    """Last clock to which no live replica will contribute any more."""
    waiting: dict[int, list[Contribution]] = field(default_factory=dict)
    """Contributions to clocks that are not reached, by clock."""
    due: deque[tuple[int, list[Contribution]]] = field(default_factory=deque)
    """Clocks with due sums that are not applied, in order, each with its contributions."""

    @property
    def clock(self) -> int:
        """Clock up to which all sums are in the values."""
        return self.due[0][0] - 1 if self.due else self.reached

    def pushes_of_groups(self) -> Iterator[Any]:
        """Yield the push of each contribution with groups; these gradients are not in the values."""
        for _, contributions in chain(self.waiting.items(), self.due):
            for each in contributions:
                if each.push.push.groups:
                    yield each.push.push

    def contribute(self, clock: int, contribution: Contribution) -> bool:
        """Add a contribution. Returns False if the contribution is too late, or its session's second."""
        if clock <= self.reached:
            return False
        pending = self.waiting.setdefault(clock, [])
        if any(other.session == contribution.session for other in pending):
            return False
        pending.append(contribution)
        return True

    def reach(self, slowest: int) -> list[tuple[int, list[Contribution]]]:
        """Take up the clock of the slowest live replica.

        Returns the contributions to each clock that becomes due.
        """
        if slowest <= self.reached:
            return []
        self.reached = slowest
        clocks = sorted(clock for clock in self.waiting if clock <= slowest)
        # Sorting is stable, so two generations of a replica stay in order of arrival.
        found = [(clock, sorted(self.waiting.pop(clock), key=attrgetter("replica"))) for clock in clocks]
        self.due.extend(found)
        return found

    def applied(self, clock: int) -> None:
        """Take note that the sum of a clock is in the values."""
        assert self.due, f"the sum of clock {clock} was applied, but none was due"
        first = self.due[0][0]
        assert first == clock, f"the sum of clock {clock} was applied before that of {first}"
        self.due.popleft()

    def check_invariants(self) -> None:
        """Assert the invariants between two events."""
        assert all(clock > self.reached for clock in self.waiting), (self.reached, list(self.waiting))
        due = [clock for clock, _ in self.due]
        assert due == sorted(set(due)), due
        assert all(self.clock < clock <= self.reached for clock in due), (self.reached, due)


class PendingBytes:
    """Memory that pending contributions use on one primary, by replica, in bytes.

    Args:
        values_bytes: Size of the bundle's values, in bytes.
    """

    def __init__(self, values_bytes: int) -> None:
        self._most = PENDING_TIMES * values_bytes + PENDING_BYTES
        self._bytes: Counter[int | None] = Counter()
        self._pushes: dict[Any, tuple[int | None, int, int]] = {}
        """Replica, size in bytes and contribution count of each queued push."""

    def refusal(self, replica: int | None) -> str:
        """Return why a replica may not contribute now; empty if it may."""
        if self._bytes[replica] < self._most:
            return ""
        return f"{self._bytes[replica]} bytes of its gradients wait for sums, and {self._most} may: wait"

    def add(self, replica: int | None, queued: Any) -> None:
        """Count a push that becomes contributions.

        The gradients of the push stay in memory until sums contain all its contributions.
        """
        places = len(queued.accepted)
        nbytes = queued.gradients.nbytes + places * CONTRIBUTION_BYTES
        if places:
            self._pushes[queued] = (replica, nbytes, places)
            self._bytes[replica] += nbytes

    def refused(self, queued: Any) -> None:
        """Record the contributions of a push that their shards refused."""
        if queued.problems:
            self._settled(queued, sum([problem.index in queued.accepted for problem in queued.problems]))

    def summed(self, pushes: Iterable[Any], shards: int) -> None:
        """Record that some shards have applied a sum; each push contributed to all of them."""
        for queued in pushes:
            self._settled(queued, shards)

    def _settled(self, queued: Any, places: int) -> None:
        known = self._pushes.get(queued)
        if known is None:
            return  # another primary counted it
        replica, nbytes, left = known
        if left > places:
            self._pushes[queued] = (replica, nbytes, left - places)
            return
        del self._pushes[queued]
        self._bytes[replica] -= nbytes
        if not self._bytes[replica]:
            del self._bytes[replica]

    def clear(self) -> None:
        """Forget all contributions: the server is no primary any more."""
        self._bytes.clear()
        self._pushes.clear()
