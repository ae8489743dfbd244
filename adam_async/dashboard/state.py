"""Pure: the state of the page of one run or cluster, computed from its events.

The memory is bounded: curves thin themselves (`Curve`), lists keep their newest entries, and the counts are
those of the roles in the newest status.
"""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from adam_async.run.cluster_status import ClusterStatus
from adam_async.run.counts import Counts, DataCounts, EpochCounts, ServerCounts, StoreCounts, WorkerCounts
from adam_async.run.events import (
    AnyEvent,
    Counted,
    Dropped,
    EpochEnds,
    Evaluated,
    IncidentBegins,
    IncidentEnds,
    Noted,
    Predicted,
    RunBegins,
    RunEnds,
    Sampled,
    StatusSeen,
    StoreCounted,
)
from adam_async.run.series import add_up

Point = tuple[float | None, ...]
"""Coordinates of a point; None for an unknown value."""

MOST_POINTS = 1000
"""Maximum number of points of a curve."""


class Curve:
    """Points in the order in which they came. At the limit, the curve keeps every second point from then on.

    The kept points are evenly spaced, so a long run looks like a short one.
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        self._kept: list[Point] = []
        self._every = 1
        self._seen = 0
        self._newest: Point | None = None

    def add(self, *point: float | None) -> None:
        """Add a point."""
        if self._seen % self._every == 0:
            if len(self._kept) >= self._most - 1:  # room for the newest one
                self._kept = self._kept[::2]
                self._every *= 2
            if self._seen % self._every == 0:
                self._kept.append(point)
        self._seen += 1
        self._newest = point

    @property
    def points(self) -> list[Point]:
        """The kept points, and the newest point."""
        is_kept = self._newest is None or (self._seen - 1) % self._every == 0
        return [*self._kept] if is_kept or self._newest is None else [*self._kept, self._newest]


Part = Literal["now", "curves", "samples"]
"""Part of the page, which the browser gets as one JSON text."""

MOST_INCIDENTS = 200
"""Maximum number of shown incidents: those in progress, and the newest other ones."""

MOST_NOTES = 100
"""Maximum number of shown notes, the newest ones."""

MOST_LINKS = 400
"""Maximum number of shown links, those with the most bytes per second."""

RECENT_POINTS = 60
"""Maximum number of points in one worker's curve."""

SMOOTHED = 0.5
"""Share of the newest poll in a rate; the rate of a single poll jumps."""

RANGES = (0, 1, 2, 3, 4, 8, 16, 32, 64)
"""Upper bounds of the staleness ranges; the last range has none."""

SUMMED = ("shards", "bytes", "refused", "duplicates", "waiting")
"""Numbers of a store that are sums over its servers."""

_FOLDERS = re.compile(
    r"(?:(?<![\w:/.])|(?<=\\[nrt]))(?:file://)?(?:[A-Za-z]:|~|\.{1,2})?/(?:[^\s/'\"\\,;:]+/)+"
)

_Spent = tuple[float, float, float, float]
"""Seconds of computing, and of waits for servers, images and clocks."""


class _Role:
    """The counts of one role at the newest poll, and rates since the one before."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.sent: dict[str, int] = {}
        self.sent_per_s: dict[str, float] = {}
        self.groups_per_s = 0.0
        self.shares: _Spent = (0.0, 0.0, 0.0, 0.0)
        self.recent = Curve(RECENT_POINTS)

    def take(self, counts: Counts, at: float, images: int) -> None:
        """Take the counts of a poll. `images` is the number of images in a group."""
        before = self.counts
        sent: dict[str, int] = {}
        for row in counts.sent:
            sent[row.receiver] = sent.get(row.receiver, 0) + row.payload_bytes + row.frame_bytes
        span_s = counts.age_s - before.age_s
        if before.pid == counts.pid and span_s > 0 and before.age_s:
            for peer, size in sent.items():
                rate = max(size - self.sent.get(peer, 0), 0) / span_s
                self.sent_per_s[peer] = _smooth(self.sent_per_s.get(peer, rate), rate)
            if isinstance(counts, WorkerCounts) and isinstance(before, WorkerCounts):
                rate = max(counts.groups - before.groups, 0) / span_s
                self.groups_per_s = _smooth(self.groups_per_s or rate, rate)
                self.recent.add(at, round(self.groups_per_s * images, 1))
                spent = zip(counts.spent_s, before.spent_s, strict=True)
                compute, servers, data, clock = (
                    min(max(now - then, 0.0) / span_s, 1.0) for now, then in spent
                )
                self.shares = compute, servers, data, clock
        self.counts, self.sent = counts, sent


def _smooth(before: float, now: float) -> float:
    return before + SMOOTHED * (now - before)


class State:
    """The page of one run or cluster. `take` gets each event, in time order.

    Args:
        title: Title until a run begins.
    """

    def __init__(self, title: str = "") -> None:
        self._given = title
        self._begin(None)

    def _begin(self, run: RunBegins | None) -> None:
        """Forget everything, before a run."""
        self._run = run
        self._title = f"{run.model} on {run.data}" if run is not None else self._given
        self._ended = ""
        self._at = self._polled_at = 0.0
        self._status: ClusterStatus | None = None
        self._roles: dict[str, _Role] = {}
        self._stores: dict[tuple[str, str], StoreCounts] = {}
        self._epochs: dict[int, EpochCounts] = {}
        self._done: dict[int, tuple[int, float]] = {0: (0, 0.0)}
        """Images and seconds of training up to the end of each epoch."""
        self._position: tuple[int, float] = (0, 0.0)
        """Images and seconds of training so far."""
        self._is_sampled = False
        self._pushes = (0, 0.0)
        """Number of pushes at the newest poll, and their summed staleness."""
        self._loss, self._accuracy, self._rate, self._staleness = Curve(), Curve(), Curve(), Curve()
        self._open: dict[tuple[str, str], dict[str, Any]] = {}
        self._over: deque[dict[str, Any]] = deque(maxlen=MOST_INCIDENTS)
        self._notes: deque[tuple[float, str]] = deque(maxlen=MOST_NOTES)
        self._dropped = 0
        self._predicted: Predicted | None = None

    @property
    def run(self) -> str:
        """Id of the run; empty without one."""
        if self._run is not None:
            return self._run.run
        return self._status.run.id if self._status is not None and self._status.run is not None else ""

    def take(self, event: AnyEvent) -> None:
        """Take one event."""
        match event:
            case RunBegins():
                if self._run is None or self._run.run != event.run:
                    status, roles = self._status, self._roles
                    self._begin(event)
                    self._status, self._roles = status, roles  # the roles are there before the run
                self._ended = ""
            case RunEnds():
                self._ended = f"{event.outcome}: {event.reason}" if event.reason else event.outcome
            case EpochEnds():
                self._end_epoch(event.epoch, event.counts)
            case Evaluated():
                self._take_evaluation(event)
            case Sampled():
                self._is_sampled = True
                self._move(event.sample.images, event.sample.s, event.sample.loss)
            case StatusSeen():
                self._take_status(event)
            case Counted():
                self._take_counts(event.counts, event.at)
            case StoreCounted():
                self._stores[event.store, event.node] = event.counts
            case IncidentBegins() | IncidentEnds():
                self._take_incident(event)
            case Noted():
                self._notes.append((event.at, event.text))
            case Predicted():
                self._predicted = event
            case Dropped():
                self._dropped += event.events
            case _:
                pass  # clients and optimizers report to their own programs
        self._at = max(self._at, event.at)

    def _end_epoch(self, epoch: int, counts: EpochCounts) -> None:
        before = (self._run.images if self._run is not None else 0) * (epoch - 1)
        images, train_s = self._done.get(epoch - 1, (before, self._position[1]))
        self._done[epoch] = images + counts.images, train_s + counts.train_s
        self._done.pop(epoch - 2, None)
        self._move(*self._done[epoch], counts.loss)

    def _take_evaluation(self, event: Evaluated) -> None:
        found = event.evaluation
        images, train_s = self._done.get(found.epoch, self._position)
        self._accuracy.add(images, round(train_s, 3), found.test_accuracy, found.validation_accuracy)

    def _move(self, images: int, train_s: float, loss: float | None) -> None:
        self._position = images, train_s
        if loss is not None:
            self._loss.add(images, round(train_s, 3), loss)

    def _take_status(self, event: StatusSeen) -> None:
        status = self._status = event.status
        self._polled_at = event.at
        here = {role.node for role in status.roles}
        self._roles = {node: each for node, each in self._roles.items() if node in here}
        self._stores = {
            key: each
            for key, each in self._stores.items()
            if key[0] in status.store_copies and key[1] in here
        }
        if status.run is not None and status.run.epoch and not self._ended:
            images, train_s = self._position
            self._rate.add(images, round(train_s, 3), round(status.run.images_per_s, 1))
            found = add_up(each.staleness for each in self._servers())
            pushes, total = found.pushes - self._pushes[0], found.mean * found.pushes - self._pushes[1]
            if pushes > 0:
                self._staleness.add(images, round(train_s, 3), round(max(total / pushes, 0.0), 3))
            self._pushes = found.pushes, found.mean * found.pushes

    def _take_counts(self, counts: Counts, at: float) -> None:
        self._roles.setdefault(counts.node, _Role()).take(counts, at, self._images_of_group)
        dealt = isinstance(counts, DataCounts) and counts.term and not self._is_sampled
        if dealt and isinstance(counts, DataCounts) and counts.epoch - 1 in self._done:
            images, train_s = self._done[counts.epoch - 1]
            self._move(
                images + counts.images, train_s + counts.train_s, counts.loss if counts.loss_images else None
            )

    def _take_incident(self, event: IncidentBegins | IncidentEnds) -> None:
        key = event.incident, event.subject
        if isinstance(event, IncidentBegins):
            while len(self._open) >= MOST_INCIDENTS:
                self._over.append(self._open.pop(next(iter(self._open))))
            self._open[key] = {
                "kind": event.incident,
                "subject": event.subject,
                "text": event.text,
                "began": event.at,
                "lasted_s": None,
                "deadline_s": event.deadline_s,
                "cure": event.cure,
            }
        elif (incident := self._open.pop(key, None)) is not None:
            self._over.append(
                {**incident, "lasted_s": event.lasted_s, "text": incident["text"] or event.text}
            )
        if event.text:
            self._notes.append((event.at, event.text))

    # --- parts of the page -------------------------------------------------------------------

    def part(self, part: Part) -> bytes:
        """Return a part of the page as JSON."""
        if part == "samples":
            return msgspec.json.encode(self._predicted)  # numbers and pixels
        return shown(msgspec.json.encode(self._now() if part == "now" else self._curves()).decode()).encode()

    def _now(self) -> dict[str, Any]:
        """Return the present state; status and incidents have the names of their records."""
        status = self._status
        servers = self._servers()
        over = list(self._over)[max(len(self._over) + len(self._open) - MOST_INCIDENTS, 0) :]
        workers = [] if status is None else [role for role in status.roles if role.role == "worker"]
        return {
            "title": self._title,
            "ended": self._ended,
            "at": self._at,
            "polled_at": self._polled_at,
            "status": status,
            "links": self._links(),
            "workers": [self._worker(role.node, role.state, role.lag) for role in workers],
            "staleness": ranges_of(add_up(each.staleness for each in servers).histogram),
            "stores": self._store_parts(servers),
            "incidents": sorted((*over, *self._open.values()), key=lambda each: each["began"]),
            "notes": [*self._notes],
            "dropped": self._dropped,
            "samples_of": self._predicted.epoch if self._predicted is not None else 0,
        }

    def _curves(self) -> dict[str, Any]:
        """Return the curves; a point begins with the trained images and the seconds of training."""
        return {
            "title": self._title,
            "loss": self._loss.points,
            "accuracy": self._accuracy.points,
            "rate": self._rate.points,
            "staleness": self._staleness.points,
        }

    @property
    def _images_of_group(self) -> int:
        found = self._run.config.get("images_per_group", 1) if self._run is not None else 1
        return found if isinstance(found, int) else 1

    def _servers(self) -> list[ServerCounts]:
        return [each.counts for each in self._roles.values() if isinstance(each.counts, ServerCounts)]

    def _links(self) -> list[tuple[str, str, int, int]]:
        """Return sender, receiver, bytes, and bytes per second of the busiest links."""
        found = [
            (node, peer, size, round(role.sent_per_s.get(peer, 0.0)))
            for node, role in self._roles.items()
            for peer, size in role.sent.items()
            if peer in self._roles
        ]
        return sorted(found, key=lambda each: -each[3])[:MOST_LINKS]

    def _worker(self, node: str, state: str, lag: int | None) -> dict[str, Any]:
        """Return a worker's work: rates and shares of its time come from the last polls."""
        role = self._roles.get(node, _Role())
        replica = state.removeprefix("replica ").partition(" ")[0]
        staleness = add_up(
            each.clients[replica].staleness for each in self._servers() if replica in each.clients
        )
        compute, servers, images, clock = (round(share, 3) for share in role.shares)
        return {
            "node": node,
            "replica": replica,
            "images_per_s": round(role.groups_per_s * self._images_of_group, 1),
            "recent": role.recent.points,
            "compute": compute,
            "servers": servers,
            "images": images,
            "clock": clock,
            "lag": lag,
            "staleness": round(staleness.mean, 2) if staleness.pushes else None,
        }

    def _store_parts(self, servers: Sequence[ServerCounts]) -> list[dict[str, Any]]:
        found: dict[str, list[StoreCounts]] = {"": [each for each in servers if each.shards]}
        for (name, _), counts in sorted(self._stores.items()):
            found.setdefault(name, []).append(counts)
        return [_store(name, counts) for name, counts in found.items() if counts]


def _store(name: str, counts: Sequence[StoreCounts]) -> dict[str, Any]:
    """Return facts of a store over its servers. The name of the run's store is empty."""
    versions = [version for each in counts for version in each.versions.values()]
    clients = {client for each in counts for client in each.clients}
    return {
        "name": name,
        "servers": len(counts),
        **{field: sum(getattr(each, field) for each in counts) for field in SUMMED},
        "first_version": min(versions, default=0),
        "last_version": max(versions, default=0),
        "clients": [_client(name, counts) for name in sorted(clients, key=lambda name: (len(name), name))],
    }


def _client(name: str, counts: Sequence[StoreCounts]) -> dict[str, Any]:
    found = [each.clients[name] for each in counts if name in each.clients]
    staleness = add_up(each.staleness for each in found)
    clocks = [each.clock for each in found if each.clock is not None]
    return {
        "name": name,
        "clock": min(clocks, default=None),
        "pushes": staleness.pushes,
        "staleness": round(staleness.mean, 2),
    }


def shown(text: str) -> str:
    """Return a text in which each path has its last part alone."""
    return _FOLDERS.sub("…/", text)


def ranges_of(histogram: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the number of pushes in each staleness range."""
    found: dict[str, int] = {}
    for text, pushes in histogram.items():
        at = next((n for n, most in enumerate(RANGES) if int(text) <= most), len(RANGES))
        least = RANGES[at - 1] + 1 if at else 0
        name = f"{least}+" if at == len(RANGES) else f"{least}-{RANGES[at]}" if least < RANGES[at] else text
        found[name] = found.get(name, 0) + pushes
    return [*found.items()]
