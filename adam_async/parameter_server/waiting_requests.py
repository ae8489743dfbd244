"""Pure: requests that wait: pulls and readings for a clock, pushes and ticks for an epoch."""

from collections import Counter
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any

from adam_async.messages import Values
from adam_async.parameter_server.events import (
    Answer,
    Effect,
    PushArrived,
    QueuedPull,
    Refuse,
    SendStates,
    SendValues,
    TickArrived,
)
from adam_async.parameter_server.shard import Session, Shard
from adam_async.parameter_server.shard_group import ShardGroup, applied_clock
from adam_async.run.ids import Replica

MOST_WAITING = 4096
"""Maximum number of pushes and ticks that wait for an epoch; the server refuses more, and clients retry."""

MOST_OF_LINK = 1 << 13
"""Maximum number of one link's pulls and reads that wait for clocks: 16 GiB in pulls of 2 MiB."""

MOST_PULLS = 1 << 17
"""Maximum number of all links' pulls and reads that wait for clocks."""

GIVEN_UP_TOGETHER = 64
"""Maximum number of requests that one round of the loop gives up, or counts for statistics."""

MOST_STALE = 1024
"""Number by which the answered requests in the heaps may exceed the waiting ones."""

EpochEvent = PushArrived | TickArrived


class WaitingRequests:
    """Waiting pulls and readings of one bundle. Deadlines are absolute seconds on the caller's clock.

    A request waits for one shard at a time. So an event costs in proportion to the number of shards with
    waiting requests, not to the number of requests. Requests for a clock that no replica reaches cost
    nothing.
    """

    def __init__(self) -> None:
        self.requests: dict[int, QueuedPull] = {}
        """Waiting requests by number, in order of arrival."""
        self._next_number = 0
        self._by_shard: dict[Shard, list[tuple[int, int]]] = {}
        """Heaps by shard: the clock that a request waits for, and the number of the request."""
        self._deadlines: list[tuple[float, int]] = []
        """Heap: the deadline of a request, and the number of the request."""
        self._stale = 0
        """Number of requests that have left since the heaps were last cleaned."""
        self._of_link: Counter[Any] = Counter()
        self.fresh = False
        """Whether a request has begun to wait since the shell last cleared this flag: there is a new
        deadline."""

    def __len__(self) -> int:
        return len(self.requests)

    def take(self, queued: QueuedPull) -> list[Effect]:
        """Answer a request if its values are ready; otherwise make it wait, or refuse it if too many wait."""
        answer = _answer(queued)
        if answer is not None:
            return [answer]
        if self._of_link[queued.link] >= MOST_OF_LINK or len(self.requests) >= MOST_PULLS:
            text = f"{self._of_link[queued.link]} requests of this link wait for clocks, {len(self)} of all"
            most = f"at most {MOST_OF_LINK} and {MOST_PULLS} may: pull again later"
            return [Refuse(queued.request, "busy", f"{text}; {most}")]
        number, self._next_number = self._next_number, self._next_number + 1
        self.requests[number] = queued
        self._of_link[queued.link] += 1
        heappush(self._deadlines, (queued.deadline, number))
        self._wait_for_shard(number, queued)
        self.fresh = True
        return []

    def _wait_for_shard(self, number: int, queued: QueuedPull) -> None:
        behind = next(shard for shard in queued.shards if shard.applied_clock() < queued.clock)
        heappush(self._by_shard.setdefault(behind, []), (queued.clock, number))

    def answer(self) -> list[Effect]:
        """Answer the requests whose values are ready now, in order of arrival."""
        answers: dict[int, Effect] = {}
        for shard, heap in list(self._by_shard.items()):
            reached = shard.applied_clock()
            while heap and heap[0][0] <= reached:
                _, number = heappop(heap)
                queued = self.requests.get(number)
                if queued is None:
                    continue
                answer = _answer(queued)
                if answer is None:
                    self._wait_for_shard(number, queued)
                else:
                    answers[number] = answer
                    self._remove(number)
            if not heap:
                del self._by_shard[shard]
        self._clean()
        return [answers[number] for number in sorted(answers)]

    def give_up(self, now: float) -> list[Effect]:
        """Answer requests past their deadline without values; with very many, only some per call."""
        late: list[Effect] = []
        while self._deadlines and self._deadlines[0][0] <= now and len(late) < GIVEN_UP_TOGETHER:
            _, number = heappop(self._deadlines)
            if number in self.requests:
                late.append(_late(self._remove(number)))
        self._clean()
        return late

    def keep(self, is_open: Callable[[Any], bool]) -> None:
        """Drop the requests that are not open: their links have closed."""
        for number in [each for each, queued in self.requests.items() if not is_open(queued.request)]:
            self._remove(number)
        self._clean()

    def drop(self) -> list[Any]:
        """Drop all requests and return them, unanswered."""
        requests = [queued.request for queued in self.requests.values()]
        for emptied in (self.requests, self._by_shard, self._deadlines, self._of_link):
            emptied.clear()
        return requests

    def _remove(self, number: int) -> QueuedPull:
        queued = self.requests.pop(number)
        self._stale += 1
        self._of_link[queued.link] -= 1
        if not self._of_link[queued.link]:
            del self._of_link[queued.link]
        return queued

    def _clean(self) -> None:
        """Remove requests that have left from the heaps, once they are the larger part."""
        if self._stale <= len(self.requests) + MOST_STALE:
            return
        self._stale = 0
        self._deadlines = [entry for entry in self._deadlines if entry[1] in self.requests]
        heapify(self._deadlines)
        for shard, heap in list(self._by_shard.items()):
            heap[:] = [entry for entry in heap if entry[1] in self.requests]
            heapify(heap)
            if not heap:
                del self._by_shard[shard]

    def next_deadline(self) -> float | None:
        """Return the next deadline; None if no request waits."""
        while self._deadlines and self._deadlines[0][1] not in self.requests:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def waiting_for(self) -> tuple[Replica, ...]:
        """Return the replicas that requests wait for; with very many requests, only those of the oldest."""
        oldest = islice(self.requests.values(), GIVEN_UP_TOGETHER)
        return tuple(sorted({replica for queued in oldest for replica in _behind(queued)}))


class EpochGate:
    """Pushes and ticks that wait for the beginning of their epoch, in order of arrival."""

    def __init__(self) -> None:
        self.events: list[tuple[Session, EpochEvent]] = []
        self._sessions: set[Session] = set()

    def __contains__(self, session: Session) -> bool:
        """Return whether an event of a session waits: later ones of the session wait behind it."""
        return session in self._sessions

    @property
    def full(self) -> bool:
        """Whether no more events may wait."""
        return len(self.events) >= MOST_WAITING

    def add(self, session: Session, event: EpochEvent) -> None:
        """Let an event wait; there must be room."""
        self.events.append((session, event))
        self._sessions.add(session)

    def keep(self, is_open: Callable[[Any], bool]) -> None:
        """Drop the events whose request is closed: no link's budget counts their memory any more."""
        self.events = [(session, event) for session, event in self.events if is_open(event.request)]
        self._sessions = {session for session, _ in self.events}

    def take(self) -> list[EpochEvent]:
        """Take all events out."""
        events = [event for _, event in self.events]
        self.events.clear()
        self._sessions.clear()
        return events

    def __repr__(self) -> str:
        return f"<EpochGate {len(self.events)} events of {len(self._sessions)} sessions>"


def _answer(queued: QueuedPull) -> SendValues | SendStates | None:
    """Return the answer to a request; None if its values are not ready."""
    if queued.clock and applied_clock(queued.shards) < queued.clock:
        return None
    if not queued.is_reading:
        return SendValues(queued.request, queued.shards, queued.vector)
    is_exact = queued.shards[0].pending is not None
    return SendStates(queued.request, queued.shards, queued.clock if is_exact else 0)


def _late(queued: QueuedPull) -> Answer | Refuse:
    behind = _behind(queued)
    if not queued.is_reading:
        late = Values(versions=(), clock=applied_clock(queued.shards), behind=tuple(map(int, behind)))
        return Answer(queued.request, late)
    names = ", ".join(map(str, behind)) or "none of those known"
    text = f"the values of clock {queued.clock} wait for all replicas; behind: {names}"
    return Refuse(queued.request, "not-settled", text)


def _behind(queued: QueuedPull) -> tuple[Replica, ...]:
    """Return the replicas that a request waits for."""
    found: set[Replica] = set()
    group = queued.shards
    shards = group[:1] if isinstance(group, ShardGroup) and group.shared() is not None else group
    for shard in shards:
        found.update(replica for replica, finished in shard.clocks.items() if finished < queued.clock)
    return tuple(sorted(found))
