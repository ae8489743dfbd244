"""A bundle keeps each committed entry on all members in sync, whichever of them is the primary."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.messages.replication import Begin, Begun, Committed, Copy, Held, PieceCopy
from adam_async.parameter_server.replication import primary
from adam_async.parameter_server.replication.local_copy import Bundle, Removed, StartAnew, Stopped, Violation
from adam_async.parameter_server.replication.member import BundleMember
from tests.adam_async.parameter_server.replication.scenarios import (
    a_joining_member_has_the_tail_of_earlier_primaries_before_it_is_added,
    another_entry_takes_the_place_of_an_uncommitted_one_and_of_all_behind_it,
)
from tests.adam_async.parameter_server.replication.small_bundle import A, B, C, SmallBundle


def test_one_copy_commits_at_once():
    bundle = SmallBundle(A)

    bundle.propose(A, "x", "y")

    assert bundle.applied[A] == ["x", "y"]
    assert bundle[A].held_bytes == 0


def test_an_entry_is_committed_once_all_members_in_sync_hold_it():
    bundle = SmallBundle(A, B, C)
    bundle[A].link_lost(C)

    bundle.propose(A, "x")

    assert bundle.applied[A] == bundle.applied[B] == []
    assert bundle[A].primary.waits_for() == (C,)
    assert bundle[A].primary.why_not_committing() == "entry 1 waits for c"

    bundle[A].link_up(C)
    bundle.settle()

    assert bundle.applied == {A: ["x"], B: ["x"], C: ["x"]}
    assert bundle[A].primary.why_not_committing() == ""


def test_below_min_in_sync_an_entry_waits_and_the_reason_is_named():
    bundle = SmallBundle(A, B, min_in_sync=2)
    bundle.lose(B)
    bundle[A].primary.strike_out(B)
    bundle.settle()
    bundle.accept(A)

    bundle.propose(A, "x")

    assert bundle.applied[A] == []
    assert bundle[A].primary.why_not_committing() == "1 in sync, 2 needed (min_in_sync)"
    assert bundle[A].primary.waits_for() == (), "pieces for a joining server must not wait for this entry"


def test_a_struck_out_member_counts_until_the_map_confirms_it():
    bundle = SmallBundle(A, B)
    bundle.lose(B)
    bundle[A].primary.strike_out(B)

    bundle.propose(A, "x")
    assert bundle.applied[A] == []

    bundle.accept(A)
    assert bundle.applied[A] == ["x"]


def test_a_proposal_of_unknown_outcome_is_repeated_as_it_was():
    bundle = SmallBundle(A, B)
    bundle[A].primary.strike_out(B)
    bundle.settle()

    bundle[A].repeat_proposal()
    bundle.settle()

    first, second = bundle.proposals(A)
    assert first == second
    assert first.expected == 1
    assert first.record.in_sync == (A,)


def test_a_joining_member_counts_from_the_moment_of_its_proposal():
    bundle = SmallBundle(A, outside=(B,))
    bundle.propose(A, "x")
    bundle[A].primary.invite(B)
    bundle.settle()
    bundle.accept(A)
    bundle.change(to=(A, B))
    bundle.settle()
    assert bundle.proposals(A)[-1].record.in_sync == (A, B)

    bundle.propose(A, "y", deliver=False)

    assert bundle.applied[A] == ["x"]
    bundle.settle()
    assert bundle.applied == {A: ["x", "y"], B: ["x", "y"]}


def test_after_two_successive_losses_an_acknowledged_entry_is_there():
    bundle = SmallBundle(A, B, C)
    bundle.applies = False
    bundle.propose(A, "x", deliver=False)
    # Both hold the entry, and do not know that it is committed.
    bundle[B].received(*bundle.waiting[B].popleft())
    bundle[C].received(*bundle.waiting[C].popleft())
    bundle.lose(A)
    bundle.change(generation=2, in_sync=(B, C))
    begin = next(message for _, message, _ in bundle.waiting[C] if isinstance(message, Begin))
    bundle[C].received(B, begin)
    bundle.lose(B)
    bundle.applies = True

    bundle.change(generation=3, in_sync=(C,))

    assert bundle.applied[C] == ["x"]


def test_an_invited_server_that_is_lost_before_it_joins_blocks_no_later_change():
    bundle = SmallBundle(A, B)
    bundle[A].primary.invite(C)
    bundle.carry_out(A)
    bundle[A].primary.strike_out(B)
    bundle.carry_out(A)
    assert bundle.proposals(A)[-1].record.joining == (C,)

    bundle[A].conflicted(bundle.record.changed)
    bundle.carry_out(A)

    last = bundle.proposals(A)[-1].record
    assert (last.in_sync, last.joining) == ((A,), ())


def test_a_change_of_a_deleted_store_is_not_proposed_again():
    bundle = SmallBundle(A, B)
    bundle[A].primary.strike_out(B)
    bundle.carry_out(A)

    bundle[A].conflicted(bundle.record.changed)
    bundle.carry_out(A)

    assert len(bundle.proposals(A)) == 1


def test_a_conflict_with_a_newer_record_changes_nothing():
    bundle = SmallBundle(A, B)
    bundle.change(lost=("c",))
    bundle[A].primary.invite(C)
    bundle.carry_out(A)
    before = len(bundle.proposals(A))

    bundle[A].conflicted(bundle.record.changed - 1)
    bundle.carry_out(A)

    assert len(bundle.proposals(A)) == before
    bundle.accept(A)
    assert bundle.record.joining == (C,)


@pytest.mark.parametrize("change", ["link_up", "link_lost"])
def test_a_session_that_waits_for_the_record_begins_though_a_link_in_the_other_direction_changes(change):
    bundle = SmallBundle(A, B, C)
    bundle.lose(A)
    bundle.change(to=(B,), generation=2, in_sync=(B, C))
    bundle.settle()  # the begin of the session is earlier at C than the record
    getattr(bundle[C], change)(B)

    bundle.change(to=(C,))
    bundle.settle()
    bundle.propose(B, "x")

    assert bundle.applied == {B: ["x"], C: ["x"]}


def test_another_entry_takes_the_place_of_an_uncommitted_one_and_of_all_behind_it():
    another_entry_takes_the_place_of_an_uncommitted_one_and_of_all_behind_it()


def test_a_primary_that_was_replaced_commits_nothing_and_stops_when_it_learns_that():
    bundle = SmallBundle(A, B)
    bundle[B].take_over()
    bundle.carry_out(B)
    bundle.accept(B)
    bundle.settle()

    bundle.propose(A, "x")

    assert bundle.applied[A] == []
    bundle[A].record_changed(bundle.record)
    bundle.settle()
    assert Stopped() in bundle.events[A]
    assert Removed() in bundle.events[A]
    assert bundle[A].held_bytes == 0


@pytest.mark.parametrize("me", [B, ("a", 2)])
def test_a_member_outside_in_sync_does_not_take_over(me):
    bundle = SmallBundle(A, outside=(me,))
    bundle.change(joining=(me,) if me == B else ())

    bundle[me].take_over()
    bundle.carry_out(me)

    assert bundle.proposals(me) == []


def test_an_entry_in_a_piece_is_not_applied_to_it_again_and_none_to_a_lacking_piece():
    bundle = SmallBundle(A, outside=(B,))
    bundle.applies = False
    bundle.propose(A, "x")
    bundle[A].link_lost(B)
    bundle.change(joining=(B,))
    bundle[A].link_up(B)
    assert not bundle[B].applies_to(0, 1)
    bundle[A].applied(1)  # before the piece is copied, and after the entry was sent

    bundle.settle()

    assert not bundle[B].applies_to(0, 1)
    assert bundle[B].applies_to(0, 2)


def test_a_joining_member_applies_no_entry_that_its_primary_has_not_applied():
    bundle = SmallBundle(A, outside=(B,))
    bundle.applies = False
    bundle.propose(A, "x")
    bundle.change(joining=(B,))
    for me in (B, A):  # the begin of a session, and its answer
        sender, message, content = bundle.waiting[me].popleft()
        bundle[me].received(sender, message, content)
        bundle.carry_out(me)

    _, entry, _ = bundle.waiting[B][0]
    assert (bundle[A].log.committed, entry.position, entry.committed) == (1, 1, 0)


def test_a_joining_member_without_pieces_is_not_added():
    bundle = SmallBundle(A, outside=(B,))
    bundle.change(joining=(B,))
    for me in (B, A):  # the begin of a session, and its answer
        sender, message, content = bundle.waiting[me].popleft()
        bundle[me].received(sender, message, content)
        bundle.carry_out(me)

    assert bundle.proposals(A) == []
    bundle.settle()
    assert bundle.proposals(A)[-1].record.in_sync == (A, B)


def test_a_process_that_was_started_again_is_no_member():
    bundle = SmallBundle(A, B)
    again = BundleMember(("b", 2), Bundle(store="s", home="a", pieces=1, min_in_sync=1), bundle.record)
    again.take_over()

    assert not again.is_whole
    assert again.take_effects() == []


def test_a_handover_waits_for_the_entries_that_are_not_applied():
    bundle = SmallBundle(A, B)
    bundle.applies = False
    bundle.propose(A, "x")
    bundle[A].primary.hand_over(B)
    bundle.carry_out(A)

    assert bundle.proposals(A) == []


def test_a_session_waits_for_the_record_that_its_primary_knows():
    bundle = SmallBundle(A, B, C)
    bundle.lose(A)
    bundle.change(to=(B,), generation=2, in_sync=(B, C))
    bundle.settle()
    bundle.propose(B, "x")
    assert bundle.applied[B] == []

    bundle[C].record_changed(bundle.record)
    bundle.settle()

    assert bundle.applied[B] == bundle.applied[C] == ["x"]


def test_a_handover_pauses_the_order_until_the_map_has_it():
    bundle = SmallBundle(A, B)
    bundle.propose(A, "x")
    bundle[A].primary.hand_over(B)
    bundle.settle()
    assert not bundle[A].is_ordering

    bundle.accept(A)
    bundle[B].record_changed(bundle.record)
    bundle.settle()

    assert not bundle[A].is_primary
    assert bundle[B].is_ordering
    bundle.propose(B, "y")
    assert bundle.applied == {A: ["x", "y"], B: ["x", "y"]}


def test_a_handover_that_waits_can_be_cancelled():
    bundle = SmallBundle(A, B)
    bundle.applies = False
    bundle.propose(A, "x")
    bundle[A].primary.hand_over(B)
    bundle.settle()
    assert bundle.proposals(A) == []

    bundle[A].primary.cancel_hand_over()

    assert bundle[A].is_ordering


def test_a_member_that_makes_the_log_exceed_its_budget_is_named():
    bundle = SmallBundle(A, B, C)
    bundle[A].link_lost(C)

    bundle.propose(A, *range(5))

    assert bundle[A].held_bytes == 50
    assert bundle[A].primary.laggards(50) == ()
    assert bundle[A].primary.laggards(49) == (C,)


def test_applied_entries_stay_until_all_members_have_applied_them():
    bundle = SmallBundle(A, B)
    bundle.applies = False
    bundle.propose(A, "x")
    bundle[A].applied(1)
    assert bundle[A].log.start == 0

    bundle[B].applied(1)
    bundle.settle()

    assert bundle[A].log.start == bundle[B].log.start == 1


def test_a_member_that_joins_over_a_new_link_drops_what_came_over_the_old_one():
    bundle = SmallBundle(A, outside=(B,), pieces=2)
    bundle.propose(A, "x")
    bundle.change(joining=(B,))
    bundle[A].link_lost(B)
    bundle[A].link_up(B)
    bundle.settle()

    assert bundle.events[B].count(StartAnew()) == 2
    assert bundle.applied[B] == ["x"]


def deliver(bundle, me, at=0):
    """Deliver one of the messages on their way to a member."""
    sender, message, content = bundle.waiting[me][at]
    del bundle.waiting[me][at]
    bundle[me].received(sender, message, content)
    bundle.carry_out(me)


def on_their_way(bundle, me):
    return [message for _, message, _ in bundle.waiting[me]]


def test_a_piece_waits_until_the_member_holds_the_entries_in_it():
    bundle = SmallBundle(A, outside=(B,))
    bundle.change(joining=(B,))
    deliver(bundle, B)
    bundle.propose(A, "x", deliver=False)
    deliver(bundle, A)  # the member has begun: its first piece is copied, with the entry in it

    assert [type(message) for message in on_their_way(bundle, B)] == [Copy]
    bundle.settle()
    assert bundle.applied[B] == ["x"]
    assert bundle.proposals(A)[-1].record.in_sync == (A, B)


def test_a_joining_member_applies_no_entry_after_the_piece_on_its_way():
    bundle = SmallBundle(A, outside=(B,))
    bundle.change(joining=(B,))
    deliver(bundle, B)
    deliver(bundle, A)
    bundle.propose(A, "x", "y", deliver=False)

    piece, *entries = on_their_way(bundle, B)
    assert (type(piece), [type(entry) for entry in entries]) == (PieceCopy, [Copy, Copy])
    assert [entry.committed for entry in entries] == [0, 0]
    for _ in entries:
        deliver(bundle, B, at=1)  # past the piece
    bundle.settle()
    assert bundle.applied[B] == ["x", "y"]
    assert bundle.proposals(A)[-1].record.in_sync == (A, B)


def test_a_joining_member_needs_the_tail_of_earlier_primaries():
    a_joining_member_has_the_tail_of_earlier_primaries_before_it_is_added()


def session(generation=1, number=1):
    return {"store": "s", "home": "a", "generation": generation, "session": number}


@pytest.mark.parametrize(
    ("sender", "to", "message", "rule"),
    [
        (C, B, Committed(**session(), committed=0, applied_by_all=0), "role"),
        (B, A, Committed(**session(), committed=0, applied_by_all=0), "role"),
        (A, B, Committed(**session(number=9), committed=0, applied_by_all=0), "session"),
        (A, B, Committed(**session(generation=2), committed=0, applied_by_all=0), "generation"),
        (A, B, Committed(**session(), committed=0, applied_by_all=0), "committed"),
        (A, B, Committed(**session(), committed=1, applied_by_all=2), "applied"),
        (A, B, Begin(**session(number=9), version=1, start=0, anew=True), "begin"),
        (B, A, Held(**session(), position=7, applied=1, pieces=1), "position"),
        (B, A, Held(**session(), position=1, applied=2, pieces=1), "applied"),
        (B, A, Held(**session(), position=1, applied=1, pieces=2), "pieces"),
        (B, A, Begun(**session(), position=1, applied=1), "answer"),
        (C, B, Held(**session(), position=1, applied=1, pieces=1), "role"),
        (A, B, PieceCopy(**session(), piece=1, position=1, nbytes=1), "piece"),
    ],
)
def test_a_message_that_no_correct_member_sends_is_refused(sender, to, message, rule):
    bundle = SmallBundle(A, B, C)
    bundle.propose(A, "x")

    with pytest.raises(Violation) as caught:
        bundle[to].received(sender, message)

    assert caught.value.rule == rule


@pytest.mark.parametrize(("position", "origin"), [(3, 1), (1, 1), (2, 2)])
def test_an_entry_that_does_not_follow_the_last_one_is_refused(position, origin):
    bundle = SmallBundle(A, B)
    bundle.propose(A, "x")
    copy = Copy(**session(), position=position, origin=origin, nbytes=1, committed=1, applied_by_all=0)

    with pytest.raises(Violation, match=r"position|origin"):
        bundle[B].received(A, copy, "y")


def dump(value):
    """Everything that a member remembers, as text."""
    if hasattr(value, "__struct_fields__") or isinstance(value, int | str | None):
        return repr(value)
    if isinstance(value, dict):
        return {repr(key): dump(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [dump(each) for each in value]
    names = getattr(value, "__slots__", ()) or vars(value)
    # The copy of a role is its member.
    return {name: dump(getattr(value, name)) for name in names if name != "_copy"}


SMALL = st.integers(0, 6)


def messages(kind):
    """Messages of a kind with small numbers, of which some are right."""
    fields = {"store": st.just("s"), "home": st.just("a")}
    for field in msgspec.structs.fields(kind):
        if field.name not in fields:
            fields[field.name] = st.booleans() if field.type is bool else SMALL
    return st.builds(kind, **fields)


ANY = st.one_of(*map(messages, (Begin, Begun, Copy, Committed, Held, PieceCopy)))


@given(
    st.sampled_from(("plain", "joining", "taken over")),
    st.lists(st.tuples(st.sampled_from((A, B, C)), st.sampled_from((A, B, C)), ANY), max_size=12),
)
def test_any_message_is_taken_or_refused_and_a_refused_one_changes_nothing(kind, received):
    bundle = SmallBundle(A, B, outside=(C,), pieces=2)
    bundle.propose(A, "x", "y")
    if kind == "joining":
        bundle.change(joining=(C,))
    elif kind == "taken over":
        bundle.change(generation=2, in_sync=(B, A), joining=(C,))
    for to, sender, message in received:
        before = dump(bundle[to])
        try:
            bundle[to].received(sender, message, "content")
        except Violation:
            assert dump(bundle[to]) == before
        log = bundle[to].log
        assert log.start <= log.applied <= log.committed <= log.last
        bundle[to].take_effects()


def test_a_primary_remembers_the_sessions_of_a_bounded_number_of_members(monkeypatch):
    monkeypatch.setattr(primary, "MOST_SESSIONS", 4)
    bundle = SmallBundle(A, B, C)
    role = bundle[A].primary
    for _ in range(20):
        bundle[A].link_lost(B)
        bundle[A].link_up(B)
    assert list(role._sessions) == [C, B]
    for number in range(20):
        role._sessions[f"left-{number}", 1] = number
    bundle[A].link_lost(C)
    bundle[A].link_up(C)
    assert len(role._sessions) == 5
    assert {B, C} < role._sessions.keys()
    bundle.propose(A, "x")
    bundle.settle()
    assert bundle.applied == {A: ["x"], B: ["x"], C: ["x"]}
