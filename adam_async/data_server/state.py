"""Pure: leases of image groups to replicas, questions that wait, and the end of an epoch.

The state belongs to the *dealer*, the data server that leases the groups of a run. It is in memory only. The
next dealer *follows*: it continues the epoch in progress from the leases that all workers send it, and from
the *sets* of groups that the shards have, which it reads afterwards. So each lease of the previous dealer is
known: a worker holds it, or all sets have the group, or the replica is lost and the sets are final for that
replica.

A *lease* is one group handed to a replica; it ends when all parts of the replica have reported the group
finished. A replica may be lost, or begin another *generation* because a worker is replaced. The old
generation's leases then wait unsettled until the dealer has read the sets (`SetsRead`). Groups that every
shard has are finished. The other groups return under the next attempt number; `epoch` decides which replica
gets them.

The groups of a replica generation are in its log (`replica_leases`). Each worker reads the log from its own
position. So all workers get the same groups, and a repeated question gets the same answer. When the first
worker reaches the end of the log, the state leases more groups.

A report is late if its group is not leased under that attempt, or if it comes from another generation; the
sets then decide about the group. The report is counted, and changes at most the known clocks. So no group of
an epoch is finished twice, and the epoch is over when all groups are finished or skipped (`epoch`). The
epoch's result then waits for the losses, which the shards count with their sets.

On each link a worker first sends the leases that it holds (`LeaseAsked.held`). A question without work is
*parked* until groups are available, the epoch changes, or its time is up. The state also parks a question of
a generation that has not begun or is over, and a first question until the epoch begins. The state answers at
once if a worker does not know yet that its replica has no more groups, or in `ssp` and `bsp` lacks the sync
clock. Times are absolute seconds on the caller's clock.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, starmap
from typing import assert_never

from adam_async.data_server.epoch import Epoch, EpochBegan, Restored, SetsRead
from adam_async.data_server.replica_leases import LeaseLimits, Logged, ReplicaLeases
from adam_async.messages import Finished, HeldLease
from adam_async.messages.group_sets import LossSum, LossSums
from adam_async.run.counts import DataCounts, EpochCounts
from adam_async.run.epoch_shares import POOL, most_clock
from adam_async.run.group_ranges import with_losses
from adam_async.run.ids import Replica

# --- events ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplicasChanged:
    """The controllers have decided which replicas are live, and in which generation."""

    replica_generations: Mapping[Replica, int]
    version: int = 0
    """Version of the map."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeaseAsked:
    """A worker asks for groups."""

    request: int
    """Number of the question; the effect that answers the question has the same number."""
    replica: Replica
    replica_generation: int
    partition: int
    epoch: int
    """Epoch of the last group that the worker received; 0 without one."""
    position: int
    """Number of groups of this epoch that the worker has received."""
    heard: int
    """Sync clock that the worker received at `position`; -1 without one."""
    count: int
    """Maximum number of groups; 0: the worker sends its leases."""
    wait_s: float
    """Maximum time for which the question is parked, in seconds."""
    held: Sequence[HeldLease] = ()
    """The newest of the received groups."""

    def position_in(self, epoch: int) -> int:
        """Return the worker's position in an epoch; 0 if its last group is of an earlier epoch."""
        return self.position if self.epoch == epoch else 0


@dataclass(frozen=True, slots=True)
class GroupsReported:
    """A worker finished its part of some groups."""

    replica: Replica
    replica_generation: int
    partition: int
    finished: Sequence[Finished]


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """The driver ends the run after the leased groups of this epoch, with a checkpoint."""

    epoch: int


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time passed: the deadline of a parked question may be over."""


Event = EpochBegan | ReplicasChanged | SetsRead | LeaseAsked | GroupsReported | DrainAsked | TimePassed


@dataclass(frozen=True, slots=True, eq=False)
class Parked:
    """A parked question."""

    asked: LeaseAsked
    deadline: float


# --- effects ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Grant:
    """Answer a question with groups (number, attempt) of the epoch, possibly none."""

    request: int
    epoch: int
    groups: tuple[tuple[int, int], ...]
    last: bool
    """Whether the replica has no more groups."""
    progress: tuple[float, ...] = ()
    """Progress of the run at each group, in epochs, for the replica whose share has the group."""
    clock: int = 0
    """Earliest clock at which the first of the groups begins."""
    end: int = 0
    """Sync clock, with `last`."""
    settled: int = 0
    """Number of groups in the epoch that all workers of the replica have received and finished; -1: see
    `Leases.settled`."""


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """Every group of the epoch is finished or skipped."""

    number: int
    counts: EpochCounts
    """Counts of the epoch, without the number of skipped images."""


Effect = Grant | EpochEnded


def joined(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Join numbers into ranges of consecutive ones, in ascending order."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return tuple(found)


def _worker(asked: LeaseAsked) -> tuple[Replica, int, int]:
    return asked.replica, asked.replica_generation, asked.partition


class DataState:
    """Leases of the epoch in progress.

    Args:
        follows: Whether another dealer has leased groups of the run.
    """

    def __init__(self, *, partitions: int = 1, follows: bool = False) -> None:
        self._partitions = partitions
        self._follows = follows
        self._epoch: Epoch | None = None
        self.outcome: EpochEnded | None = None
        """End of the newest epoch; None before it."""
        self._images = 0
        self._losses: LossSums = {}
        """By epoch, the losses of reported groups and of earlier groups."""
        self._started: float | None = None
        self._before_s = self._train_s = 0.0
        self._clock = 0
        self._most_clock = 0
        """Largest clock accepted from a replica, in steps, if replicas synchronise their clocks."""
        self._logs: dict[Replica, ReplicaLeases] = {}
        self._limits = LeaseLimits()
        self._parked: list[Parked] = []
        self.returned = 0
        self.late_reports = 0
        self.leased = 0

    def handle(self, event: Event, *, now: float) -> list[Effect]:
        """Apply one event; return its effects."""
        match event:
            case EpochBegan():
                return self._begin(event, now)
            case ReplicasChanged():
                self._replicas_changed(event)
            case SetsRead():
                return self._settle(event, now) + self._answer_parked(now)
            case LeaseAsked():
                return self._asked(event, now) + self._answer_parked(now)
            case GroupsReported():
                return self._reported(event, now)
            case DrainAsked():
                if self._epoch is not None and self._epoch.number == event.epoch:
                    self._epoch.drain()
            case TimePassed():
                pass
            case _:
                assert_never(event)
        return self._answer_parked(now)

    def _replicas_changed(self, event: ReplicasChanged) -> None:
        # A replica in another generation leaves and joins again: its leases must return first.
        wanted = event.replica_generations
        staying = {r: log for r, log in self._logs.items() if wanted.get(r) == log.replica_generation}
        joining = {r: ReplicaLeases(wanted[r], self._partitions) for r in wanted if r not in staying}
        for logs in (staying, {**staying, **joining}):
            self._logs = logs
            if self._epoch is not None:
                self._epoch.replicas_changed(logs, event.version)
            self._limits.keep(logs)

    def _settle(self, event: SetsRead, now: float) -> list[Effect]:
        epoch = self._epoch
        if epoch is None or epoch.number != event.epoch:
            return []
        if self.awaits_losses:
            return self._end(epoch, event)
        done, returned = epoch.settle(event)
        self.returned += returned
        self._images += sum(map(epoch.images_of, done))
        if done:
            self._note_time(now)
        self._clock = max(self._clock, event.clock)
        epoch.advance()
        return []

    def _begin(self, event: EpochBegan, now: float) -> list[Effect]:
        # The epoch counts on from the part that an earlier run, or another dealer, has trained.
        self._losses = with_losses({}, event.number, event.loss_images, event.loss_sum)
        self._started = None
        self._before_s = self._train_s = event.train_s
        # Clocks never fall, whatever the controllers report.
        self._clock = max(self._clock, event.first_clock, event.clock)
        self._most_clock = most_clock(stands_at=self._clock, epochs=1, groups=event.groups)
        # All leased groups of the last epoch are finished, so no worker asks for them again.
        self._limits = LeaseLimits(event.step)
        restored = self._restored(event) if self.needs_held else None
        for log in self._logs.values() if restored is None else ():
            log.begin_epoch()
        self._epoch = epoch = Epoch(event, self._logs, restored)
        for replica in {lease.replica for lease in epoch.leases.values()}:
            held = [lease for lease in epoch.leases.values() if lease.replica == replica]
            self._limits.leased(replica, len(held), now)
            self._started = now
        self._images = sum(map(epoch.images_of, chain.from_iterable(starmap(range, event.finished))))
        self.outcome = None
        return self._answer_parked(now)

    # --- the dealer before -------------------------------------------------------------------

    @property
    def needs_held(self) -> bool:
        """Whether the next epoch begins from leases of another dealer, which the workers may hold."""
        return self._follows and self._epoch is None

    @property
    def lacks_held(self) -> bool:
        """Whether the next epoch needs leases that a live replica's worker has not sent yet."""
        return self.needs_held and any(None in sent for sent in self._held().values())

    def _held(self) -> dict[Replica, list[LeaseAsked | None]]:
        """Return the first question of each worker of the live replicas; None: the worker has not asked."""
        sent = {_worker(parked.asked): parked.asked for parked in self._parked if not parked.asked.count}
        return {
            replica: [sent.get((replica, log.replica_generation, part)) for part in range(self._partitions)]
            for replica, log in self._logs.items()
        }

    def _restored(self, event: EpochBegan) -> dict[Replica, Restored]:
        """Rebuild the logs of the live replicas from their workers' leases."""
        restored = {}
        for replica, sent in self._held().items():
            workers = [
                (each.position_in(event.number), each.heard, each.held if each.epoch == event.number else ())
                for each in sent
                if each is not None
            ]
            log = self._logs[replica]
            groups = log.restore(workers)
            marked = log.mark_at(log.stop)
            clock = marked if marked >= 0 else groups[-1].clock if groups else None
            leases = [(group.number, group.attempt) for group in groups if group.number < event.groups]
            restored[replica] = Restored(leases, clock, 0 if marked >= 0 else log.stop)
        return restored

    # --- leases ------------------------------------------------------------------------------

    def _asked(self, event: LeaseAsked, now: float) -> list[Effect]:
        # No replica has this part, so the question would wait for ever.
        if event.partition >= self._partitions:
            return [Grant(event.request, 0, (), last=False)]
        # A worker that lost its link asks again; its new question replaces the parked one.
        void = [parked for parked in self._parked if _worker(parked.asked) == _worker(event)]
        self._parked = [parked for parked in self._parked if parked not in void]
        self._parked.append(Parked(event, now + event.wait_s))
        log = self._logs.get(event.replica)
        # A worker that claims unleased groups waits for them, and confirms no group.
        if (
            log is not None
            and self._epoch is not None
            and log.replica_generation == event.replica_generation
            and (position := event.position_in(self._epoch.number)) <= log.stop
        ):
            log.confirm(event.partition, position)
            log.settle(self._epoch.leases)
        # The void questions are answered too, because the server keeps them open.
        return [Grant(parked.asked.request, 0, (), last=False) for parked in void]

    def _reported(self, event: GroupsReported, now: float) -> list[Effect]:
        log = self._logs.get(event.replica)
        if (
            log is None
            or log.replica_generation != event.replica_generation
            or event.partition >= self._partitions
        ):
            # The sets of the shards decide about the leases of a lost generation.
            self.late_reports += len(event.finished)
            return []
        effects = [e for r in event.finished for e in self._finish(event.replica, event.partition, r, now)]
        if self._epoch is not None:
            log.settle(self._epoch.leases)
        # A slow replica may get more groups after finishing some (`replica_leases`).
        if any(parked.asked.replica == event.replica for parked in self._parked):
            effects += self._answer_parked(now)
        return effects

    def _finish(self, replica: Replica, partition: int, report: Finished, now: float) -> list[Effect]:
        epoch = self._epoch
        if epoch is None or report.epoch != epoch.number:
            self.late_reports += 1
            return []
        # A clock that no replica can have reached would raise all clocks with it.
        if epoch.clock_targets is not None and report.clock > self._most_clock:
            self.late_reports += 1
            return []
        # A late report also proves that its replica has reached this clock.
        self._clock = max(self._clock, report.clock)
        if epoch.clock_targets is not None:
            epoch.clock_targets.seen(report.clock)
        lease = epoch.open_lease(report.number, replica, report.attempt)
        if lease is None or partition in lease.losses:
            self.late_reports += 1  # returned and leased again, or reported twice
            return []
        lease.losses[partition] = report.loss
        before = epoch.warming, epoch.closed
        # The parts of a replica report one by one; the last report finishes the group.
        if len(lease.losses) == self._partitions:
            epoch.finish(report.number)
            self._limits.finished(replica)
            self._note_time(now)
            self._images += report.images
            # Each part reports its share of the loss.
            loss = sum(lease.losses[part] for part in sorted(lease.losses))
            self._losses = with_losses(self._losses, epoch.number, report.images, loss * report.images)
            epoch.advance()
        # Without clocks a report frees no work, unless it ends the warm start, or closes or ends the epoch.
        if epoch.clock_targets is not None or (epoch.warming, epoch.closed) != before or epoch.over:
            return self._answer_parked(now)
        return []

    def _note_time(self, now: float) -> None:
        assert self._started is not None, "a finished group was leased"
        self._train_s = self._before_s + now - self._started

    @property
    def awaits_losses(self) -> bool:
        """Whether the epoch is over, and its result waits for the losses that the shards have."""
        return self._epoch is not None and self._epoch.over and self.outcome is None

    def _end(self, epoch: Epoch, sets: SetsRead) -> list[Effect]:
        """Return the result of an epoch that is over."""
        loss_images, loss_sum = sets.images, sets.loss_sum
        # The part with the loss may push no arrays: then only the reports have its losses, not the shards.
        # Otherwise the reports may have more: after another dealer, workers report again the groups that only
        # some shards had.
        if not loss_images:
            loss_images, loss_sum = self._loss.images, self._loss.total
        counts = EpochCounts(
            images=self._images,
            loss=loss_sum / max(loss_images, 1),
            loss_images=loss_images,
            train_s=self._train_s,
            clock=self._sync_clock(epoch),
            skipped_groups=joined(epoch.skipped),
            # The groups of a pool are in no share.
            behind=tuple(sorted(set(epoch.skipped.values()) - {POOL})),
        )
        self.outcome = EpochEnded(epoch.number, counts)
        return [self.outcome]

    @property
    def _loss(self) -> LossSum:
        """Losses of the epoch's reported groups, and of earlier groups."""
        return self._losses.get(self.epoch, LossSum())

    @property
    def lost_at(self) -> int:
        """Version of the map whose sets settle all leases; 0 if no lease is unsettled."""
        unsettled = self._epoch.unsettled.values() if self._epoch is not None else ()
        return max((lease.lost_at for lease in unsettled), default=0)

    @property
    def epoch(self) -> int:
        """Number of the newest epoch; 0 before the first."""
        return self._epoch.number if self._epoch is not None else 0

    @property
    def draining(self) -> bool:
        """Whether the run stops after the leased groups of the epoch."""
        return self._epoch is not None and self._epoch.draining

    @property
    def groups(self) -> int:
        """Number of groups in the newest epoch; 0 before any."""
        return self._epoch.groups if self._epoch is not None else 0

    @property
    def replica_generations(self) -> dict[Replica, int]:
        """Generations of the live replicas."""
        return {replica: log.replica_generation for replica, log in self._logs.items()}

    def _sync_clock(self, epoch: Epoch) -> int:
        return epoch.clock_targets.end if epoch.clock_targets is not None else self._clock

    def _answer_parked(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        waiting: list[Parked] = []
        for parked in self._parked:
            grant = self._grant(parked, now)
            if grant is not None:
                effects.append(grant)
            else:
                waiting.append(parked)
        self._parked = waiting
        return effects

    def _grant(self, parked: Parked, now: float) -> Grant | None:
        """Return the answer to a parked question; None if it must wait."""
        asked = parked.asked
        epoch, log = self._epoch, self._logs.get(asked.replica)
        late = parked.deadline <= now
        number = epoch.number if epoch is not None else 0
        if not asked.count:
            if self.needs_held:
                return Grant(asked.request, 0, (), last=False, settled=-1) if late else None
            return Grant(asked.request, number, (), last=False)
        position = asked.position_in(number)
        # The generation has not begun or is over, or the log does not reach the position.
        if (
            epoch is None
            or log is None
            or log.replica_generation != asked.replica_generation
            or not log.holds(position)
        ):
            return Grant(asked.request, number, (), last=True) if late else None
        # Answer a late question in any case, if necessary with a sync clock that the worker has already.
        heard = asked.heard if not late else -1
        if position == log.stop and not epoch.has_work(asked.replica):
            self._mark(epoch, asked.replica, log, heard)
        # The step before a mark may have fewer groups, so every worker of the replica must get the mark.
        mark = log.mark_at(position)
        if mark > heard:
            return Grant(asked.request, number, (), last=True, end=mark, settled=log.settled)
        # Another worker of the replica may have extended the log.
        groups = log.read(position, asked.count)
        stop = position + len(groups)
        # New leases only follow the log's end, so all workers of the replica get the same groups.
        if stop == log.stop and (not groups or log.mark_at(stop) < 0):
            count = min(asked.count - len(groups), log.room)
            groups += self._lease(epoch, asked.replica, log, count, now)
            stop = log.stop
        # The replica's limit is reached, or its worker has the sync clock: it waits for work.
        if not groups:
            return Grant(asked.request, number, (), last=False) if late else None
        # The last groups carry the mark, which saves the worker a question.
        if stop == log.stop and not epoch.has_work(asked.replica):
            self._mark(epoch, asked.replica, log, -1)
        end = log.mark_at(stop)
        leased = tuple((group.number, group.attempt) for group in groups)
        return Grant(
            asked.request,
            number,
            leased,
            last=end >= 0,
            progress=tuple(epoch.progress(group.number) for group in groups),
            clock=groups[0].clock,
            end=max(end, 0),
            settled=log.settled,
        )

    def _lease(
        self, epoch: Epoch, replica: Replica, log: ReplicaLeases, count: int, now: float
    ) -> list[Logged]:
        # An epoch that closes early waits for its leases, so a slow replica must not hold many.
        room = self._limits.room(replica, now) if epoch.may_close_early else epoch.most_piece
        fresh = epoch.lease(replica, count if room is None else min(count, room))
        if not fresh:
            return []
        self._limits.leased(replica, len(fresh), now)
        # The time of the epoch counts from its first lease.
        self._started = self._started if self._started is not None else now
        self.leased += len(fresh)
        stop = log.stop
        log.append(fresh, epoch.begins_at(replica))
        return log.read(stop, len(fresh))

    def _mark(self, epoch: Epoch, replica: Replica, log: ReplicaLeases, heard: int) -> None:
        """Mark the end of the log with the sync clock, unless the worker has received this clock."""
        if heard < epoch.end:
            log.mark(epoch.report_end(replica))

    def next_deadline(self) -> float | None:
        """Return when the next parked question expires; None without parked questions."""
        return min((parked.deadline for parked in self._parked), default=None)

    # --- invariants and statistics -----------------------------------------------------------

    def check_invariants(self) -> None:
        """Assert that every group of the epoch is queued, leased, unsettled, skipped or finished, exactly
        once."""
        epoch = self._epoch
        if epoch is None:
            return
        everywhere = [*epoch.waiting(), *epoch.leases, *epoch.unsettled, *epoch.skipped]
        assert len(everywhere) == len(set(everywhere)), "a group is in two places"
        assert len(everywhere) + epoch.finished == epoch.groups, (len(everywhere), epoch.finished)
        holders = {lease.replica for lease in epoch.leases.values()}
        assert holders <= set(self._logs), f"replicas {holders - set(self._logs)} are lost and hold leases"
        assert all(len(lease.losses) < self._partitions for lease in epoch.leases.values())

    def statistics(self) -> DataCounts:
        """Return the progress of the epoch, and leases since the start of the run."""
        epoch = self._epoch
        return DataCounts(
            epoch=self.epoch,
            groups=self.groups,
            finished=epoch.finished if epoch else 0,
            drained=epoch is not None and epoch.drained,
            clock=self._sync_clock(epoch) if epoch else 0,
            images=self._images,
            train_s=self._train_s,
            skipped_groups=joined(epoch.skipped) if epoch else (),
            loss=self._loss.total / max(self._loss.images, 1),
            loss_images=self._loss.images,
            leased=self.leased,
            returned=self.returned,
            late_reports=self.late_reports,
        )
