"""Messages and effects of a node: elections, the log, questions, snapshots, membership, handing over."""

from zlib import crc32

import pytest

from adam_async.controller.consensus import (
    Apply,
    Core,
    Done,
    Entry,
    Led,
    Persist,
    Read,
    ReadReady,
    Received,
    Refused,
    Restore,
    Role,
    Saved,
    Send,
    Settings,
    Snapshotted,
    Tick,
    Transfer,
    Unknown,
    Violation,
    bootstrapped,
)
from adam_async.controller.consensus.messages import Append, Appended, AskVote, Chunk, TakeOver, Vote
from tests.adam_async.controller.consensus.small_group import SmallGroup


def kinds(effects):
    return [type(effect) for effect in effects]


def elected(**options):
    group = SmallGroup("abc", **options)
    group.elect("a")
    return group


# --- elections ---------------------------------------------------------------------------------


def test_a_group_of_one_leads_and_commits_as_soon_as_it_is_on_disk():
    group = SmallGroup("a")
    group.slow.add("a")
    group.tick("a")
    assert group["a"].role is Role.CANDIDATE
    group.sync("a")
    assert group["a"].role is Role.LEADER
    assert group.propose("a") == []
    assert kinds(group.sync("a")) == [Apply, Apply, Done]
    assert group["a"].commit == 3


@pytest.mark.parametrize("names", ["abc", "abcde"])
def test_a_majority_elects_a_leader_and_all_apply_what_it_commits(names):
    group = SmallGroup(names)
    group.elect("b")
    group.propose("b", b"one")
    group.deliver()
    assert Done("write", 3) in group.seen["b"]
    group.beat("b")
    for name in names:
        applied = [
            entry.command for effect in group.seen[name] if type(effect) is Apply for entry in effect.entries
        ]
        assert applied == [None, b"one"]
        assert group["b"].leader == "b"


def test_a_minority_elects_nobody_and_raises_no_term():
    group = SmallGroup("abc")
    for _ in range(5):
        group.tick("a")
        group.deliver("a")
    assert group["a"].role is Role.PROBER
    assert group["a"].term == 1


def test_a_vote_is_on_disk_before_it_is_sent():
    group = SmallGroup("abc")
    group.slow.add("b")
    ask = AskVote(sender="a", to="b", term=2, last_index=1, last_term=1, pre=False)
    group.hand(ask)
    assert group.wire == []
    group.sync("b")
    (vote,) = group.take("Vote")
    assert vote.granted


def test_a_vote_is_given_once_in_a_term_also_over_a_restart():
    group = SmallGroup("abc")
    group.hand(AskVote(sender="a", to="b", term=2, last_index=1, last_term=1, pre=False))
    group.restart("b")
    group.hand(AskVote(sender="c", to="b", term=2, last_index=9, last_term=1, pre=False))
    group.hand(AskVote(sender="a", to="b", term=2, last_index=1, last_term=1, pre=False))
    assert [(vote.to, vote.granted) for vote in group.take("Vote")] == [
        ("a", True),
        ("c", False),
        ("a", True),
    ]


@pytest.mark.parametrize(
    ("last_index", "last_term", "granted"), [(2, 2, True), (1, 2, False), (9, 1, False), (1, 3, True)]
)
@pytest.mark.parametrize("pre", [True, False])
def test_a_vote_is_for_a_log_that_ends_as_late_as_ones_own(last_index, last_term, granted, pre):
    group = elected()
    group.now += 10
    group.hand(AskVote(sender="c", to="b", term=5, last_index=last_index, last_term=last_term, pre=pre))
    (vote,) = group.take("Vote", to="c")
    assert (vote.granted, vote.pre, vote.term) == (granted, pre, 5)


def test_a_node_that_hears_a_leader_does_not_answer_a_candidate():
    group = elected()
    group.beat("a")
    for name in "ab":
        group.hand(AskVote(sender="c", to=name, term=9, last_index=9, last_term=9, pre=False))
    assert group.wire == []
    assert group["b"].term == 2


def test_a_leader_that_hears_no_majority_gives_up():
    group = elected()
    group.propose("a", tag="mine")
    group.wire.clear()
    effects = group.tick("a")
    assert group["a"].role is Role.FOLLOWER
    assert effects == [Unknown("mine"), Led(2, None)]


def test_a_leader_of_an_older_term_learns_of_the_newer_one_and_follows():
    group = elected()
    old = Append(sender="a", to="b", term=2, prev_index=2, prev_term=2, entries=(), commit=2, round=0)
    group.elect("b", "bc")
    group.hand(old)
    (answer,) = group.take("Appended")
    assert (answer.to, answer.term, answer.ok) == ("a", 3, False)
    assert group.hand(answer) == [Led(3, None)]
    group.beat("b")
    assert group["a"].leader == "b"


def test_a_message_for_an_earlier_identity_is_ignored():
    group = SmallGroup("abc")
    core = group["a"]
    ask = AskVote(sender="b", to="a/1", term=7, last_index=9, last_term=9, pre=False)
    assert core.handle(Received(ask), now=0.0) == []
    assert core.term == 1


# --- the log -----------------------------------------------------------------------------------


def test_entries_are_on_disk_before_they_are_acknowledged():
    group = elected()
    group.slow.add("b")
    group.propose("a")
    group.hand(*group.take("Append", to="b"))
    assert group.take("Appended") == []
    group.sync("b")
    (answer,) = group.take("Appended")
    assert (answer.ok, answer.match) == (True, 3)


def test_a_leader_sends_before_its_own_disk_is_ready_and_counts_the_others():
    group = elected()
    group.slow.add("a")
    group.propose("a")
    group.deliver("ab")
    assert group["a"].commit == 2
    group.propose("a")
    group.deliver()
    assert group["a"].commit == 4


def test_entries_in_conflict_with_the_leaders_are_replaced():
    group = elected()
    for command in (b"1", b"2", b"3"):
        group.propose("a", command)
    group.wire.clear()
    group.elect("b", "bc")
    group.propose("b", b"new")
    group.deliver("bc")
    group.beat("b")
    group.beat("b")
    assert group.log("a") == group.log("b") == group.log("c") == [(2, None), (3, None), (3, b"new")]


def test_a_lost_message_is_noticed_by_the_next_heartbeat():
    group = elected()
    group.propose("a", b"lost")
    group.wire.clear()
    group.beat("a")
    assert group["a"].commit == 3


def test_no_more_than_a_window_is_sent_ahead_of_answers():
    group = elected(window=4, message_bytes=1)
    for _ in range(20):
        group.propose("a")
    sent = [entry.index for message in group.take("Append", to="b") for entry in message.entries]
    assert sent == [3, 4, 5, 6]


def test_a_follower_commits_only_what_it_knows_to_be_the_same():
    group = elected()
    for _ in range(3):
        group.propose("a")
    group.wire.clear()
    assert group["a"].log.last_index == 5
    heartbeat = Append(sender="b", to="a", term=5, prev_index=2, prev_term=2, entries=(), commit=5, round=0)
    group.hand(heartbeat)
    assert group["a"].commit == 2


def test_entries_are_taken_only_after_an_entry_that_both_have():
    group = elected()
    group.propose("a")
    group.wire.clear()
    after = Append(
        sender="b", to="a", term=5, prev_index=3, prev_term=4, entries=(Entry(4, 5, b"x"),), commit=1, round=0
    )
    group.hand(after)
    (answer,) = group.take("Appended", to="b")
    assert not answer.ok
    assert group.log("a") == [(2, None), (2, b"x")]


def test_an_entry_of_an_earlier_term_is_committed_with_one_of_the_leaders_own():
    """As in figure 8 of the Raft paper: until then, one with a later entry may still be elected."""
    group = elected(message_bytes=1)
    group.propose("a", b"old")
    group.wire.clear()
    group.restart("a")
    group.tick("a")
    while group.wire:
        message = group.wire.pop(0)
        if "c" not in (message.sender, message.to):
            group.hand(message)
            assert group["a"].commit in (1, 4), group["a"]
    assert group["a"].commit == 4
    assert group.log("b") == [(2, None), (2, b"old"), (3, None)]


def test_a_late_word_of_the_leader_undoes_nothing():
    group = elected()
    group.propose("a", b"1")
    late = group.take("Append", to="b")
    group.propose("a", b"2")
    group.deliver()
    group.beat("a")
    before = group.log("b")
    for message in late * 2:
        group.hand(message)
    assert group.log("b") == before
    assert group["b"].commit == 4


# --- questions ---------------------------------------------------------------------------------


def test_a_follower_names_the_leader():
    group = elected()
    assert group.propose("b") == [Refused("write", "this node does not lead", "a")]
    assert group.give("c", Read("read"))[0].leader == "a"


def test_a_command_that_is_too_large_and_one_too_many_are_refused():
    group = elected(command_bytes=4, backlog=2)
    (effect,) = group.propose("a", b"12345")
    assert "5 bytes is above the limit of 4" in effect.reason
    assert group.propose("a", b"1234") == group.propose("a") == []
    (effect,) = group.propose("a")
    assert "2 entries wait" in effect.reason


def test_one_read_too_many_is_refused():
    group = elected(backlog=2)
    assert group.give("a", Read(1)) == group.give("a", Read(2)) == []
    (effect,) = group.give("a", Read(3))
    assert "2 reads wait" in effect.reason
    group.deliver()
    assert [effect for effect in group.seen["a"] if type(effect) is ReadReady] == [ReadReady(1), ReadReady(2)]


def test_a_read_is_answered_after_a_majority_has_answered_its_round():
    group = elected()
    assert group.give("a", Read("r")) == []
    (first, *_) = group.take("Append", to="b")
    assert first.round == 1
    assert group.give("a", Read("later")) == []
    group.hand(first)
    (answer,) = group.take("Appended")
    assert group.hand(answer) == [ReadReady("r")]
    assert {message.round for message in group.take("Append")} == {1, 2}


def test_a_new_leader_answers_no_read_before_its_first_entry_is_committed():
    group = elected(message_bytes=1)
    group.propose("a", b"written")
    group.deliver("ab")
    group.now += 10
    group.tick("b")
    while group["b"].role is not Role.LEADER:
        group.hand(group.wire.pop(0))
    assert group.give("b", Read("r")) == []
    group.deliver("bc")
    (applied,) = [
        effect for effect in group.seen["b"] if type(effect) is Apply and effect.entries[-1].index == 4
    ]
    assert group.seen["b"].index(applied) < group.seen["b"].index(ReadReady("r"))


def test_a_leader_that_resigns_answers_all_waiting_requests():
    group = elected()
    group.propose("a", tag="w")
    group.give("a", Read("r"))
    group.wire.clear()
    effects = group.hand(Appended(sender="b", to="a", term=9, ok=False, match=0, round=0))
    assert effects == [Unknown("w"), Refused("r", "leadership was lost", None), Led(9, None)]


# --- snapshots ---------------------------------------------------------------------------------


def test_one_whose_entries_are_gone_is_sent_the_snapshot_in_pieces_and_then_the_rest():
    group = elected(chunk_bytes=3)
    for _ in range(5):
        group.propose("a")
        group.deliver("ab")
    group.give("a", Snapshotted(6, b"0123456789"))
    group.propose("a", b"after")
    group.deliver("ab")
    assert group["a"].log.snapshot.index == 6
    group.beat("a")
    (restored,) = [effect.snapshot for effect in group.seen["c"] if type(effect) is Restore]
    assert (restored.index, restored.state) == (6, b"0123456789")
    group.beat("a")
    assert group["c"].commit == 8
    group.restart("c")
    assert group["c"].log.snapshot == restored
    assert group["c"].log.last_index == 8


def chunk(offset, data, **changes):
    said = {"sender": "b", "to": "a", "term": 3, "index": 7, "index_term": 2, "size": 4, "crc": 0xDECDA46A}
    said |= {"members": bootstrapped("a", "abc").snapshot.members, "offset": offset, "data": data, "round": 0}
    return Chunk(**said | changes)


def test_a_piece_that_comes_twice_or_out_of_order_does_no_harm():
    group = SmallGroup("abc")
    state = b"abcd"
    for offset in (2, 0, 0, 2):
        group.hand(chunk(offset, state[offset : offset + 2], crc=crc32(state)))
    (restored,) = [effect.snapshot for effect in group.seen["a"] if type(effect) is Restore]
    assert restored.state == state
    assert [(type(word).__name__, getattr(word, "offset", None)) for word in group.take()] == [
        ("Taken", 0),
        ("Taken", 2),
        ("Taken", 2),
        ("Appended", None),
    ]


def test_a_snapshot_that_is_not_what_it_should_be_is_begun_again():
    group = SmallGroup("abc")
    group.hand(chunk(0, b"abcd", crc=1))
    (answer,) = group.take("Taken")
    assert answer.offset == 0
    assert group["a"].commit == 1


def test_a_snapshot_has_the_membership_at_its_index():
    group = joined()
    group.give("a", Snapshotted(group["a"].commit, b""))
    assert group["a"].log.snapshot.members.learners == ("d",)


def test_a_snapshot_removes_entries_that_do_not_follow_it():
    group = elected()
    for _ in range(4):
        group.propose("a")
    assert group["a"].log.last_index == 6
    group.hand(chunk(0, b"s", term=9, index=4, index_term=8, size=1, crc=crc32(b"s")))
    assert group["a"].log.last_index == 4, group["a"].log.entries


def test_a_snapshot_of_what_is_not_applied_is_a_mistake_of_the_caller():
    group = SmallGroup("abc")
    with pytest.raises(ValueError, match="at 5 was taken, but only 1 entries"):
        group["a"].handle(Snapshotted(5, b""), now=0.0)


# --- membership --------------------------------------------------------------------------------


def joined(joiners="d", **settings):
    group = elected(joiners=joiners, **settings)
    for name in joiners:
        group.change("a", "add", name)
        for _ in range(3):
            group.beat("a")
    return group


def test_a_node_joins_as_a_learner_catches_up_and_becomes_a_voter():
    group = joined()
    assert group["d"].commit == 3
    assert group["a"].members.voters == ("a", "b", "c")
    group.change("a", "promote", "d")
    group.deliver()
    assert group["a"].members.voters == ("a", "b", "c", "d")
    assert group["a"].members.quorum == 3


def test_a_learner_is_not_counted_and_does_not_stand():
    group = joined()
    group.propose("a")
    group.deliver("ad")
    assert group["a"].commit == 3
    group.tick("d")
    assert group["d"].role is Role.FOLLOWER


def test_a_learner_that_lacks_too_much_is_not_made_a_voter():
    group = elected(joiners="d", catch_up=2)
    group.change("a", "add", "d")
    for _ in range(4):
        group.propose("a")
    group.deliver("abc")
    (effect,) = group.change("a", "promote", "d")
    assert "d lacks 7 entries" in effect.reason


def test_one_step_is_committed_before_the_next_begins():
    group = elected(joiners="de")
    assert group.change("a", "add", "d") == []
    (effect,) = group.change("a", "add", "e")
    assert "another change" in effect.reason
    group.deliver("abc")
    assert group.change("a", "add", "e") == []


def test_a_step_waits_for_an_entry_of_the_leaders_term():
    """Else two leaders could each begin a step that the other does not know, and be two steps apart."""
    group = SmallGroup("abc", joiners="d")
    group.tick("a")
    while group["a"].role is not Role.LEADER:
        group.hand(group.wire.pop(0))
    (effect,) = group.change("a", "add", "d")
    assert "no entry of this term" in effect.reason
    group.deliver()
    assert group.change("a", "add", "d") == []


def test_a_step_that_does_not_fit_is_refused_with_the_reason():
    group = elected()
    (effect,) = group.change("a", "remove", "z")
    assert "z is not in the group a, b, c" in effect.reason


def test_a_leader_that_removes_itself_leads_until_that_is_committed():
    group = elected()
    group.change("a", "remove", "a")
    assert group["a"].role is Role.LEADER
    group.deliver("ab")
    assert group["a"].role is Role.LEADER  # b alone is no majority of b and c
    group.beat("a")
    assert group["a"].role is Role.FOLLOWER
    group.elect("b")
    assert group["b"].members.voters == ("b", "c")


def test_a_membership_that_is_cut_off_is_no_longer_in_force():
    group = elected(joiners="d")
    group.change("a", "add", "d")
    group.wire.clear()
    assert group["a"].members.learners == ("d",)
    group.elect("b", "bc")
    group.beat("b")
    group.beat("b")
    assert group["a"].members.learners == ()


def test_one_whose_removal_only_it_has_still_stands_when_the_others_need_it():
    group = SmallGroup("ab")
    group.elect("a")
    group.change("a", "remove", "a")
    group.wire.clear()
    group.restart("a")
    group.tick("b")
    group.deliver()
    assert group["b"].role is Role.PROBER  # a does not vote for the shorter log
    group.tick("a")
    group.deliver()
    assert group["a"].role is Role.FOLLOWER  # it led until that was committed
    group.elect("b")
    assert group["b"].members.voters == ("b",)


def test_the_last_voter_stays():
    group = SmallGroup("a")
    group.elect("a")
    (effect,) = group.change("a", "remove", "a")
    assert "the only voter" in effect.reason


# --- handing over ------------------------------------------------------------------------------


def test_leadership_goes_to_the_one_who_is_named():
    group = elected()
    group.propose("a")
    group.deliver("ab")
    group.give("a", Transfer("stop", "c"))
    assert group.take("TakeOver") == []
    (effect,) = group.propose("a")
    assert "on its way to c" in effect.reason
    group.beat("a")
    group.beat("c")
    assert group["c"].role is Role.LEADER
    assert group["c"].commit == group["a"].commit == 4
    assert Done("stop", 0) in group.seen["a"]


def test_a_hand_over_that_does_not_succeed_is_given_up():
    group = elected()
    group.give("a", Transfer("stop", "c"))
    group.wire.clear()
    for _ in range(6):
        group.beat("a", "ab")
    assert any(type(effect) is Refused and effect.tag == "stop" for effect in group.seen["a"])
    assert group.propose("a") == []


def test_a_transfer_to_a_node_that_cannot_lead_is_refused():
    group = joined()
    for to in "adz":
        (effect,) = group.give("a", Transfer("t", to))
        assert f"{to} is not another voter; there are b, c" in effect.reason


# --- the rest ----------------------------------------------------------------------------------


def test_a_core_names_its_deadline_and_its_state():
    core = Core(bootstrapped("a", "abc"), Settings(), draw=lambda: 0.25, now=100.0)
    assert core.next_deadline() == 101.25
    assert core.handle(Tick(), now=101.0) == []
    effects = core.handle(Tick(), now=101.25)
    assert {effect.message.to for effect in effects if type(effect) is Send} == {"b", "c"}
    assert Persist not in kinds(effects)
    assert repr(core) == "<Core a prober term 1 commit 1 of 1>"


def test_another_core_goes_on_from_the_saved_state():
    group = elected()
    group.propose("a")
    saved = group["a"].saved
    assert saved == Saved(me="a", term=2, vote="a", snapshot=saved.snapshot, entries=saved.entries)
    again = Core(saved, Settings(), draw=lambda: 0.5, now=0.0)
    assert again.saved == saved
    again.check_invariants()


def test_two_leaders_of_one_term_are_an_error_and_not_a_case():
    group = elected()
    rival = Append(sender="b", to="a", term=2, prev_index=1, prev_term=1, entries=(), commit=1, round=0)
    with pytest.raises(Violation, match="b leads in term 2 as well as a"):
        group["a"].handle(Received(rival), now=group.now)


def test_answers_that_come_too_late_change_nothing():
    group = elected()
    before = repr(group["b"])
    group.hand(Vote(sender="c", to="b", term=2, pre=False, granted=True))
    group.hand(Appended(sender="c", to="b", term=2, ok=True, match=9, round=9))
    group.hand(TakeOver(sender="c", to="b", term=1))
    assert repr(group["b"]) == before


@pytest.mark.parametrize("field", ["heartbeat_s", "window", "chunk_bytes"])
def test_settings_must_be_positive(field):
    with pytest.raises(ValueError, match=f"{field} must be positive, not 0"):
        Settings(**{field: 0})


def test_an_election_time_out_is_longer_than_a_heartbeat():
    with pytest.raises(ValueError, match="election_s must be at least twice heartbeat_s"):
        Settings(heartbeat_s=1.0, election_s=1.5)
