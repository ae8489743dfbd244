"""The replication core without one of its safeguards: each row patches one named function of it."""

import dataclasses

import msgspec

from adam_async.messages.replication import Copy, Held, PieceCopy
from adam_async.parameter_server.replication.local_copy import LocalCopy, ProposeRecord
from adam_async.parameter_server.replication.log import Log
from adam_async.parameter_server.replication.member import BundleMember
from adam_async.parameter_server.replication.primary import Primary
from adam_async.parameter_server.replication.secondary import Secondary
from tests.ablations.patches import replaces, replaces_property
from tests.adam_async.controller.consensus.ablations import Ablation
from tests.adam_async.parameter_server.replication.scenarios import (
    a_joining_member_has_the_tail_of_earlier_primaries_before_it_is_added,
    another_entry_takes_the_place_of_an_uncommitted_one_and_of_all_behind_it,
)

FAR = 1 << 50
"""Position beyond every log."""


@replaces(Primary, "_counted")
def commit_alone(*_):
    """Commit without waiting for another member."""
    return set()


@replaces(Secondary, "received")
def apply_uncommitted(received, self, message, content):
    """Apply each entry once it is there."""
    if not isinstance(message, PieceCopy):
        message = msgspec.structs.replace(message, committed=FAR)
    received(self, message, content)


@replaces(BundleMember, "_refuse_old")
def acknowledge_old_generations(_, self, sender, message):
    """Acknowledge the entries of an older generation's primary."""
    if isinstance(message, Copy):
        fields = {
            name: getattr(message, name) for name in ("store", "home", "generation", "session", "position")
        }
        applied = min(self.log.applied, message.position)
        self._copy.send(sender, Held(**fields, applied=applied, pieces=self._copy.bundle.pieces))


@replaces(Log, "put")
def keep_conflicting_entries(put, self, entry):
    """Keep the own entry at a position."""
    if entry.position > self.last:
        put(self, entry)


@replaces(Log, "put")
def keep_entries_after_conflict(put, self, entry):
    """Keep the entries after a conflicting one."""
    later = self.after(entry.position) if entry.position < self.last else []
    put(self, entry)
    if self.last == entry.position:
        for each in later:
            self._add(each)


@replaces(Secondary, "begin")
def drop_tail(begin, self, message):
    """Drop the uncommitted entries at the begin of a session."""
    if message.session > self._session:
        self._copy.log._drop_from(self._copy.log.committed + 1)
        self._equal = self._copy.log.committed
    begin(self, message)


@replaces(Secondary, "begin")
def count_tail_as_equal(begin, self, message):
    """Take the own tail for the primary's."""
    if message.session > self._session:
        self._equal = self._copy.log.last
    begin(self, message)


@replaces(Secondary, "take_over")
def take_over_from_outside(take_over, self):
    """Let each member become the primary."""
    copy = self._copy
    if copy.me in copy.record.in_sync or copy.proposed is not None:
        take_over(self)
        return
    record = copy.record
    copy.propose(
        msgspec.structs.replace(
            record, generation=record.generation + 1, in_sync=(copy.me, *record.in_sync[1:]), joining=()
        )
    )


def as_if_the_process_had_not_changed(record, me):
    """Return a record with this process in place of an earlier one of its node."""
    names = {node for node, _ in record.in_sync}
    if me[0] not in names:
        return record
    in_sync = tuple(me if node == me[0] else (node, incarnation) for node, incarnation in record.in_sync)
    return msgspec.structs.replace(record, in_sync=in_sync)


@replaces(BundleMember, "__init__")
def start_without_incarnation(init, self, me, bundle, record):
    """Take an earlier process of the node for this one, and begin with its record."""
    init(self, me, bundle, as_if_the_process_had_not_changed(record, me))


@replaces(Primary, "_counted")
def count_members_of_the_map_alone(_, self):
    """Count a joining member only once the map has it in sync."""
    return set(self._copy.record.in_sync) - {self._copy.me}


@replaces(Primary, "_counted")
def count_proposed_members_alone(counted, self):
    """Stop counting a member once its strike-out is proposed."""
    proposed = self._copy.proposed
    return counted(self) if proposed is None else set(proposed.in_sync) - {self._copy.me}


@replaces(Primary, "_has_everything")
def add_without_pieces(_, self, member):
    """Add a joining member that has all entries."""
    peer = self._peers[member]
    return peer.has_begun and peer.held >= max(self._copy.log.committed, self._tail)


@replaces(Primary, "_has_everything")
def add_without_entries(_, self, member):
    """Add a joining member that has all pieces."""
    peer = self._peers[member]
    return peer.has_begun and peer.pieces == self._copy.bundle.pieces


@replaces(Primary, "_has_everything")
def add_without_tail(has_everything, self, member):
    """Add a joining member without the entries that earlier primaries may have committed."""
    tail, self._tail = self._tail, 0
    try:
        return has_everything(self, member)
    finally:
        self._tail = tail


@replaces(Primary, "_commit")
def commit_below_min_in_sync(commit, self):
    """Commit with any number of members in sync."""
    bundle = self._copy.bundle
    self._copy.bundle = dataclasses.replace(bundle, min_in_sync=0)
    try:
        commit(self)
    finally:
        self._copy.bundle = bundle


@replaces(BundleMember, "applies_to")
def apply_again(_, self, piece, position):
    """Apply entries to a piece that has them."""
    return piece < len(self._copy.pieces)


@replaces(Primary, "_watermarks")
def let_joining_members_apply_all(watermarks, self, member, peer):
    """Let a joining member apply all committed entries."""
    return self._copy.log.committed, watermarks(self, member, peer)[1]


@replaces(Primary, "_watermarks")
def let_entries_pass_pieces(watermarks, self, member, peer):
    """Let a joining member apply entries that are not in the piece on its way."""
    at, peer.piece_at = peer.piece_at, None
    try:
        return watermarks(self, member, peer)
    finally:
        peer.piece_at = at


@replaces(Primary, "_send_piece")
def let_pieces_pass_entries(send_piece, self, member, peer):
    """Send a piece before the member holds the entries in it."""
    held, peer.held = peer.held, FAR
    try:
        send_piece(self, member, peer)
    finally:
        peer.held = held


@replaces(Primary, "_applied_by_all")
def drop_own_applied_entries(_, self):
    """Drop entries that this primary has applied."""
    return self._copy.log.applied


@replaces(Primary, "_applied_by_all")
def drop_entries_of_joining_members(_, self):
    """Drop entries that the members in sync have applied."""
    counted = self._counted()
    return max(
        self._copy.log.start,
        min([self._copy.log.applied, *(self._peers[member].applied for member in counted)]),
    )


@replaces(Primary, "_is_present")
def count_answers_of_earlier_links(_, self, peer, message):
    """Take an answer of any session."""
    return peer.has_begun or message.session == peer.session


@replaces(LocalCopy, "repeat_proposal")
def propose_without_version(repeat, self):
    """Set the record whatever version the map has."""
    if self.proposed is not None:
        self.effects.append(ProposeRecord(self.proposed, None))


@replaces(Primary, "_is_flushed")
def hand_over_without_flush(*_):
    """Hand over at once."""
    return True


@replaces_property(Primary, "is_ordering")
def order_during_handover(self):
    """Order entries during a handover."""
    return self._serves


ABLATIONS = (
    Ablation("an entry is committed before all members hold it", commit_alone),
    Ablation("a secondary applies uncommitted entries", apply_uncommitted),
    Ablation("an older generation is accepted", acknowledge_old_generations, seed=1),
    Ablation("a conflicting tail stays", keep_conflicting_entries, seed=51),
    Ablation(
        "the entries after a conflicting one stay",
        keep_entries_after_conflict,
        story=another_entry_takes_the_place_of_an_uncommitted_one_and_of_all_behind_it,
    ),
    Ablation("the tail goes at the begin of a session", drop_tail, seed=7),
    Ablation("the own tail counts as the primary's", count_tail_as_equal, seed=51),
    Ablation("a member outside in_sync takes over", take_over_from_outside, seed=6),
    Ablation("a member is a node without its incarnation", start_without_incarnation, seed=3),
    Ablation("a joining member does not count once it is proposed", count_members_of_the_map_alone, seed=1),
    Ablation(
        "a struck-out member stops counting before the map agrees", count_proposed_members_alone, seed=1
    ),
    Ablation("a joining member is added without all pieces", add_without_pieces, seed=2),
    Ablation("a joining member is added without all entries", add_without_entries, seed=3),
    # A piece waits for the entries in it, so a correct member has the tail soon after its first piece.
    Ablation(
        "a joining member is added without the tail of earlier primaries",
        add_without_tail,
        story=a_joining_member_has_the_tail_of_earlier_primaries_before_it_is_added,
    ),
    Ablation("an entry is committed below min_in_sync", commit_below_min_in_sync, seed=6),
    Ablation("an entry is applied to a piece that has it", apply_again, seed=1),
    Ablation("a joining member applies more than the primary", let_joining_members_apply_all, seed=3),
    Ablation("a joining member applies entries before the piece that lacks them", let_entries_pass_pieces),
    Ablation("a piece is sent before the entries in it are held", let_pieces_pass_entries),
    Ablation("applied entries go before all have applied them", drop_own_applied_entries),
    Ablation("applied entries go before joining members apply them", drop_entries_of_joining_members, seed=1),
    Ablation("an answer of an earlier link is counted", count_answers_of_earlier_links, seed=206),
    Ablation("a record is proposed without its version", propose_without_version, seed=1),
    Ablation("a handover does not flush", hand_over_without_flush, seed=22),
    Ablation("entries are ordered during a handover", order_during_handover, seed=33),
)
