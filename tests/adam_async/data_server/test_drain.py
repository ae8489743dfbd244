"""An epoch of a run that stops pauses after its leased groups, at one clock of all replicas."""

import pytest

from adam_async.data_server.state import EpochEnded, PauseAsked, Paused, PauseEnded
from adam_async.run.ids import Replica
from tests.adam_async.data_server.scene import Scene, began, turns

ZERO, ONE = Replica(0), Replica(1)


def scene_of(*replicas, epoch):
    """Replicas that are live, and then an epoch."""
    scene = Scene()
    scene.live(*replicas)
    scene.enter(epoch)
    return scene


def test_waiting_groups_are_not_leased_and_the_pause_comes_with_the_last_leased_one():
    scene = scene_of(ZERO, ONE, epoch=began(10, {ZERO: (0, 5), ONE: (5, 10)}))
    assert scene.leased(ZERO, 2) == ((0, 1), (1, 1))
    assert scene.leased(ONE, 1) == ((5, 1),)
    assert scene.enter(PauseAsked(1)) == []
    assert (scene.leased(ZERO, 9), scene.leased(ONE, 9)) == ((), ())
    assert scene.report(ZERO, 0, 1) == []
    assert scene.report(ONE, 5) == [Paused(1, 3)]
    assert scene.state.trained_ranges() == ((0, 2), (5, 6))


def test_a_run_that_goes_on_gets_the_other_groups_in_their_order():
    scene = scene_of(ZERO, epoch=began(4))
    scene.ask(ZERO, 1)
    scene.enter(PauseAsked(1))
    assert scene.report(ZERO, 0) == [Paused(1, 1)]
    scene.enter(PauseEnded())
    assert not scene.state.draining
    assert scene.leased(ZERO, 9) == ((1, 1), (2, 1), (3, 1))
    (ended,) = scene.report(ZERO, 1, 2, 3)
    assert isinstance(ended, EpochEnded)


def test_without_a_lease_the_pause_comes_at_once_but_not_before_the_first_group():
    scene = scene_of(ZERO, epoch=began(4))
    assert scene.enter(PauseAsked(1)) == []
    assert scene.leased(ZERO, 9) == ((0, 1),)
    assert scene.report(ZERO, 0) == [Paused(1, 1)]
    scene.enter(PauseEnded())
    assert scene.enter(PauseAsked(1)) == [Paused(1, 1)]


def test_all_groups_leased_end_the_epoch_in_the_place_of_a_pause():
    scene = scene_of(ZERO, epoch=began(2))
    scene.ask(ZERO, 2)
    scene.enter(PauseAsked(1))
    (ended,) = scene.report(ZERO, 0, 1)
    assert isinstance(ended, EpochEnded)


def test_a_pause_of_an_earlier_epoch_is_ignored():
    scene = scene_of(ZERO, epoch=began(4))
    scene.enter(PauseAsked(2))
    assert scene.leased(ZERO, 9) == ((0, 1), (1, 1), (2, 1), (3, 1))


def test_with_rounds_all_replicas_reach_the_highest_clock_of_a_lease():
    scene = scene_of(ZERO, ONE, epoch=turns(16))
    assert scene.granted(ZERO, 3) == ([0, 1, 4], False, 0, 0)
    assert scene.granted(ONE, 1) == ([2], False, 0, 0)
    scene.enter(PauseAsked(1))
    assert scene.granted(ZERO, 9) == ([5], True, 0, 2)
    assert scene.granted(ONE, 9) == ([3, 6, 7], True, 0, 2)
    scene.report(ZERO, 0, 1, 4, 5, clock=2)
    assert scene.report(ONE, 2, 3, 6, 7, clock=2) == [Paused(1, 8)]
    assert (scene.state.trained_ranges(), scene.state.statistics().clock) == (((0, 8),), 2)
    scene.enter(PauseEnded())
    assert scene.granted(ZERO, 9) == ([8, 9, 12, 13], True, 2, 4)


def test_with_rounds_an_end_that_a_replica_has_received_stays():
    scene = scene_of(ZERO, ONE, epoch=turns(8))
    assert scene.granted(ZERO, 9) == ([0, 1, 4, 5], True, 0, 2)
    scene.enter(PauseAsked(1))
    assert scene.granted(ONE, 9) == ([2, 3, 6, 7], True, 0, 2)


def test_with_rounds_an_epoch_without_a_lease_trains_one_step():
    scene = scene_of(ZERO, ONE, epoch=turns(12, clock=7))
    scene.enter(PauseAsked(1))
    assert scene.granted(ZERO, 9) == ([0, 1], True, 7, 8)
    assert scene.granted(ONE, 9) == ([2, 3], True, 7, 8)


@pytest.mark.parametrize("round_groups", [0, 2])
def test_the_leases_of_a_lost_replica_are_trained_before_the_pause(round_groups):
    epoch = turns(8) if round_groups else began(8, {ZERO: (0, 4), ONE: (4, 8)})
    scene = scene_of(ZERO, ONE, epoch=epoch)
    (kept, lost), end = ((0, 1), (2, 3)) if round_groups else ((0, 1), (4, 5)), 2 if round_groups else 0
    assert scene.leased(ZERO, 2) == tuple((number, 1) for number in kept)
    assert scene.leased(ONE, 2) == tuple((number, 1) for number in lost)
    scene.enter(PauseAsked(1))
    scene.report(ZERO, *kept, clock=1 if round_groups else 0)
    scene.live(ZERO)
    assert scene.leased(ZERO, 9) == tuple((number, 2) for number in lost)
    assert scene.report(ZERO, *lost, clock=end) == [Paused(1, 4)]


def test_a_warm_start_is_trained_to_its_end():
    scene = scene_of(ZERO, ONE, epoch=turns(12, warm=4))
    scene.ask(ZERO, 1)
    scene.enter(PauseAsked(1))
    assert scene.granted(ZERO, 9)[0] == [1, 2, 3]
    assert scene.report(ZERO, 0, 1, 2, 3, clock=2) == [Paused(1, 4)]


def test_a_pool_whose_warm_start_is_its_fraction_ends_after_the_pause():
    scene = scene_of(ZERO, epoch=began(4, warm=3, fraction=0.5, pooled=True))
    scene.ask(ZERO, 9)
    scene.enter(PauseAsked(1))
    assert scene.report(ZERO, 0, 1, 2) == [Paused(1, 3)]
    (ended,) = scene.enter(PauseEnded())
    assert isinstance(ended, EpochEnded)
    assert ended.skipped == ((3, 4),)
