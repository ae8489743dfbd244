"""Pure: the primary of a bundle orders entries, counts the members that hold them, and changes the record."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from adam_async.messages.replication import Begin, Begun, Committed, Copy, Held, PieceCopy
from adam_async.parameter_server.replication.local_copy import (
    Apply,
    BecamePrimary,
    CopyPiece,
    Entry,
    LocalCopy,
    Violation,
)
from adam_async.run.store_record import BundleRecord, Member

MOST_SESSIONS = 256
"""Maximum number of members whose sessions a primary remembers, beside its present members."""


@dataclass(slots=True)
class _Peer:
    """State of another member, on the primary."""

    session: int = 0
    """Session that began with the present link; 0 without a link."""
    has_begun: bool = False
    """Whether the member has answered `Begin`."""
    is_anew: bool = False
    """Whether the session began with an empty copy."""
    held: int = 0
    """Position up to which the member's log surely equals the log of this primary."""
    applied: int = 0
    """Position of the last entry that the member has reported as applied."""
    pieces: int = 0
    """Number of pieces that a joining member has."""
    asked: int = 0
    """Number of pieces requested from the shell in this session."""
    sent: int = 0
    """Number of pieces sent in this session."""
    unsent: tuple[PieceCopy, Any] | None = None
    """Copied piece that waits until the member has the entries in it; None without a copied piece."""
    piece_at: int | None = None
    """Position of the copied piece until the member confirms the piece; None without a copied piece. The
    member applies no later entry before confirming the piece."""
    reported: tuple[int, int] = (0, 0)
    """Last watermarks sent to the member."""


class Primary:
    """Role of the primary in one generation."""

    def __init__(self, copy: LocalCopy, links: Iterable[Member]) -> None:
        self._copy = copy
        self._generation = copy.record.generation
        self._tail = copy.log.last
        """Position of the last entry of earlier generations; the primary applies these entries before it
        orders new ones."""
        self._serves = False
        self._links = set(links)
        self._peers: dict[Member, _Peer] = {}
        self._last_session = 0
        self._sessions: dict[Member, int] = {}
        """Newest session of each member, including members that have left: their late answers are valid."""
        self._strikes: set[Member] = set()
        """Members that this primary wants to strike out."""
        self._invites: list[Member] = []
        """Servers that this primary wants to invite."""
        self._successor: Member | None = None
        """Member that becomes the primary in a handover; None without a handover."""
        self.record_changed()

    @property
    def is_ordering(self) -> bool:
        """Whether this primary takes new entries."""
        return self._serves and self._successor is None

    # --- entries -----------------------------------------------------------------------------

    def propose(self, content: Any, nbytes: int) -> int:
        """Append an entry, send it to the members with a begun session, and return its position."""
        assert self.is_ordering, "this member orders no entries now"
        entry = self._copy.log.append(self._generation, content, nbytes)
        for member, peer in self._peers.items():
            if peer.has_begun:
                self._send_entry(member, peer, entry)
        self.advance()
        return entry.position

    def advance(self) -> None:
        """Commit and drop entries, and propose changes, as far as the present state permits."""
        self._commit()
        self._copy.log.truncate(self._applied_by_all())
        if not self._serves and self._copy.log.applied >= self._tail:
            self._serves = True
            self._copy.effects.append(BecamePrimary())
        self._change_record()

    def _counted(self) -> set[Member]:
        """Return the other members that must hold an entry: those in sync before or after a proposal."""
        copy = self._copy
        proposed = copy.proposed.in_sync if copy.proposed is not None else ()
        return {*copy.record.in_sync, *proposed} - {copy.me}

    def _commit(self) -> None:
        copy = self._copy
        if len(copy.record.in_sync) < copy.bundle.min_in_sync:
            return
        held = min([copy.log.last, *(self._peers[member].held for member in self._counted())])
        entries = copy.log.commit(held)
        if entries:
            copy.effects.append(Apply(entries))

    def _applied_by_all(self) -> int:
        """Return the position of the last entry that no member needs."""
        # A joining member counts too: it may be the next primary, and the others then need the entries after
        # their own.
        needing = self._counted() | {member for member, peer in self._peers.items() if peer.session}
        applied = min([self._copy.log.applied, *(self._peers[member].applied for member in needing)])
        return max(applied, self._copy.log.start)

    def _watermarks(self, member: Member, peer: _Peer) -> tuple[int, int]:
        # A piece has this member's applied position, which a joining member must not exceed. Entries may
        # arrive before an earlier piece, which may travel on another link.
        log = self._copy.log
        committed = log.committed if member in self._counted() else log.applied
        if peer.piece_at is not None:
            committed = min(committed, peer.piece_at)
        # After a conflict in the map, a member with all pieces may join again: its watermark stays.
        committed = max(committed, peer.reported[0])
        return committed, min(self._applied_by_all(), committed)

    def _send_entry(self, member: Member, peer: _Peer, entry: Entry) -> None:
        peer.reported = self._watermarks(member, peer)
        self._copy.send(
            member,
            Copy(
                **self._copy.of_bundle,
                session=peer.session,
                position=entry.position,
                origin=entry.generation,
                nbytes=entry.nbytes,
                committed=peer.reported[0],
                applied_by_all=peer.reported[1],
            ),
            entry.content,
        )

    def report(self) -> None:
        """Send each member changed watermarks."""
        for member, peer in self._peers.items():
            watermarks = self._watermarks(member, peer)
            if not peer.has_begun or watermarks == peer.reported:
                continue
            peer.reported = watermarks
            self._copy.send(
                member,
                Committed(
                    **self._copy.of_bundle,
                    session=peer.session,
                    committed=watermarks[0],
                    applied_by_all=watermarks[1],
                ),
            )

    # --- sessions ----------------------------------------------------------------------------

    def link_up(self, member: Member) -> None:
        """Begin a session on a new link, if it leads to a member."""
        self._links.add(member)
        if member in self._peers:
            self._begin(member, self._peers[member])

    def link_lost(self, member: Member) -> None:
        """End the session of a member. A member in sync keeps its entries."""
        self._links.discard(member)
        if member in self._peers:
            peer = self._peers[member]
            peer.session, peer.has_begun = 0, False
            peer.unsent = peer.piece_at = None
        self.advance()

    def _begin(self, member: Member, peer: _Peer) -> None:
        self._last_session += 1
        self._sessions.pop(member, None)  # so that the newest session comes last
        peer.session = self._sessions[member] = self._last_session
        for old in list(self._sessions)[:-MOST_SESSIONS]:
            if old not in self._peers:
                del self._sessions[old]
        peer.has_begun, peer.is_anew = False, member not in self._counted()
        peer.reported = (0, 0)
        peer.pieces = 0 if peer.is_anew else self._copy.bundle.pieces
        if peer.is_anew:
            peer.held, peer.applied = 0, self._copy.log.start
        peer.asked = peer.sent = peer.pieces
        peer.unsent = peer.piece_at = None
        self._copy.send(
            member,
            Begin(
                **self._copy.of_bundle,
                session=peer.session,
                version=self._copy.record.changed,
                start=self._copy.log.start,
                anew=peer.is_anew,
            ),
        )

    def received(self, sender: Member, message: Begun | Held) -> None:
        """Take an answer of a member.

        Raises:
            Violation: No correct member sends this answer. The state is unchanged.
        """
        if message.session > self._sessions.get(sender, 0):
            raise Violation("session", f"{message.session} of {sender} has not begun")
        peer = self._peers.get(sender)
        if peer is None or message.session != peer.session:
            return
        self._check_answer(peer, message)
        if isinstance(message, Begun):
            peer.has_begun = True
            peer.held, peer.applied = message.position, message.applied
            for entry in self._copy.log.after(message.position):
                self._send_entry(sender, peer, entry)
        else:
            peer.held, peer.applied, peer.pieces = message.position, message.applied, message.pieces
            if peer.pieces == peer.asked:
                peer.piece_at = None
        self._send_piece(sender, peer)
        self._ask_for_piece(sender, peer)
        self.advance()

    def _check_answer(self, peer: _Peer, message: Begun | Held) -> None:
        log = self._copy.log
        lowest = max(peer.held, log.start) if isinstance(message, Begun) else peer.held
        if isinstance(message, Begun) is peer.has_begun:
            raise Violation("answer", f"{type(message).__name__}, and has_begun is {peer.has_begun}")
        if isinstance(message, Begun) and peer.is_anew and message.position != peer.applied:
            raise Violation("position", f"{message.position}, of an empty log after {peer.applied}")
        if not lowest <= message.position <= log.last:
            raise Violation("position", f"{message.position}, not within {lowest} and {log.last}")
        if not peer.applied <= message.applied <= message.position:
            raise Violation("applied", f"{message.applied}, not within {peer.applied} and {message.position}")
        if isinstance(message, Held) and not peer.pieces <= message.pieces <= peer.sent:
            raise Violation("pieces", f"{message.pieces}, not within {peer.pieces} and {peer.sent}")

    # --- pieces ------------------------------------------------------------------------------

    def _ask_for_piece(self, member: Member, peer: _Peer) -> None:
        """Ask the shell for the next piece, once the member has all pieces before it."""
        if member in self._copy.record.joining and peer.is_anew and peer.asked == peer.pieces:
            if peer.asked < self._copy.bundle.pieces:
                self._copy.effects.append(CopyPiece(member, peer.session, peer.asked))
                peer.asked += 1

    def wants_piece(self, asked: CopyPiece) -> bool:
        """Return whether the session in which a piece was requested is still the present session."""
        peer = self._peers.get(asked.to)
        return peer is not None and peer.session == asked.session

    def piece_copied(self, asked: CopyPiece, position: int, content: Any, nbytes: int) -> None:
        """Send a piece once the member holds all entries in it. The entries may come on another link.

        Args:
            position: Position of the last entry in the piece.
        """
        if not self.wants_piece(asked):
            return
        peer, log = self._peers[asked.to], self._copy.log
        # The piece may be newer than the applied position, because this member may have joined with it.
        position = max(position, self._copy.pieces[asked.piece])
        assert log.applied <= position <= log.last, f"piece at {position}, with {log}"
        message = PieceCopy(
            **self._copy.of_bundle, session=peer.session, piece=asked.piece, position=position, nbytes=nbytes
        )
        peer.unsent, peer.piece_at = (message, content), position
        self._send_piece(asked.to, peer)

    def _send_piece(self, member: Member, peer: _Peer) -> None:
        if peer.unsent is None or peer.held < peer.unsent[0].position:
            return
        (message, content), peer.unsent = peer.unsent, None
        peer.sent += 1
        self._copy.send(member, message, content)

    # --- the record --------------------------------------------------------------------------

    def record_changed(self) -> None:
        """Take over a record of this primary's generation."""
        record = self._copy.record
        others = [member for member in record.members if member != self._copy.me]
        self._peers = {member: self._peers.get(member, _Peer()) for member in others}
        self._strikes.intersection_update(others)
        self._invites = [member for member in self._invites if member not in others]
        if self._successor not in record.in_sync:
            self._successor = None
        for member, peer in self._peers.items():
            if not peer.session and member in self._links:
                self._begin(member, peer)
        self.advance()

    def strike_out(self, member: Member) -> None:
        """Take a silent member out of the record. The member counts until the map has the change."""
        if member in self._peers:
            self._strikes.add(member)
            self.advance()

    def invite(self, member: Member) -> None:
        """Let a server join. The invited server must be able to take the whole state."""
        if member not in self._copy.record.members and member not in self._invites:
            self._invites.append(member)
            self.advance()

    def drop_invites(self) -> None:
        """Withdraw the invitations of servers that have not begun to join."""
        self._invites.clear()
        self.advance()

    def hand_over(self, member: Member) -> None:
        """Let a member in sync become the primary. Ordering pauses until then."""
        if member in self._copy.record.in_sync[1:]:
            self._successor = member
            self.advance()

    def cancel_hand_over(self) -> None:
        """Order entries again, unless the handover is already proposed to the map."""
        proposed = self._copy.proposed
        if proposed is None or proposed.generation == self._generation:
            self._successor = None

    def _change_record(self) -> None:
        if self._copy.proposed is not None:
            return
        record = self._copy.record
        wanted = self._wanted_record()
        if wanted == record and self._successor is not None and self._is_flushed(self._successor):
            others = (member for member in record.in_sync if member != self._successor)
            wanted = msgspec.structs.replace(
                record, generation=self._generation + 1, in_sync=(self._successor, *others)
            )
        if wanted != record:
            self._copy.propose_record(wanted)

    def _wanted_record(self) -> BundleRecord:
        record, strikes = self._copy.record, self._strikes
        joined = [member for member in record.joining if self._has_everything(member)]
        joining = [member for member in record.joining if member not in joined]
        return msgspec.structs.replace(
            record,
            in_sync=tuple(member for member in (*record.in_sync, *joined) if member not in strikes),
            joining=tuple(member for member in (*joining, *self._invites) if member not in strikes),
        )

    def _has_everything(self, member: Member) -> bool:
        peer = self._peers[member]
        # Entries of earlier generations may be committed although this primary does not know it.
        needed = max(self._copy.log.committed, self._tail)
        return peer.has_begun and peer.pieces == self._copy.bundle.pieces and peer.held >= needed

    def _is_flushed(self, successor: Member) -> bool:
        log = self._copy.log
        return log.applied == log.last == self._peers[successor].applied

    # --- questions ---------------------------------------------------------------------------

    def waits_for(self) -> tuple[Member, ...]:
        """Return the members that the commit of the last entry waits for, sorted by name."""
        last = self._copy.log.last
        return tuple(sorted(member for member in self._counted() if self._peers[member].held < last))

    def why_not_committing(self) -> str:
        """Return why the last entry is not committed, and which members it waits for; empty if it is."""
        copy = self._copy
        if copy.log.committed == copy.log.last:
            return ""
        in_sync, least = len(copy.record.in_sync), copy.bundle.min_in_sync
        if in_sync < least:
            return f"{in_sync} in sync, {least} needed (min_in_sync)"
        nodes = ", ".join(node for node, _ in self.waits_for())
        return f"entry {copy.log.committed + 1} waits for {nodes}"

    def joining_pieces(self) -> dict[Member, int]:
        """Return the number of pieces that each joining member has in its session."""
        return {member: self._peers[member].pieces for member in self._copy.record.joining}

    def laggards(self, budget_bytes: int) -> tuple[Member, ...]:
        """Return the members that make the log exceed a budget: they lack entries, or apply them late."""
        log = self._copy.log
        if log.nbytes <= budget_bytes:
            return ()
        return tuple(
            member
            for member, peer in self._peers.items()
            if log.bytes_between(peer.held, log.last) + log.bytes_between(peer.applied, log.applied)
            > budget_bytes
        )
