"""Pure: leases of image groups to replicas, questions that wait, and the end of an epoch.

A *lease* is one group handed to a replica; it ends when all parts of the replica have reported the group
finished. When the replica is lost, or begins another *generation* because a worker is replaced, its leased
groups return under the next attempt number; `epoch` decides which replica gets them.

The groups of a replica generation are in its log (`replica_leases`). Each worker reads the log from its own
position: all workers get the same groups, and a repeated question gets the same answer. When the first worker
reaches the end of the log, the state leases more groups.

A report of a group that is not leased under that attempt, or of another generation, is late: another replica
may train the group. The report is counted, and changes at most the known clocks. So no group of an epoch is
finished twice, and the epoch ends when all of them are finished or skipped (`epoch`).

A question without work is *parked* until groups are available, the epoch changes, or its time is up; so is a
question of a generation that has not begun or is over. If a worker has not learnt yet that its replica has no
more groups, or with `ssp` and `bsp` has not got the sync clock, the state answers its question at once. Times
are absolute seconds on the caller's clock.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, assert_never

import msgspec

from adam_async.data_server.epoch import MOST_REPLICAS, Epoch, EpochBegan, ReplicaNumber
from adam_async.data_server.lease_limits import LeaseLimits
from adam_async.data_server.replica_leases import Logged, ReplicaLeases
from adam_async.data_server.statistics import DataStatistics
from adam_async.messages import Finished
from adam_async.messages.bounds import (
    MOST_IN_A_META,
    After,
    Clock,
    Count,
    DrawnId,
    Instant,
    NodeId,
    Partition,
    Seconds,
)
from adam_async.messages.bounds import Epoch as EpochNumber
from adam_async.run.epoch_shares import POOL, most_clock
from adam_async.run.ids import Replica

LATE_KEPT = 1 << 14
"""Number of the last finished groups whose clocks are kept, for a checkpoint at a clock."""

MOST_PARKED = 1 << 16
"""Maximum number of parked questions at the start of an epoch."""

Request = tuple[NodeId, Count] | None
"""Data server and number of a question; the effect that answers the question has both, too."""


# --- events ----------------------------------------------------------------------------------


class ReplicasChanged(msgspec.Struct, frozen=True, tag=True):
    """The controllers decided which replicas are live, and in which generation."""

    replica_generations: Annotated[dict[ReplicaNumber, DrawnId], msgspec.Meta(max_length=MOST_REPLICAS)]


class LeaseAsked(msgspec.Struct, frozen=True, tag=True, kw_only=True, eq=False):
    """A worker asks for groups."""

    request: Request
    replica: ReplicaNumber
    replica_generation: DrawnId
    partition: Partition
    position: Count
    """Number of groups that the worker has received."""
    heard: After
    """Sync clock that the worker has received at `position`; -1 if none."""
    count: Count
    wait_s: Seconds
    """Maximum time for which the question is parked, in seconds."""


class GroupsReported(msgspec.Struct, frozen=True, tag=True):
    """A worker finished its part of some groups."""

    replica: ReplicaNumber
    replica_generation: DrawnId
    partition: Partition
    finished: Annotated[tuple[Finished, ...], msgspec.Meta(max_length=MOST_IN_A_META)]
    request: Request = None


class DrainAsked(msgspec.Struct, frozen=True, tag=True):
    """The driver ends the run after the leased groups of this epoch, with a checkpoint."""

    epoch: EpochNumber


class TimePassed(msgspec.Struct, frozen=True, tag=True):
    """Time passed: the deadline of a parked question may be over."""


Event = EpochBegan | ReplicasChanged | LeaseAsked | GroupsReported | DrainAsked | TimePassed


class Parked(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """A parked question."""

    asked: LeaseAsked
    deadline: Instant


class OpenLog(msgspec.Struct, frozen=True, array_like=True):
    """The log of a replica generation, between two epochs."""

    replica: ReplicaNumber
    replica_generation: DrawnId
    stop: Count
    """Number of groups leased to the generation."""
    positions: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MOST_IN_A_META)]
    """Number of groups that each worker has received."""


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """A whole state before an epoch begins."""

    partitions: Partition = 1
    clock: Clock = 0
    logs: Annotated[tuple[OpenLog, ...], msgspec.Meta(max_length=MOST_REPLICAS)] = ()
    parked: Annotated[tuple[Parked, ...], msgspec.Meta(max_length=MOST_PARKED)] = ()
    trained_again: Count = 0
    late_reports: Count = 0
    leased: Count = 0


# --- effects ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Grant:
    """Answer a question with groups (number, attempt) of the epoch, possibly none."""

    request: Request
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


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """Every group of the epoch is finished or skipped."""

    number: int
    images: int
    loss: float
    """Mean loss over the images as trained."""
    train_s: float
    """Time from the first lease to the last report, in seconds, earlier parts of a resumed epoch included."""
    clock: int
    """Sync clock; without rounds the highest reported clock of a replica."""
    skipped: tuple[tuple[int, int], ...] = ()
    behind: tuple[Replica, ...] = ()
    """Replicas in whose shares the skipped groups were."""
    again: tuple[int, ...] = ()
    """Numbers of the groups whose leases were returned, once for each return, without skipped groups."""


Effect = Grant | EpochEnded


@dataclass(frozen=True, slots=True)
class Trained:
    """The finished groups of an epoch, for a checkpoint."""

    ranges: tuple[tuple[int, int], ...]
    images: int
    loss: float
    """Mean loss over the images."""


class _LateGroup(NamedTuple):
    """A finished group whose clock is kept; see `LATE_KEPT`."""

    clock: int
    number: int
    images: int
    loss_sum: float


def _ranges(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
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
    """Leases of the epoch in progress."""

    def __init__(self, *, partitions: int = 1) -> None:
        self._partitions = partitions
        self._epoch: Epoch | None = None
        self.carried_images = b""
        """`EpochOrder.carried_images` of the newest epoch."""
        self._outcome: EpochEnded | None = None
        self._images = 0
        self._loss_sum = 0.0
        self._started: float | None = None
        self._before_s = self._train_s = 0.0
        self._late: deque[_LateGroup] = deque()
        """Last finished groups of the epoch, if replicas synchronise their clocks."""
        self._dropped_clock = 0
        """Highest clock of the finished groups that `_late` has dropped."""
        self._clock = 0
        self._most_clock = 0
        """Largest clock accepted from a replica, in steps, if replicas synchronise their clocks."""
        self._logs: dict[Replica, ReplicaLeases] = {}
        self._limits = LeaseLimits()
        self._parked: list[Parked] = []
        self.trained_again = 0
        self.late_reports = 0
        self.leased = 0

    @classmethod
    def of(cls, opening: Opening) -> "DataState":
        """Make a state that continues the one with this `opening`, before an epoch begins."""
        state = cls(partitions=opening.partitions)
        state._clock = opening.clock
        state._logs = {
            log.replica: ReplicaLeases(
                log.replica_generation, opening.partitions, stop=log.stop, positions=log.positions
            )
            for log in opening.logs
        }
        state._parked = list(opening.parked)
        state.trained_again, state.late_reports = opening.trained_again, opening.late_reports
        state.leased = opening.leased
        return state

    def opening(self) -> Opening:
        """Return the state without the rest of its epoch, for an epoch that begins now."""
        return Opening(
            partitions=self._partitions,
            clock=self._clock,
            logs=tuple(
                OpenLog(r, log.replica_generation, log.stop, log.positions) for r, log in self._logs.items()
            ),
            parked=tuple(self._parked),
            trained_again=self.trained_again,
            late_reports=self.late_reports,
            leased=self.leased,
        )

    def handle(self, event: Event, *, now: float) -> list[Effect]:
        """Apply one event; return its effects."""
        match event:
            case EpochBegan():
                return self._begin(event, now)
            case ReplicasChanged():
                self._replicas_changed(event)
                # A loss may end a closed epoch: its returned groups are skipped.
                return self._ended_if_over() + self._answer_parked(now)
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
                self.trained_again += self._epoch.replicas_changed(logs)
            self._limits.keep(logs)

    def _begin(self, event: EpochBegan, now: float) -> list[Effect]:
        # A resumed epoch counts on from the part that an earlier run has trained.
        self._images, self._loss_sum, self._started = event.images, event.loss * event.images, None
        self._before_s = self._train_s = event.train_s
        self._late.clear()
        self._dropped_clock = 0
        # Clocks never fall, whatever the controllers report.
        self._clock = max(self._clock, event.first_clock)
        self._most_clock = most_clock(stands_at=self._clock, epochs=1, groups=event.groups)
        # All leased groups of the last epoch are finished, so no worker asks for them again.
        for log in self._logs.values():
            log.begin_epoch()
        self._limits = LeaseLimits(event.step)
        self.carried_images = event.carried_images
        self._epoch = Epoch(event, self._logs)
        # A resumed epoch may have no groups left.
        self._outcome = None
        return self._ended_if_over() + self._answer_parked(now)

    # --- leases ------------------------------------------------------------------------------

    def _asked(self, event: LeaseAsked, now: float) -> list[Effect]:
        # No replica has this part, so the question would wait for ever.
        if event.partition >= self._partitions:
            return [Grant(event.request, 0, (), last=False)]
        # A worker that lost its link asks again, and its new question replaces the parked one.
        void = [parked for parked in self._parked if _worker(parked.asked) == _worker(event)]
        self._parked = [parked for parked in self._parked if parked not in void]
        self._parked.append(Parked(event, now + event.wait_s))
        log = self._logs.get(event.replica)
        # A worker that claims unleased groups waits for them, and confirms none.
        if (
            log is not None
            and log.replica_generation == event.replica_generation
            and event.position <= log.stop
        ):
            log.confirm(event.partition, event.position)
        # The void questions are answered too, because their server keeps them open. A question that a
        # ledger replica enters twice, for a new leader, does not void itself.
        requests = [parked.asked.request for parked in void]
        return [Grant(request, 0, (), last=False) for request in requests if request != event.request]

    def _reported(self, event: GroupsReported, now: float) -> list[Effect]:
        log = self._logs.get(event.replica)
        if (
            log is None
            or log.replica_generation != event.replica_generation
            or event.partition >= self._partitions
        ):
            # The leases of a lost generation came back under the next attempt.
            self.late_reports += len(event.finished)
            return []
        effects = [e for r in event.finished for e in self._finish(event.replica, event.partition, r, now)]
        # A slow replica may get more groups after it has finished some (`lease_limits`).
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
        effects: list[Effect] = []
        before = epoch.warming, epoch.closed
        # The parts of a replica report one by one; the last report finishes the group.
        if len(lease.losses) == self._partitions:
            epoch.finish(report.number)
            self._limits.finished(replica)
            assert self._started is not None, "what is reported was leased"
            self._train_s = self._before_s + now - self._started
            self._images += report.images
            # Each part reports its share of the loss.
            loss_sum = sum(lease.losses.values()) * report.images
            self._loss_sum += loss_sum
            if epoch.clock_targets is not None:
                self._late.append(_LateGroup(report.clock, report.number, report.images, loss_sum))
                if len(self._late) > LATE_KEPT:
                    self._dropped_clock = max(self._dropped_clock, self._late.popleft().clock)
            epoch.advance()
            effects = self._ended_if_over()
        # Without clocks a report frees no work, unless it ends the warm start, or closes or ends the epoch.
        if epoch.clock_targets is not None or (epoch.warming, epoch.closed) != before or epoch.over:
            effects += self._answer_parked(now)
        return effects

    def _ended_if_over(self) -> list[Effect]:
        """Return the result of the epoch, once, after its end."""
        epoch = self._epoch
        if epoch is None or not epoch.over or self._outcome is not None:
            return []
        self._outcome = EpochEnded(
            number=epoch.number,
            images=self._images,
            loss=self._loss_sum / max(self._images, 1),
            train_s=self._train_s,
            clock=self._sync_clock(epoch),
            skipped=_ranges(epoch.skipped),
            # The groups of a pool are in no share.
            behind=tuple(sorted(set(epoch.skipped.values()) - {POOL})),
            # A skipped group is not trained again, however often its lease returned.
            again=tuple(number for number in epoch.again if number not in epoch.skipped),
        )
        return [self._outcome]

    def unreported(self) -> EpochEnded | None:
        """Return the end of the epoch, which the controllers may not have yet."""
        # A new leader cannot know the reports of the old one; a second report changes nothing.
        return self._outcome

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
        """Number of groups of the newest epoch; 0 before the first."""
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
        # The generation has not begun or is over, or the log does not have the position.
        if (
            epoch is None
            or log is None
            or log.replica_generation != asked.replica_generation
            or not log.holds(asked.position)
        ):
            return Grant(asked.request, number, (), last=True) if late else None
        # A late question is answered in any case, if necessary with a sync clock that the worker has.
        heard = asked.heard if not late else -1
        if asked.position == log.stop and not epoch.has_work(asked.replica):
            self._mark(epoch, asked.replica, log, heard)
        # The step before a mark may have fewer groups, so every worker of the replica must get the mark.
        mark = log.mark_at(asked.position)
        if mark > heard:
            return Grant(asked.request, number, (), last=True, end=mark)
        # Another worker of the replica may have extended the log.
        groups = log.read(asked.position, asked.count)
        stop = asked.position + len(groups)
        # New leases only follow the log's end, so all workers of the replica get the same groups.
        if stop == log.stop and (not groups or log.mark_at(stop) < 0):
            groups += self._lease(epoch, asked.replica, log, asked.count - len(groups), now)
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
        )

    def _lease(
        self, epoch: Epoch, replica: Replica, log: ReplicaLeases, count: int, now: float
    ) -> list[Logged]:
        # An epoch that closes early waits for its leases, so a slow replica must not hold many.
        room = self._limits.room(replica, now) if epoch.may_close_early else None
        fresh = epoch.lease(replica, count if room is None else min(count, room))
        if not fresh:
            return []
        self._limits.leased(replica, len(fresh), now)
        # The time of the epoch counts from its first lease.
        self._started = self._started if self._started is not None else now
        self.leased += len(fresh)
        stop = log.stop
        log.append(fresh, epoch.begins_at(replica, fresh))
        return log.read(stop, len(fresh))

    def _mark(self, epoch: Epoch, replica: Replica, log: ReplicaLeases, heard: int) -> None:
        """Mark the end of the log with the sync clock, unless the worker has received this clock."""
        if heard < epoch.end:
            log.mark(epoch.report_end(replica))

    def next_deadline(self) -> float | None:
        """Return the time at which the next parked question expires; None without parked questions."""
        return min((parked.deadline for parked in self._parked), default=None)

    def upcoming(self, replica: Replica, count: int) -> list[int]:
        """Return the next group numbers of a replica, for read-ahead."""
        return self._epoch.upcoming(replica, count) if self._epoch is not None else []

    def trained(self) -> Trained:
        """Return the finished groups of the epoch, which are neither queued nor leased nor skipped."""
        return self._trained_without(())

    def trained_at(self, clock: int) -> Trained | None:
        """Return the finished groups of the steps up to a clock, if replicas synchronise their clocks.

        Returns None without an epoch, while a group of such a step is leased, or if the server has already
        dropped the clocks of groups after this clock.
        """
        epoch = self._epoch
        if epoch is None or clock < self._dropped_clock:
            return None
        if any(lease.clock <= clock for lease in epoch.leases.values()):
            return None
        return self._trained_without([late for late in self._late if late.clock > clock])

    def _trained_without(self, later: Sequence[_LateGroup]) -> Trained:
        epoch = self._epoch
        if epoch is None:
            return Trained((), 0, 0.0)
        left = sorted(
            (*epoch.waiting(), *epoch.leases, *epoch.skipped, *(each.number for each in later), epoch.groups)
        )
        starts = [0, *(number + 1 for number in left)]
        images = self._images - sum(each.images for each in later)
        loss_sum = self._loss_sum - sum(each.loss_sum for each in later)
        return Trained(
            tuple((start, stop) for start, stop in zip(starts, left, strict=False) if start < stop),
            images,
            loss_sum / images if images else 0.0,
        )

    # --- invariants and statistics -----------------------------------------------------------

    def check_invariants(self) -> None:
        """Assert that every group of the epoch is queued, leased, skipped or finished, exactly once."""
        epoch = self._epoch
        if epoch is None:
            return
        everywhere = epoch.waiting() + list(epoch.leases) + list(epoch.skipped)
        assert len(everywhere) == len(set(everywhere)), "a group is in two places"
        assert len(everywhere) + epoch.finished == epoch.groups, (len(everywhere), epoch.finished)
        holders = {lease.replica for lease in epoch.leases.values()}
        assert holders <= set(self._logs), f"replicas {holders - set(self._logs)} are lost and hold leases"
        assert all(len(lease.losses) < self._partitions for lease in epoch.leases.values())

    def statistics(self) -> DataStatistics:
        """Return the progress of the epoch, and leases since the start of the run."""
        epoch = self._epoch
        return DataStatistics(
            epoch=self.epoch,
            groups=self.groups,
            finished=epoch.finished if epoch else 0,
            drained=epoch is not None and epoch.drained,
            clock=self._sync_clock(epoch) if epoch else 0,
            images=self._images,
            train_s=self._train_s,
            skipped_groups=_ranges(epoch.skipped) if epoch else (),
            loss=self._loss_sum / self._images if self._images else 0.0,
            leased=self.leased,
            trained_again=self.trained_again,
            late_reports=self.late_reports,
        )
