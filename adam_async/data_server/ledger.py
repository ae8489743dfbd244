"""Pure: the ledger of a run's leases, as one data server has it.

Theory of operation
-------------------
All that happens to leases is *entered* into one ledger, in one order, by one data server, the *lender*; the
others copy it. A `DataState` is a function of its entries, their times included, so whoever has the ledger
has the state: which groups are finished, who holds which, what each worker was told. An entry is *settled*
when all who are to have it do; what follows from it is done then, and not before, for what was told to
nobody may still be forgotten.

An epoch leaves little behind: what a state is between two of them is an `Opening`. The ledger of an epoch
is the opening before it and the entries since then, from `EpochBegan` on, and that is all that anybody new
has to read. Older entries are let go when they are settled.

Times are seconds on the lender's clock. A new lender goes on from the last entry's time.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from adam_async.data_server.state import DataState, Effect, EpochBegan, Event, Opening
from adam_async.messages.bounds import Instant


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One event, and when it was."""

    now: Instant
    event: Event


class Settled(NamedTuple):
    """An event that all have, and what is to be done now."""

    event: Event
    effects: list[Effect]


class Ledger:
    """Opening and entries, and the state that they make.

    Args:
        opening: What came before.
        first: Number of the first entry behind it.
    """

    def __init__(self, opening: Opening, *, first: int = 0) -> None:
        self.state = DataState.of(opening)
        self._openings: deque[tuple[int, Opening]] = deque([(first, opening)])
        """Each with the number of the entry behind it; the last one is of the epoch in progress."""
        self._first = first
        self._entries: list[Entry] = []
        self._unsettled: deque[Settled] = deque()
        self.last_now = 0.0
        """When the last entry was; 0 before the first."""

    @property
    def stop(self) -> int:
        """Number of the next entry."""
        return self._first + len(self._entries)

    @property
    def settled(self) -> int:
        """Number of the first entry that is not settled."""
        return self.stop - len(self._unsettled)

    def append(self, entry: Entry) -> None:
        """Write an entry, which changes the state at once."""
        if isinstance(entry.event, EpochBegan):
            self._openings.append((self.stop, self.state.opening()))
        effects = self.state.handle(entry.event, now=entry.now)
        self._entries.append(entry)
        self._unsettled.append(Settled(entry.event, effects))
        self.last_now = entry.now

    def settle(self, number: int) -> list[Settled]:
        """All who are to have them have the entries before this number; returns those that this settles."""
        done = [self._unsettled.popleft() for _ in range(min(number, self.stop) - self.settled)]
        while len(self._openings) > 1 and self._openings[1][0] <= self.settled:
            self._openings.popleft()
            first = self._openings[0][0]
            del self._entries[: first - self._first]
            self._first = first
        return done

    def before(self, number: int) -> "Ledger":
        """Return a new ledger with the entries before a number: it takes as long as to read them anew."""
        first, opening = self._openings[0]
        ledger = Ledger(opening, first=first)
        for entry in self._entries[: number - first]:
            ledger.append(entry)
        ledger.settle(self.settled)
        return ledger

    def begin(self) -> tuple[int, Opening]:
        """Where somebody new begins to read: the number of an entry, and the opening before it."""
        return self._openings[-1]

    def read(self, number: int, count: int) -> Sequence[Entry] | None:
        """Entries from a number on, `count` at most; None if they were let go: `begin` anew."""
        at = number - self._first
        return self._entries[at : at + count] if at >= 0 else None

    def __repr__(self) -> str:
        return f"<Ledger of {self.stop} entries, {self.settled} settled, epoch {self.state.epoch}>"
