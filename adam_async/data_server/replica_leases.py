"""Pure: the leases of one replica generation, in a log that gives all its workers the same answers.

A replica's workers train the same groups, each at its own pace. The replica's leases are written to its log.
Each worker reads the log from its own *position*, the number of groups that it has received. A question names
the position, so a repeated question gets the same groups. A worker has all groups before its position.
Positions begin at 0 in each epoch.

Between two groups of the log there may be a *mark*: here the replica got the sync clock, because it had no
more groups. Every worker that passes the mark must get the sync clock, because the step before the mark may
have fewer groups. The clock of the last mark may rise until a group follows.

The workers keep the groups of the log that are not *settled*: received by all workers, and finished. From the
kept groups the next dealer makes the log again (`restore`).

*Limits.* An epoch that ends early waits for its leases (`epoch.py`). Shares are leased ahead of need, as many
groups to a slow replica as to a fast one, and the slow replica takes longer for them. So a replica below half
the fastest rate gets only as many groups as it can finish in a limited time: the time in which the fastest
replica would finish the most groups that the slow one held at once. The limit is at least one and a half
steps, rounded down, because a report needs a whole step.

*Clocks.* With `ssp` and `bsp` no replica may wait for a replica without work. So there is a *sync clock*:
when an epoch ends or a run stops, every replica advances to the same clock, the *end*. A data server counts
the steps of its leased groups, so it can report this clock. When other replicas get the groups of a lost
replica, the end may rise, and replicas with a lower end get the new one.

A step is `round_groups` groups in the order of their leases. A group returned from a lost replica is a
separate step, and the step before it ends short. If fewer groups wait for the replica, the step has fewer
groups. The replica's clock after the step is then the reported end, at which its next groups begin. The end
must not be too low, because a worker with a higher clock would wait for all others; a worker with a lower
clock only advances. A report, or a shard's set, may have a higher clock and so raise the end. If the run
stops, `shorten` lowers the end to the highest clock that leased groups lead to.
"""

from bisect import bisect_right
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from adam_async.messages import MOST_HELD, HeldLease
from adam_async.run.ids import Replica


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
    def settled(self) -> int:
        """Number of first groups in the epoch that all workers have received and finished."""
        return self._first

    @property
    def stop(self) -> int:
        """Number of this generation's leases in the epoch."""
        return self._first + len(self._groups)

    def holds(self, position: int) -> bool:
        """Return whether the log has the group at a position, or ends there."""
        return self._first <= position <= self.stop

    @property
    def room(self) -> int:
        """Number of further groups that the workers can hold."""
        return MOST_HELD - len(self._groups)

    def confirm(self, partition: int, position: int) -> None:
        """Record that a worker has all groups before a position."""
        self._positions[partition] = max(self._positions[partition], position)

    def settle(self, unfinished: Container[int]) -> None:
        """Drop the settled groups."""
        most = min(min(self._positions), self.stop) - self._first
        behind = 0
        while behind < most and self._groups[behind].number not in unfinished:
            behind += 1
        if behind:
            del self._groups[:behind]
            self._first += behind
            self._marks = {at: end for at, end in self._marks.items() if at >= self._first}

    def begin_epoch(self) -> None:
        """Drop all groups, which are received and finished at the start of an epoch."""
        self._first, self._groups, self._marks = 0, [], {}
        self._positions = [0] * len(self._positions)

    def restore(self, sent: Sequence[tuple[int, int, Sequence[HeldLease]]]) -> list[Logged]:
        """Begin an epoch with an earlier dealer's log; return the groups in it.

        Args:
            sent: For each worker: its position, the sync clock that it received there (-1: none), and the
                earlier groups that it holds.
        """
        self.begin_epoch()
        stop, heard, held = max(sent, key=lambda each: each[:2])
        # Groups before those that a worker holds are settled.
        self._first = min(max(position - len(groups) for position, _, groups in sent), stop)
        for at, each in enumerate(held[len(held) - (stop - self._first) :], start=self._first):
            self._groups.append(Logged(each.number, each.attempt, each.clock))
            if each.sync_clock >= 0:
                self._marks[at] = each.sync_clock
        if heard >= 0:
            self._marks[stop] = heard
        return list(self._groups)

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


LAGS = 0.5
"""Fraction of the fastest replica's rate below which a replica is limited."""

RECORDED = 8
"""Number of groups that a worker may report together, if a step has fewer groups."""

SURE_AFTER = 8
"""Minimum number of finished groups for a known rate of a replica."""


class _Replica:
    """One replica's counts."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.held = self.finished = 0
        self.most = 0
        """Largest number of groups that the replica held at once."""

    def rate(self, now: float) -> float | None:
        """Return the rate in groups per second; None after too few groups."""
        if self.finished < SURE_AFTER or now <= self.since:
            return None
        return self.finished / (now - self.since)


class LeaseLimits:
    """Rates and limits of the replicas in one epoch. Times are seconds on the caller's clock."""

    def __init__(self, step: int = 1) -> None:
        self._least = 3 * max(step, RECORDED) // 2
        self._replicas: dict[Replica, _Replica] = {}

    def leased(self, replica: Replica, groups: int, now: float) -> None:
        """Count groups leased to a replica, whose time begins with the first lease."""
        counts = self._replicas.setdefault(replica, _Replica(now))
        counts.held += groups
        counts.most = max(counts.most, counts.held)

    def finished(self, replica: Replica) -> None:
        """Count a finished group of a replica."""
        counts = self._replicas[replica]
        counts.held -= 1
        counts.finished += 1

    def keep(self, replicas: Collection[Replica]) -> None:
        """Forget all replicas except these; a returning replica begins from nothing."""
        self._replicas = {name: counts for name, counts in self._replicas.items() if name in replicas}

    def room(self, replica: Replica, now: float) -> int | None:
        """Return how many further groups a replica may get; None: no limit."""
        own = self._replicas.get(replica)
        rate = own.rate(now) if own is not None else None
        if own is None or rate is None:
            return None
        fastest = max(known for each in self._replicas.values() if (known := each.rate(now)) is not None)
        if rate >= LAGS * fastest:
            return None
        return max(max(self._least, ceil(own.most * rate / fastest)) - own.held, 0)


@dataclass(slots=True)
class _Course:
    """One replica's leases since the server last reported the end to it."""

    clock: int
    """Earliest clock at which the groups leased since that report begin."""
    given: int = 0


class ClockTargets:
    """The clocks of all replicas in one epoch."""

    def __init__(self, *, round_groups: int, clock: int) -> None:
        self._round_groups = round_groups
        self.end = clock
        """Known sync clock; only `shorten` decreases it."""
        self._reported = clock
        """Highest clock that a replica has received or reported."""
        self._courses: dict[Replica, _Course] = {}

    def join(self, replica: Replica, clock: int | None = None, given: int = 0) -> None:
        """Add a replica at the sync clock, or one that has received groups since another clock."""
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
            attempts: Attempts of the waiting groups, in order.
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
        """Raise the end to a reported clock if that is higher."""
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
