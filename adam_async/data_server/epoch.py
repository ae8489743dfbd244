"""Pure: the groups of the epoch in progress: what waits for whom, what is leased, what is finished.

Theory of operation
-------------------
An epoch is trained in *stretches*. In a stretch each replica has a queue; groups of later stretches lie
aside. A stretch ends when all its groups are finished. The first one is the warm start, if there is one: a
queue for one replica alone. The others are the whole rest, or, where checkpoints are wanted within an epoch,
as many groups as lie between two of them; with turns they are whole rounds, so that all clocks are equal.

Whoever is lost leaves groups behind. In ranges they go to the *successor*, the next live replica; in turns
they are dealt out, turn by turn, to all that take part, those first that will be done first. Whoever joins
gets an equal part of what nobody has been given yet, in ranges; with turns it takes part from the next epoch
on, unless nobody else is there. Without any live replica groups wait for the next one.

An epoch may end before all its groups are trained. It *closes* when a fraction of the live replicas to whom
it gave work have finished their shares: from then on nothing is leased, but for groups that hold what the
epoch before has skipped, which go to those that have finished. What is leased is still trained and counts;
when all of that is finished the epoch is over, and what is neither finished nor leased was skipped. Of a pool
as many groups are leased as make up the fraction, so it closes when these are finished.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from math import ceil

from adam_async.data_server.clock_targets import ClockTargets
from adam_async.run.epoch_shares import POOL, Ranges, assign, assign_pool
from adam_async.run.ids import Replica

Queue = deque[tuple[int, int]]
"""Groups that wait: their numbers and the attempt that the next lease is."""


@dataclass(slots=True)
class GroupLease:
    """One group in the hands of a replica."""

    replica: Replica
    attempt: int
    losses: dict[int, float] = field(default_factory=dict)
    """Of the parts of the replica that have reported it. They add up to its loss."""


class Epoch:
    """Groups of one epoch.

    Args:
        number: Of the epoch, from 1.
        groups: How many it has.
        shares: Replica to its range, or to its place and the number of places.
        turn: Groups of a turn; 0: shares are ranges, and there are no clocks.
        first_clock: Where the clocks stand, with turns.
        finished: Ranges of groups that were trained before the run was resumed.
        warm: Groups of the warm start.
        every: Groups between two pauses; 0: none.
        live: Replicas that are live.
        carried: Groups, from the first one, of images that the epoch before has skipped.
        behind: Replicas in whose shares those were.
        fraction: Of replicas, or of groups in a pool, after which it closes.
        pooled: Whether there is one queue for all.
    """

    def __init__(
        self,
        *,
        number: int,
        groups: int,
        shares: Mapping[Replica, tuple[int, int]],
        round_groups: int,
        first_clock: int,
        finished: Ranges,
        warm: int,
        every: int,
        live: Collection[Replica],
        carried: int = 0,
        behind: Collection[Replica] = (),
        fraction: float = 1.0,
        pooled: bool = False,
    ) -> None:
        self.number, self.groups = number, groups
        self._round_groups, self._every = round_groups, every
        self._carried, self._fraction, self._pooled = carried, fraction, pooled
        if pooled:
            assigned = assign_pool(groups, warm=warm, finished=finished)
        else:
            assigned = assign(
                shares,
                groups=groups,
                round_groups=round_groups,
                warm=warm,
                finished=finished,
                carried=carried,
                behind=behind,
            )
        self._progress = assigned.progress
        self.finished = groups - len(assigned.progress)
        self._paused_at = self.finished
        self.paused = False
        self.stretch = 0
        """Stretches that have begun, without the warm start."""
        self.queues: dict[Replica, Queue] = {}
        self.leases: dict[int, GroupLease] = {}
        self.closed = False
        self.skipped: dict[int, Replica] = {}
        """Groups that were not trained, and in whose share they were."""
        self.again: list[int] = []
        """Groups whose lease has come back."""
        self._given: set[Replica] = set()
        self._later = {
            replica: deque((group, 1) for group in queue) for replica, queue in assigned.queues.items()
        }
        self._live = tuple(sorted(live))
        self._members = set(shares) & set(live)
        self.clock_targets = (
            ClockTargets(round_groups=round_groups, clock=first_clock) if round_groups else None
        )
        if self.clock_targets is not None:
            for replica in self._live:
                self.clock_targets.join(replica)
        self._warming = warm > 0
        self._open(assigned.warm, shares)

    def _open(self, warm: Sequence[int], shares: Collection[Replica]) -> None:
        """Begin the first stretch, with those who are there."""
        if self._warming:
            lowest = min(self._members or shares)
            self.queues[lowest] = deque((group, 1) for group in warm)
        else:
            self._begin_stretch()
        for replica in self._live:
            self._take_in(replica)
        self._pass_on()
        self._close_if_due()

    def progress(self, number: int) -> float:
        """Epochs of the run that lie before a group, for the replica of its share."""
        return self.number - 1 + self._progress[number]

    # --- stretches ---------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether every group is finished or skipped."""
        return self.finished + len(self.skipped) == self.groups

    def advance(self) -> bool:
        """Close the epoch or begin the next stretch, if it is time; returns whether it pauses first."""
        self._close_if_due()
        if self.paused or self.over or self.leases or any(self.queues.values()):
            return False
        self.paused = bool(self._every) and self.finished - self._paused_at >= self._every
        if not self.paused:
            self._begin_stretch()
            self._close_if_due()
        return self.paused

    def resume(self) -> None:
        """Begin the next stretch: the pause is over."""
        if self.paused:
            self.paused, self._paused_at = False, self.finished
            self._begin_stretch()

    def _begin_stretch(self) -> None:
        self._warming = False
        self.stretch += 1
        takers = sum(map(bool, self._later.values())) or 1  # of a pool all together
        size = self.groups
        if self._every:
            size = -(-self._every // takers)
            size = -(-size // self._round_groups) * self._round_groups if self._round_groups else size
        for replica, later in self._later.items():
            queue = self.queues.setdefault(replica, deque())
            queue.extend(later.popleft() for _ in range(min(size, len(later))))
        if self.clock_targets is not None:
            self.clock_targets.begin_stretch()
            self._grow()

    def _grow(self) -> None:
        if self.clock_targets is not None:
            waiting = [(replica, len(queue)) for replica, queue in self.queues.items()]
            self.clock_targets.grow([each for each in waiting if each[0] in self._live])

    # --- leases ------------------------------------------------------------------------------

    def lease(self, replica: Replica, count: int) -> tuple[tuple[int, int], ...]:
        """Hand the next groups, `count` at most, to a live replica."""
        granted: list[tuple[int, int]] = []
        while len(granted) < count and self.has_work(replica) and replica in self._live:
            number, attempt = self._queue_of(replica).popleft()
            self.leases[number] = GroupLease(replica, attempt)
            self._given.add(replica)
            granted.append((number, attempt))
        return tuple(granted)

    def _queue_of(self, replica: Replica) -> Queue:
        return self.queues.setdefault(POOL if self._pooled and not self._warming else replica, deque())

    @property
    def may_close_early(self) -> bool:
        """Whether it ends with what is leased when enough is done, instead of with all that there is."""
        return self._pooled or (self.clock_targets is None and self._fraction < 1)

    @property
    def end(self) -> int:
        """Where all meet, as far as is known; 0 where there are no clocks."""
        return self.clock_targets.end if self.clock_targets is not None else 0

    def begins_at(self, replica: Replica, groups: int) -> int:
        """Count groups that a live replica is given; returns `Groups.clock` of them."""
        return self.clock_targets.give(replica, groups) if self.clock_targets is not None else 0

    def has_work(self, replica: Replica) -> bool:
        """Whether a group waits for the replica."""
        queue = self._queue_of(replica)
        if not queue or self._warming or not self._pooled:
            return bool(queue)
        return queue[0][0] < self._carried or self.finished + len(self.leases) < self._pool_limit

    @property
    def _pool_limit(self) -> int:
        return _part(self._fraction, self.groups)

    def tell_end(self, replica: Replica) -> int:
        """A live replica is told that nothing more waits for it; returns `Groups.end`."""
        return self.clock_targets.tell(replica) if self.clock_targets is not None else 0

    def open_lease(self, number: int, replica: Replica, attempt: int) -> GroupLease | None:
        """The lease of a group; None if it is not leased to the replica under that attempt."""
        lease = self.leases.get(number)
        if lease is None or lease.attempt != attempt or lease.replica != replica:
            return None
        return lease

    def finish(self, number: int) -> None:
        """Count a group that is leased as finished."""
        del self.leases[number]
        self.finished += 1

    def _return_leases(self, replica: Replica) -> int:
        """Put what a replica was leased back into its queue; returns how much that is."""
        back = sorted(number for number, lease in self.leases.items() if lease.replica == replica)
        groups = [(number, self.leases.pop(number).attempt + 1) for number in back]
        self._queue_of(replica).extendleft(reversed(groups))
        self.again += back
        if self.closed:
            self._queue_of(replica).extend(self._skip({replica: self._queue_of(replica)}))
        return len(back)

    # --- the early end -----------------------------------------------------------------------

    def _close_if_due(self) -> None:
        """Nothing more is leased once enough is done, but for what was carried."""
        if self.closed or self._warming or self.clock_targets is not None or self._fraction >= 1:
            return
        if self._pooled:
            done = [POOL] if self.finished >= self._pool_limit else []
        else:
            done = self._done_if_enough()
        if done:
            self.closed = True
            kept = self._skip(self.queues) + self._skip(self._later)
            for at, group in enumerate(sorted(kept)):
                self.queues.setdefault(done[at % len(done)], deque()).append(group)

    def _done_if_enough(self) -> list[Replica]:
        """The replicas that have finished their shares, if they are as many as close the epoch."""
        if all(self.queues.get(replica) for replica in self._given):
            return []  # the usual answer, and soon found: this is asked with every group that is finished
        waiting = {r for queues in (self.queues, self._later) for r, queue in queues.items() if queue}
        needed = _part(self._fraction, len(self._members & (waiting | self._given)))
        idle = sorted(self._members & self._given - waiting)
        if len(idle) < needed:
            return []
        busy = {lease.replica for lease in self.leases.values()}
        done = [replica for replica in idle if replica not in busy]
        return done if len(done) >= needed else []

    def _skip(self, queues: dict[Replica, Queue]) -> list[tuple[int, int]]:
        """Skip what waits in some queues, but for what was carried, which is taken out and returned."""
        kept = [group for queue in queues.values() for group in queue if group[0] < self._carried]
        for replica, queue in queues.items():
            self.skipped.update((number, replica) for number, _ in queue if number >= self._carried)
            queue.clear()
        return kept

    # --- who is there ------------------------------------------------------------------------

    def replicas_changed(self, live: Collection[Replica]) -> int:
        """Some replicas are lost, others join; returns how many leases are trained again."""
        lost = [replica for replica in self._live if replica not in live]
        joined = sorted(replica for replica in live if replica not in self._live)
        self._live = tuple(sorted(live))
        again = sum(self._lose(replica) for replica in lost)
        self._pass_on()
        for replica in joined:
            self._join(replica)
        self._close_if_due()
        return again

    def _lose(self, replica: Replica) -> int:
        again = self._return_leases(replica)
        self._members.discard(replica)
        self._given.discard(replica)
        if self.clock_targets is not None:
            self.clock_targets.leave(replica)
        return again

    def _join(self, replica: Replica) -> None:
        if self.clock_targets is not None:
            self.clock_targets.join(replica)
        self._take_in(replica)
        self._pass_on()

    def _take_in(self, replica: Replica) -> None:
        """Let a live replica take part, if it may in this epoch."""
        if replica in self._members or (self.clock_targets is not None and self._members):
            return
        self._members.add(replica)
        if self.clock_targets is None and not self._pooled:
            for queues in (self._later,) if self._warming else (self.queues, self._later):
                self._cut_a_part(queues, replica)

    def _cut_a_part(self, queues: dict[Replica, Queue], replica: Replica) -> None:
        """Give a joining replica an equal part of what waits, from the ends of the longest queues."""
        own = queues.setdefault(replica, deque())
        others = [queue for name, queue in queues.items() if name in self._members and name != replica]
        if own or not others:
            return
        part = sum(map(len, others)) // (len(others) + 1)
        own.extend(sorted(max(others, key=len).pop() for _ in range(part)))

    def _pass_on(self) -> None:
        """Give what waits for those who take no part to those who do."""
        if not self._members:
            self._members = set(self._live)  # all that are left joined in the middle of it
        if not self._members:
            return
        first = min(self._members)
        for queues in (self.queues, self._later):
            takers = [first] if self._warming and queues is self.queues else sorted(self._members)
            for replica in sorted(r for r, queue in queues.items() if queue and r not in (POOL, *takers)):
                self._deal(queues, takers, replica)
        self._grow()

    def _deal(self, queues: dict[Replica, Queue], takers: list[Replica], replica: Replica) -> None:
        groups = list(queues.pop(replica))
        if self.clock_targets is None:
            successor = min(takers, key=lambda taker: (taker <= replica, taker))
            queues.setdefault(successor, deque()).extend(groups)
            return
        reach = self.clock_targets.reach
        takers = sorted(takers, key=lambda taker: (reach(taker, len(queues.get(taker, ()))), taker))
        for at, start in enumerate(range(0, len(groups), self._round_groups)):
            queue = queues.setdefault(takers[at % len(takers)], deque())
            queue.extend(groups[start : start + self._round_groups])

    # --- looking -----------------------------------------------------------------------------

    def upcoming(self, replica: Replica, count: int) -> list[int]:
        """The next group numbers that the replica would get."""
        whose = POOL if self._pooled and not self.queues.get(replica) else replica
        waiting = chain(self.queues.get(whose, ()), self._later.get(whose, ()))
        return [number for number, _ in islice(waiting, count)]

    def waiting(self) -> list[int]:
        """All group numbers that nobody has been given."""
        queues = chain(self.queues.values(), self._later.values())
        return [number for queue in queues for number, _ in queue]


def _part(fraction: float, whole: int) -> int:
    """The least whole number that is at least this part of another one, but for the errors of a product."""
    return ceil(fraction * whole - 1e-9)
