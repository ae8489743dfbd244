"""Pure: one ledger on several data servers, which survives the loss of any of them.

Theory of operation
-------------------
The cluster map names the *ledger replicas*, which have the ledger, and the *term*, which rises with each new
*ledger leader*. The leader enters events and copies them to the other replicas. The leader settles an entry
when all replicas have it; it first removes an unreachable replica from the map. Every remaining replica
therefore has all settled entries, and the first of them becomes the next leader.

A new replica reads the ledger from its opening, counts as soon as it has the whole ledger, and is then added
to the map. In a new term every replica reads the ledger again, because it may have entries that the new
leader never got. A replica drops its old ledger only when the new one is whole, so all replicas always have
all settled entries. Replicas refuse copies of an older term: a removed leader that has not learnt of its
removal settles no more entries, because a replica that it waits for has a newer term.
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
"""Maximum number of entries of one part for a receiver; the sender sends fewer."""

LedgerReplica = tuple[str, int]
"""Node and incarnation of a data server."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the ledger, sent by the ledger leader."""

    first: Count
    """Number of the first entry."""
    settled: Count
    """Number of the first unsettled entry: all ledger replicas have the entries before it."""
    entries: Annotated[tuple[Entry, ...], msgspec.Meta(max_length=MOST_ENTRIES)] = ()
    opening: Opening | None = None
    """State before the first entry, for a replica that reads from the start; None for other replicas."""
    whole: bool = True
    """Whether the part ends with the last entry so far."""


class CopyRefused(Exception):
    """Refusal of a part of a ledger."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(slots=True)
class _Copy:
    """The ledger leader's record of one replica's copy."""

    has: int = -1
    """Number of entries that the replica has; -1 if it must read from the start."""
    reported: int = -1
    """Number of settled entries that the leader has reported to the replica; -1 at first."""
    whole: bool = False
    """Whether the replica has had the whole ledger at some time since it began to read. Before that time a
    replica with `counts` lets the leader settle no entry."""
    counts: bool = False
    """Whether settling an entry needs this replica."""


class LedgerReplication:
    """The role of one data server in the replication of a ledger."""

    def __init__(self, me: LedgerReplica, opening: Opening) -> None:
        self._me = me
        self.term = 0
        self.leads = False
        self.ledger = Ledger(opening)
        self._incoming: Ledger | None = None
        """Ledger that is being read and is not whole yet."""
        self._read_in = 0
        """Term in which `ledger` was read."""
        self._copies: dict[LedgerReplica, _Copy] = {}
        self._lag_s = 0.0
        """Offset of the ledger's clock from this server's, in seconds."""

    # --- the leader --------------------------------------------------------------------------

    def lead(self, term: int, ledger_replicas: Iterable[LedgerReplica], *, now: float) -> None:
        """Lead in a term with these replicas. This server's ledger is whole."""
        self.term, self.leads, self._incoming = term, True, None
        self._lag_s = self.ledger.last_now - now if self.ledger.stop else 0.0
        self._copies = {each: _Copy(counts=True) for each in ledger_replicas if each != self._me}

    def enter(self, events: Sequence[Event], *, now: float) -> list[Settled]:
        """Enter events, as the leader; return the newly settled ones."""
        assert self.leads, "only the ledger leader enters events"
        for event in events:
            self.ledger.append(Entry(now + self._lag_s, event))
        return self._settle()

    def time_of(self, deadline: float) -> float:
        """Return a ledger's deadline on this server's clock, rounded so that no event is too early."""
        ours = deadline - self._lag_s
        while ours + self._lag_s < deadline:  # rounded down: a timer would fire too early
            # A large time has coarse steps: quarters of one reach it within a few rounds.
            ours = max(math.nextafter(ours, math.inf), ours + math.ulp(deadline) / 4)
        return ours

    def welcome(self, ledger_replica: LedgerReplica) -> None:
        """Begin to copy for a replica, unless that has begun."""
        self._copies.setdefault(ledger_replica, _Copy())

    def copies(self) -> tuple[LedgerReplica, ...]:
        """Return the replicas that get copies."""
        return tuple(self._copies)

    def counts(self, ledger_replica: LedgerReplica) -> bool:
        """Return whether settling an entry needs a replica."""
        return ledger_replica in self._copies and self._copies[ledger_replica].counts

    def part_for(self, ledger_replica: LedgerReplica, count: int) -> Part | None:
        """Return the next part for a replica, `count` entries at most; None if it is up to date."""
        copy, ledger = self._copies[ledger_replica], self.ledger
        entries = ledger.read(copy.has, count) if copy.has >= 0 else None
        opening = None
        if entries is None:
            copy.has, opening = ledger.begin()
            copy.whole = False
            entries = ledger.read(copy.has, count) or ()
        elif not entries and copy.reported >= ledger.settled:
            return None
        return Part(
            first=copy.has,
            settled=ledger.settled,
            entries=tuple(entries),
            opening=opening,
            whole=copy.has + len(entries) == ledger.stop,
        )

    def copied(self, ledger_replica: LedgerReplica, part: Part) -> list[Settled]:
        """Record that a replica has taken a part; return the newly settled entries.

        A replica counts from the moment that it has all entries.
        """
        copy = self._copies.get(ledger_replica)
        if copy is None:
            return []
        copy.has, copy.reported = part.first + len(part.entries), part.settled
        copy.whole = copy.whole or part.whole
        copy.counts = copy.counts or copy.has == self.ledger.stop
        return self._settle()

    def begin_anew(self, ledger_replica: LedgerReplica) -> None:
        """Let a replica read the ledger from the start, because its copy is unknown."""
        if ledger_replica in self._copies:
            copy = self._copies[ledger_replica]
            copy.has, copy.reported, copy.whole = -1, -1, False

    def strike_out(self, ledger_replica: LedgerReplica) -> list[Settled]:
        """Drop a replica that the map no longer names; return the newly settled entries."""
        self._copies.pop(ledger_replica, None)
        return self._settle()

    def _settle(self) -> list[Settled]:
        held = [copy.has if copy.whole else -1 for copy in self._copies.values() if copy.counts]
        return self.ledger.settle(min([self.ledger.stop, *held]))

    # --- the others --------------------------------------------------------------------------

    def follow(self) -> None:
        """Follow another leader."""
        self.leads = False
        self._copies.clear()

    def take(self, term: int, part: Part) -> list[Settled]:
        """Take a part from the leader; return the newly settled entries. A refused part adds no entries.

        Raises:
            CopyRefused: The part is of an older term, leaves a gap, or has entries that no state accepts.
        """
        if term < self.term or (term == self.term and self.leads):
            raise CopyRefused("old-term", f"this is term {self.term}, not {term}")
        if part.opening is None and term > self.term:
            raise CopyRefused("gap", f"in term {term} a replica reads the ledger anew")
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
            # A late part of an earlier reading in this term must not replace a longer ledger.
            if self._read_in == term and incoming.stop < self.ledger.stop:
                raise CopyRefused("gap", f"{incoming.stop} entries came late: here are {self.ledger.stop}")
            self.ledger, self._read_in = incoming, term
        return self.ledger.settle(part.settled)

    def _append(self, ledger: Ledger, entries: Sequence[Entry]) -> None:
        """Append all entries of a part, or none of them."""
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


def _opened(opening: Opening, first: int) -> Ledger:
    try:
        return Ledger(opening, first=first)
    except Exception as error:  # a peer chose the opening
        raise _impossible(error) from error


def _impossible(error: Exception) -> CopyRefused:
    return CopyRefused("impossible", f"no ledger has these entries: {error!r}")
