"""Pure: how several data servers have one ledger, whichever of them is lost.

Theory of operation
-------------------
The cluster map names the *keepers*, those that have the ledger, and the *term*, which grows whenever another
of them becomes the lender. The lender enters events and copies them to the others. It settles an entry when
all keepers have it; one that it cannot reach is first struck out of the map. So whatever is settled, any
keeper that is left has, and the first of them goes on where the lost lender was.

Somebody new reads the ledger from its opening, counts as a keeper from the moment that it has all of it, and
is written into the map then. In a new term everybody reads anew, for a keeper may have entries that the new
lender never got; what a keeper had is given up only when the new one is whole, so that at any moment all
keepers have whatever is settled. Copies of an older term are refused: a lender that was struck out and does
not know it settles nothing more, for one that it waits for has gone on.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from adam_async.data_server.ledger import Entry, Ledger, Settled
from adam_async.data_server.state import Event, Opening
from adam_async.messages.bounds import Count

MOST_ENTRIES = 1 << 16
"""Maximum number of entries of one part; the sender sends fewer."""

LedgerReplica = tuple[str, int]
"""Node and incarnation of a data server."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What a lender sends of its ledger at a time."""

    first: Count
    """Number of the first of the entries."""
    settled: Count
    """All keepers have the entries before this number."""
    entries: Annotated[tuple[Entry, ...], msgspec.Meta(max_length=MOST_ENTRIES)] = ()
    opening: Opening | None = None
    """What comes before the first entry, for who reads anew."""
    whole: bool = True
    """Whether these are all entries so far."""


class CopyRefused(Exception):
    """A part of a ledger cannot be taken.

    Args:
        code: ``old-term``, ``gap`` or ``impossible``.
        text: What was wrong.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(slots=True)
class _Copy:
    """What the lender knows of somebody else's copy."""

    has: int = -1
    """Entries before this number; -1: it is to read anew."""
    told: int = -1
    """Entries before this number are known there to be settled."""
    whole: bool = False
    """Whether it has taken the last entry there was: what is read anew is of use to nobody before that."""
    counts: bool = False
    """Whether nothing is settled without it."""


class LedgerReplication:
    """One data server's part in it.

    Args:
        me: Which one.
        opening: Of an empty ledger.
    """

    def __init__(self, me: LedgerReplica, opening: Opening) -> None:
        self._me = me
        self.term = 0
        self.leads = False
        self.ledger = Ledger(opening)
        self._incoming: Ledger | None = None
        """A ledger that is read anew and is not whole yet."""
        self._read_in = 0
        """The term in which `ledger` was read."""
        self._copies: dict[LedgerReplica, _Copy] = {}
        self._lag_s = 0.0
        """Seconds from our clock to the ledger's."""

    # --- the lender --------------------------------------------------------------------------

    def lead(self, term: int, ledger_replicas: Iterable[LedgerReplica], *, now: float) -> None:
        """We are the lender of this term, and these are the keepers. Our ledger is whole."""
        self.term, self.leads, self._incoming = term, True, None
        self._lag_s = self.ledger.last_now - now if self.ledger.stop else 0.0
        self._copies = {
            ledger_replica: _Copy(counts=True)
            for ledger_replica in ledger_replicas
            if ledger_replica != self._me
        }

    def enter(self, events: Sequence[Event], *, now: float) -> list[Settled]:
        """Enter events, as the lender; returns what that settles."""
        assert self.leads, "only the lender enters events"
        for event in events:
            self.ledger.append(Entry(now + self._lag_s, event))
        return self._settle()

    def time_of(self, deadline: float) -> float:
        """When a deadline of the ledger is, on our clock; what is entered then is not too early for it."""
        ours = deadline - self._lag_s
        while ours + self._lag_s < deadline:  # rounded down; there is nothing to be done until then
            # A far clock is coarser than ours: its smallest step, in parts, leads there within a few rounds.
            ours = max(math.nextafter(ours, math.inf), ours + math.ulp(deadline) / 4)
        return ours

    def welcome(self, ledger_replica: LedgerReplica) -> None:
        """Begin to copy for somebody, unless we do already."""
        self._copies.setdefault(ledger_replica, _Copy())

    def copies(self) -> tuple[LedgerReplica, ...]:
        """Whom we copy for."""
        return tuple(self._copies)

    def counts(self, ledger_replica: LedgerReplica) -> bool:
        """Whether nothing is settled without this one."""
        return ledger_replica in self._copies and self._copies[ledger_replica].counts

    def part_for(self, ledger_replica: LedgerReplica, count: int) -> Part | None:
        """What to send next, `count` entries at most; None while there is no news."""
        copy, ledger = self._copies[ledger_replica], self.ledger
        entries = ledger.read(copy.has, count) if copy.has >= 0 else None
        opening = None
        if entries is None:
            copy.has, opening = ledger.begin()
            copy.whole = False
            entries = ledger.read(copy.has, count) or ()
        elif not entries and copy.told >= ledger.settled:
            return None
        return Part(
            first=copy.has,
            settled=ledger.settled,
            entries=tuple(entries),
            opening=opening,
            whole=copy.has + len(entries) == ledger.stop,
        )

    def copied(self, ledger_replica: LedgerReplica, part: Part) -> list[Settled]:
        """Somebody has taken a part; from when it has all it counts. Returns what that settles."""
        copy = self._copies.get(ledger_replica)
        if copy is None:
            return []
        copy.has, copy.told = part.first + len(part.entries), part.settled
        copy.whole = copy.whole or part.whole
        copy.counts = copy.counts or copy.has == self.ledger.stop
        return self._settle()

    def begin_anew(self, ledger_replica: LedgerReplica) -> None:
        """What somebody has is unknown."""
        if ledger_replica in self._copies:
            copy = self._copies[ledger_replica]
            copy.has, copy.told, copy.whole = -1, -1, False

    def strike_out(self, ledger_replica: LedgerReplica) -> list[Settled]:
        """Somebody is no keeper any more, in the map; returns what that settles."""
        self._copies.pop(ledger_replica, None)
        return self._settle()

    def _settle(self) -> list[Settled]:
        held = [copy.has if copy.whole else -1 for copy in self._copies.values() if copy.counts]
        return self.ledger.settle(min([self.ledger.stop, *held]))

    # --- the others --------------------------------------------------------------------------

    def follow(self) -> None:
        """Somebody else is the lender."""
        self.leads = False
        self._copies.clear()

    def take(self, term: int, part: Part) -> list[Settled]:
        """Take what a lender sends; returns what is settled here now.

        A refused part changes nothing.

        Raises:
            CopyRefused: It is of an older term, does not follow what we have, or no state takes its entries.
        """
        if term < self.term or (term == self.term and self.leads):
            raise CopyRefused("old-term", f"this is term {self.term}, not {term}")
        if part.opening is None and term > self.term:
            raise CopyRefused("gap", f"in term {term} the ledger is to be read anew")
        incoming = self._incoming if part.opening is None else _opened(part.opening, part.first)
        ledger = incoming or self.ledger
        if part.first != ledger.stop:
            raise CopyRefused("gap", f"entry {part.first} does not follow {ledger.stop}")
        self._append(ledger, part.entries)
        self.term, self._incoming = term, incoming
        if self.leads:
            self.follow()
        if incoming is not None:
            if not part.whole:
                return []
            self._incoming = None
            if self._read_in == term and incoming.stop < self.ledger.stop:
                raise CopyRefused("gap", f"{incoming.stop} entries came late: here are {self.ledger.stop}")
            self.ledger, self._read_in = incoming, term
        return self.ledger.settle(part.settled)

    def _append(self, ledger: Ledger, entries: Sequence[Entry]) -> None:
        """Write all entries of a part, or none of them."""
        stop = ledger.stop
        try:
            for entry in entries:
                ledger.append(entry)
        except Exception as error:  # a peer chose the entries: the state may raise anything
            before = ledger.before(stop)
            if ledger is self.ledger:
                self.ledger = before
            elif ledger is self._incoming:
                self._incoming = before
            raise _impossible(error) from error

    def __repr__(self) -> str:
        part = "leads" if self.leads else "follows"
        return f"<Keeping {self._me[0]} {part} in term {self.term}, {self.ledger!r}>"


def _opened(opening: Opening, first: int) -> Ledger:
    try:
        return Ledger(opening, first=first)
    except Exception as error:  # a peer chose the opening
        raise _impossible(error) from error


def _impossible(error: Exception) -> CopyRefused:
    return CopyRefused("impossible", f"no ledger has these entries: {error!r}")
