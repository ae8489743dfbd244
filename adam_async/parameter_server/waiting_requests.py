"""Pure: requests that wait: pulls for a clock, readings for sums, pushes and ticks for an epoch."""

from collections.abc import Callable
from typing import Any

from adam_async.parameter_server.events import (
    Effect,
    PushArrived,
    QueuedPull,
    QueuedRead,
    Refuse,
    SendBehind,
    SendStates,
    SendValues,
    TickArrived,
)
from adam_async.parameter_server.shard import Session
from adam_async.parameter_server.shard_group import applied_clock
from adam_async.run.ids import Replica

MOST_WAITING = 4096
"""Maximum number of pushes and ticks that wait for an epoch; the server refuses more, and clients retry."""

EpochEvent = PushArrived | TickArrived


class WaitingRequests:
    """Waiting pulls and readings of one server. Deadlines are absolute seconds on the caller's clock."""

    def __init__(self) -> None:
        self._waiting: list[QueuedPull | QueuedRead] = []
        self.fresh = False
        """Whether a request has begun to wait since the shell last cleared this: there is a new deadline."""

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, queued: QueuedPull | QueuedRead) -> list[Effect]:
        """Answer a request if its values are ready; otherwise let it wait."""
        answer = _answer(queued)
        if answer is not None:
            return [answer]
        self._waiting.append(queued)
        self.fresh = True
        return []

    def answer(self) -> list[Effect]:
        """Answer the requests whose values are ready now."""
        answers: list[Effect] = []
        waiting: list[QueuedPull | QueuedRead] = []
        for queued in self._waiting:
            answer = _answer(queued)
            if answer is None:
                waiting.append(queued)
            else:
                answers.append(answer)
        self._waiting = waiting
        return answers

    def give_up(self, now: float) -> list[Effect]:
        """Answer the requests whose deadline has passed, without values."""
        late = [queued for queued in self._waiting if queued.deadline <= now]
        self._waiting = [queued for queued in self._waiting if queued.deadline > now]
        return [_late(queued) for queued in late]

    def drop(self) -> list[Any]:
        """Drop all requests and return them, unanswered."""
        requests = [queued.request for queued in self._waiting]
        self._waiting.clear()
        return requests

    def next_deadline(self) -> float | None:
        """The next deadline; None if no request waits."""
        return min((queued.deadline for queued in self._waiting), default=None)

    def waiting_for(self) -> tuple[Replica, ...]:
        """The replicas that a request waits for."""
        return tuple(sorted({replica for queued in self._waiting for replica in _behind(queued)}))


class EpochGate:
    """Pushes and ticks that wait for the begin of their epoch, in the order of their arrival."""

    def __init__(self) -> None:
        self._events: list[tuple[Session, EpochEvent]] = []
        self._sessions: set[Session] = set()

    def __contains__(self, session: Session) -> bool:
        """Whether an event of a session waits: later ones of the session wait behind it."""
        return session in self._sessions

    @property
    def full(self) -> bool:
        """Whether no more events may wait."""
        return len(self._events) >= MOST_WAITING

    def add(self, session: Session, event: EpochEvent) -> None:
        """Let an event wait; there must be room."""
        self._events.append((session, event))
        self._sessions.add(session)

    def keep(self, is_open: Callable[[Any], bool]) -> None:
        """Drop the events whose request is not open: no budget pays for their memory any more."""
        self._events = [(session, event) for session, event in self._events if is_open(event.request)]
        self._sessions = {session for session, _ in self._events}

    def take(self) -> list[EpochEvent]:
        """Take all events out."""
        events = [event for _, event in self._events]
        self._events.clear()
        self._sessions.clear()
        return events

    def __repr__(self) -> str:
        return f"<EpochGate {len(self._events)} events of {len(self._sessions)} sessions>"


def _answer(queued: QueuedPull | QueuedRead) -> SendValues | SendStates | None:
    """The answer to a request, if its values are ready."""
    if isinstance(queued, QueuedRead):
        ready = all(shard.pending is None or shard.pending.settled for shard in queued.shards)
        return SendStates(queued.request, queued.shards) if ready else None
    if queued.clock and applied_clock(queued.shards) < queued.clock:
        return None
    return SendValues(queued.request, queued.shards)


def _late(queued: QueuedPull | QueuedRead) -> SendBehind | Refuse:
    behind = _behind(queued)
    if isinstance(queued, QueuedPull):
        clock = applied_clock(queued.shards)
        return SendBehind(queued.request, clock, behind)
    names = ", ".join(map(str, behind)) or "none of those known"
    text = f"contributions wait for those of all replicas; behind: {names}"
    return Refuse(queued.request, "not-settled", text)


def _behind(queued: QueuedPull | QueuedRead) -> tuple[Replica, ...]:
    """The replicas that a request waits for."""
    found: set[Replica] = set()
    for shard in queued.shards:
        if isinstance(queued, QueuedPull):
            clock = queued.clock
        else:
            clock = max(shard.pending.waiting, default=0) if shard.pending is not None else 0
        found.update(replica for replica, finished in shard.clocks.items() if finished < clock)
    return tuple(sorted(found))
