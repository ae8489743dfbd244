"""Pure: one member of a bundle; `replication` has the theory of operation."""

from typing import Any

from adam_async.messages.replication import Begin, Begun, Committed, Copy, Held, PieceCopy
from adam_async.parameter_server.replication.local_copy import (
    Bundle,
    Effect,
    LocalCopy,
    Message,
    Removed,
    Stopped,
    Violation,
)
from adam_async.parameter_server.replication.primary import Primary
from adam_async.parameter_server.replication.secondary import Secondary
from adam_async.run.store_record import BundleRecord, Member


class BundleMember(LocalCopy):
    """One server's copy of a bundle. After each call the shell carries out `take_effects`.

    Args:
        me: Node and incarnation of this server.
        record: The bundle's record in the cluster map. If this server is in sync, its copy begins with the
            bundle's first state, like the copies of all members in sync.
    """

    def __init__(self, me: Member, bundle: Bundle, record: BundleRecord) -> None:
        super().__init__(me, bundle, record)
        self._links: set[Member] = set()
        self._waiting: dict[Member, Begin] = {}
        """Newest `Begin` of each primary; the message waits for a newer record. The `Begin` came on a link
        that the primary dialled, so it survives the end of a link that this member dialled."""
        self.primary: Primary | None = None
        """Role of this member; set if the member believes that it is the primary."""
        if me in record.in_sync:
            self.drop(pieces=bundle.pieces)
        self._secondary = Secondary(self)
        self._choose_role()

    def __repr__(self) -> str:
        role = "primary" if self.is_primary else "member"
        return f"<BundleMember {self.me} {role} of {self.record} {self.log}>"

    # --- questions ---------------------------------------------------------------------------

    @property
    def is_primary(self) -> bool:
        """Whether this member believes that it is the primary."""
        return self.primary is not None

    @property
    def is_ordering(self) -> bool:
        """Whether `propose` takes entries: only after `BecamePrimary`, and not during a handover."""
        return self.primary is not None and self.primary.is_ordering

    @property
    def held_bytes(self) -> int:
        """Size of all entries in the log, in bytes."""
        return self.log.nbytes

    def applies_to(self, piece: int, position: int) -> bool:
        """Return whether an entry is still to be applied to a piece that this member has."""
        pieces = self.pieces
        return piece < len(pieces) and position > pieces[piece]

    def position_of(self, piece: int) -> int:
        """Return the position of the last entry in a piece.

        The member must be whole, and between two entries.
        """
        # A piece may be newer than the applied position, because this member may have joined with it.
        return max(self.log.applied, self.pieces[piece])

    def take_effects(self) -> list[Effect]:
        """Return the effects since the last call."""
        effects, self.effects = self.effects, []
        return effects

    # --- the record --------------------------------------------------------------------------

    def record_changed(self, record: BundleRecord) -> None:
        """Take the record of the cluster map, also after a proposal of this member; ignore older records."""
        before = self.record
        if record.changed <= before.changed:
            return
        # The map has another version than the proposal expects, so the proposal took effect or never will.
        self.record, self.proposed = record, None
        was_primary = self.primary is not None
        if record.generation > before.generation or (was_primary and record.primary != self.me):
            if was_primary:
                self.primary = None
                self.effects.append(Stopped())
            self._secondary = Secondary(self)
            self._choose_role()
        elif self.primary is not None:
            self.primary.record_changed()
        else:
            self._secondary.record_changed()
        if self.me in before.members and self.me not in record.members:
            self.drop()
            self.effects.append(Removed())
        self._begin_waiting()

    def _choose_role(self) -> None:
        if self.record.primary == self.me:
            self.primary = Primary(self, self._links)

    def conflicted(self, expected: int) -> None:
        """Drop a proposal that never takes effect, although the record still has the expected version.

        The map refuses the record if an invited server is lost, or if the store has failed or was deleted.
        Another proposal may take effect without the invitation.
        """
        proposed, record = self.proposed, self.record
        if proposed is not None and record.changed == expected:
            self.proposed = None
            if self.primary is not None and not {*proposed.joining} <= {*record.members}:
                self.primary.drop_invites()

    def take_over(self) -> None:
        """Propose to become the primary instead of the silent one."""
        if self.primary is None:
            self._secondary.take_over()

    # --- entries -----------------------------------------------------------------------------

    def propose(self, content: Any, nbytes: int) -> int:
        """As the primary, append an entry and return its position. `is_ordering` permits it."""
        assert self.primary is not None, "only the primary proposes entries"
        return self.primary.propose(content, nbytes)

    def applied(self, position: int) -> None:
        """Record that the shell has applied the next entry."""
        assert position == self.log.applied + 1 <= self.log.committed, f"{position}, with {self.log}"
        self.log.applied = position
        if self.primary is not None:
            self.primary.advance()

    def report(self) -> None:
        """Acknowledge entries, or send watermarks. The shell calls it once in an iteration of its loop."""
        if self.primary is not None:
            self.primary.report()
        else:
            self._secondary.report()

    # --- links and messages ------------------------------------------------------------------

    def link_up(self, member: Member) -> None:
        """Record a new link that this member dialled; it replaces an earlier link."""
        self._links.add(member)
        if self.primary is not None:
            self.primary.link_up(member)

    def link_lost(self, member: Member) -> None:
        """Record the end of a link that this member dialled."""
        self._links.discard(member)
        if self.primary is not None:
            self.primary.link_lost(member)

    def received(self, sender: Member, message: Message, content: Any = None) -> None:
        """Take a message from a link.

        Args:
            sender: Node and incarnation of the link's other end.
            content: Whole content of a `Copy` or `PieceCopy`, of `nbytes` bytes.

        Raises:
            Violation: No correct member sends this message. The state is unchanged.
        """
        record = self.record
        if message.generation < record.generation:
            return  # its sender learns from the cluster map of its replacement
        if isinstance(message, Begin) and message.version > record.changed:
            known = self._waiting.get(sender, message)
            self._waiting[sender] = max(known, message, key=lambda begin: (begin.generation, begin.session))
        elif message.generation > record.generation:
            raise Violation("generation", f"{message.generation}, and the record is {record}")
        elif isinstance(message, Begun | Held):
            if self.primary is None:
                raise Violation("role", f"{type(message).__name__} for a member that is not the primary")
            self.primary.received(sender, message)
        else:
            self._take_from_primary(sender, message, content)

    def expects_piece(self, message: PieceCopy) -> bool:
        """Return whether a piece of the primary is the next one that this member lacks in this session."""
        is_present = message.generation == self.record.generation and self.primary is None
        return is_present and self._secondary.expects_piece(message)

    def _take_from_primary(
        self, sender: Member, message: Begin | Copy | Committed | PieceCopy, content: Any
    ) -> None:
        record = self.record
        if sender != record.primary or self.primary is not None:
            raise Violation("role", f"{sender} is not the primary of {record}")
        if isinstance(message, Begin):
            self._secondary.begin(message)
        else:
            self._secondary.received(message, content)

    def _begin_waiting(self) -> None:
        """Take the `Begin` messages that waited for a newer record; drop an invalid message."""
        waiting, self._waiting = self._waiting, {}
        for sender, begin in waiting.items():
            try:
                self.received(sender, begin)
            except Violation:
                continue
