"""What happened when: the raw events of a profile, noted as they happen, turned into a file afterwards.

Theory of operation
-------------------
A `Timeline` is handed to the roles of a process, which note events on their one event loop: a group is
leased, delivered, trained, pushed, applied, reported; a message leaves or comes. Noting builds one small
record and appends it, under a microsecond; nothing is formatted, sent or written while training goes on.
The records are msgspec structures outside the garbage collector's sight, so that many of them slow no
collection down. There is room for `limit_events` of them; what comes later is counted and dropped.

`part` is what one process noted, and `parts` also holds what others sent of theirs; the clock is the
system's monotonic one, which all processes of a machine share. `trace_events.py` makes a file of the parts.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from adam_async.messages import Finished, GetProfile, Lease, Profile, Push, Record, pack, text_tensor
from adam_async.runtime.disk import Clock, fine_clock
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
"""About 40,000 groups in place, 60 MB of memory, and a file of 100 MB, which Perfetto still takes."""

EVENT_TEXT_BYTES = 160
"""Bytes of text charged in advance for an event."""

MOST_ANSWERED = 100_000
"""Maximum number of events of one answer: some 20 MB of text."""


class Timeline:
    """Notes what the roles of one event loop do. Not for several threads.

    Args:
        process: What the process is called in the file.
        limit_events: Most events noted; the rest is counted in `dropped`.
        clock: What all times are read from; that of the compute pool.
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

    # --- what roles note; each slice ends now -------------------------------------------------

    def leased(self, node: str, run: str, worker: str, leases: Sequence[Lease], started: float) -> None:
        """A data server answered a question for groups."""
        groups = tuple([(lease.epoch, lease.number, lease.attempt) for lease in leases])
        self._add(Leased(node, run, worker, groups, started, self.clock()))

    def delivered(self, node: str, run: str, tag: Tag, started: float) -> None:
        """A worker admitted a group and gave it to its engine."""
        self._add(Delivered(node, run, tag.epoch, tag.number, tag.attempt, started, self.clock()))

    def fired(self, node: str, run: str, record: TraceRecord) -> None:
        """A node of a worker's graph ran for a group."""
        name, (epoch, number, attempt), queued, started, finished, thread = record
        self._add(Fired(node, run, name, thread, epoch, number, attempt, queued, started, finished))

    def stepped(self, node: str, run: str, session: int, clock: int, leases: Sequence[Lease]) -> None:
        """A worker is about to push, or record, the step of these groups."""
        groups = tuple([(lease.epoch, lease.number, lease.attempt) for lease in leases])
        self._add(Stepped(node, run, session, clock, groups, self.clock()))

    def applied(self, node: str, pushes: Sequence[Push], values: int, started: float) -> None:
        """A server applied pushes to as many values, and acknowledged them."""
        steps = tuple([(push.session, push.clock) for push in pushes])
        self._add(Settled(node, "apply", steps, values, started, self.clock()))

    def recorded(self, node: str, record: Record, started: float) -> None:
        """A server counted steps that were applied in place."""
        steps = tuple([(record.session, step.clock) for step in record.steps])
        self._add(Settled(node, "record", steps, 0, started, self.clock()))

    def reported(self, node: str, run: str, group: Finished, started: float) -> None:
        """All servers of a worker have acknowledged a group; its report goes to the data server."""
        self._add(Reported(node, run, group.epoch, group.number, group.attempt, started, self.clock()))

    def carried(
        self, node: str, peer: str, sent: bool, kind: str, payload_bytes: int, frame_bytes: int
    ) -> None:
        """A link of a node took a message of type `kind` to its peer, or brought one."""
        self._add(Carried(node, peer, sent, kind, payload_bytes + frame_bytes, self.clock()))

    def phase(self, node: str, name: str, started: float) -> None:
        """Something long ended that ran on no thread in particular, such as an epoch."""
        self._add(Phase(node, name, False, started, self.clock()))

    def flushed(self, node: str, started: float) -> None:
        """A worker, with no group left, sent what it was collecting."""
        self._add(Phase(node, "flush", True, started, self.clock()))

    # --- what becomes of it --------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether events were dropped, here or in another process."""
        return self.dropped > 0 or any(part.dropped for part in self.others)

    def part(self, start: int = 0, stop: int | None = None) -> Part:
        """What was noted here, from one event to another."""
        return Part(self.process, self.dropped, self._events[start:stop])

    @property
    def num_events(self) -> int:
        """Events noted here. (No length: a timeline without events is not nothing.)"""
        return len(self._events)

    def trace(self) -> bytes:
        """Everything, those of other processes included, as a file in Trace Event JSON.

        It takes some twenty microseconds per event, and may run in another thread once nothing is noted any
        more.
        """
        return msgspec.json.encode(self.document())

    def document(self) -> dict[str, Any]:
        """The same, before it is written as text."""
        return trace_file([self.part(), *self.others])

    def __repr__(self) -> str:
        return f"<Timeline {self.process} {self.num_events} events, {self.dropped} dropped>"


def answer_profile(request: Request, asked: GetProfile, timeline: Timeline | None) -> None:
    """Answer a driver that gathers what the roles of other processes noted."""
    if timeline is None:
        request.fail("no-profile", "this role was not told to note a profile when it was started")
        return
    noted = len(range(timeline.num_events)[asked.start : asked.stop])
    if noted > MOST_ANSWERED:
        request.fail("too-large", f"{MOST_ANSWERED} events are told at a time: ask for fewer")
        return

    def profile() -> None:
        events = text_tensor(timeline.part(asked.start, asked.stop))
        request.reply(pack(Profile(total=timeline.num_events), [events]))

    request.charge(EVENT_TEXT_BYTES * noted, profile)
