"""Leases as timelines, and as a machine that kills replicas at random."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from adam_async.data_server.state import (
    DataState,
    EpochBegan,
    EpochEnded,
    Grant,
    GroupsReported,
    LeaseAsked,
    Paused,
    PauseEnded,
    ReplicasChanged,
)
from adam_async.ids import Replica
from adam_async.messages import Finished
from adam_async.model_worker.clocks import ReplicaClock
from adam_async.shares import groups_left, share_out, warm_groups

ZERO, ONE, TWO = Replica(0), Replica(1), Replica(2)
WAIT_S = 5.0


def began(groups=6, shares=None, number=1):
    return EpochBegan(number, groups, shares or {ZERO: (0, groups)})


def asked(replica=ZERO, count=2, *, life=7, holding=None, now=0.0):
    return LeaseAsked(
        request=object(),
        replica=replica,
        incarnation=life,
        count=count,
        deadline=now + WAIT_S,
        holding=holding,
    )


def finished(number, *, attempt=1, epoch=1, images=4, loss=1.0):
    return Finished(epoch, number, attempt, images, loss)


def started(*events):
    state = DataState()
    for event in events:
        state.handle(event, now=0.0)
        state.check_invariants()
    return state


def grant(state, question, *, now=0.0):
    """Ask, and return the groups of the answer, or None while the question is parked."""
    effects = state.handle(question, now=now)
    state.check_invariants()
    for effect in effects:
        if isinstance(effect, Grant) and effect.request is question.request:
            return effect.groups
    return None


def test_groups_are_leased_in_the_order_of_the_share():
    state = started(ReplicasChanged((ZERO,)), began())
    assert grant(state, asked(count=4)) == ((0, 1), (1, 1), (2, 1), (3, 1))
    assert grant(state, asked(count=4)) == ((4, 1), (5, 1))


def test_an_answer_says_when_nothing_more_waits():
    state = started(ReplicasChanged((ZERO,)), began(groups=3))
    (first,) = state.handle(asked(count=2), now=0.0)
    (second,) = state.handle(asked(count=2), now=0.0)
    assert (first.last, second.last) == (False, True)


def test_a_question_without_work_is_parked_until_its_time_is_up():
    state = started(ReplicasChanged((ZERO,)))
    question = asked(now=10.0)
    assert grant(state, question, now=10.0) is None
    assert state.next_deadline() == 15.0
    assert state.tick(now=14.9) == []
    (answer,) = state.tick(now=15.0)
    assert (answer.request, answer.groups) == (question.request, ())
    assert state.next_deadline() is None


def test_a_parked_question_is_answered_when_the_epoch_begins():
    state = started(ReplicasChanged((ZERO,)))
    question = asked()
    assert grant(state, question) is None
    (answer,) = state.handle(began(), now=1.0)
    assert (answer.request, answer.epoch, answer.groups) == (question.request, 1, ((0, 1), (1, 1)))


def test_an_epoch_ends_once_with_its_totals_when_the_last_group_is_reported():
    state = started(ReplicasChanged((ZERO,)), began(groups=2))
    grant(state, asked(), now=3.0)
    assert state.handle(GroupsReported(ZERO, (finished(0, loss=1.0, images=3),)), now=4.0) == []
    (ended,) = state.handle(GroupsReported(ZERO, (finished(1, loss=5.0, images=1),)), now=9.0)
    assert ended == EpochEnded(1, 4, 2.0, 6.0, 0)
    assert state.handle(GroupsReported(ZERO, (finished(1),)), now=9.0) == []
    assert state.late_reports == 1


def test_what_a_lost_replica_held_and_what_waited_for_it_goes_to_its_successor():
    state = started(ReplicasChanged((ZERO, ONE, TWO)), began(6, {ZERO: (0, 2), ONE: (2, 4), TWO: (4, 6)}))
    assert grant(state, asked(ONE, 1)) == ((2, 1),)
    assert grant(state, asked(TWO, 9)) == ((4, 1), (5, 1))
    state.handle(ReplicasChanged((ZERO, TWO)), now=0.0)
    state.check_invariants()
    assert grant(state, asked(TWO, 9)) == ((2, 2), (3, 1))
    assert state.trained_again == 1


def test_the_successor_of_the_highest_replica_is_the_lowest():
    state = started(ReplicasChanged((ZERO, TWO)), began(2, {ZERO: (0, 1), TWO: (1, 2)}))
    state.handle(ReplicasChanged((ZERO,)), now=0.0)
    assert grant(state, asked(ZERO, 9)) == ((0, 1), (1, 1))


def test_a_parked_successor_gets_the_lost_groups_at_once():
    state = started(ReplicasChanged((ZERO, ONE)), began(2, {ZERO: (0, 1), ONE: (1, 2)}))
    assert grant(state, asked(ZERO)) == ((0, 1),)
    assert grant(state, asked(ONE)) == ((1, 1),)
    waiting = asked(ONE)
    assert grant(state, waiting) is None
    (answer,) = state.handle(ReplicasChanged((ONE,)), now=1.0)
    assert (answer.request, answer.groups) == (waiting.request, ((0, 2),))


def test_a_share_of_a_replica_that_was_lost_before_the_epoch_is_passed_on():
    state = started(ReplicasChanged((ONE,)), began(2, {ZERO: (0, 1), ONE: (1, 2)}))
    assert grant(state, asked(ONE, 9)) == ((1, 1), (0, 1))


def test_a_lost_replica_whose_question_is_parked_gets_nothing_back():
    state = started(ReplicasChanged((ZERO,)), began(2))
    assert grant(state, asked()) == ((0, 1), (1, 1))
    question = asked()
    assert grant(state, question) is None
    (answer,) = state.handle(ReplicasChanged(()), now=0.0)
    assert (answer.request, answer.groups) == (question.request, ())
    state.handle(ReplicasChanged((ONE,)), now=0.0)
    assert grant(state, asked(ONE)) == ((0, 2), (1, 2))


def test_without_any_live_replica_groups_wait_for_the_next_worker_of_that_number():
    state = started(ReplicasChanged((ZERO,)), began(2))
    grant(state, asked())
    state.handle(ReplicasChanged(()), now=0.0)
    state.check_invariants()
    state.handle(ReplicasChanged((ZERO,)), now=0.0)
    assert grant(state, asked(life=8)) == ((0, 2), (1, 2))


def test_a_new_life_gets_what_the_old_one_held_whatever_the_numbers_of_the_two():
    for old, new in ((7, 8), (8, 7)):
        state = started(ReplicasChanged((ZERO,)), began(2))
        assert grant(state, asked(life=old)) == ((0, 1), (1, 1))
        assert grant(state, asked(life=new)) == ((0, 2), (1, 2))


def test_an_outlived_worker_gets_nothing_and_is_not_answered_before_its_time():
    state = started(ReplicasChanged((ZERO,)), began(4))
    grant(state, asked(life=7))
    grant(state, asked(life=8, count=1))
    question = asked(life=7)
    assert grant(state, question) is None
    (answer,) = state.tick(now=WAIT_S)
    assert (answer.request, answer.groups) == (question.request, ())
    assert grant(state, asked(life=8, count=9)) == ((1, 2), (2, 1), (3, 1))


def test_after_a_broken_link_only_what_the_worker_does_not_hold_is_leased_again():
    state = started(ReplicasChanged((ZERO,)), began(4))
    grant(state, asked(count=3))
    assert grant(state, asked(count=3, holding=(1,))) == ((0, 2), (2, 2), (3, 1))
    assert state.trained_again == 2


def test_a_question_on_a_new_link_replaces_the_one_of_the_old_link():
    state = started(ReplicasChanged((ZERO,)))
    lost = asked()
    assert grant(state, lost) is None
    again = asked(holding=())
    (empty,) = state.handle(again, now=0.0)
    assert (empty.request, empty.groups) == (lost.request, ())
    (answer,) = state.handle(began(), now=0.0)
    assert answer.request is again.request


def test_late_reports_are_counted_and_change_nothing():
    state = started(ReplicasChanged((ZERO, ONE)), began(2, {ZERO: (0, 1), ONE: (1, 2)}))
    grant(state, asked(ZERO))
    state.handle(ReplicasChanged((ONE,)), now=0.0)
    grant(state, asked(ONE, 9))
    for report in (
        GroupsReported(ZERO, (finished(0),)),  # leased to another meanwhile
        GroupsReported(ONE, (finished(0, attempt=1),)),  # an attempt that is over
        GroupsReported(ONE, (finished(1, epoch=2),)),  # of another epoch
        GroupsReported(ONE, (finished(99),)),  # never leased
    ):
        assert state.handle(report, now=0.0) == []
        state.check_invariants()
    assert state.late_reports == 4
    assert state.statistics()["finished"] == 0


def test_read_ahead_sees_the_next_groups_without_taking_them():
    state = started(ReplicasChanged((ZERO,)), began(4))
    assert state.upcoming(ZERO, 2) == [0, 1]
    assert grant(state, asked(count=1)) == ((0, 1),)
    assert state.upcoming(ZERO, 9) == [1, 2, 3]
    assert state.upcoming(ONE, 9) == []


def test_the_ranges_that_are_trained_leave_out_what_waits_and_what_is_leased():
    state = started(ReplicasChanged((ZERO, ONE)), began(10, {ZERO: (0, 5), ONE: (5, 10)}))
    assert state.trained_ranges() == ()
    assert grant(state, asked(count=3)) == ((0, 1), (1, 1), (2, 1))
    assert grant(state, asked(ONE, count=1)) == ((5, 1),)
    state.handle(GroupsReported(ZERO, (finished(0), finished(2))), now=1.0)
    assert state.trained_ranges() == ((0, 1), (2, 3))
    assert state.statistics()["trained_ranges"] == ()  # not while groups are leased: it would not last
    state.handle(GroupsReported(ZERO, (finished(1),)), now=1.0)
    state.handle(GroupsReported(ONE, (finished(5),)), now=1.0)
    assert state.statistics()["trained_ranges"] == ((0, 3), (5, 6))
    grant(state, asked(count=9))
    grant(state, asked(ONE, count=9))
    state.handle(GroupsReported(ZERO, (finished(3), finished(4))), now=1.0)
    state.handle(GroupsReported(ONE, tuple(map(finished, range(6, 10)))), now=1.0)
    assert state.trained_ranges() == ((0, 10),)


# --- turns and clocks --------------------------------------------------------------------------


def turns(groups=12, *, replicas=(ZERO, ONE), turn=2, clock=0, **more):
    shares = {replica: (place, len(replicas)) for place, replica in enumerate(replicas)}
    return EpochBegan(1, groups, shares, turn=turn, first_clock=clock, **more)


def told(state, question):
    """Ask, and return what the answer says: its groups' numbers, last, clock and end."""
    for effect in state.handle(question, now=0.0):
        if isinstance(effect, Grant) and effect.request is question.request:
            return [number for number, _ in effect.groups], effect.last, effect.clock, effect.end
    return None


def report(state, replica, *numbers, attempt=1, clock=0):
    reports = tuple(Finished(1, number, attempt, 4, 1.0, clock) for number in numbers)
    effects = state.handle(GroupsReported(replica, reports), now=1.0)
    state.check_invariants()
    return effects


def test_groups_go_out_in_turns_and_the_last_answer_says_where_all_meet():
    state = started(ReplicasChanged((ZERO, ONE)), turns(10, clock=7))
    assert told(state, asked(ZERO, 4)) == ([0, 1, 4, 5], False, 7, 0)
    assert told(state, asked(ONE, 9)) == ([2, 3, 6, 7], True, 7, 10)
    assert told(state, asked(ZERO, 4)) == ([8, 9], True, 7, 10)


def test_a_replica_without_a_turn_hears_at_once_where_all_meet_and_then_waits():
    state = started(ReplicasChanged((ZERO, ONE)), turns(2, clock=3))
    assert told(state, asked(ONE)) == ([], True, 3, 4)
    assert told(state, asked(ONE)) is None


def test_the_turns_of_a_lost_replica_are_dealt_out_and_those_who_wait_hear_of_the_new_end():
    state = started(ReplicasChanged((ZERO, ONE, TWO)), turns(18, replicas=(ZERO, ONE, TWO)))
    assert told(state, asked(ZERO, 9)) == ([0, 1, 6, 7, 12, 13], True, 0, 3)
    assert told(state, asked(TWO, 2)) == ([4, 5], False, 0, 0)
    assert told(state, asked(ONE, 1)) == ([2], False, 0, 0)
    parked = asked(ZERO, 9)
    assert told(state, parked) is None
    effects = state.handle(ReplicasChanged((ZERO, TWO)), now=0.0)
    state.check_invariants()
    (answer,) = effects
    # The lost turns are 2 and 3, 8 and 9, 14 and 15. Who has heard of an end begins again from there.
    assert [number for number, _ in answer.groups] == [2, 3, 14, 15]
    assert (answer.last, answer.clock, answer.end) == (True, 3, 5)
    assert told(state, asked(TWO, 9)) == ([10, 11, 16, 17, 8, 9], True, 0, 5)


def test_who_joins_an_epoch_of_turns_hears_where_it_ends_and_gets_work_from_the_next():
    state = started(ReplicasChanged((ZERO,)), turns(4, replicas=(ZERO,)))
    question = asked(ONE)
    assert told(state, question) is None
    (answer,) = state.handle(ReplicasChanged((ZERO, ONE)), now=0.0)
    assert (answer.request, answer.groups, answer.last, answer.end) == (question.request, (), True, 2)
    assert told(state, asked(ZERO, 9)) == ([0, 1, 2, 3], True, 0, 2)


def test_who_joins_when_nobody_else_is_left_takes_over_from_where_all_would_have_met():
    state = started(ReplicasChanged((ZERO,)), turns(4, replicas=(ZERO,)))
    told(state, asked(ZERO, 3))
    state.handle(ReplicasChanged(()), now=0.0)
    state.handle(ReplicasChanged((ONE,)), now=0.0)
    assert told(state, asked(ONE, 9)) == ([0, 1, 2, 3], True, 2, 4)


def test_a_new_life_that_nobody_announced_leaves_its_turns_to_the_others():
    state = started(ReplicasChanged((ZERO, ONE)), turns(8))
    assert told(state, asked(ONE, 1)) == ([2], False, 0, 0)
    assert told(state, asked(ONE, 1, life=8)) == ([], True, 4, 4)
    assert told(state, asked(ZERO, 9)) == ([0, 1, 4, 5, 2, 3, 6, 7], True, 0, 4)


def test_a_new_life_that_was_announced_keeps_what_it_was_given_since():
    state = started(ReplicasChanged((ZERO, ONE)))
    told(state, asked(ONE))  # the old life waits for the first epoch
    state.handle(ReplicasChanged((ZERO,)), now=0.0)
    state.handle(ReplicasChanged((ZERO, ONE)), now=0.0)
    state.handle(turns(8), now=0.0)
    assert told(state, asked(ONE, 9, life=8)) == ([2, 3, 6, 7], True, 0, 2)


def test_an_answer_that_was_lost_is_given_again_as_it_was():
    state = started(ReplicasChanged((ZERO, ONE)), turns(8))
    first = ([2, 3], False, 0, 0)
    rest = ([6, 7], True, 0, 2)
    assert told(state, asked(ONE, 2)) == first
    assert told(state, asked(ONE, 2)) == rest
    assert told(state, asked(ONE, 2, holding=(2, 3))) == rest
    assert told(state, asked(ONE, 2, holding=(2, 3, 6, 7))) == ([], True, 2, 2)  # it may not have heard


def test_a_clock_beyond_what_was_known_moves_the_end_for_all():
    state = started(ReplicasChanged((ZERO, ONE)), turns(8))
    told(state, asked(ZERO, 9))
    told(state, asked(ONE, 9))
    waiting = asked(ONE)
    assert told(state, waiting) is None
    (answer,) = report(state, ZERO, 0, clock=5)
    assert (answer.request, answer.last, answer.end) == (waiting.request, True, 5)


def test_the_end_of_an_epoch_says_where_all_meet():
    state = started(ReplicasChanged((ZERO, ONE)), turns(4, clock=5))
    told(state, asked(ZERO, 9))
    told(state, asked(ONE, 9))
    report(state, ZERO, 0, 1, clock=6)
    (ended,) = report(state, ONE, 2, 3, clock=6)
    assert (ended.number, ended.clock) == (1, 6)


def test_an_asynchronous_epoch_ends_with_the_highest_clock_of_all():
    state = started(ReplicasChanged((ZERO,)), began(2))
    grant(state, asked())
    report(state, ZERO, 0, clock=4)
    (ended,) = report(state, ZERO, 1, clock=3)
    assert ended.clock == 4


# --- progress ----------------------------------------------------------------------------------


def test_progress_is_the_part_of_the_share_or_of_the_epoch_that_lies_before():
    state = started(ReplicasChanged((ZERO, ONE)), began(8, {ZERO: (0, 4), ONE: (4, 8)}, number=3))
    assert [state.progress(number) for number in (0, 2, 4, 7)] == [2.0, 2.5, 2.0, 2.75]
    state.handle(turns(8), now=0.0)
    assert [state.progress(number) for number in (0, 2, 4, 7)] == [0.0, 0.25, 0.5, 0.875]


def test_a_group_that_was_passed_on_keeps_its_progress():
    state = started(ReplicasChanged((ZERO, ONE)), began(8, {ZERO: (0, 4), ONE: (4, 8)}))
    state.handle(ReplicasChanged((ZERO,)), now=0.0)
    assert state.progress(6) == 0.5


# --- who joins an asynchronous epoch -----------------------------------------------------------


def test_who_joins_gets_an_equal_part_of_what_nobody_has_been_given_yet_at_once():
    state = started(ReplicasChanged((ZERO, ONE)), began(12, {ZERO: (0, 6), ONE: (6, 12)}))
    assert grant(state, asked(ZERO, 3)) == ((0, 1), (1, 1), (2, 1))
    question = asked(TWO, 9)
    assert grant(state, question) is None
    (answer,) = state.handle(ReplicasChanged((ZERO, ONE, TWO)), now=0.0)
    state.check_invariants()
    assert (answer.request, answer.groups) == (question.request, ((9, 1), (10, 1), (11, 1)))
    assert grant(state, asked(ZERO, 9)) == ((3, 1), (4, 1), (5, 1))
    assert grant(state, asked(ONE, 9)) == ((6, 1), (7, 1), (8, 1))


def test_a_replica_that_comes_back_takes_part_at_once():
    state = started(ReplicasChanged((ZERO, ONE)), began(8, {ZERO: (0, 4), ONE: (4, 8)}))
    state.handle(ReplicasChanged((ZERO,)), now=0.0)
    state.handle(ReplicasChanged((ZERO, ONE)), now=0.0)
    assert grant(state, asked(ONE, 9, life=9)) == ((4, 1), (5, 1), (6, 1), (7, 1))
    assert grant(state, asked(ZERO, 9)) == ((0, 1), (1, 1), (2, 1), (3, 1))


# --- warm start --------------------------------------------------------------------------------


def test_in_a_warm_start_the_others_wait_until_its_groups_are_finished():
    state = started(ReplicasChanged((ZERO, ONE)), EpochBegan(1, 8, {ZERO: (0, 5), ONE: (5, 8)}, warm=2))
    waiting = asked(ONE)
    assert grant(state, waiting) is None
    assert grant(state, asked(ZERO, 9)) == ((0, 1), (1, 1))
    assert report(state, ZERO, 0) == []
    (answer,) = report(state, ZERO, 1)
    assert (answer.request, answer.groups) == (waiting.request, ((5, 1), (6, 1)))
    assert grant(state, asked(ZERO, 9)) == ((2, 1), (3, 1), (4, 1))


def test_with_turns_the_others_meet_where_the_warm_start_ends_and_begin_there():
    state = started(ReplicasChanged((ZERO, ONE)), turns(12, warm=4))
    assert told(state, asked(ONE)) == ([], True, 0, 2)
    assert told(state, asked(ZERO, 9)) == ([0, 1, 2, 3], True, 0, 2)
    report(state, ZERO, 0, 1, 2, 3, clock=2)
    assert told(state, asked(ONE, 9)) == ([6, 7, 10, 11], True, 2, 4)
    assert told(state, asked(ZERO, 9)) == ([4, 5, 8, 9], True, 2, 4)


def test_a_warm_start_goes_to_the_lowest_that_is_left():
    state = started(ReplicasChanged((ZERO, ONE, TWO)), turns(12, replicas=(ZERO, ONE, TWO), warm=4))
    told(state, asked(ZERO, 1))
    state.handle(ReplicasChanged((ONE, TWO)), now=0.0)
    assert told(state, asked(TWO)) == ([], True, 0, 2)
    assert told(state, asked(ONE, 9)) == ([0, 1, 2, 3], True, 0, 2)


# --- pauses ------------------------------------------------------------------------------------


def test_an_epoch_pauses_when_as_many_groups_are_finished_and_nothing_is_leased():
    state = started(ReplicasChanged((ZERO, ONE)), EpochBegan(1, 10, {ZERO: (0, 5), ONE: (5, 10)}, every=3))
    assert grant(state, asked(ZERO, 9)) == ((0, 1), (1, 1))
    assert grant(state, asked(ONE, 9)) == ((5, 1), (6, 1))
    waiting = asked(ONE, 9)
    assert grant(state, waiting) is None
    assert report(state, ZERO, 0, 1) == []
    assert report(state, ONE, 5, 6) == [Paused(1, 4)]
    assert state.trained_ranges() == ((0, 2), (5, 7))
    (answer,) = state.handle(PauseEnded(), now=0.0)
    assert (answer.request, answer.groups) == (waiting.request, ((7, 1), (8, 1)))


def test_with_turns_an_epoch_pauses_at_whole_rounds_and_all_meet_there():
    state = started(ReplicasChanged((ZERO, ONE)), turns(14, every=5))
    assert told(state, asked(ZERO, 9)) == ([0, 1, 4, 5], True, 0, 2)
    assert told(state, asked(ONE, 9)) == ([2, 3, 6, 7], True, 0, 2)
    report(state, ZERO, 0, 1, 4, 5, clock=2)
    assert report(state, ONE, 2, 3, 6, 7, clock=2) == [Paused(1, 8)]
    assert (state.trained_ranges(), state.statistics()["clock"]) == (((0, 8),), 2)
    state.handle(PauseEnded(), now=0.0)
    assert told(state, asked(ZERO, 9)) == ([8, 9, 12, 13], True, 2, 4)
    assert told(state, asked(ONE, 9)) == ([10, 11], True, 2, 4)
    report(state, ZERO, 8, 9, 12, 13, clock=4)
    (ended,) = report(state, ONE, 10, 11, clock=3)
    assert isinstance(ended, EpochEnded)


def test_who_dies_before_or_in_a_pause_holds_nothing_up():
    state = started(ReplicasChanged((ZERO, ONE)), turns(8, every=4))
    told(state, asked(ZERO, 9))
    told(state, asked(ONE, 9))
    report(state, ZERO, 0, 1, clock=1)
    state.handle(ReplicasChanged((ZERO,)), now=0.0)
    assert told(state, asked(ZERO, 9)) == ([2, 3], True, 1, 2)
    assert report(state, ZERO, 2, 3, attempt=2, clock=2) == [Paused(1, 4)]
    state.handle(ReplicasChanged(()), now=0.0)
    state.handle(PauseEnded(), now=0.0)
    state.handle(ReplicasChanged((TWO,)), now=0.0)
    state.check_invariants()
    # A pause comes after as many groups as one replica has now.
    assert told(state, asked(TWO, 9)) == ([4, 5, 6, 7], True, 2, 4)


# --- resumed epochs ----------------------------------------------------------------------------


@pytest.mark.parametrize("turn", [0, 2])
def test_a_resumed_epoch_goes_on_with_what_is_left_and_counts_what_was(turn):
    shares = {ZERO: (0, 2), ONE: (1, 2)} if turn else {ZERO: (0, 6), ONE: (6, 8)}
    resumed = EpochBegan(
        1,
        8,
        shares,
        turn=turn,
        first_clock=2 * bool(turn),
        finished=((0, 4),),
        images=16,
        loss=3.0,
        train_s=7.5,
    )
    state = started(ReplicasChanged((ZERO, ONE)), resumed)
    assert state.trained_ranges() == ((0, 4),)
    assert told(state, asked(ZERO, 9)) == ([4, 5], True, 2 * bool(turn), 3 * bool(turn))
    assert told(state, asked(ONE, 9)) == ([6, 7], True, 2 * bool(turn), 3 * bool(turn))
    report(state, ZERO, 4, 5)
    (ended,) = report(state, ONE, 6, 7)
    assert (ended.images, ended.loss, ended.train_s) == (32, 2.0, 8.5)


def test_a_resumed_epoch_of_which_nothing_is_left_ends_at_once():
    state = started(ReplicasChanged((ZERO,)))
    began_over = EpochBegan(1, 8, {ZERO: (0, 8)}, finished=((0, 8),), images=30, loss=0.5)
    assert state.handle(began_over, now=4.0) == [EpochEnded(1, 30, 0.5, 0.0, 0)]


# --- everything at random ----------------------------------------------------------------------


class Leases(RuleBasedStateMachine):
    """Workers ask, report, lose links, die and join at random; every group is finished exactly once.

    With turns each worker has a clock, which goes as a worker's goes, and none is ever beyond the end that
    the data server knows; when all is done all have met.
    """

    REPLICAS = 3
    GROUPS = 11
    TURN = 0
    WARM = 0
    EVERY = 0
    FINISHED: tuple[tuple[int, int], ...] = ()

    def __init__(self):
        super().__init__()
        self.state = DataState()
        self.now = 0.0
        self.epoch = 0
        self.lives = dict.fromkeys(range(self.REPLICAS), 1)
        self.births = 0
        self.live = {0, 1}
        self.held: dict[int, dict[int, tuple[int, int]]] = {n: {} for n in range(self.REPLICAS)}
        self.clocks: dict[int, ReplicaClock] = {}
        self.heard: dict[int, tuple[int, int]] = {}
        self.questions: dict[object, int] = {}
        self.broken: set[int] = set()
        self.done: list[int] = []
        self.ends: list[EpochEnded] = []
        self.paused = False
        for replica in range(self.REPLICAS):
            self.new_life(replica)
        self.tell_live()
        self.begin()

    def new_life(self, replica, start=0):
        """A worker starts at a clock and holds nothing; answers to the one before are lost."""
        self.births += 1
        self.lives[replica] = self.births * 5 % 997  # no two are the same, and they have no order
        self.clocks[replica] = ReplicaClock(
            start=start, push_every=max(self.TURN, 1), slack=0, synchronous=False
        )
        self.held[replica] = {}
        self.heard[replica] = (0, 0)
        self.broken.discard(replica)
        for request, asker in self.questions.items():
            if asker == replica:
                self.questions[request] = None

    def tell_live(self):
        self.tell(ReplicasChanged(tuple(map(Replica, sorted(self.live)))))

    def begin(self):
        self.epoch += 1
        finished = self.FINISHED if self.epoch == 1 else ()
        left = groups_left(self.GROUPS, finished)
        self.done = [number for number in range(self.GROUPS) if number not in left]
        warm = warm_groups(self.WARM, epoch=self.epoch, groups=self.GROUPS, finished=finished, turn=self.TURN)
        replicas = sorted(self.live) or range(2)
        shares = share_out(tuple(replicas), groups=self.GROUPS, turn=self.TURN, warm=warm, finished=finished)
        began = EpochBegan(
            self.epoch,
            self.GROUPS,
            {Replica(int(replica)): share for replica, share in shares.items()},
            turn=self.TURN,
            first_clock=self.ends[-1].clock if self.ends and self.TURN else 0,
            finished=finished,
            warm=warm,
            every=self.EVERY,
        )
        self.tell(began)

    def tell(self, event):
        self.take(self.state.handle(event, now=self.now))

    def take(self, effects):
        for effect in effects:
            if isinstance(effect, EpochEnded):
                self.ends.append(effect)
            elif isinstance(effect, Paused):
                assert not self.paused
                assert not any(self.held[replica] for replica in self.live)
                self.paused = True
            else:
                replica = self.questions.pop(effect.request)
                if replica is not None:
                    self.receive(replica, effect)

    def receive(self, replica, grant):
        assert not (self.paused and grant.groups)
        clock = self.clocks[replica]
        before = self.heard[replica]
        if self.TURN and (grant.groups or grant.last) and (grant.clock or grant.end):
            assert grant.clock >= before[0]
            assert not grant.last or grant.end >= before[1]
            self.heard[replica] = (grant.clock, max(grant.end, before[1]))
            if grant.clock > clock.step:
                clock.meet(grant.clock)
        for number, attempt in grant.groups:
            self.held[replica][number] = (attempt, clock.join().step + 1)
        if grant.last and self.TURN:
            clock.meet(grant.end)

    def ask(self, replica, *, lost=False, holding=None):
        """Ask; of a `lost` question the answer never arrives."""
        request = object()
        self.questions[request] = None if lost else replica
        question = LeaseAsked(
            request=request,
            replica=Replica(replica),
            incarnation=self.lives[replica],
            count=2,
            deadline=self.now + WAIT_S,
            holding=holding,
        )
        self.tell(question)

    replicas = st.integers(0, REPLICAS - 1)

    @rule(replica=replicas, lost=st.booleans())
    def asks(self, replica, lost):
        if replica in self.live:
            if replica in self.broken:
                self.link_breaks(replica)
            else:
                self.ask(replica, lost=lost)
                if lost:
                    self.broken.add(replica)

    @rule(replica=replicas)
    def link_breaks(self, replica):
        if replica in self.live:
            for request, asker in self.questions.items():
                if asker == replica:
                    self.questions[request] = None
            self.broken.discard(replica)
            self.ask(replica, holding=tuple(self.held[replica]))

    @rule(replica=replicas, twice=st.booleans())
    def reports(self, replica, twice):
        if self.held[replica] and replica in self.live:
            number, (attempt, clock) = self.held[replica].popitem()
            finished = Finished(self.epoch, number, attempt, 1, 0.0, clock if self.TURN else 0)
            for _ in range(1 + twice):
                before = self.state.statistics()["finished"]
                self.tell(GroupsReported(Replica(replica), (finished,)))
                if self.state.statistics()["finished"] > before:
                    self.done.append(number)

    @rule(replica=replicas)
    def dies(self, replica):
        self.live.discard(replica)
        self.new_life(replica)
        self.tell_live()

    @rule(replica=replicas)
    def comes(self, replica):
        if replica not in self.live:
            self.new_life(replica, start=self.state.statistics()["clock"] if self.TURN else 0)
            self.live.add(replica)
            self.tell_live()

    @rule(replica=replicas)
    def lives_again_unnoticed(self, replica):
        if replica in self.live:
            self.new_life(replica)
            self.ask(replica, holding=())

    @precondition(lambda self: self.paused)
    @rule()
    def the_pause_ends(self):
        self.paused = False
        self.tell(PauseEnded())

    @rule(seconds=st.floats(0.1, 6.0))
    def time_passes(self, seconds):
        self.now += seconds
        self.take(self.state.tick(now=self.now))

    @precondition(lambda self: self.ends and self.ends[-1].number == self.epoch)
    @rule()
    def next_epoch(self):
        self.begin()

    @invariant()
    def every_group_is_somewhere_and_finished_once(self):
        self.state.check_invariants()
        assert len(self.done) == len(set(self.done))
        ended = bool(self.ends) and self.ends[-1].number == self.epoch
        assert ended == (len(self.done) == self.GROUPS)

    @invariant()
    def no_clock_is_beyond_the_end(self):
        if self.TURN:
            end = self.state.statistics()["clock"]
            assert all(clock.step + (clock.groups > 0) <= end for clock in self.clocks.values())

    def teardown(self):
        """Whatever happened, the replicas that are left can finish the epoch, and all of them meet."""
        if not self.live:
            self.comes(0)
        for _ in range(6 * self.GROUPS):
            if len(self.done) == self.GROUPS:
                break
            if self.paused:
                self.the_pause_ends()
            for replica in sorted(self.live):
                self.link_breaks(replica)
                while self.held[replica]:
                    self.reports(replica, twice=False)
        assert sorted(self.done) == list(range(self.GROUPS))
        self.state.check_invariants()
        if self.TURN:
            for replica in sorted(self.live):
                self.link_breaks(replica)
            met = {self.clocks[replica].step for replica in self.live}
            assert met == {self.state.statistics()["clock"]} == {self.ends[-1].clock}


class WarmLeases(Leases):
    WARM = 4


class PausingLeases(Leases):
    EVERY = 4


class ResumedLeases(Leases):
    EVERY = 3
    FINISHED = ((1, 3), (6, 9))


class Turns(Leases):
    TURN = 2


class TurnsOfOne(Leases):
    TURN = 1
    WARM = 13


class WarmTurns(Leases):
    TURN = 3
    WARM = 4


class PausingTurns(Leases):
    TURN = 2
    EVERY = 5
    WARM = 2


class ResumedTurns(Leases):
    TURN = 2
    EVERY = 2
    FINISHED = ((0, 3), (5, 6))


for machine in (
    Leases,
    WarmLeases,
    PausingLeases,
    ResumedLeases,
    Turns,
    TurnsOfOne,
    WarmTurns,
    PausingTurns,
    ResumedTurns,
):
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)

TestLeases = Leases.TestCase
TestWarmLeases = WarmLeases.TestCase
TestPausingLeases = PausingLeases.TestCase
TestResumedLeases = ResumedLeases.TestCase
TestTurns = Turns.TestCase
TestTurnsOfOne = TurnsOfOne.TestCase
TestWarmTurns = WarmTurns.TestCase
TestPausingTurns = PausingTurns.TestCase
TestResumedTurns = ResumedTurns.TestCase
