"""Pure: one member of a bundle; `replication` has the theory of operation."""

from typing import Any

from adam_async.messages.replication import Begin, Begun, Committed, Copy, Held, PieceCopy, Superseded
from adam_async.parameter_server.replication.local_copy import (
    Bundle,
    CopyPiece,
    Effect,
    LocalCopy,
    Message,
    ReadRecord,
    Removed,
    Stopped,
)
from adam_async.parameter_server.replication.log import Log
from adam_async.parameter_server.replication.primary import Primary
from adam_async.parameter_server.replication.secondary import Secondary
from adam_async.parameter_server.replication.violations import Violation
from adam_async.run.bundle_record import BundleRecord, Member


class BundleMember:
    """One server's copy of a bundle. After each call the shell carries out `take_effects`.

    Args:
        me: Node and incarnation of this server.
        record: The bundle's record in the cluster map. If this server is in sync, it begins with the first
            state of the bundle, like all members in sync.
    """

    def __init__(self, me: Member, bundle: Bundle, record: BundleRecord) -> None:
        self._copy = LocalCopy(me, bundle, record)
        self._links: set[Member] = set()
        self._waiting: dict[Member, Begin] = {}
        """Newest `Begin` of each primary, which waits for a newer record. It came on a link that the primary
        dialled, so the end of a link that this member dialled does not remove it."""
        self._primary: Primary | None = None
        if me in record.in_sync:
            self._copy.drop(pieces=bundle.pieces)
        self._secondary = Secondary(self._copy)
        self._choose_role()

    def __repr__(self) -> str:
        role = "primary" if self.is_primary else "member"
        return f"<BundleMember {self._copy.me} {role} of {self._copy.record} {self.log}>"

    # --- questions ---------------------------------------------------------------------------

    @property
    def me(self) -> Member:
        """Node and incarnation of this server."""
        return self._copy.me

    @property
    def record(self) -> BundleRecord:
        """The newest record that this member has seen in the cluster map."""
        return self._copy.record

    @property
    def log(self) -> Log:
        """The log, for reading."""
        return self._copy.log

    @property
    def is_whole(self) -> bool:
        """Whether this member has all pieces of the state."""
        return self._copy.is_whole

    @property
    def is_primary(self) -> bool:
        """Whether this member is the primary, as far as it knows."""
        return self._primary is not None

    @property
    def is_ordering(self) -> bool:
        """Whether `propose` takes entries: only after `BecamePrimary`, and not during a handover."""
        return self._primary is not None and self._primary.is_ordering

    @property
    def held_bytes(self) -> int:
        """Size of all entries in the log, in bytes."""
        return self.log.nbytes

    def applies_to(self, piece: int, position: int) -> bool:
        """Return whether an entry is still to be applied to a piece that this member has."""
        pieces = self._copy.pieces
        return piece < len(pieces) and position > pieces[piece]

    def position_of(self, piece: int) -> int:
        """Return the position of the last entry in a piece.

        The member must be whole, and between two entries.
        """
        # A piece may be newer than the applied position, because this member may have joined with it.
        return max(self.log.applied, self._copy.pieces[piece])

    def waits_for(self) -> tuple[Member, ...]:
        """Return the members without the last entry that its commit waits for; none on a secondary."""
        return self._primary.waits_for() if self._primary is not None else ()

    def why_not_committing(self) -> str:
        """Return why the last entry is not committed; empty if it is, and on a secondary."""
        return self._primary.why_not_committing() if self._primary is not None else ""

    def joining_pieces(self) -> dict[Member, int]:
        """Return the number of pieces that each joining member has; none on a secondary."""
        return self._primary.joining_pieces() if self._primary is not None else {}

    def laggards(self, budget_bytes: int) -> tuple[Member, ...]:
        """Return the members that make the log exceed a budget; the primary may strike them out."""
        return self._primary.laggards(budget_bytes) if self._primary is not None else ()

    def take_effects(self) -> list[Effect]:
        """Return the effects since the last call."""
        effects, self._copy.effects = self._copy.effects, []
        return effects

    # --- the record --------------------------------------------------------------------------

    def record_changed(self, record: BundleRecord) -> None:
        """Take the record of the cluster map, also after a proposal of this member; ignore older records."""
        copy, before = self._copy, self._copy.record
        if record.changed <= before.changed:
            return
        # The map has another version than the proposal expects, so the proposal took effect or never will.
        copy.record, copy.proposed = record, None
        was_primary = self._primary is not None
        if record.generation > before.generation or (was_primary and record.primary != copy.me):
            if was_primary:
                self._primary = None
                copy.effects.append(Stopped(record.generation))
            self._secondary = Secondary(copy)
            self._choose_role()
        elif self._primary is not None:
            self._primary.record_changed()
        else:
            self._secondary.record_changed()
        if copy.me in before.members and copy.me not in record.members:
            copy.drop()
            copy.effects.append(Removed())
        self._begin_waiting()

    def _choose_role(self) -> None:
        if self._copy.record.primary == self._copy.me:
            self._primary = Primary(self._copy, self._links)

    def outcome_unknown(self) -> None:
        """Repeat the proposal: the controllers gave no outcome, and the map no newer record."""
        self._copy.repeat_proposal()

    def conflicted(self, expected: int) -> None:
        """Drop a proposal that never takes effect, although the record still has the expected version.

        The reason is that an invited server is lost, or that the store has failed or was deleted. Another
        proposal may take effect without the invitation.
        """
        proposed, record = self._copy.proposed, self._copy.record
        if proposed is not None and record.changed == expected:
            self._copy.proposed = None
            if self._primary is not None and not {*proposed.joining} <= {*record.members}:
                self._primary.drop_invites()

    def take_over(self) -> None:
        """Propose to become the primary, in place of the silent one."""
        if self._primary is None:
            self._secondary.take_over()

    def strike_out(self, member: Member) -> None:
        """Take a silent member out of the record, as the primary."""
        if self._primary is not None:
            self._primary.strike_out(member)

    def invite(self, member: Member) -> None:
        """Let a server join, as the primary."""
        if self._primary is not None:
            self._primary.invite(member)

    def hand_over(self, member: Member) -> None:
        """Let a member in sync become the primary, once it has applied all entries; ordering pauses."""
        if self._primary is not None:
            self._primary.hand_over(member)

    def cancel_hand_over(self) -> None:
        """Order entries again, unless the handover is already proposed to the map."""
        if self._primary is not None:
            self._primary.cancel_hand_over()

    # --- entries -----------------------------------------------------------------------------

    def propose(self, content: Any, nbytes: int) -> int:
        """Append an entry, as the primary; return its position. `is_ordering` permits it."""
        assert self._primary is not None, "only the primary proposes entries"
        return self._primary.propose(content, nbytes)

    def applied(self, position: int) -> None:
        """Record that the shell has applied the next entry."""
        assert position == self.log.applied + 1 <= self.log.committed, f"{position}, with {self.log}"
        self.log.applied = position
        if self._primary is not None:
            self._primary.advance()

    def piece_copied(self, asked: CopyPiece, position: int, content: Any, nbytes: int) -> None:
        """Send a piece that the core requested. `position` is that of the last entry in it."""
        if self._primary is not None:
            self._primary.piece_copied(asked, position, content, nbytes)

    def wants_piece(self, asked: CopyPiece) -> bool:
        """Return whether the session in which a piece was requested is still the present session."""
        return self._primary is not None and self._primary.wants_piece(asked)

    def report(self) -> None:
        """Acknowledge entries, or send watermarks. The shell calls it once in an iteration of its loop."""
        if self._primary is not None:
            self._primary.report()
        else:
            self._secondary.report()

    # --- links and messages ------------------------------------------------------------------

    def link_up(self, member: Member) -> None:
        """Note a new link that this member dialled; it takes the place of an earlier one."""
        self._links.add(member)
        if self._primary is not None:
            self._primary.link_up(member)

    def link_lost(self, member: Member) -> None:
        """Note that a link that this member dialled has ended."""
        self._links.discard(member)
        if self._primary is not None:
            self._primary.link_lost(member)

    def received(self, sender: Member, message: Message, content: Any = None) -> None:
        """Take a message from a link.

        Args:
            sender: Node and incarnation of the link's other end.
            content: Whole content of a `Copy` or `PieceCopy`, of `nbytes` bytes.

        Raises:
            Violation: No correct member sends this message. The state is unchanged.
        """
        record = self._copy.record
        if isinstance(message, Superseded):
            if message.generation > record.generation and sender in record.members:
                self._copy.effects.append(ReadRecord(message.generation))
        elif message.generation < record.generation:
            self._refuse_old(sender, message)
        elif isinstance(message, Begin) and message.version > record.changed:
            known = self._waiting.get(sender, message)
            self._waiting[sender] = max(known, message, key=lambda begin: (begin.generation, begin.session))
        elif message.generation > record.generation:
            raise Violation("generation", f"{message.generation}, and the record is {record}")
        elif isinstance(message, Begun | Held):
            if self._primary is None:
                raise Violation("role", f"{type(message).__name__} for a member that is not the primary")
            self._primary.received(sender, message)
        else:
            self._take_from_primary(sender, message, content)

    def expects_piece(self, message: PieceCopy) -> bool:
        """Return whether a piece of the primary is the next one that this member lacks, in this session."""
        is_present = message.generation == self._copy.record.generation and self._primary is None
        return is_present and self._secondary.expects_piece(message)

    def _refuse_old(
        self, sender: Member, message: Begin | Begun | Copy | Committed | Held | PieceCopy
    ) -> None:
        if not isinstance(message, Begun | Held):
            bundle = self._copy.bundle
            self._copy.send(
                sender,
                Superseded(store=bundle.store, home=bundle.home, generation=self._copy.record.generation),
            )

    def _take_from_primary(
        self, sender: Member, message: Begin | Copy | Committed | PieceCopy, content: Any
    ) -> None:
        record = self._copy.record
        if sender != record.primary or self._primary is not None:
            raise Violation("role", f"{sender} is not the primary of {record}")
        if isinstance(message, Begin):
            self._secondary.begin(message)
        else:
            self._secondary.received(message, content)

    def _begin_waiting(self) -> None:
        """Take the `Begin` messages that waited for a newer record; drop an invalid one."""
        waiting, self._waiting = self._waiting, {}
        for sender, begin in waiting.items():
            try:
                self.received(sender, begin)
            except Violation:
                continue
