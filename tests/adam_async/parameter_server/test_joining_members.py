"""A joining member without progress is struck out, and not invited again for a while."""

from itertools import pairwise

from adam_async.parameter_server.members_watch import (
    JOIN_S,
    MOST_KNOWN,
    PAUSE_S,
    STEADY_S,
    UNSTEADY_S,
    JoiningMembers,
)

FIRST, SECOND = ("ps-1", 1), ("ps-2", 1)
WHOLE = 5


def is_up(member):
    return True


def is_down(member):
    return False


def silenced(members, member, now):
    """A member is silent, and the controllers strike it out."""
    members.members_changed({FIRST, SECOND}, now)
    members.silent([member])
    return members.members_changed({FIRST, SECOND} - {member}, now)


def test_a_member_without_a_new_piece_is_stalled_also_if_it_begins_again_and_again():
    members = JoiningMembers([FIRST, SECOND])
    assert members.stalled({FIRST: 0, SECOND: 0}, WHOLE, 0.0) == []
    assert members.stalled({FIRST: 2, SECOND: 0}, WHOLE, JOIN_S) == []
    assert members.stalled({FIRST: 0, SECOND: 0}, WHOLE, JOIN_S + 1) == [SECOND]
    assert members.stalled({FIRST: 2}, WHOLE, 2 * JOIN_S) == []
    assert members.stalled({FIRST: 1}, WHOLE, 2 * JOIN_S + 1) == [FIRST]


def test_a_member_with_all_pieces_may_wait_for_entries():
    members = JoiningMembers([FIRST, SECOND])
    assert members.stalled({FIRST: WHOLE}, WHOLE, 0.0) == []
    assert members.stalled({FIRST: WHOLE}, WHOLE, 10 * JOIN_S) == []


def test_a_stalled_member_and_one_that_left_have_a_pause_that_ends():
    members = JoiningMembers([FIRST, SECOND])
    members.stalled({FIRST: 0}, WHOLE, 0.0)
    members.stalled({FIRST: 0}, WHOLE, JOIN_S + 1)
    members.pause([SECOND], JOIN_S + 2)
    assert set(members.barred(JOIN_S + 2, is_up)) == {FIRST, SECOND}
    assert set(members.barred(JOIN_S + 1 + PAUSE_S, is_up)) == {SECOND}
    assert set(members.barred(JOIN_S + 2 + PAUSE_S, is_up)) == set()


def test_a_member_that_was_invited_again_has_the_whole_time():
    members = JoiningMembers([FIRST, SECOND])
    members.stalled({FIRST: 0}, WHOLE, 0.0)
    members.stalled({}, WHOLE, 1.0)
    members.stalled({FIRST: 0}, WHOLE, JOIN_S)
    assert members.stalled({FIRST: 0}, WHOLE, JOIN_S + 1) == []


def test_a_silent_member_is_barred_until_it_answers():
    members = JoiningMembers([FIRST, SECOND])
    assert silenced(members, FIRST, 0.0) == {FIRST}
    assert members.away == {FIRST}
    assert members.is_back(FIRST)
    assert members.barred(1.0, is_down) == {FIRST}
    assert members.barred(1.0, is_up) == set()
    assert members.members_changed({FIRST, SECOND}, 2.0) == set()
    assert members.away == set()
    assert members.barred(2.0, is_down) == set()


def test_a_member_that_leaves_without_a_silence_is_not_away():
    members = JoiningMembers([FIRST, SECOND])
    assert members.members_changed({SECOND}, 0.0) == set()
    assert members.away == set()


def test_the_next_incarnation_of_a_server_takes_the_place_of_the_one_that_is_away():
    members = JoiningMembers([FIRST, SECOND])
    silenced(members, FIRST, 0.0)
    assert members.is_back(("ps-1", 2))
    members.members_changed({("ps-1", 2), SECOND}, 1.0)
    assert members.away == set()
    assert not members.is_back(("ps-1", 2))


def test_a_server_that_was_never_a_member_is_not_back():
    assert not JoiningMembers([FIRST]).is_back(SECOND)


def test_a_member_that_falls_silent_again_and_again_returns_once_in_each_pause():
    members = JoiningMembers([FIRST, SECOND])
    now, returns = 0.0, []
    while now < 60.0:
        silenced(members, FIRST, now)
        while members.barred(now, is_up):
            now += 0.5
        returns.append(now)
        now += 1.5
    pauses = [later - earlier for earlier, later in pairwise(returns)]
    assert min(pauses) >= UNSTEADY_S
    assert len(returns) > 5


def test_a_member_that_was_steady_returns_at_once_from_the_next_silence():
    members = JoiningMembers([FIRST, SECOND])
    silenced(members, FIRST, 0.0)
    silenced(members, FIRST, STEADY_S)
    assert members.barred(STEADY_S, is_up) == set()
    silenced(members, FIRST, 2 * STEADY_S - 0.1)
    assert members.barred(2 * STEADY_S, is_up) == {FIRST}


def test_servers_that_were_lost_for_good_take_bounded_memory():
    members = JoiningMembers([FIRST, SECOND])
    for number in range(3 * MOST_KNOWN):
        lost = (f"other-{number}", 1)
        members.members_changed({FIRST, lost}, float(number))
        members.silent([lost])
        members.members_changed({FIRST}, float(number))
    assert len(members.away) < MOST_KNOWN
    assert len(members._incarnations) == MOST_KNOWN
    assert members.is_back(lost)
    assert not members.is_back(("other-0", 1))
    assert not members.is_back(FIRST)
    assert members.is_back(("ps-1", 2))
