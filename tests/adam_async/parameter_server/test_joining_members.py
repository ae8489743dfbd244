"""A joining member without progress is struck out, and not invited again for a while."""

from adam_async.parameter_server.joining_members import JOIN_S, PAUSE_S, JoiningMembers

FIRST, SECOND = ("ps-1", 1), ("ps-2", 1)
WHOLE = 5


def test_a_member_without_a_new_piece_is_stalled_also_if_it_begins_again_and_again():
    members = JoiningMembers()
    assert members.stalled({FIRST: 0, SECOND: 0}, WHOLE, 0.0) == []
    assert members.stalled({FIRST: 2, SECOND: 0}, WHOLE, JOIN_S) == []
    assert members.stalled({FIRST: 0, SECOND: 0}, WHOLE, JOIN_S + 1) == [SECOND]
    assert members.stalled({FIRST: 2}, WHOLE, 2 * JOIN_S) == []
    assert members.stalled({FIRST: 1}, WHOLE, 2 * JOIN_S + 1) == [FIRST]


def test_a_member_with_all_pieces_may_wait_for_entries():
    members = JoiningMembers()
    assert members.stalled({FIRST: WHOLE}, WHOLE, 0.0) == []
    assert members.stalled({FIRST: WHOLE}, WHOLE, 10 * JOIN_S) == []


def test_a_stalled_member_and_one_that_left_have_a_pause_that_ends():
    members = JoiningMembers()
    members.stalled({FIRST: 0}, WHOLE, 0.0)
    members.stalled({FIRST: 0}, WHOLE, JOIN_S + 1)
    members.pause([SECOND], JOIN_S + 2)
    assert set(members.paused(JOIN_S + 2)) == {FIRST, SECOND}
    assert set(members.paused(JOIN_S + 1 + PAUSE_S)) == {SECOND}
    assert set(members.paused(JOIN_S + 2 + PAUSE_S)) == set()


def test_a_member_that_was_invited_again_has_the_whole_time():
    members = JoiningMembers()
    members.stalled({FIRST: 0}, WHOLE, 0.0)
    members.stalled({}, WHOLE, 1.0)
    members.stalled({FIRST: 0}, WHOLE, JOIN_S)
    assert members.stalled({FIRST: 0}, WHOLE, JOIN_S + 1) == []
