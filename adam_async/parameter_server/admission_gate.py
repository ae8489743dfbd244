"""Pure: pushes and ticks that wait on a server for the begin of their epoch."""

from collections.abc import Callable
from typing import Any

from adam_async.parameter_server.events import PushArrived, TickArrived
from adam_async.parameter_server.shard import Session

MOST_GATED = 4096
"""Maximum number of pushes and ticks that wait for an epoch; the server refuses more, and clients retry."""


Event = PushArrived | TickArrived


class Gated:
    """Events that wait, in the order of their arrival, and the sessions that they are of."""

    def __init__(self) -> None:
        self._events: list[tuple[Session, Event]] = []
        self._sessions: set[Session] = set()

    def __contains__(self, session: Session) -> bool:
        """Whether an event of a session waits: later ones of the session wait behind it."""
        return session in self._sessions

    @property
    def full(self) -> bool:
        """Whether no more events may wait."""
        return len(self._events) >= MOST_GATED

    def add(self, session: Session, event: Event) -> None:
        """Let an event wait; there must be room."""
        self._events.append((session, event))
        self._sessions.add(session)

    def keep(self, is_open: Callable[[Any], bool]) -> None:
        """Drop the events with a request that is not open: nobody pays for their memory any more."""
        self._events = [(session, event) for session, event in self._events if is_open(event.request)]
        self._sessions = {session for session, _ in self._events}

    def take(self) -> list[Event]:
        """Take all events out."""
        events = [event for _, event in self._events]
        self._events.clear()
        self._sessions.clear()
        return events

    def __repr__(self) -> str:
        return f"<Gated {len(self._events)} events of {len(self._sessions)} sessions>"
