"""Pure: who trains which image group: leases, questions that wait, and when an epoch has ended.

A *lease* is one group handed to a replica; it ends when the replica reports the group finished. What a
replica holds comes back under the next attempt number, when

- the replica is lost: `epoch` says who gets its groups;
- a worker asks under a new incarnation, or, after a broken link, names what it still holds: the
  answer that carried the missing groups was lost.

Incarnations have no order. The newest life of a replica's worker is the one that began to ask last; its
earlier lives, and replicas that the controllers do not count as live, get nothing.

A report for a group that is not leased under that attempt is late: the group was given to another
and will be trained again. It is counted, and changes nothing. Every group of an epoch is thus
finished exactly once, and the epoch ends when all of them are.

A question that finds no work is *parked* until there is some, the epoch changes, or its time is up; but with
`ssp` and `bsp` a replica for which nothing waits hears at once, and again when it changes, where all clocks
meet. Times are absolute seconds on the caller's clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, assert_never

from adam_async.data_server.epoch import Epoch
from adam_async.ids import Replica
from adam_async.messages import Finished
from adam_async.shares import Ranges

Request = Any
"""The shell's handle on a question; passed back in the effect that answers it."""


# --- events ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EpochBegan:
    """The controllers shared out an epoch: see `cluster_map.EpochRecord`."""

    number: int
    groups: int
    shares: Mapping[Replica, tuple[int, int]]
    turn: int = 0
    first_clock: int = 0
    finished: Ranges = ()
    """Ranges of groups that were trained before the run was resumed."""
    images: int = 0
    """Images in them."""
    loss: float = 0.0
    """Mean over those."""
    train_s: float = 0.0
    """Seconds that they took."""
    warm: int = 0
    """Groups of the warm start."""
    every: int = 0
    """Groups between two pauses; 0: none."""


@dataclass(frozen=True, slots=True)
class ReplicasChanged:
    """The controllers decided which replicas are live."""

    live: tuple[Replica, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LeaseAsked:
    """A worker wants groups."""

    request: Request
    replica: Replica
    incarnation: int
    count: int
    deadline: float
    holding: tuple[int, ...] | None = None
    """On a new link: the group numbers that the worker still holds."""


@dataclass(frozen=True, slots=True)
class GroupsReported:
    """A worker finished groups."""

    replica: Replica
    finished: tuple[Finished, ...]


@dataclass(frozen=True, slots=True)
class PauseEnded:
    """The driver has taken its checkpoint."""


Event = EpochBegan | ReplicasChanged | LeaseAsked | GroupsReported | PauseEnded


# --- effects ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Grant:
    """Answer a question with these groups (number, attempt) of the epoch; possibly none."""

    request: Request
    epoch: int
    groups: tuple[tuple[int, int], ...]
    last: bool
    """Whether nothing more waits for this replica."""
    clock: int = 0
    """Where the first of these groups begins, at the earliest."""
    end: int = 0
    """With `last`: the clock at which all meet."""


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """Every group of the epoch is finished."""

    number: int
    images: int
    loss: float
    """Mean over images of the groups' losses as trained."""
    train_s: float
    """Seconds from the first lease to the last report, those of the runs that this one continues included."""
    clock: int
    """Where all meet; without turns the highest clock of a replica."""


@dataclass(frozen=True, slots=True)
class Paused:
    """Nothing is leased, and nothing will be before `PauseEnded`."""

    number: int
    finished: int
    """Groups."""


Effect = Grant | EpochEnded | Paused


class DataState:
    """Leases of the epoch in progress."""

    def __init__(self) -> None:
        self._epoch: Epoch | None = None
        self._images = 0
        self._loss_sum = 0.0
        self._started: float | None = None
        self._before_s = self._train_s = 0.0
        self._clock = 0
        self._live: tuple[Replica, ...] = ()
        self._incarnations: dict[Replica, int] = {}
        self._outlived: set[tuple[Replica, int]] = set()
        self._unheard: set[Replica] = set()
        self._parked: list[LeaseAsked] = []
        self.trained_again = 0
        self.late_reports = 0
        self.leased = 0

    def handle(self, event: Event, *, now: float) -> list[Effect]:
        """Take one event; return the answers that it makes possible."""
        match event:
            case EpochBegan():
                return self._begin(event, now)
            case ReplicasChanged():
                return self._replicas_changed(event, now)
            case LeaseAsked():
                return self._asked(event, now)
            case GroupsReported():
                return [e for r in event.finished for e in self._finish(event.replica, r, now)]
            case PauseEnded():
                if self._epoch is not None:
                    self._epoch.resume()
            case _:
                assert_never(event)
        return self._answer_parked(now)

    def _replicas_changed(self, event: ReplicasChanged, now: float) -> list[Effect]:
        joined = set(event.live).difference(self._live)
        lost = set(self._live).difference(event.live)
        self._unheard = (self._unheard | joined) & set(event.live)
        self._live = event.live
        # Questions of the lost must not be answered with groups should their number be given again.
        void = [asked for asked in self._parked if asked.replica in lost]
        self._parked = [asked for asked in self._parked if asked.replica not in lost]
        if self._epoch is not None:
            self.trained_again += self._epoch.replicas_changed(event.live)
        return [Grant(asked.request, 0, (), last=False) for asked in void] + self._answer_parked(now)

    def _begin(self, event: EpochBegan, now: float) -> list[Effect]:
        self._images, self._loss_sum, self._started = event.images, event.loss * event.images, None
        self._before_s = self._train_s = event.train_s
        self._clock = max(self._clock, event.first_clock)
        self._epoch = Epoch(
            number=event.number,
            groups=event.groups,
            shares=event.shares,
            turn=event.turn,
            first_clock=event.first_clock,
            finished=event.finished,
            warm=event.warm,
            every=event.every,
            live=self._live,
        )
        return self._ended(self._epoch) if self._epoch.over else self._answer_parked(now)

    # --- leases ------------------------------------------------------------------------------

    def _asked(self, event: LeaseAsked, now: float) -> list[Effect]:
        effects: list[Effect] = []
        epoch = self._epoch
        life = (event.replica, event.incarnation)
        # A new question replaces one that the same worker lost the link of.
        for parked in [p for p in self._parked if (p.replica, p.incarnation) == life]:
            self._parked.remove(parked)
            effects.append(Grant(parked.request, 0, (), last=False))
        self._parked.append(event)
        if life in self._outlived:
            return effects  # parked until its time is up, so that it does not ask again at once
        known = self._incarnations.get(event.replica)
        self._incarnations[event.replica] = event.incarnation
        begun = (
            event.replica in self._unheard
        )  # with the controllers' word, to which this is the first question
        self._unheard.discard(event.replica)
        if known is not None and known != event.incarnation:
            self._outlived.add((event.replica, known))
            if epoch is not None and event.replica in self._live and not begun:
                self.trained_again += epoch.begin_life(event.replica)
        elif event.holding is not None and epoch is not None:
            self.trained_again += epoch.take_back(event.replica, event.holding)
        return effects + self._answer_parked(now)

    def _finish(self, replica: Replica, report: Finished, now: float) -> list[Effect]:
        epoch = self._epoch
        if epoch is None or report.epoch != epoch.number:
            self.late_reports += 1
            return []
        self._clock = max(self._clock, report.clock)
        if epoch.meeting is not None:
            epoch.meeting.seen(report.clock)
        if not epoch.finish(report.number, replica, report.attempt):
            self.late_reports += 1
            return []
        assert self._started is not None, "what is reported was leased"
        self._train_s = self._before_s + now - self._started
        self._images += report.images
        self._loss_sum += report.loss * report.images
        if epoch.over:
            return self._ended(epoch)
        stretch = epoch.stretch
        effects: list[Effect] = [Paused(epoch.number, epoch.finished)] if epoch.advance() else []
        if epoch.meeting is not None or epoch.stretch != stretch:
            effects += self._answer_parked(now)
        return effects

    def _ended(self, epoch: Epoch) -> list[Effect]:
        loss = self._loss_sum / max(self._images, 1)
        return [EpochEnded(epoch.number, self._images, loss, self._train_s, self._meet(epoch))]

    def _meet(self, epoch: Epoch) -> int:
        return epoch.meeting.end if epoch.meeting is not None else self._clock

    def _answer_parked(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        waiting: list[LeaseAsked] = []
        for asked in self._parked:
            granted = self._lease(asked, now)
            if granted or asked.deadline <= now or self._must_hear(asked):
                effects.append(self._grant(asked, granted))
            else:
                waiting.append(asked)
        self._parked = waiting
        return effects

    def _counts(self, asked: LeaseAsked) -> bool:
        """Whether the question is of the newest life of a live replica."""
        return asked.replica in self._live and (asked.replica, asked.incarnation) not in self._outlived

    def _must_hear(self, asked: LeaseAsked) -> bool:
        return self._epoch is not None and self._epoch.must_hear(asked.replica) and self._counts(asked)

    def _grant(self, asked: LeaseAsked, granted: tuple[tuple[int, int], ...]) -> Grant:
        epoch = self._epoch
        if epoch is None or not self._counts(asked):
            return Grant(asked.request, epoch.number if epoch is not None else 0, granted, last=True)
        numbers = [number for number, _ in granted]
        last, clock, end = epoch.answer(asked.replica, numbers)
        return Grant(asked.request, epoch.number, granted, last, clock, end)

    def _lease(self, asked: LeaseAsked, now: float) -> tuple[tuple[int, int], ...]:
        if self._epoch is None or not self._counts(asked):
            return ()
        granted = self._epoch.lease(asked.replica, asked.count)
        if granted:
            self._started = self._started if self._started is not None else now
            self.leased += len(granted)
        return granted

    def progress(self, number: int) -> float:
        """Epochs of the run that lie before a group of this epoch, for the replica of its share."""
        assert self._epoch is not None, "there is no epoch"
        return self._epoch.progress(number)

    # --- time --------------------------------------------------------------------------------

    def tick(self, *, now: float) -> list[Effect]:
        """Answer the parked questions whose time is up."""
        return self._answer_parked(now)

    def next_deadline(self) -> float | None:
        """When `tick` may next have news; None while nothing is parked."""
        return min((asked.deadline for asked in self._parked), default=None)

    def upcoming(self, replica: Replica, count: int) -> list[int]:
        """The next group numbers that `replica` would get, for read-ahead."""
        return self._epoch.upcoming(replica, count) if self._epoch is not None else []

    def trained_ranges(self) -> tuple[tuple[int, int], ...]:
        """Ranges of the epoch's groups that are finished: those that are neither queued nor leased."""
        epoch = self._epoch
        if epoch is None:
            return ()
        left = sorted((*epoch.waiting(), *epoch.leases, epoch.groups))
        starts = [0, *(number + 1 for number in left)]
        return tuple((start, stop) for start, stop in zip(starts, left, strict=False) if start < stop)

    # --- invariants and statistics -----------------------------------------------------------

    def check_invariants(self) -> None:
        """Assert that every group of the epoch is queued, leased or finished, exactly once."""
        epoch = self._epoch
        if epoch is None:
            return
        everywhere = epoch.waiting() + list(epoch.leases)
        assert len(everywhere) == len(set(everywhere)), "a group is in two places"
        assert len(everywhere) + epoch.finished == epoch.groups, (len(everywhere), epoch.finished)

    def statistics(self) -> dict[str, Any]:
        """Progress of the epoch, what was trained again, and which groups are done, while none is leased."""
        epoch = self._epoch
        return {
            "epoch": epoch.number if epoch else 0,
            "groups": epoch.groups if epoch else 0,
            "finished": epoch.finished if epoch else 0,
            "trained_ranges": self.trained_ranges() if epoch and not epoch.leases else (),
            "clock": self._meet(epoch) if epoch else 0,
            "images": self._images,
            "train_s": self._train_s,
            "loss": self._loss_sum / self._images if self._images else 0.0,
            "leased": self.leased,
            "trained_again": self.trained_again,
            "late_reports": self.late_reports,
        }
