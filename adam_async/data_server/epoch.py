"""Pure: an epoch: the order of its images, cut into groups; replicas' queues, leases, skipped groups.

Theory of operation
-------------------
Each replica has a queue. During a warm start only one replica has groups; the others get groups when these
are finished. A run that stops *drains* its epoch: the dealer leases no more groups, except ragged ones and
those that bring all clocks to the same value.

A lost replica leaves unfinished groups. A lost replica's leases are *unsettled* until the dealer knows which
of their groups the shards have. Groups that every shard has are finished; the others wait again. A group that
only some shards have is *ragged*. A ragged group is trained again as a separate step, and never skipped; the
shards that have it refuse the step. While a lease is unsettled, the epoch neither closes nor ends.

If shares are ranges, the groups of a lost replica move to the *successor*, the next live replica. If shares
are rounds, all participants get these groups round by round, beginning with the replica that will finish
first. With ranges a joining replica gets an equal part of the waiting groups. With rounds a joining replica
takes part from the next epoch on, unless it is alone. Without a live replica, groups wait for the next one.

An epoch may end before all its groups are trained. An epoch *closes* when a fraction of the live replicas
with groups have finished their shares. A closed epoch leases only groups whose images the previous epoch
skipped, and only to replicas that have finished their shares. Leased groups are still trained and count. The
epoch is over when all leased groups are finished; it skips all other groups. If all replicas lease from one
pool, the epoch leases only this fraction of its groups, and closes when they are finished.

An epoch's order, cut into image groups, depends only on the seed, the epoch, and the images that the previous
epoch skipped. So every server, restart and replay makes the same order. The skipped images depend on the
previous epoch's order, and so on all earlier epochs; one bit per image represents them. Skipped images come
first, then all others, both in the order of a permutation that depends on seed and epoch only. Group `number`
holds the images at positions `number * images_per_group` onwards; the last group of an epoch may be short.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.replica_leases import ClockTargets
from adam_async.model.keyed_random import Dice
from adam_async.run.epoch_shares import POOL, Ranges, assign, assign_pool
from adam_async.run.ids import Replica

PURPOSE = "epoch-order"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochOrder:
    """One epoch's order of the training images."""

    epoch: int
    images_per_group: int
    indices: NDArray[np.int64]
    """Shape (images,): a permutation of the image numbers."""
    carried: int = 0
    """Number of images that come first because the previous epoch skipped them."""

    @property
    def carried_images(self) -> bytes:
        """The images that come first because the previous epoch skipped them.

        One bit per image of the order, by number, highest bit of each byte first; empty if all are 0.
        """
        return _bits(self.indices[: self.carried], len(self.indices))

    def images_in(self, ranges: Ranges) -> bytes:
        """Return the images in ranges of groups, in the form of `carried_images`."""
        size = self.images_per_group
        images = [self.indices[start * size : stop * size] for start, stop in ranges]
        return _bits(np.concatenate(images), len(self.indices)) if images else b""

    @property
    def num_groups(self) -> int:
        """Number of groups in the epoch."""
        return count_groups(len(self.indices), self.images_per_group)

    def group(self, number: int) -> NDArray[np.int64]:
        """Return the image numbers of group `number`; a view. Raises IndexError beyond the last group."""
        if not 0 <= number < self.num_groups:
            raise IndexError(f"epoch {self.epoch} has groups 0 to {self.num_groups - 1}, not {number}")
        start = number * self.images_per_group
        return self.indices[start : start + self.images_per_group]

    def __repr__(self) -> str:
        return f"<EpochOrder {self.epoch} {len(self.indices)} images {self.num_groups} groups>"


class EpochOrders:
    """The orders of a run's epochs, each of which may depend on the order before.

    Raises:
        ValueError: `num_images` or `images_per_group` is not positive.
    """

    def __init__(self, dice: Dice, *, num_images: int, images_per_group: int) -> None:
        if num_images < 1 or images_per_group < 1:
            raise ValueError(
                f"num_images and images_per_group must be positive, not {num_images} and {images_per_group}"
            )
        self._dice = dice
        self.num_images = num_images
        self._images_per_group = images_per_group
        self._last: EpochOrder | None = None

    @property
    def num_groups(self) -> int:
        return count_groups(self.num_images, self._images_per_group)

    def images_of(self, number: int) -> int:
        """Return the number of images in a group; 0 if no epoch has the group."""
        return max(min(self._images_per_group, self.num_images - number * self._images_per_group), 0)

    def order(
        self, epoch: int, skipped: Sequence[Ranges] = (), *, first: int = 1, carried: bytes = b""
    ) -> EpochOrder:
        """Shuffle the images of one epoch.

        Args:
            epoch: From 1.
            skipped: For each epoch from `first` to the last one before `epoch`: ranges of its untrained
                groups. All calls for a run must pass the same values.
            first: First epoch of `skipped`, at most `epoch`.
            carried: `EpochOrder.carried_images` of epoch `first`.
        """

        def of(number: int) -> Ranges:
            return skipped[number - first] if number - first < len(skipped) else ()

        begin, last = epoch, self._last
        while begin > first and of(begin - 1) and (last is None or last.epoch != begin):
            begin -= 1
        if last is not None and last.epoch == begin:
            order = last
        else:
            order = self._shuffle(begin, carried if begin == first else b"")
        for number in range(begin + 1, epoch + 1):
            order = self._shuffle(number, order.images_in(of(number - 1)))
        self._last = order
        return order

    def _shuffle(self, epoch: int, carried: bytes) -> EpochOrder:
        indices = self._dice.permutation(PURPOSE, keys=(epoch,), n=self.num_images)
        indices = np.ascontiguousarray(indices, dtype=np.int64)
        count = 0
        if carried:
            bits = np.unpackbits(np.frombuffer(carried, np.uint8), count=self.num_images)
            come_first = bits.astype(np.bool_)[indices]
            count = int(np.count_nonzero(come_first))
            indices = np.concatenate([indices[come_first], indices[~come_first]])
        return EpochOrder(
            epoch=epoch, images_per_group=self._images_per_group, indices=indices, carried=count
        )


def _bits(images: NDArray[np.int64], num_images: int) -> bytes:
    """Return one bit for each of `num_images` images, set for these images; empty if there are none."""
    if not len(images):
        return b""
    chosen = np.zeros(num_images, np.bool_)
    chosen[images] = True
    return np.packbits(chosen).tobytes()


def count_groups(num_images: int, images_per_group: int) -> int:
    """Return how many groups `num_images` images make, including a short last group."""
    return -(-num_images // images_per_group)


Queue = deque[tuple[int, int]]
"""Waiting groups: number, and attempt of the next lease."""


@dataclass(slots=True)
class GroupLease:
    """One leased group."""

    replica: Replica
    attempt: int
    losses: dict[int, float] = field(default_factory=dict)
    """Losses from the parts of the replica that have reported the group; their sum is the group's loss."""
    lost_at: int = 0
    """Version of the map that first lacks the replica generation of an unsettled lease."""


@dataclass(frozen=True, slots=True)
class EpochBegan:
    """The controllers assigned the shares of an epoch: see `cluster_map.EpochRecord`."""

    number: int
    groups: int
    shares: Mapping[Replica, tuple[int, int]]
    """Share of each replica: its range of groups, or its number among the replicas and their total."""
    round_groups: int = 0
    """Number of groups in a replica's round; 0: shares are ranges, and there are no clocks."""
    first_clock: int = 0
    """Clock of all replicas at the start, with rounds."""
    clock: int = 0
    """Highest clock of a push or tick that a bundle had ordered by then."""
    finished: Ranges = ()
    """Ranges of groups that were trained before this dealer began the epoch."""
    skipped: Ranges = ()
    """Ranges of groups that an earlier run has skipped in this epoch."""
    ragged: Collection[int] = ()
    """Groups that only some shards had by then."""
    loss_images: int = 0
    """Number of images whose losses the shards had by then."""
    loss_sum: float = 0.0
    """Sum of these losses."""
    train_s: float = 0.0
    """Training time of the epoch before this dealer began it, in seconds."""
    warm: int = 0
    """Number of first groups in the epoch that belong to the warm start."""
    carried: int = 0
    """Number of groups at the front; they have the images that the previous epoch skipped."""
    behind: Collection[Replica] = ()
    """Replicas in whose shares the epoch before has skipped images."""
    fraction: float = 1.0
    """Fraction of the replicas, or of the groups in a pool, after which no more groups are leased."""
    pooled: bool = False
    """Whether all replicas lease from one pool."""
    step: int = 1
    """Number of groups of a step."""
    images_per_group: int = 1
    num_images: int = 0
    """Number of images in the epoch; the last group may have fewer than others; 0: whole groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetsRead:
    """All bundles of the run's store have sent the groups that their shards have."""

    epoch: int
    version: int
    """Version of the map from which on bundles order only pushes of generations in the map."""
    every: Set[int]
    """Groups in every shard that takes gradients."""
    some: Set[int]
    """Groups that some of these shards have, and others lack."""
    clock: int = 0
    """Highest clock of a push or tick that a bundle has ordered."""
    images: int = 0
    """Number of images whose losses the shards have."""
    loss_sum: float = 0.0
    """Sum of the losses of these images."""


class Restored(NamedTuple):
    """The groups that a live replica's workers hold, in an epoch that another dealer began."""

    leases: Sequence[tuple[int, int]]
    """Number and attempt of their groups, some of which may be finished."""
    clock: int | None
    """Earliest clock at which the first of the `given` groups begins; None without a received group."""
    given: int
    """Number of groups that the workers have received since that clock."""


class Epoch:
    """Groups of one epoch.

    The epoch begins with the event `EpochBegan` and the live replicas; if another dealer began it, also with
    what these replicas hold.
    """

    def __init__(
        self, began: EpochBegan, live: Collection[Replica], restored: Mapping[Replica, Restored] | None = None
    ) -> None:
        self.number, self.groups = began.number, began.groups
        self._round_groups = began.round_groups
        self._carried, self._fraction, self._pooled = began.carried, began.fraction, began.pooled
        self._step = began.step
        done = (*began.finished, *began.skipped)
        if began.pooled:
            assigned = assign_pool(began.groups, warm=began.warm, finished=done)
        else:
            assigned = assign(
                began.shares,
                groups=began.groups,
                round_groups=began.round_groups,
                warm=began.warm,
                finished=done,
                carried=began.carried,
                behind=began.behind,
                follows=restored is not None,
            )
        restored = restored or {}
        self._images_per_group, self._images = began.images_per_group, began.num_images
        self._progress = assigned.progress
        self.draining = False
        """Whether the run stops when the leased groups are finished."""
        self.queues: dict[Replica, Queue] = {}
        self.leases = {
            number: GroupLease(replica, attempt)
            for replica, each in restored.items()
            for number, attempt in each.leases
            if number in assigned.progress
        }
        self.unsettled: dict[int, GroupLease] = {}
        """Leases of lost replicas, until the sets of the shards decide."""
        self.ragged = set(began.ragged).intersection(assigned.progress).difference(self.leases)
        """Unfinished groups that only some shards have."""
        self.closed = False
        self.skipped = {number: POOL for start, stop in began.skipped for number in range(start, stop)}
        """Skipped groups, and the replicas whose shares had them."""
        self.finished = began.groups - len(assigned.progress) - len(self.skipped)
        self._given = {lease.replica for lease in self.leases.values()}
        self._later = {  # after the warm start
            replica: self._new_queue(queue) for replica, queue in assigned.queues.items()
        }
        self._live = tuple(sorted(live))
        self._members = set(began.shares) & set(live)
        self._warming = bool(assigned.warm)
        self.clock_targets: ClockTargets | None = None
        if began.round_groups:
            clocks = [each.clock for each in restored.values() if each.clock is not None]
            # Replicas that hold groups stand at several clocks, and no other replica may skip one of these
            # clocks.
            start = min(clocks, default=max(began.first_clock, began.clock))
            self.clock_targets = ClockTargets(round_groups=began.round_groups, clock=start)
            for replica in self._live:
                _, clock, given = restored.get(replica, Restored((), None, 0))
                if not self._warming and replica == min(began.shares):
                    given = max(given - began.warm, 0)
                self.clock_targets.join(replica, clock, given)
            self.clock_targets.seen(began.clock)
        self._open(assigned.warm, began.shares)

    def _open(self, warm: Sequence[int], shares: Collection[Replica]) -> None:
        """Begin with the warm start, if any, and the live replicas."""
        if self._warming:
            # Without a live member the groups wait for the lowest replica: `_pass_on` moves them later.
            lowest = min(self._members or shares)
            self.queues[lowest] = self._new_queue(warm)
        else:
            self._open_shares()
        for replica in self._live:
            self._take_in(replica)
        self._pass_on()
        self._close_if_due()

    def _new_queue(self, numbers: Sequence[int]) -> Queue:
        # An attempt above the first makes a ragged group a separate step.
        left = [number for number in numbers if number not in self.leases]
        return deque((number, 2 if number in self.ragged else 1) for number in left)

    def images_of(self, number: int) -> int:
        size = self._images_per_group
        return min(size, self._images - number * size) if self._images else size

    def progress(self, number: int) -> float:
        """Return the progress of the run at a group, in epochs, for the replica whose share has the group."""
        # A part of a replica may receive a group after all shards have it, if it trains no arrays.
        return self.number - 1 + self._progress.get(number, number / self.groups)

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
        """Close the epoch, or end the warm start, if enough groups are finished."""
        # Closing may skip all waiting groups.
        self._close_if_due()
        busy = self.over or self.leases or self.unsettled or any(self.queues.values())
        if self._warming and not busy:
            self._end_warm_start()
            # The warm start alone may be the fraction of a pool.
            self._close_if_due()

    @property
    def drained(self) -> bool:
        """Whether the epoch drains and is not over, and no lease exists or may still begin."""
        if not self.draining or self.over or self.leases or self.unsettled or self.ragged:
            return False
        return not any(map(self.has_work, self._live))

    def drain(self) -> None:
        """Lease no more groups except ragged ones, whose gradients some shards have already. With clocks all
        replicas then train up to the same clock."""
        self.draining = True
        if self.clock_targets is not None:
            self.clock_targets.shorten()
        self._put_ragged_first()

    def _put_ragged_first(self) -> None:
        """Let an epoch that drains lease its ragged groups."""
        for replica, queue in self.queues.items():
            ragged = [group for group in queue if group[0] in self.ragged]
            if ragged:
                rest = [group for group in queue if group[0] not in self.ragged]
                queue.clear()
                queue.extend((*ragged, *rest))
                if self.clock_targets is not None and replica in self._live:
                    self.clock_targets.grow([(replica, _attempts(ragged))])

    def _end_warm_start(self) -> None:
        if self.clock_targets is not None:
            self.clock_targets.end_warm_start()
        self._open_shares()

    def _open_shares(self) -> None:
        self._warming = False
        for replica, later in self._later.items():
            self.queues.setdefault(replica, deque()).extend(later)
            later.clear()
        self._grow()

    def _grow(self) -> None:
        if self.clock_targets is not None and not self.draining:
            waiting = [(replica, _attempts(queue)) for replica, queue in self.queues.items()]
            self.clock_targets.grow([each for each in waiting if each[0] in self._live])

    # --- leases ------------------------------------------------------------------------------

    def lease(self, replica: Replica, count: int) -> tuple[tuple[int, int], ...]:
        """Lease the next groups, `count` at most, to a live replica."""
        granted: list[tuple[int, int]] = []
        # A pool counts the new leases against its limit, and clocks count too, so each group is checked.
        while len(granted) < count and self.has_work(replica) and replica in self._live:
            number, attempt = self._queue_of(replica).popleft()
            if self.clock_targets is not None:
                self.clock_targets.give(replica, attempt)
            self.leases[number] = GroupLease(replica, attempt)
            self._given.add(replica)
            granted.append((number, attempt))
        return tuple(granted)

    def _queue_of(self, replica: Replica) -> Queue:
        return self.queues.setdefault(POOL if self._pooled and not self._warming else replica, deque())

    @property
    def may_close_early(self) -> bool:
        """Whether the epoch may end before the replicas have finished their shares."""
        return not self._pooled and self.clock_targets is None and self._fraction < 1

    @property
    def most_piece(self) -> int | None:
        """Maximum number of groups in one answer from a pool; None without a pool.

        A quarter of an equal share of the remaining groups lets all replicas end at about the same time.
        """
        if not self._pooled or self._warming:
            return None
        taken = self.finished + len(self.leases) + len(self.unsettled)
        left = min(len(self.queues.get(POOL, ())), max(self._pool_limit - taken, 0))
        return max(left // (4 * max(len(self._live), 1)), self._step)

    @property
    def end(self) -> int:
        """Known sync clock; 0 without clocks."""
        return self.clock_targets.end if self.clock_targets is not None else 0

    def begins_at(self, replica: Replica) -> int:
        """Return `Groups.clock` of the groups that a live replica gets now."""
        return self.clock_targets.begin_of(replica) if self.clock_targets is not None else 0

    def has_work(self, replica: Replica) -> bool:
        """Return whether a group waits that the replica may lease."""
        queue = self._queue_of(replica)
        # The last groups of a closed epoch must be trained, so that it ends.
        if self.draining and not self.closed and not self._has_room(replica, queue):
            return False
        if not queue or self._warming or not self._pooled:
            return bool(queue)
        # Carried groups come first in a pool, and are always leased, so that no group is skipped twice.
        taken = self.finished + len(self.leases) + len(self.unsettled)
        return self._is_kept(queue[0][0]) or taken < self._pool_limit

    def _is_kept(self, number: int) -> bool:
        """Return whether a group is trained even if the epoch ends early."""
        return number < self._carried or number in self.ragged

    def _has_room(self, replica: Replica, queue: Queue) -> bool:
        """Return whether a replica may lease the next group of a queue in an epoch that drains."""
        if not queue:
            return False
        number, attempt = queue[0]
        if self.clock_targets is None:
            return number in self.ragged
        return self.clock_targets.has_room(replica, attempt)

    @property
    def _pool_limit(self) -> int:
        return _part(self._fraction, self.groups)

    def report_end(self, replica: Replica) -> int:
        """Report to a live replica that it has no more groups; return `Groups.end`."""
        return self.clock_targets.report_end(replica) if self.clock_targets is not None else 0

    def open_lease(self, number: int, replica: Replica, attempt: int) -> GroupLease | None:
        """Return the lease of a group to a replica in a given attempt; None without such a lease."""
        lease = self.leases.get(number)
        if lease is None or lease.attempt != attempt or lease.replica != replica:
            return None
        return lease

    def finish(self, number: int) -> None:
        """Count a leased group as finished."""
        del self.leases[number]
        self.ragged.discard(number)
        self.finished += 1

    def settle(self, sets: SetsRead) -> tuple[list[int], int]:
        """Settle the leases of replicas that the sets' map no longer names.

        Returns the groups that every shard has (they are finished), and the number of returned leases.
        """
        settled = [number for number, lease in self.unsettled.items() if lease.lost_at <= sets.version]
        done = [number for number in settled if number in sets.every]
        for number in done:
            del self.unsettled[number]
        self.finished += len(done)
        if self.clock_targets is not None:
            # In bsp the sums of ended generations need the other replicas up to these generations' highest
            # clock.
            self.clock_targets.seen(sets.clock)
        returned = sorted(set(settled).difference(done))
        self.ragged.difference_update(done)
        self.ragged.update(number for number in returned if number in sets.some)
        holders: dict[Replica, list[int]] = {}
        for number in returned:
            holders.setdefault(self.unsettled[number].replica, []).append(number)
        for replica, numbers in sorted(holders.items()):
            self._return_leases(replica, numbers)
        if settled:
            self._pass_on()
            self._close_if_due()
        return done, len(returned)

    def _return_leases(self, replica: Replica, numbers: list[int]) -> None:
        """Put groups of a lost replica back into its queue."""
        groups = [(number, self.unsettled.pop(number).attempt + 1) for number in numbers]
        # Returned groups are the oldest, so they go to the front, in order.
        self._queue_of(replica).extendleft(reversed(groups))
        # A closed epoch leases no more groups, so it skips a returned group unless it must be kept.
        if self.closed:
            self._queue_of(replica).extend(self._skip({replica: self._queue_of(replica)}))

    # --- the early end -----------------------------------------------------------------------

    def _close_if_due(self) -> None:
        """Close the epoch after enough finished groups or shares; carried groups are still leased."""
        # With clocks all groups are trained, and the warm start belongs to one replica.
        if self.closed or self._warming or self.clock_targets is not None or self._fraction >= 1:
            return
        if self.unsettled:
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
        """Return the replicas that have finished their shares, if enough have to close the epoch."""
        if all(self.queues.get(replica) for replica in self._given):
            return []  # the usual answer first, because every finished group calls this
        waiting = {r for queues in (self.queues, self._later) for r, queue in queues.items() if queue}
        # A member without any work, such as a late joiner, does not count.
        needed = _part(self._fraction, len(self._members & (waiting | self._given)))
        idle = sorted(self._members & self._given - waiting)
        if len(idle) < needed:
            return []
        # An empty queue is not a finished share: its last groups may still be in training.
        busy = {lease.replica for lease in self.leases.values()}
        done = [replica for replica in idle if replica not in busy]
        return done if len(done) >= needed else []

    def _skip(self, queues: dict[Replica, Queue]) -> list[tuple[int, int]]:
        """Empty some queues: skip their groups, but return those that must be kept."""
        kept = [group for queue in queues.values() for group in queue if self._is_kept(group[0])]
        for replica, queue in queues.items():
            self.skipped.update((number, replica) for number, _ in queue if not self._is_kept(number))
            queue.clear()
        return kept

    # --- membership --------------------------------------------------------------------------

    def replicas_changed(self, live: Collection[Replica], version: int) -> None:
        """Remove the lost replicas, and add the new ones, in a version of the map."""
        lost = [replica for replica in self._live if replica not in live]
        joined = sorted(replica for replica in live if replica not in self._live)
        self._live = tuple(sorted(live))
        # Handle all losses first: no group may move to a replica that is lost too.
        for replica in lost:
            self._lose(replica, version)
        self._pass_on()
        for replica in joined:
            self._join(replica)
        self._close_if_due()

    def _lose(self, replica: Replica, version: int) -> None:
        for number in [number for number, lease in self.leases.items() if lease.replica == replica]:
            lease = self.unsettled[number] = self.leases.pop(number)
            lease.lost_at = version
        # A lost replica does not count among those whose shares close the epoch.
        self._members.discard(replica)
        self._given.discard(replica)
        if self.clock_targets is not None:
            self.clock_targets.leave(replica)

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
        # Groups that may return are older than the replica's other groups, and move with them.
        staying = {POOL, *(lease.replica for lease in self.unsettled.values())}
        for queues in (self.queues, self._later):
            # The warm start stays with one replica.
            takers = [first] if self._warming and queues is self.queues else sorted(self._members)
            for replica in sorted(r for r, queue in queues.items() if queue and r not in {*staying, *takers}):
                self._deal(queues, takers, replica)
        self._grow()
        if self.draining:
            self._put_ragged_first()

    def _deal(self, queues: dict[Replica, Queue], takers: list[Replica], replica: Replica) -> None:
        groups = list(queues.pop(replica))
        if self.clock_targets is None:
            successor = min(takers, key=lambda taker: (taker <= replica, taker))
            queues.setdefault(successor, deque()).extend(groups)
            return
        # Whole rounds, first to the replica that finishes first, change the sync clock least.
        reach = self.clock_targets.reach
        takers = sorted(takers, key=lambda taker: (reach(taker, _attempts(queues.get(taker, ()))), taker))
        for at, start in enumerate(range(0, len(groups), self._round_groups)):
            queue = queues.setdefault(takers[at % len(takers)], deque())
            queue.extend(groups[start : start + self._round_groups])

    # --- queries -----------------------------------------------------------------------------

    def waiting(self) -> list[int]:
        """Return the numbers of all groups that wait."""
        queues = chain(self.queues.values(), self._later.values())
        return [number for queue in queues for number, _ in queue]


def _attempts(groups: Iterable[tuple[int, int]]) -> Iterator[int]:
    """Return the attempts of waiting groups."""
    return (attempt for _, attempt in groups)


def _part(fraction: float, whole: int) -> int:
    """Return a fraction of a whole number, rounded up, at least 1 of 1 or more.

    The rounding error of the product has no effect.
    """
    return max(ceil(fraction * whole - 1e-9), min(whole, 1))
