"""Pure: the events of a profile, and the Trace Event JSON that Perfetto and chrome://tracing open.

Lanes
-----
Each process has one lane per thread: its event loop, shared by its roles, and each compute thread. Work on a
thread is a complete event (``X``) with its node as category. Two further kinds of lane belong to no thread.
``links of NODE`` has an instant per message, sent or received. ``NODE`` has the phases that span many
iterations of the loop, such as an epoch. The time of a job in the queue of the compute threads is an
asynchronous event (``b``, ``e``) named ``waits for a thread``, because many jobs wait at once.

Arrows
------
A group's journey is one flow: leased, delivered, run by each node of the worker's graph, pushed with its
step, applied (or recorded) by each server, reported. A flow point belongs to the slice of its lane that
encloses its time. Each point is the beginning of a slice, except the push of a step, which lies within a
slice. Servers count steps, not groups: a step is (session, clock), and the worker noted its groups.

Times are seconds of one monotonic clock; the file counts microseconds from the first event.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

Group = tuple[int, int, int]
"""Epoch, number and attempt."""

LOOP = "event loop"
LOOPS, THREADS, PHASES, LINKS = range(4)
"""Kinds of lanes, in the order of the file."""

JOURNEY = "journey of a group"


class _Event(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all events. The garbage collector ignores events, because no event is part of a cycle."""


class _OfGroup(_Event, frozen=True):
    """Base of the events of one group as a whole."""

    node: str
    run: str
    epoch: int
    number: int
    attempt: int
    started: float
    finished: float


class Leased(_Event, frozen=True):
    """A data server's answer to a request for groups."""

    node: str
    run: str
    worker: str
    groups: tuple[Group, ...]
    started: float
    finished: float


class Delivered(_OfGroup, frozen=True):
    """A group given to a worker's engine."""


class Fired(_Event, frozen=True):
    """A node of a worker's graph, run for a group."""

    node: str
    run: str
    name: str
    thread: str
    epoch: int
    number: int
    attempt: int
    queued: float
    started: float
    finished: float


class Stepped(_Event, frozen=True):
    """A step that a worker is about to push or record."""

    node: str
    run: str
    session: int
    clock: int
    groups: tuple[Group, ...]
    at: float


class Settled(_Event, frozen=True):
    """Steps applied (``apply``) or counted (``record``) by a server."""

    node: str
    what: str
    steps: tuple[tuple[int, int], ...]
    """Session and clock of each step."""
    values: int
    """Number of values applied; 0 if compute threads applied them."""
    started: float
    finished: float


class Reported(_OfGroup, frozen=True):
    """A group that all servers have acknowledged."""


class Carried(_Event, frozen=True):
    """A message sent or received by a node."""

    node: str
    peer: str
    sent: bool
    kind: str
    size_bytes: int
    at: float


class Phase(_Event, frozen=True):
    """Work for no group in particular."""

    node: str
    name: str
    one_iteration: bool
    """Whether the work took one iteration of the loop; otherwise it spans many, in a separate lane."""
    started: float
    finished: float


Event = Leased | Delivered | Fired | Stepped | Settled | Reported | Carried | Phase


class Part(msgspec.Struct, frozen=True):
    """Events noted by one process."""

    process: str
    dropped: int
    """Number of events dropped because the timeline was full."""
    events: list[Event]


class _Point(NamedTuple):
    """Point of a group's journey on a lane."""

    at: float
    pid: int
    tid: int


_Journey = tuple[str, int, int, int]
"""Run, epoch, number, attempt."""


def trace_file(parts: Sequence[Part]) -> dict[str, Any]:
    """Return the content of the file, as builtins.

    Args:
        parts: Events of each process. Parts of the same name share a process.
    """
    writer = _Writer(min((_begin(event) for part in parts for event in part.events), default=0.0))
    for part in parts:
        for event in part.events:
            if type(event) is Stepped:
                writer.steps.setdefault((event.session, event.clock), []).extend(
                    (event.run, *group) for group in event.groups
                )
    for part in parts:
        writer.add(part)
    events = [*writer.events, *writer.flows()]
    # Of two slices that begin together, the longer one encloses the other and must come first.
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    counts = {"events": sum(len(part.events) for part in parts), "dropped": sum(p.dropped for p in parts)}
    return {
        "displayTimeUnit": "ms",
        "otherData": {"format": "adam-async profile 1", **counts},
        "traceEvents": [*writer.names(), *events],
    }


def _begin(event: Event) -> float:
    if isinstance(event, (Stepped, Carried)):
        return event.at
    return event.queued if isinstance(event, Fired) else event.started


class _Writer:
    """Lays events out on lanes, and collects the points of each group's journey.

    Args:
        zero: Time of the first event, in seconds; the file counts from it.
    """

    def __init__(self, zero: float) -> None:
        self._zero = zero
        self.steps: dict[tuple[int, int], list[_Journey]] = {}
        self.events: list[dict[str, Any]] = []
        self._pids: dict[str, int] = {}
        self._lanes: dict[tuple[int, str], tuple[int, int]] = {}
        """Number and kind of each lane, by process and name."""
        self._journeys: dict[_Journey, list[_Point]] = {}
        self._waits = 0

    def add(self, part: Part) -> None:
        """Lay out the events of one process, and mark the end of a full timeline."""
        pid = self._pids.setdefault(part.process, len(self._pids) + 1)
        for event in part.events:
            self._add_event(pid, event)
        if part.dropped and part.events:
            what = f"profile full: {len(part.events)} events, {part.dropped} more dropped"
            lane = self._lane(pid, LOOP, LOOPS)
            self._instant(pid, lane, what, "profile", _end(part.events[-1]), {}, scope="p")

    def _add_event(self, pid: int, event: Event) -> None:
        match event:
            case Fired():
                self._fired(pid, event)
            case Carried():
                name = f"{event.kind} {'to' if event.sent else 'from'} {event.peer}"
                lane = self._lane(pid, f"links of {event.node}", LINKS)
                self._instant(pid, lane, name, "link", event.at, {"bytes": event.size_bytes})
            case Phase() if not event.one_iteration:
                lane = self._lane(pid, event.node, PHASES)
                self._slice(pid, lane, event.name, event.node, event, {})
            case _:
                self._one_iteration(pid, self._lane(pid, LOOP, LOOPS), event)

    def _one_iteration(
        self, pid: int, loop: int, event: Delivered | Reported | Leased | Stepped | Settled | Phase
    ) -> None:
        """Lay out the work of one iteration of the loop."""
        match event:
            case Delivered() | Reported():
                name = "deliver" if type(event) is Delivered else "report"
                journey = (event.run, event.epoch, event.number, event.attempt)
                self._slice(pid, loop, name, event.node, event, _named(journey))
                self._visit(journey, event.started, pid, loop)
            case Leased():
                numbers = [number for _, number, _ in event.groups]
                args: dict[str, Any] = {"worker": event.worker, "groups": numbers}
                self._slice(pid, loop, f"lease {len(numbers)}", event.node, event, args)
                for group in event.groups:
                    self._visit((event.run, *group), event.started, pid, loop)
            case Stepped():
                for group in event.groups:
                    self._visit((event.run, *group), event.at, pid, loop)
            case Settled():
                args = {"steps": [clock for _, clock in event.steps], "values": event.values}
                self._slice(pid, loop, event.what, event.node, event, args)
                for step in event.steps:
                    for journey in self.steps.get(step, ()):
                        self._visit(journey, event.started, pid, loop)
            case Phase():
                self._slice(pid, loop, event.name, event.node, event, {})

    def _fired(self, pid: int, event: Fired) -> None:
        journey = (event.run, event.epoch, event.number, event.attempt)
        light = event.thread == "loop"
        lane = self._lane(pid, LOOP, LOOPS) if light else self._lane(pid, event.thread, THREADS)
        args = _named(journey)
        if not light:
            args["waited_us"] = round((event.started - event.queued) * 1e6, 3)
            self._wait(pid, lane, event)
        self._slice(pid, lane, event.name, event.node, event, args)
        self._visit(journey, event.started, pid, lane)

    def _wait(self, pid: int, lane: int, event: Fired) -> None:
        self._waits += 1
        wait = {"cat": "pool", "name": "waits for a thread", "id": self._waits, "pid": pid, "tid": lane}
        self.events.append({"ph": "b", "ts": self._us(event.queued), **wait})
        self.events.append({"ph": "e", "ts": self._us(event.started), **wait})

    def _visit(self, journey: _Journey, at: float, pid: int, tid: int) -> None:
        self._journeys.setdefault(journey, []).append(_Point(at, pid, tid))

    def _slice(
        self,
        pid: int,
        tid: int,
        name: str,
        category: str,
        span: Delivered | Fired | Leased | Settled | Reported | Phase,
        args: dict[str, Any],
    ) -> None:
        begin = self._us(span.started)
        self.events.append(
            {
                "ph": "X",
                "name": name,
                "cat": category,
                "ts": begin,
                "dur": round(self._us(span.finished) - begin, 3),
                "pid": pid,
                "tid": tid,
                "args": args,
            }
        )

    def _instant(
        self, pid: int, tid: int, name: str, category: str, at: float, args: dict[str, Any], scope: str = "t"
    ) -> None:
        place = {"ts": self._us(at), "pid": pid, "tid": tid, "s": scope}
        self.events.append({"ph": "i", "name": name, "cat": category, **place, "args": args})

    def flows(self) -> Iterator[dict[str, Any]]:
        """Yield the arrows of each group with at least two points."""
        for number, points in enumerate(self._journeys.values(), start=1):
            points.sort()
            last = len(points) - 1
            for place, point in enumerate(points if last else ()):
                flow = {"name": JOURNEY, "cat": "group", "id": number, "pid": point.pid, "tid": point.tid}
                # ``bp`` binds the end to its enclosing slice; other points are bound to theirs by default.
                end = {"ph": "f", "bp": "e"} if place == last else {"ph": "t" if place else "s"}
                yield {**end, "ts": self._us(point.at), **flow}

    def names(self) -> Iterator[dict[str, Any]]:
        """Yield the names of processes and lanes, and their order."""
        for process, pid in self._pids.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}
        order = sorted(self._lanes, key=lambda lane: (lane[0], self._lanes[lane][1], lane[1]))
        for place, (pid, name) in enumerate(order):
            row = {"ph": "M", "pid": pid, "tid": self._lanes[pid, name][0]}
            yield {**row, "name": "thread_name", "args": {"name": name}}
            yield {**row, "name": "thread_sort_index", "args": {"sort_index": place}}

    def _lane(self, pid: int, name: str, kind: int) -> int:
        # Number lanes across all processes, because some readers take a thread's number as unique.
        return self._lanes.setdefault((pid, name), (len(self._lanes) + 1, kind))[0]

    def _us(self, at: float) -> float:
        return round((at - self._zero) * 1e6, 3)


def _end(event: Event) -> float:
    return event.at if isinstance(event, (Stepped, Carried)) else event.finished


def _named(journey: _Journey) -> dict[str, Any]:
    _, epoch, number, attempt = journey
    return {"epoch": epoch, "group": number, "attempt": attempt}
