"""Pure: the ledger of a run's leases at one data server.

Theory of operation
-------------------
One data server, the *ledger leader*, enters all events of leases into one ledger, in one order; the other
servers copy it. A `DataState` is a function of the ledger's entries, including their times, so a server with
the ledger has the state: finished groups, leases, answers to workers. An entry is *settled* when all ledger
replicas have it. Its effects run only after it is settled, because an unsettled entry may be lost.

An epoch leaves little state: a state between two epochs is an `Opening`. The ledger of an epoch is the
opening before it and all later entries, from `EpochBegan` on; a new replica reads only this ledger. A replica
drops older entries when they are settled.

Times are seconds on the ledger leader's clock. A new leader continues from the last entry's time.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from adam_async.data_server.epoch import EpochBegan
from adam_async.data_server.state import DataState, Effect, Event, Opening
from adam_async.messages.bounds import Instant


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One event and its time."""

    now: Instant
    event: Event


class Settled(NamedTuple):
    """An event that all ledger replicas have, and its effects."""

    event: Event
    effects: list[Effect]


class Ledger:
    """Opening and entries, and the state that they give."""

    def __init__(self, opening: Opening, *, first: int = 0) -> None:
        self.state = DataState.of(opening)
        self._openings: deque[tuple[int, Opening]] = deque([(first, opening)])
        """Openings with the number of the next entry; the last opening is that of the current epoch."""
        self._first = first
        self._entries: list[Entry] = []
        self._unsettled: deque[Settled] = deque()
        self.last_now = 0.0
        """Time of the last entry; 0 before the first."""

    @property
    def stop(self) -> int:
        """Number of the next entry."""
        return self._first + len(self._entries)

    @property
    def settled(self) -> int:
        """Number of the first unsettled entry."""
        return self.stop - len(self._unsettled)

    def append(self, entry: Entry) -> None:
        """Append an entry, which changes the state at once."""
        if isinstance(entry.event, EpochBegan):
            self._openings.append((self.stop, self.state.opening()))
        effects = self.state.handle(entry.event, now=entry.now)
        self._entries.append(entry)
        self._unsettled.append(Settled(entry.event, effects))
        self.last_now = entry.now

    def settle(self, number: int) -> list[Settled]:
        """Settle the entries before a number; return the newly settled ones."""
        done = [self._unsettled.popleft() for _ in range(min(number, self.stop) - self.settled)]
        while len(self._openings) > 1 and self._openings[1][0] <= self.settled:
            self._openings.popleft()
            first = self._openings[0][0]
            del self._entries[: first - self._first]
            self._first = first
        return done

    def before(self, number: int) -> "Ledger":
        """Return a new ledger with the entries before a number; it applies all of them again."""
        first, opening = self._openings[0]
        ledger = Ledger(opening, first=first)
        for entry in self._entries[: number - first]:
            ledger.append(entry)
        ledger.settle(self.settled)
        return ledger

    def begin(self) -> tuple[int, Opening]:
        """Return the number of the first entry after the newest opening, and this opening."""
        return self._openings[-1]

    def read(self, number: int, count: int) -> Sequence[Entry] | None:
        """Return entries from a number on, `count` at most; None if they are dropped, and the reader must
        `begin` again."""
        at = number - self._first
        return self._entries[at : at + count] if at >= 0 else None
