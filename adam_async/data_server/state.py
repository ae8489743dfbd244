"""Pure: who trains which image group: queues, leases, and when an epoch has ended.

Each replica has a queue of the groups of its share. A *lease* is one group handed to a replica; it
ends when the replica reports the group finished. What a replica holds comes back, at the front of a
queue and under the next attempt number, when

- the replica is lost: its leases and the rest of its queue go to its *successor*, the next live
  replica (without any, they wait for the next worker that takes its number);
- a worker asks under a new incarnation, or, after a broken link, names what it still holds: the
  answer that carried the missing groups was lost.

Incarnations have no order. The newest life of a replica's worker is the one that began to ask last; its
earlier lives, and replicas that the controllers do not count as live, get nothing.

A report for a group that is not leased under that attempt is late: the group was given to another
and will be trained again. It is counted, and changes nothing. Every group of an epoch is thus
finished exactly once, and the epoch ends when all of them are.

A question that finds no work is *parked* until there is some, the epoch changes, or its time is up.
Times are absolute seconds on the caller's clock.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, assert_never

from adam_async.ids import Replica
from adam_async.messages import Finished

Request = Any
"""The shell's handle on a question; passed back in the effect that answers it."""


# --- events ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EpochBegan:
    """The controllers shared out an epoch: ranges of group numbers per replica."""

    number: int
    groups: int
    shares: Mapping[Replica, tuple[int, int]]


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


Event = EpochBegan | ReplicasChanged | LeaseAsked | GroupsReported


# --- effects ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Grant:
    """Answer a question with these groups (number, attempt) of the epoch; possibly none."""

    request: Request
    epoch: int
    groups: tuple[tuple[int, int], ...]
    last: bool
    """Whether nothing more waits for this replica."""


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """Every group of the epoch is finished."""

    number: int
    images: int
    loss: float
    """Mean over images of the groups' losses as trained."""
    started: float
    """When the first group was leased."""
    ended: float
    """When the last report came in."""


Effect = Grant | EpochEnded


@dataclass(slots=True)
class _Lease:
    replica: Replica
    incarnation: int
    attempt: int


@dataclass(slots=True)
class _Epoch:
    number: int
    groups: int
    queues: dict[Replica, deque[tuple[int, int]]]
    leases: dict[int, _Lease] = field(default_factory=dict)
    finished: int = 0
    images: int = 0
    loss_sum: float = 0.0
    started: float = 0.0


class DataState:
    """Leases of the epoch in progress."""

    def __init__(self) -> None:
        self._epoch: _Epoch | None = None
        self._live: tuple[Replica, ...] = ()
        self._incarnations: dict[Replica, int] = {}
        self._outlived: set[tuple[Replica, int]] = set()
        self._parked: list[LeaseAsked] = []
        self.trained_again = 0
        self.late_reports = 0
        self.leased = 0

    def handle(self, event: Event, *, now: float) -> list[Effect]:
        """Take one event; return the answers that it makes possible."""
        match event:
            case EpochBegan():
                queues = {
                    replica: deque((number, 1) for number in range(start, stop))
                    for replica, (start, stop) in event.shares.items()
                }
                self._epoch = _Epoch(event.number, event.groups, queues)
                self._pass_on_the_lost()
                return self._answer_parked(now)
            case ReplicasChanged():
                lost = [replica for replica in self._live if replica not in event.live]
                self._live = event.live
                for replica in lost:
                    self._take_back(replica, None)
                self._pass_on_the_lost()
                return self._answer_parked(now)
            case LeaseAsked():
                return self._asked(event, now)
            case GroupsReported():
                return [e for r in event.finished for e in self._finish(event.replica, r, now)]
        assert_never(event)

    # --- leases ------------------------------------------------------------------------------

    def _asked(self, event: LeaseAsked, now: float) -> list[Effect]:
        effects: list[Effect] = []
        life = (event.replica, event.incarnation)
        # A new question replaces one that the same worker lost the link of.
        for parked in [p for p in self._parked if (p.replica, p.incarnation) == life]:
            self._parked.remove(parked)
            effects.append(Grant(parked.request, 0, (), last=False))
        self._parked.append(event)
        if life in self._outlived:
            return effects  # parked until its time is up, so that it does not ask again at once
        known = self._incarnations.get(event.replica)
        if known is not None and known != event.incarnation:
            self._outlived.add((event.replica, known))
            self._take_back(event.replica, None)
        elif event.holding is not None:
            self._take_back(event.replica, frozenset(event.holding))
        self._incarnations[event.replica] = event.incarnation
        return effects + self._answer_parked(now)

    def _finish(self, replica: Replica, report: Finished, now: float) -> list[Effect]:
        epoch = self._epoch
        lease = epoch.leases.get(report.number) if epoch is not None else None
        if (
            epoch is None
            or report.epoch != epoch.number
            or lease is None
            or lease.attempt != report.attempt
            or lease.replica != replica
        ):
            self.late_reports += 1
            return []
        del epoch.leases[report.number]
        epoch.finished += 1
        epoch.images += report.images
        epoch.loss_sum += report.loss * report.images
        if epoch.finished < epoch.groups:
            return []
        return [
            EpochEnded(
                epoch.number,
                epoch.images,
                epoch.loss_sum / max(epoch.images, 1),
                epoch.started,
                now,
            )
        ]

    def _take_back(self, replica: Replica, holding: frozenset[int] | None) -> None:
        """Return leases of `replica` to its queue, but for those it is `holding`."""
        epoch = self._epoch
        if epoch is None:
            return
        back = sorted(
            number
            for number, lease in epoch.leases.items()
            if lease.replica == replica and (holding is None or number not in holding)
        )
        queue = epoch.queues.setdefault(replica, deque())
        for number in reversed(back):
            lease = epoch.leases.pop(number)
            queue.appendleft((number, lease.attempt + 1))
            self.trained_again += 1

    def _pass_on_the_lost(self) -> None:
        """Give what waits for a lost replica to its successor, the next live one in ring order."""
        epoch = self._epoch
        if epoch is None or not self._live:
            return
        for replica in [r for r, queue in epoch.queues.items() if queue and r not in self._live]:
            successor = min(self._live, key=lambda live: (live <= replica, live))
            epoch.queues.setdefault(successor, deque()).extend(epoch.queues[replica])
            epoch.queues[replica].clear()

    def _answer_parked(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        waiting: list[LeaseAsked] = []
        for asked in self._parked:
            granted = self._lease(asked, now)
            if granted or asked.deadline <= now:
                effects.append(self._grant(asked, granted))
            else:
                waiting.append(asked)
        self._parked = waiting
        return effects

    def _grant(self, asked: LeaseAsked, granted: tuple[tuple[int, int], ...]) -> Grant:
        epoch = self._epoch
        if epoch is None:
            return Grant(asked.request, 0, granted, last=True)
        return Grant(asked.request, epoch.number, granted, last=not epoch.queues.get(asked.replica))

    def _lease(self, asked: LeaseAsked, now: float) -> tuple[tuple[int, int], ...]:
        epoch = self._epoch
        queue = epoch.queues.get(asked.replica) if epoch is not None else None
        outlived = (asked.replica, asked.incarnation) in self._outlived
        if epoch is None or not queue or outlived or asked.replica not in self._live:
            return ()
        epoch.started = epoch.started or now
        granted = tuple(queue.popleft() for _ in range(min(asked.count, len(queue))))
        for number, attempt in granted:
            epoch.leases[number] = _Lease(asked.replica, asked.incarnation, attempt)
        self.leased += len(granted)
        return granted

    # --- time --------------------------------------------------------------------------------

    def tick(self, *, now: float) -> list[Effect]:
        """Answer the parked questions whose time is up."""
        return self._answer_parked(now)

    def next_deadline(self) -> float | None:
        """When `tick` may next have news; None while nothing is parked."""
        return min((asked.deadline for asked in self._parked), default=None)

    def upcoming(self, replica: Replica, count: int) -> list[int]:
        """The next group numbers that `replica` would get, for read-ahead."""
        queue = self._epoch.queues.get(replica, ()) if self._epoch is not None else ()
        return [number for number, _ in islice(queue, count)]

    def trained_ranges(self) -> tuple[tuple[int, int], ...]:
        """Ranges of the epoch's groups that are finished: those that are neither queued nor leased."""
        epoch = self._epoch
        if epoch is None:
            return ()
        queued = [number for queue in epoch.queues.values() for number, _ in queue]
        left = sorted((*queued, *epoch.leases, epoch.groups))
        starts = [0, *(number + 1 for number in left)]
        return tuple((start, stop) for start, stop in zip(starts, left, strict=False) if start < stop)

    # --- invariants and statistics -----------------------------------------------------------

    def check_invariants(self) -> None:
        """Assert that every group of the epoch is queued, leased or finished, exactly once."""
        epoch = self._epoch
        if epoch is None:
            return
        queued = [number for queue in epoch.queues.values() for number, _ in queue]
        everywhere = queued + list(epoch.leases)
        assert len(everywhere) == len(set(everywhere)), "a group is in two places"
        assert len(everywhere) + epoch.finished == epoch.groups, (len(everywhere), epoch.finished)

    def statistics(self) -> dict[str, Any]:
        """Progress of the epoch, what was trained again, and, while none is leased, the groups trained."""
        epoch = self._epoch
        return {
            "epoch": epoch.number if epoch else 0,
            "groups": epoch.groups if epoch else 0,
            "finished": epoch.finished if epoch else 0,
            "trained_ranges": self.trained_ranges() if epoch and not epoch.leases else (),
            "images": epoch.images if epoch else 0,
            "loss": epoch.loss_sum / epoch.images if epoch and epoch.images else 0.0,
            "leased": self.leased,
            "trained_again": self.trained_again,
            "late_reports": self.late_reports,
        }
