"""Pure: the groups of the epoch in progress: queues of replicas, leases, finished and skipped groups.

Theory of operation
-------------------
Each replica has a queue. With a warm start one replica alone has groups first; no replica gets other groups
until these are finished. A run that stops *drains* its epoch: the ledger leases no more groups, except those
that equal clocks need.

A lost replica leaves unfinished groups. If shares are ranges, its groups move to the *successor*, the next
live replica. If shares are rounds, all participants get its groups, round by round, beginning with the
replica that will finish first. With ranges a joining replica gets an equal part of the waiting groups. With
rounds a joining replica takes part from the next epoch on, unless it is alone. Without a live replica, groups
wait for the next one.

An epoch may end before all its groups are trained. An epoch *closes* when a fraction of the live replicas
with groups have finished their shares. A closed epoch leases only groups with images that the epoch before
has skipped, and only to replicas that have finished their shares. Leased groups are still trained and count.
The epoch is over when all leased groups are finished; it skips the groups that were not leased. If all
replicas lease from one pool, the epoch leases only this fraction of its groups, and closes when they are
finished.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from math import ceil
from typing import Annotated

import msgspec

from adam_async.data_server.clock_targets import ClockTargets
from adam_async.messages.bounds import (
    Clock,
    Count,
    GroupNumber,
    Images,
    Loss,
    Progress,
    Seconds,
)
from adam_async.messages.bounds import Epoch as EpochNumber
from adam_async.run.epoch_shares import POOL, assign, assign_pool
from adam_async.run.ids import Replica

MOST_REPLICAS = 1 << 16
"""Maximum number of replicas in one event."""

MOST_IMAGE_BYTES = 16 << 20
"""Maximum size of a bit set of images of a data set, in bytes."""

ReplicaNumber = Annotated[Replica, msgspec.Meta(ge=0, le=(1 << 20) - 1)]
"""Number of a replica."""

GroupRanges = Annotated[tuple[tuple[GroupNumber, GroupNumber], ...], msgspec.Meta(max_length=1 << 20)]
"""Ranges of groups."""

Shares = Annotated[
    dict[ReplicaNumber, tuple[GroupNumber, GroupNumber]], msgspec.Meta(max_length=MOST_REPLICAS)
]
"""Share of each replica: its range of groups, or its number among the replicas and their total."""

Queue = deque[tuple[int, int]]
"""Waiting groups: number, and attempt of the next lease."""


@dataclass(slots=True)
class GroupLease:
    """One leased group."""

    replica: Replica
    attempt: int
    clock: int = 0
    """Earliest clock after the group's step, which is the clock of the values that contain the group; 0
    without clocks."""
    losses: dict[int, float] = field(default_factory=dict)
    """Losses of the parts of the replica that have reported the group, whose sum is the group's loss."""


class EpochBegan(msgspec.Struct, frozen=True, tag=True):
    """The controllers assigned the shares of an epoch: see `cluster_map.EpochRecord`."""

    number: EpochNumber
    groups: GroupNumber
    shares: Shares
    round_groups: Count = 0
    """Number of groups of a replica's round; 0: shares are ranges, and there are no clocks."""
    first_clock: Clock = 0
    """Clock of all replicas at the start, with rounds."""
    finished: GroupRanges = ()
    """Ranges of groups that were trained before the run was resumed."""
    images: Images = 0
    """Number of the epoch's images that were trained before the run was resumed."""
    loss: Loss = 0.0
    """Mean loss over the epoch's images that were trained before the run was resumed."""
    train_s: Seconds = 0.0
    """Training time of the epoch before the run was resumed, in seconds."""
    warm: GroupNumber = 0
    """Number of groups of the warm start."""
    carried: GroupNumber = 0
    """Number of groups at the front, which have the images that the epoch before has skipped."""
    behind: Annotated[tuple[ReplicaNumber, ...], msgspec.Meta(max_length=MOST_REPLICAS)] = ()
    """Replicas in whose shares the epoch before has skipped images."""
    fraction: Progress = 1.0
    """Fraction of the replicas, or of the groups in a pool, after which no more groups are leased."""
    pooled: bool = False
    """Whether all replicas lease their groups from one pool."""
    step: GroupNumber = 1
    """Number of groups of a step."""
    carried_images: Annotated[bytes, msgspec.Meta(max_length=MOST_IMAGE_BYTES)] = b""
    """`EpochOrder.carried_images`, on which the order of the epoch depends."""


class Epoch:
    """Groups of one epoch.

    The epoch begins with the event `EpochBegan` and the live replicas.
    """

    def __init__(self, began: EpochBegan, live: Collection[Replica]) -> None:
        self.number, self.groups = began.number, began.groups
        self._round_groups = began.round_groups
        self._carried, self._fraction, self._pooled = began.carried, began.fraction, began.pooled
        if began.pooled:
            assigned = assign_pool(began.groups, warm=began.warm, finished=began.finished)
        else:
            assigned = assign(
                began.shares,
                groups=began.groups,
                round_groups=began.round_groups,
                warm=began.warm,
                finished=began.finished,
                carried=began.carried,
                behind=began.behind,
            )
        self._progress = assigned.progress
        self.finished = began.groups - len(assigned.progress)
        self.draining = False
        """Whether the run stops when the leased groups are finished."""
        self.queues: dict[Replica, Queue] = {}
        self.leases: dict[int, GroupLease] = {}
        self.closed = False
        self.skipped: dict[int, Replica] = {}
        """Skipped groups, and the replicas in whose shares they were."""
        self.again: list[int] = []
        """Numbers of the groups whose leases were returned, once for each return."""
        self._given: set[Replica] = set()
        self._later = {  # after the warm start
            replica: deque((group, 1) for group in queue) for replica, queue in assigned.queues.items()
        }
        self._live = tuple(sorted(live))
        self._members = set(began.shares) & set(live)
        self.clock_targets = (
            ClockTargets(round_groups=began.round_groups, clock=began.first_clock)
            if began.round_groups
            else None
        )
        if self.clock_targets is not None:
            for replica in self._live:
                self.clock_targets.join(replica)
        self._warming = began.warm > 0
        self._open(assigned.warm, began.shares)

    def _open(self, warm: Sequence[int], shares: Collection[Replica]) -> None:
        """Begin with the warm start, if any, and the live replicas."""
        if self._warming:
            # Without a live member the groups wait for the lowest replica: `_pass_on` moves them later.
            lowest = min(self._members or shares)
            self.queues[lowest] = deque((group, 1) for group in warm)
        else:
            self._end_warm_start()
        for replica in self._live:
            self._take_in(replica)
        self._pass_on()
        self._close_if_due()

    def progress(self, number: int) -> float:
        """Return the progress of the run at a group, in epochs, for the replica whose share has the group."""
        return self.number - 1 + self._progress[number]

    # --- the end -----------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether every group is finished or skipped."""
        return self.finished + len(self.skipped) == self.groups

    @property
    def warming(self) -> bool:
        """Whether the warm start is in training."""
        return self._warming

    def advance(self) -> None:
        """Close the epoch, or end the warm start, if enough groups are finished for it."""
        # Closing may skip all waiting groups.
        self._close_if_due()
        if self._warming and not (self.over or self.leases or any(self.queues.values())):
            self._end_warm_start()
            # The warm start alone may be the fraction of a pool.
            self._close_if_due()

    @property
    def drained(self) -> bool:
        """Whether the epoch drains and is not over, and no group is leased or may still be leased."""
        if not self.draining or self.over or self.leases:
            return False
        return not any(map(self.has_work, self._live))

    def drain(self) -> None:
        """Lease no more groups. With clocks all replicas then train up to the same clock."""
        self.draining = True
        if self.clock_targets is not None:
            self.clock_targets.shorten()

    def _end_warm_start(self) -> None:
        self._warming = False
        for replica, later in self._later.items():
            self.queues.setdefault(replica, deque()).extend(later)
            later.clear()
        if self.clock_targets is not None:
            self.clock_targets.end_warm_start()
            self._grow()

    def _grow(self) -> None:
        if self.clock_targets is not None and not self.draining:
            waiting = [(replica, len(queue)) for replica, queue in self.queues.items()]
            self.clock_targets.grow([each for each in waiting if each[0] in self._live])

    # --- leases ------------------------------------------------------------------------------

    def lease(self, replica: Replica, count: int) -> tuple[tuple[int, int], ...]:
        """Lease the next groups, `count` at most, to a live replica."""
        granted: list[tuple[int, int]] = []
        if self.draining and not self.closed:
            count = min(count, self._room(replica))
        # A pool counts the new leases against its limit, so each group is checked.
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
        """Whether the epoch may end before all its groups are trained."""
        return self._pooled or (self.clock_targets is None and self._fraction < 1)

    @property
    def end(self) -> int:
        """Known sync clock; 0 without clocks."""
        return self.clock_targets.end if self.clock_targets is not None else 0

    def begins_at(self, replica: Replica, groups: Sequence[tuple[int, int]]) -> int:
        """Count groups leased to a live replica; return their `Groups.clock`."""
        if self.clock_targets is None:
            return 0
        begins_at = self.clock_targets.begin_of(replica)
        for number, _ in groups:
            self.leases[number].clock = self.clock_targets.give(replica)
        return begins_at

    def has_work(self, replica: Replica) -> bool:
        """Return whether a group waits for a replica, and the replica may lease it."""
        queue = self._queue_of(replica)
        # The last groups of a closed epoch are trained, so that it ends.
        if self.draining and not self.closed and self._room(replica) <= 0:
            return False
        if not queue or self._warming or not self._pooled:
            return bool(queue)
        # Carried groups come first in a pool, and are leased in any case, so that none is skipped twice.
        return queue[0][0] < self._carried or self.finished + len(self.leases) < self._pool_limit

    def _room(self, replica: Replica) -> int:
        """Return the number of groups that a replica may still lease in an epoch that drains."""
        return self.clock_targets.room(replica) if self.clock_targets is not None else 0

    @property
    def _pool_limit(self) -> int:
        return _part(self._fraction, self.groups)

    def report_end(self, replica: Replica) -> int:
        """Report to a live replica that it has no more groups; return `Groups.end`."""
        return self.clock_targets.report_end(replica) if self.clock_targets is not None else 0

    def open_lease(self, number: int, replica: Replica, attempt: int) -> GroupLease | None:
        """Return the lease of a group to a replica under an attempt; None without such a lease."""
        lease = self.leases.get(number)
        if lease is None or lease.attempt != attempt or lease.replica != replica:
            return None
        return lease

    def finish(self, number: int) -> None:
        """Count a leased group as finished."""
        del self.leases[number]
        self.finished += 1

    def _return_leases(self, replica: Replica) -> int:
        """Put the leased groups of a replica back into its queue; return their number."""
        back = sorted(number for number, lease in self.leases.items() if lease.replica == replica)
        groups = [(number, self.leases.pop(number).attempt + 1) for number in back]
        # Returned groups are the oldest ones, so they go to the front, in their order.
        self._queue_of(replica).extendleft(reversed(groups))
        self.again += back
        # A closed epoch leases no more groups, so a returned group is skipped unless it was carried.
        if self.closed:
            self._queue_of(replica).extend(self._skip({replica: self._queue_of(replica)}))
        return len(back)

    # --- the early end -----------------------------------------------------------------------

    def _close_if_due(self) -> None:
        """Close the epoch after enough finished groups or shares; carried groups are still leased."""
        # With clocks all groups are trained; the warm start belongs to one replica.
        if self.closed or self._warming or self.clock_targets is not None or self._fraction >= 1:
            return
        if self._pooled:
            done = [POOL] if self.finished >= self._pool_limit else []
        else:
            done = self._done_if_enough()
        if done:
            self.closed = True
            # No image may be skipped twice in a row, so finished replicas train the carried groups.
            kept = self._skip(self.queues) + self._skip(self._later)
            for at, group in enumerate(sorted(kept)):
                self.queues.setdefault(done[at % len(done)], deque()).append(group)

    def _done_if_enough(self) -> list[Replica]:
        """Return the replicas that have finished their shares, if they are enough to close the epoch."""
        if all(self.queues.get(replica) for replica in self._given):
            return []  # the usual answer first, because every finished group calls this
        waiting = {r for queues in (self.queues, self._later) for r, queue in queues.items() if queue}
        # A member without any work, such as one that joined late, does not count.
        needed = _part(self._fraction, len(self._members & (waiting | self._given)))
        idle = sorted(self._members & self._given - waiting)
        if len(idle) < needed:
            return []
        # An empty queue is not a finished share: its last groups may still be in training.
        busy = {lease.replica for lease in self.leases.values()}
        done = [replica for replica in idle if replica not in busy]
        return done if len(done) >= needed else []

    def _skip(self, queues: dict[Replica, Queue]) -> list[tuple[int, int]]:
        """Empty some queues: skip their groups, except carried groups; return the carried groups."""
        kept = [group for queue in queues.values() for group in queue if group[0] < self._carried]
        for replica, queue in queues.items():
            self.skipped.update((number, replica) for number, _ in queue if number >= self._carried)
            queue.clear()
        return kept

    # --- membership --------------------------------------------------------------------------

    def replicas_changed(self, live: Collection[Replica]) -> int:
        """Remove the lost replicas, and add the new ones; return the number of returned leases."""
        lost = [replica for replica in self._live if replica not in live]
        joined = sorted(replica for replica in live if replica not in self._live)
        self._live = tuple(sorted(live))
        # All losses first: no group may move to a replica that is lost too.
        again = sum(self._lose(replica) for replica in lost)
        self._pass_on()
        for replica in joined:
            self._join(replica)
        self._close_if_due()
        return again

    def _lose(self, replica: Replica) -> int:
        again = self._return_leases(replica)
        # A lost replica does not count among those whose shares close the epoch.
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
        """Let a live replica take part in this epoch, if the rules permit it."""
        if replica in self._members or (self.clock_targets is not None and self._members):
            return
        self._members.add(replica)
        if self.clock_targets is None and not self._pooled:
            for queues in (self._later,) if self._warming else (self.queues, self._later):
                self._cut_a_part(queues, replica)

    def _cut_a_part(self, queues: dict[Replica, Queue], replica: Replica) -> None:
        """Give a joining replica an equal part of the waiting groups, from the ends of the longest queues."""
        own = queues.setdefault(replica, deque())
        others = [queue for name, queue in queues.items() if name in self._members and name != replica]
        # A replica that returns may find its own groups still waiting.
        if own or not others:
            return
        part = sum(map(len, others)) // (len(others) + 1)
        own.extend(sorted(max(others, key=len).pop() for _ in range(part)))

    def _pass_on(self) -> None:
        """Move the groups of replicas that are no members of the epoch to its members."""
        if not self._members:
            self._members = set(self._live)  # only replicas that joined late are left
        if not self._members:
            return
        first = min(self._members)
        for queues in (self.queues, self._later):
            # The warm start stays with one replica.
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
        # Whole rounds, first to the replica that finishes first, change the sync clock least.
        reach = self.clock_targets.reach
        takers = sorted(takers, key=lambda taker: (reach(taker, len(queues.get(taker, ()))), taker))
        for at, start in enumerate(range(0, len(groups), self._round_groups)):
            queue = queues.setdefault(takers[at % len(takers)], deque())
            queue.extend(groups[start : start + self._round_groups])

    # --- queries -----------------------------------------------------------------------------

    def upcoming(self, replica: Replica, count: int) -> list[int]:
        """Return the next group numbers of a replica."""
        # A pool has a queue of a single replica during the warm start only.
        whose = POOL if self._pooled and not self.queues.get(replica) else replica
        waiting = chain(self.queues.get(whose, ()), self._later.get(whose, ()))
        return [number for number, _ in islice(waiting, count)]

    def waiting(self) -> list[int]:
        """Return the numbers of all groups that wait."""
        queues = chain(self.queues.values(), self._later.values())
        return [number for queue in queues for number, _ in queue]


def _part(fraction: float, whole: int) -> int:
    """Return a fraction of a whole number, rounded up; the rounding error of the product has no effect."""
    return ceil(fraction * whole - 1e-9)
