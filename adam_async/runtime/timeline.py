"""Timelines: the events of a profile, noted during a run and written to a file afterwards.

Theory of operation
-------------------
The roles of a process share a `Timeline` and note events on their one event loop: a group is leased,
delivered, trained, pushed, applied, reported; a message is sent or received. A note builds and appends one
small record in under a microsecond. Nothing is formatted, sent or written during training. The records are
msgspec structures outside garbage collection, so many of them do not slow a collection down. A timeline takes
`limit_events` events; later events are counted and dropped.

`part` has this process's events, and `others` those of other processes. The clock is the system's monotonic
one, which all processes of a machine share. `trace_events.py` makes a file from the parts.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from adam_async.messages import Finished, GetProfile, Lease, Profile, Push, ReportSteps, pack, text_tensor
from adam_async.runtime.clock import Clock, fine_clock
from adam_async.runtime.trace_events import (
    Carried,
    Delivered,
    Event,
    Fired,
    Leased,
    Part,
    Phase,
    Reported,
    Settled,
    Stepped,
    trace_file,
)
from dataflow import Tag, TraceRecord
from transport import Request

LIMIT_EVENTS = 300_000
"""Default maximum number of events: those of about 40,000 groups in place, with 60 MB of memory and a file of
100 MB for Perfetto."""

EVENT_TEXT_BYTES = 160
"""Size in bytes that an answer reserves in advance for one event's text."""

MOST_ANSWERED = 100_000
"""Maximum number of events of one answer, for which it reserves 16 MB of text."""


class Timeline:
    """Notes the events of the roles of one event loop. Not for several threads.

    Args:
        process: Name of the process in the file.
        limit_events: Maximum number of events; `dropped` counts the rest.
        clock: Clock of all times; that of the compute pool.
    """

    def __init__(
        self, process: str = "adam-async", *, limit_events: int = LIMIT_EVENTS, clock: Clock = fine_clock
    ) -> None:
        if limit_events < 1:
            raise ValueError(f"limit_events must be at least 1, not {limit_events}")
        self.process = process
        self.clock = clock
        self.limit_events = limit_events
        self.dropped = 0
        self.others: list[Part] = []
        self._events: list[Event] = []

    def _add(self, event: Event) -> None:
        if len(self._events) < self.limit_events:
            self._events.append(event)
        else:
            self.dropped += 1

    # --- events of roles; each slice ends now -------------------------------------------------

    def leased(self, node: str, run: str, worker: str, leases: Sequence[Lease], started: float) -> None:
        """Note the answer of a data server to a request for groups."""
        groups = tuple([(lease.epoch, lease.number, lease.attempt) for lease in leases])
        self._add(Leased(node, run, worker, groups, started, self.clock()))

    def delivered(self, node: str, run: str, tag: Tag, started: float) -> None:
        """Note a group that a worker admitted and passed to its engine."""
        self._add(Delivered(node, run, tag.epoch, tag.number, tag.attempt, started, self.clock()))

    def fired(self, node: str, run: str, record: TraceRecord) -> None:
        """Note a node of a worker's graph that ran for a group."""
        name, (epoch, number, attempt), queued, started, finished, thread = record
        self._add(Fired(node, run, name, thread, epoch, number, attempt, queued, started, finished))

    def stepped(self, node: str, run: str, session: int, clock: int, leases: Sequence[Lease]) -> None:
        """Note the step of these groups, which a worker is about to push or record."""
        groups = tuple([(lease.epoch, lease.number, lease.attempt) for lease in leases])
        self._add(Stepped(node, run, session, clock, groups, self.clock()))

    def applied(self, node: str, pushes: Sequence[Push], values: int, started: float) -> None:
        """Note pushes that a server applied to `values` values, and acknowledged."""
        steps = tuple([(push.session, push.clock) for push in pushes])
        self._add(Settled(node, "apply", steps, values, started, self.clock()))

    def recorded(self, node: str, report: ReportSteps, started: float) -> None:
        """Note steps applied in place, which a server counted."""
        steps = tuple([(report.session, step.clock) for step in report.steps])
        self._add(Settled(node, "record", steps, 0, started, self.clock()))

    def reported(self, node: str, run: str, group: Finished, started: float) -> None:
        """Note a group that all servers have acknowledged, whose report is sent to the data server."""
        self._add(Reported(node, run, group.epoch, group.number, group.attempt, started, self.clock()))

    def carried(
        self, node: str, peer: str, sent: bool, kind: str, payload_bytes: int, frame_bytes: int
    ) -> None:
        """Note a message of type `kind` that a node sent to its peer, or received."""
        self._add(Carried(node, peer, sent, kind, payload_bytes + frame_bytes, self.clock()))

    def phase(self, node: str, name: str, started: float) -> None:
        """Note the end of long work outside any thread, such as an epoch."""
        self._add(Phase(node, name, False, started, self.clock()))

    def flushed(self, node: str, started: float) -> None:
        """Note that a worker without further groups sent its partial push."""
        self._add(Phase(node, "flush", True, started, self.clock()))

    # --- the file --------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether events were dropped, here or in another process."""
        return self.dropped > 0 or any(part.dropped for part in self.others)

    def part(self, start: int = 0, stop: int | None = None) -> Part:
        """Return the events of this process from number `start` to number `stop`, without the latter."""
        return Part(self.process, self.dropped, self._events[start:stop])

    @property
    def num_events(self) -> int:
        """Number of events of this process. (A property, not a length, so an empty timeline is true.)"""
        return len(self._events)

    def trace(self) -> bytes:
        """Return the events of all processes as a file in Trace Event JSON.

        The call takes about twenty microseconds per event, and may run in another thread after the last
        event.
        """
        return msgspec.json.encode(self.document())

    def document(self) -> dict[str, Any]:
        """Return the content of the file, before its encoding."""
        return trace_file([self.part(), *self.others])

    def __repr__(self) -> str:
        return f"<Timeline {self.process} {self.num_events} events, {self.dropped} dropped>"


def answer_profile(request: Request, asked: GetProfile, timeline: Timeline | None) -> None:
    """Answer a driver that collects the events of other processes."""
    if timeline is None:
        request.fail("no-profile", "this role was started without a profile")
        return
    noted = len(range(timeline.num_events)[asked.start : asked.stop])
    if noted > MOST_ANSWERED:
        request.fail("too-large", f"an answer has at most {MOST_ANSWERED} events: ask for fewer")
        return

    def profile() -> None:
        events = text_tensor(timeline.part(asked.start, asked.stop))
        request.reply(pack(Profile(total=timeline.num_events), [events]))

    request.charge(EVENT_TEXT_BYTES * noted, profile)
