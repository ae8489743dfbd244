"""Leases as timelines."""

from itertools import permutations

import pytest

from adam_async.data_server.epoch import EpochBegan
from adam_async.data_server.state import EpochEnded, GroupsReported
from adam_async.run.counts import EpochCounts
from adam_async.run.ids import Replica
from tests.adam_async.data_server.scene import WAIT_S, Scene, began, contents, finished, turns

ZERO, ONE, TWO = Replica(0), Replica(1), Replica(2)


def scene_of(*replicas, epoch=None, partitions=1):
    """Replicas that are live, and then an epoch."""
    scene = Scene(partitions=partitions)
    scene.live(*replicas)
    if epoch is not None:
        scene.enter(epoch)
    return scene


def test_groups_are_leased_in_the_order_of_the_share():
    scene = scene_of(ZERO, epoch=began())
    assert scene.leased(ZERO, 4) == ((0, 1), (1, 1), (2, 1), (3, 1))
    assert scene.leased(ZERO, 4) == ((4, 1), (5, 1))


def test_an_answer_says_when_nothing_more_waits():
    scene = scene_of(ZERO, epoch=began(groups=3))
    assert [scene.ask(ZERO).last, scene.ask(ZERO).last] == [False, True]


def test_a_question_without_work_is_parked_until_its_time_is_up():
    scene = scene_of(ZERO)
    assert scene.ask(ZERO, now=10.0) is None
    assert scene.state.next_deadline() == 15.0
    scene.tick(14.9)
    assert scene.worker(ZERO).answer is None
    scene.tick(15.0)
    assert contents(scene.worker(ZERO).answer) == ([], True, 0, 0)
    assert scene.state.next_deadline() is None


def test_a_parked_question_is_answered_when_the_epoch_begins():
    scene = scene_of(ZERO)
    assert scene.leased(ZERO) is None
    scene.enter(began())
    answer = scene.worker(ZERO).answer
    assert (answer.epoch, answer.groups) == (1, ((0, 1), (1, 1)))


def test_a_worker_without_the_sync_clock_gets_it_once_at_once():
    scene = scene_of(ZERO, ONE, epoch=began(1))
    assert scene.granted(ONE) == ([], True, 0, 0)
    assert scene.granted(ONE) is None


def test_an_epoch_ends_once_with_its_totals_when_the_last_group_is_reported():
    scene = scene_of(ZERO, epoch=began(groups=2, num_images=4))
    scene.losses = 4, 8.0
    scene.ask(ZERO, now=3.0)
    assert scene.report(ZERO, 0, images=3, now=4.0) == []
    assert scene.report(ZERO, 1, images=1, now=9.0) == [EpochEnded(1, EpochCounts(4, 2.0, 4, 6.0))]
    assert scene.report(ZERO, 1, now=9.0) == []
    assert scene.state.late_reports == 1


def test_the_loss_of_an_epoch_has_the_same_bits_in_every_order_of_reports():
    """A sum of floats in the order of the reports gives 0, 0.1 or 0.125 times the images."""
    losses = {0: 2.0**60, 1: 0.1, 2: -(2.0**60)}
    means = set()
    for order in permutations(losses):
        scene = scene_of(ZERO, epoch=began(3))
        scene.ask(ZERO, now=1.0)
        scene.ask(ZERO, now=1.0)
        ended = [end for number in order for end in scene.report(ZERO, number, loss=losses[number], now=2.0)]
        means.add(ended[0].counts.loss)
    assert means == {0.4 / 12}


def test_leases_and_queue_of_a_lost_replica_go_to_its_successor():
    scene = scene_of(ZERO, ONE, TWO, epoch=began(6, {ZERO: (0, 2), ONE: (2, 4), TWO: (4, 6)}))
    assert scene.leased(ONE, 1) == ((2, 1),)
    assert scene.leased(TWO, 9) == ((4, 1), (5, 1))
    scene.live(ZERO, TWO)
    assert scene.leased(TWO, 9) == ((2, 2), (3, 1))
    assert scene.state.returned == 1


def test_the_successor_of_the_highest_replica_is_the_lowest():
    scene = scene_of(ZERO, TWO, epoch=began(2, {ZERO: (0, 1), TWO: (1, 2)}))
    scene.live(ZERO)
    assert scene.leased(ZERO, 9) == ((0, 1), (1, 1))


def test_a_parked_successor_gets_the_lost_groups_at_once():
    scene = scene_of(ZERO, ONE, epoch=began(2, {ZERO: (0, 1), ONE: (1, 2)}))
    assert scene.leased(ZERO) == ((0, 1),)
    assert scene.leased(ONE) == ((1, 1),)
    assert scene.leased(ONE) is None
    scene.live(ONE)
    assert scene.worker(ONE).answer.groups == ((0, 2),)


def test_a_share_of_a_replica_that_was_lost_before_the_epoch_is_passed_on():
    scene = scene_of(ONE, epoch=began(2, {ZERO: (0, 1), ONE: (1, 2)}))
    assert scene.leased(ONE, 9) == ((1, 1), (0, 1))


def test_a_lost_replica_whose_question_is_parked_gets_nothing_back():
    scene = scene_of(ZERO, epoch=began(2))
    assert scene.leased(ZERO) == ((0, 1), (1, 1))
    lost = scene.worker(ZERO)
    assert scene.leased(ZERO) is None
    scene.live()
    scene.live(ONE)
    assert scene.leased(ONE) == ((0, 2), (1, 2))
    assert lost.answer is None
    scene.tick(WAIT_S)
    assert lost.answer.groups == ()


def test_without_any_live_replica_groups_wait_for_the_next_worker_of_that_number():
    scene = scene_of(ZERO, epoch=began(2))
    scene.ask(ZERO)
    scene.live()
    scene.live(ZERO)
    assert scene.leased(ZERO) == ((0, 2), (1, 2))


def test_a_new_generation_gets_the_leases_of_the_old_one_without_a_reported_loss():
    scene = scene_of(ZERO, epoch=began(2))
    assert scene.leased(ZERO) == ((0, 1), (1, 1))
    scene.live(ZERO, anew=[ZERO])
    assert scene.leased(ZERO) == ((0, 2), (1, 2))


def test_questions_of_a_generation_that_has_not_begun_wait_for_it():
    scene = scene_of(epoch=began(2))
    early = scene.worker(ZERO, replica_generation=7)
    scene.enter(early.question(2))
    assert early.answer is None
    scene.live(ZERO)
    assert scene.replica_generations == {ZERO: 7}
    assert early.answer.groups == ((0, 1), (1, 1))


def test_an_outlived_worker_gets_nothing_and_is_not_answered_before_its_time():
    scene = scene_of(ZERO, epoch=began(4))
    scene.ask(ZERO)
    old = scene.worker(ZERO)
    scene.live(ZERO, anew=[ZERO])
    scene.ask(ZERO, 1)
    scene.enter(old.question(2))
    assert old.answer is None
    scene.tick(WAIT_S)
    assert old.answer.groups == ()
    assert scene.leased(ZERO, 9) == ((1, 2), (2, 1), (3, 1))


def test_after_a_broken_link_the_same_groups_are_given_under_the_same_attempts_and_then_more():
    scene = scene_of(ZERO, epoch=began(4))
    worker = scene.worker(ZERO)
    scene.enter(worker.question(3))
    worker.position = 0  # the answer was lost
    assert scene.leased(ZERO, 4) == ((0, 1), (1, 1), (2, 1), (3, 1))
    assert scene.state.returned == 0


def test_a_question_on_a_new_link_replaces_the_one_of_the_old_link():
    scene = scene_of(ZERO)
    assert scene.ask(ZERO) is None
    assert scene.ask(ZERO) is None
    assert [grant.groups for grant in scene.void] == [()]
    scene.enter(began())
    assert scene.worker(ZERO).answer.groups == ((0, 1), (1, 1))


def test_late_reports_are_counted_and_change_nothing():
    scene = scene_of(ZERO, ONE, epoch=began(2, {ZERO: (0, 1), ONE: (1, 2)}))
    scene.ask(ZERO)
    gone = scene.replica_generations[ZERO]
    scene.live(ONE)
    scene.ask(ONE, 9)
    replica_generation = scene.replica_generations[ONE]
    for late in (
        GroupsReported(ZERO, gone, 0, (finished(0),)),  # of a life that is over
        GroupsReported(ONE, replica_generation, 0, (finished(0, attempt=1),)),  # an attempt that is over
        GroupsReported(ONE, replica_generation, 0, (finished(1, epoch=2),)),  # of another epoch
        GroupsReported(ONE, replica_generation, 0, (finished(99),)),  # never leased
        GroupsReported(ONE, gone, 0, (finished(1),)),  # of another's life
    ):
        assert scene.enter(late) == []
    assert scene.state.late_reports == 5
    assert scene.state.statistics().finished == 0


def test_the_ranges_that_are_trained_leave_out_what_waits_and_what_is_leased():
    scene = scene_of(ZERO, ONE, epoch=began(10, {ZERO: (0, 5), ONE: (5, 10)}))
    assert scene.trained == ()
    assert scene.leased(ZERO, 3) == ((0, 1), (1, 1), (2, 1))
    assert scene.leased(ONE, 1) == ((5, 1),)
    scene.report(ZERO, 0, 2)
    assert scene.trained == ((0, 1), (2, 3))
    scene.report(ZERO, 1)
    scene.report(ONE, 5)
    assert scene.trained == ((0, 3), (5, 6))
    scene.ask(ZERO, 9)
    scene.ask(ONE, 9)
    scene.report(ZERO, 3, 4)
    scene.report(ONE, *range(6, 10))
    assert scene.trained == ((0, 10),)


# --- replicas of several workers ---------------------------------------------------------------


def test_all_workers_of_a_replica_are_given_the_same_groups_each_at_its_own_pace():
    scene = scene_of(ZERO, epoch=began(6), partitions=2)
    assert scene.leased(ZERO, 4, part=0) == ((0, 1), (1, 1), (2, 1), (3, 1))
    assert scene.leased(ZERO, 3, part=1) == ((0, 1), (1, 1), (2, 1))
    assert scene.leased(ZERO, 3, part=1) == ((3, 1), (4, 1), (5, 1))
    assert scene.leased(ZERO, 3, part=0) == ((4, 1), (5, 1))
    assert scene.state.leased == 6


def test_a_group_is_finished_when_all_parts_are_and_its_losses_add_up():
    scene = scene_of(ZERO, epoch=began(1), partitions=3)
    for part in range(3):
        scene.ask(ZERO, part=part)
    assert scene.report(ZERO, 0, part=1, loss=0.0) == []
    assert scene.report(ZERO, 0, part=1, loss=0.0) == []
    assert scene.report(ZERO, 0, part=0, loss=0.5) == []
    assert (scene.state.late_reports, scene.state.statistics().finished) == (1, 0)
    assert scene.report(ZERO, 0, part=2, loss=1.5, now=2.0) == [EpochEnded(1, EpochCounts(4, 2.0, 4, 2.0))]
    assert scene.state.statistics().loss == 2.0


def test_a_group_that_some_parts_finished_is_trained_again_when_the_replica_is_lost():
    scene = scene_of(ZERO, ONE, epoch=began(1), partitions=2)
    for part in range(2):
        scene.ask(ZERO, part=part)
    scene.report(ZERO, 0, part=0)
    scene.live(ONE)
    for part in range(2):
        assert scene.leased(ONE, part=part) == ((0, 2),)
    assert scene.report(ONE, 0, part=1) == []
    assert [type(effect) for effect in scene.report(ONE, 0, part=0)] == [EpochEnded]


def test_a_mark_sent_to_one_worker_is_sent_to_the_others_too():
    scene = scene_of(ZERO, ONE, epoch=turns(8), partitions=2)
    assert scene.granted(ZERO, 3, part=0) == ([0, 1, 4], False, 0, 0)
    assert scene.granted(ONE, 9, part=0) == ([2, 3, 6, 7], True, 0, 2)
    assert scene.granted(ONE, 9, part=0) is None
    scene.live(ONE)
    # The lost turns are for who has heard of an end: they begin there, though more waits than when it heard.
    assert contents(scene.worker(ONE, 0).answer) == ([0, 1, 4, 5], True, 2, 6)
    assert scene.granted(ONE, 3, part=1) == ([2, 3, 6], False, 0, 0)
    assert scene.granted(ONE, 3, part=1) == ([7], True, 0, 2)
    assert scene.granted(ONE, 3, part=1) == ([0, 1, 4], False, 2, 0)
    assert scene.granted(ONE, 3, part=1) == ([5], True, 2, 6)


def test_an_end_that_moved_on_is_heard_by_all_workers_of_a_replica():
    scene = scene_of(ZERO, ONE, epoch=turns(8), partitions=2)
    scene.ask(ZERO, 9, part=0)
    assert scene.granted(ONE, 9, part=0) == ([2, 3, 6, 7], True, 0, 2)
    scene.ask(ONE, 9, part=0)
    scene.report(ZERO, 0, part=0, clock=5)
    assert contents(scene.worker(ONE, 0).answer) == ([], True, 0, 5)
    assert scene.granted(ONE, 9, part=1) == ([2, 3, 6, 7], True, 0, 5)


# --- turns and clocks --------------------------------------------------------------------------


def test_groups_go_out_in_rounds_and_the_last_answer_has_the_sync_clock():
    scene = scene_of(ZERO, ONE, epoch=turns(10, clock=7))
    assert scene.granted(ZERO, 4) == ([0, 1, 4, 5], False, 7, 0)
    assert scene.granted(ONE, 9) == ([2, 3, 6, 7], True, 7, 10)
    assert scene.granted(ZERO, 4) == ([8, 9], True, 7, 10)


def test_a_replica_without_a_round_gets_the_sync_clock_at_once_and_then_waits():
    scene = scene_of(ZERO, ONE, epoch=turns(2, clock=3))
    assert scene.granted(ONE) == ([], True, 0, 4)
    assert scene.granted(ONE) is None


def test_the_rounds_of_a_lost_replica_are_dealt_out_and_waiting_replicas_get_the_new_end():
    scene = scene_of(ZERO, ONE, TWO, epoch=turns(18, replicas=(ZERO, ONE, TWO)))
    assert scene.granted(ZERO, 9) == ([0, 1, 6, 7, 12, 13], True, 0, 3)
    assert scene.granted(TWO, 2) == ([4, 5], False, 0, 0)
    assert scene.granted(ONE, 1) == ([2], False, 0, 0)
    assert scene.granted(ZERO, 9) is None
    scene.live(ZERO, TWO)
    # The lost turns are 2 and 3, 8 and 9, 14 and 15. Who has heard of an end begins again from there.
    assert contents(scene.worker(ZERO).answer) == ([2, 3, 14, 15], True, 3, 6)
    assert scene.granted(TWO, 9) == ([10, 11, 16, 17, 8, 9], True, 0, 6)


def test_a_replica_that_joins_an_epoch_of_rounds_gets_its_end_and_work_from_the_next():
    scene = scene_of(ZERO, epoch=turns(4, replicas=(ZERO,)))
    scene.live(ZERO, ONE)
    assert scene.granted(ONE) == ([], True, 0, 2)
    assert scene.granted(ZERO, 9) == ([0, 1, 2, 3], True, 0, 2)


def test_a_replica_that_joins_alone_takes_over_from_the_sync_clock():
    scene = scene_of(ZERO, epoch=turns(4, replicas=(ZERO,)))
    scene.ask(ZERO, 3)
    scene.live()
    scene.live(ONE)
    assert scene.granted(ONE, 9) == ([0, 1, 2, 3], True, 2, 6)


def test_a_new_generation_leaves_the_rounds_of_the_old_one_to_the_others():
    scene = scene_of(ZERO, ONE, epoch=turns(8))
    assert scene.granted(ONE, 1) == ([2], False, 0, 0)
    scene.live(ZERO, ONE, anew=[ONE])
    # Group 2 is a step of its own now, so the steps are 0 1, 4 5, 2, 3 6, and 7.
    assert scene.granted(ONE, 1) == ([], True, 0, 5)
    assert scene.granted(ZERO, 9) == ([0, 1, 4, 5, 2, 3, 6, 7], True, 0, 5)


def test_a_new_generation_keeps_its_own_leases():
    scene = scene_of(ZERO, ONE)
    scene.ask(ONE)  # the old life waits for the first epoch
    scene.live(ZERO)
    scene.live(ZERO, ONE)
    scene.enter(turns(8))
    assert scene.granted(ONE, 9) == ([2, 3, 6, 7], True, 0, 2)


def test_an_answer_that_was_lost_is_given_again_as_it_was():
    scene = scene_of(ZERO, ONE, epoch=turns(8))
    worker = scene.worker(ONE)
    rest = ([6, 7], True, 0, 2)
    assert scene.granted(ONE, 2) == ([2, 3], False, 0, 0)
    assert scene.granted(ONE, 2) == rest
    worker.position, worker.heard = 2, -1
    assert scene.granted(ONE, 2) == rest
    worker.heard = -1
    assert scene.granted(ONE, 2) == ([], True, 0, 2)


def test_a_clock_beyond_what_was_known_moves_the_end_for_all():
    scene = scene_of(ZERO, ONE, epoch=turns(8))
    scene.ask(ZERO, 9)
    scene.ask(ONE, 9)
    assert scene.granted(ONE) is None
    assert scene.report(ZERO, 0, clock=5) == []
    assert contents(scene.worker(ONE).answer) == ([], True, 0, 5)


def test_the_end_of_an_epoch_has_the_sync_clock():
    scene = scene_of(ZERO, ONE, epoch=turns(4, clock=5))
    scene.ask(ZERO, 9)
    scene.ask(ONE, 9)
    scene.report(ZERO, 0, 1, clock=6)
    (ended,) = scene.report(ONE, 2, 3, clock=6)
    assert (ended.number, ended.counts.clock) == (1, 6)


def test_an_asynchronous_epoch_ends_with_the_highest_clock_of_all():
    scene = scene_of(ZERO, epoch=began(2))
    scene.ask(ZERO)
    scene.report(ZERO, 0, clock=4)
    (ended,) = scene.report(ZERO, 1, clock=3)
    assert ended.counts.clock == 4


# --- progress ----------------------------------------------------------------------------------


def test_progress_is_the_part_of_the_share_or_of_the_epoch_that_lies_before():
    scene = scene_of(ZERO, ONE, epoch=began(8, {ZERO: (0, 4), ONE: (4, 8)}, number=3))
    assert [scene.ask(who, 4).progress for who in (ZERO, ONE)] == [(2.0, 2.25, 2.5, 2.75)] * 2
    scene = scene_of(ZERO, ONE, epoch=turns(8))
    assert scene.ask(ZERO, 4).progress == (0.0, 0.125, 0.5, 0.625)
    assert scene.ask(ONE, 4).progress == (0.25, 0.375, 0.75, 0.875)


def test_a_group_that_was_passed_on_keeps_its_progress():
    scene = scene_of(ZERO, ONE, epoch=began(8, {ZERO: (0, 4), ONE: (4, 8)}))
    scene.live(ZERO)
    told = scene.ask(ZERO, 8)
    assert dict(zip([number for number, _ in told.groups], told.progress, strict=True))[6] == 0.5


# --- who joins an asynchronous epoch -----------------------------------------------------------


def test_a_joining_replica_gets_an_equal_part_of_the_waiting_groups_at_once():
    scene = scene_of(ZERO, ONE, epoch=began(12, {ZERO: (0, 6), ONE: (6, 12)}))
    assert scene.leased(ZERO, 3) == ((0, 1), (1, 1), (2, 1))
    scene.live(ZERO, ONE, TWO)
    assert scene.leased(TWO, 9) == ((9, 1), (10, 1), (11, 1))
    assert scene.leased(ZERO, 9) == ((3, 1), (4, 1), (5, 1))
    assert scene.leased(ONE, 9) == ((6, 1), (7, 1), (8, 1))


def test_a_replica_that_comes_back_takes_part_at_once():
    scene = scene_of(ZERO, ONE, epoch=began(8, {ZERO: (0, 4), ONE: (4, 8)}))
    scene.live(ZERO)
    scene.live(ZERO, ONE)
    assert scene.leased(ONE, 9) == ((4, 1), (5, 1), (6, 1), (7, 1))
    assert scene.leased(ZERO, 9) == ((0, 1), (1, 1), (2, 1), (3, 1))


# --- warm start --------------------------------------------------------------------------------


def test_in_a_warm_start_the_others_wait_until_its_groups_are_finished():
    scene = scene_of(ZERO, ONE, epoch=EpochBegan(1, 8, {ZERO: (0, 5), ONE: (5, 8)}, warm=2))
    assert scene.granted(ONE) == ([], True, 0, 0)
    assert scene.leased(ONE) is None
    assert scene.leased(ZERO, 9) == ((0, 1), (1, 1))
    assert scene.report(ZERO, 0) == []
    assert scene.worker(ONE).answer is None
    assert scene.report(ZERO, 1) == []
    assert scene.worker(ONE).answer.groups == ((5, 1), (6, 1))
    assert scene.leased(ZERO, 9) == ((2, 1), (3, 1), (4, 1))


def test_with_rounds_the_others_begin_at_the_clock_of_the_warm_starts_end():
    scene = scene_of(ZERO, ONE, epoch=turns(12, warm=4))
    assert scene.granted(ONE) == ([], True, 0, 2)
    assert scene.granted(ZERO, 9) == ([0, 1, 2, 3], True, 0, 2)
    scene.report(ZERO, 0, 1, 2, 3, clock=2)
    assert scene.granted(ONE, 9) == ([6, 7, 10, 11], True, 2, 4)
    assert scene.granted(ZERO, 9) == ([4, 5, 8, 9], True, 2, 4)


def test_a_warm_start_goes_to_the_lowest_that_is_left():
    scene = scene_of(ZERO, ONE, TWO, epoch=turns(12, replicas=(ZERO, ONE, TWO), warm=4))
    scene.ask(ZERO, 1)
    scene.live(ONE, TWO)
    assert scene.granted(TWO) == ([], True, 0, 3)
    assert scene.granted(ONE, 9) == ([0, 1, 2, 3], True, 0, 3)


# --- resumed epochs ----------------------------------------------------------------------------


@pytest.mark.parametrize("round_groups", [0, 2])
def test_a_resumed_epoch_goes_on_with_what_is_left_and_counts_what_was(round_groups):
    shares = {ZERO: (0, 2), ONE: (1, 2)} if round_groups else {ZERO: (0, 6), ONE: (6, 8)}
    resumed = EpochBegan(
        1,
        8,
        shares,
        round_groups=round_groups,
        first_clock=2 * bool(round_groups),
        finished=((0, 4),),
        loss_images=16,
        loss_sum=48.0,
        train_s=7.5,
        images_per_group=4,
    )
    scene = scene_of(ZERO, ONE, epoch=resumed)
    assert scene.trained == ((0, 4),)
    assert scene.state.statistics().loss == 3.0
    assert scene.granted(ZERO, 9) == ([4, 5], True, 2 * bool(round_groups), 3 * bool(round_groups))
    assert scene.granted(ONE, 9) == ([6, 7], True, 2 * bool(round_groups), 3 * bool(round_groups))
    scene.losses = 32, 64.0
    scene.report(ZERO, 4, 5)
    (ended,) = scene.report(ONE, 6, 7)
    assert (ended.counts.images, ended.counts.loss, ended.counts.train_s) == (32, 2.0, 8.5)


def test_a_clock_that_no_replica_can_have_moves_nothing_and_its_groups_stay_leased():
    scene = Scene(turns())
    scene.live(*turns().shares)
    leased = scene.leased(Replica(0))
    before = scene.state.statistics().clock
    scene.report(Replica(0), leased[0][0], clock=1 << 40)
    assert scene.state.statistics().clock == before
    assert scene.state.late_reports == 1
    scene.report(Replica(0), leased[0][0], clock=1)
    assert scene.state.statistics().finished == 1


def test_a_worker_that_claims_unleased_groups_forgets_none_of_them():
    scene = Scene(began())
    scene.live(Replica(0))
    liar = scene.worker(Replica(0))
    liar.position = 1 << 40
    scene.enter(liar.question(2))
    liar.position = 0
    assert scene.leased(Replica(0)) == ((0, 1), (1, 1))
    assert scene.leased(Replica(0)) == ((2, 1), (3, 1))


def test_a_part_that_no_replica_has_is_given_nothing_and_finishes_nothing():
    scene = Scene(began())
    scene.live(Replica(0))
    (number, _), *_ = scene.leased(Replica(0))
    assert scene.ask(Replica(0), part=5).groups == ()
    scene.report(Replica(0), number, part=5)
    assert scene.state.statistics().finished == 0
    assert scene.state.late_reports == 1
