"""An epoch of a run that stops ends its leases, at one clock of all replicas."""

import pytest

from adam_async.data_server.state import DrainAsked, EpochEnded
from adam_async.run.ids import Replica
from tests.adam_async.data_server.scene import Scene, began, turns

ZERO, ONE = Replica(0), Replica(1)


def scene_of(*replicas, epoch):
    """Replicas that are live, and then an epoch."""
    scene = Scene()
    scene.live(*replicas)
    scene.enter(epoch)
    return scene


def drained(scene):
    return scene.state.statistics().drained


def test_waiting_groups_are_not_leased_and_the_epoch_is_drained_with_the_last_leased_one():
    scene = scene_of(ZERO, ONE, epoch=began(10, {ZERO: (0, 5), ONE: (5, 10)}))
    assert scene.leased(ZERO, 2) == ((0, 1), (1, 1))
    assert scene.leased(ONE, 1) == ((5, 1),)
    scene.enter(DrainAsked(1))
    assert (scene.leased(ZERO, 9), scene.leased(ONE, 9)) == ((), ())
    scene.report(ZERO, 0, 1)
    assert not drained(scene)
    scene.report(ONE, 5)
    assert drained(scene)
    assert scene.trained == ((0, 2), (5, 6))


def test_without_a_lease_an_epoch_is_drained_at_once():
    scene = scene_of(ZERO, epoch=began(4))
    scene.enter(DrainAsked(1))
    assert drained(scene)
    assert scene.leased(ZERO, 9) == ()


def test_all_groups_leased_end_the_epoch():
    scene = scene_of(ZERO, epoch=began(2))
    scene.ask(ZERO, 2)
    scene.enter(DrainAsked(1))
    (ended,) = scene.report(ZERO, 0, 1)
    assert isinstance(ended, EpochEnded)


def test_a_stop_in_an_earlier_epoch_is_ignored():
    scene = scene_of(ZERO, epoch=began(4))
    scene.enter(DrainAsked(2))
    assert scene.leased(ZERO, 9) == ((0, 1), (1, 1), (2, 1), (3, 1))


def test_with_rounds_all_replicas_reach_the_highest_clock_of_a_lease():
    scene = scene_of(ZERO, ONE, epoch=turns(16))
    assert scene.granted(ZERO, 3) == ([0, 1, 4], False, 0, 0)
    assert scene.granted(ONE, 1) == ([2], False, 0, 0)
    scene.enter(DrainAsked(1))
    assert scene.granted(ZERO, 9) == ([5], True, 0, 2)
    assert scene.granted(ONE, 9) == ([3, 6, 7], True, 0, 2)
    scene.report(ZERO, 0, 1, 4, 5, clock=2)
    assert not drained(scene)
    scene.report(ONE, 2, 3, 6, 7, clock=2)
    assert drained(scene)
    assert (scene.trained, scene.state.statistics().clock) == (((0, 8),), 2)


def test_with_rounds_an_epoch_is_not_drained_before_each_replica_has_its_last_step():
    scene = scene_of(ZERO, ONE, epoch=turns(16))
    assert scene.granted(ZERO, 2) == ([0, 1], False, 0, 0)
    scene.enter(DrainAsked(1))
    scene.report(ZERO, 0, 1, clock=1)
    assert not drained(scene)
    assert scene.granted(ONE, 9) == ([2, 3], True, 0, 1)
    scene.report(ONE, 2, 3, clock=1)
    assert drained(scene)


def test_with_rounds_an_end_that_a_replica_has_received_stays():
    scene = scene_of(ZERO, ONE, epoch=turns(8))
    assert scene.granted(ZERO, 9) == ([0, 1, 4, 5], True, 0, 2)
    scene.enter(DrainAsked(1))
    assert scene.granted(ONE, 9) == ([2, 3, 6, 7], True, 0, 2)


@pytest.mark.parametrize("round_groups", [0, 2])
def test_the_leases_of_a_lost_replica_do_not_hold_a_stop_up(round_groups):
    epoch = turns(8) if round_groups else began(8, {ZERO: (0, 4), ONE: (4, 8)})
    scene = scene_of(ZERO, ONE, epoch=epoch)
    assert scene.leased(ZERO, 2) == ((0, 1), (1, 1))
    scene.ask(ONE, 2)
    scene.enter(DrainAsked(1))
    scene.report(ZERO, 0, 1, clock=1 if round_groups else 0)
    scene.live(ZERO)
    assert drained(scene)
    assert scene.leased(ZERO, 9) == ()
    assert scene.trained == ((0, 2),)


def test_with_rounds_a_warm_start_is_trained_to_the_end_that_others_have_received():
    scene = scene_of(ZERO, ONE, epoch=turns(12, warm=4))
    scene.ask(ZERO, 1)
    assert scene.granted(ONE) == ([], True, 0, 2)
    scene.enter(DrainAsked(1))
    assert scene.granted(ZERO, 9)[0] == [1, 2, 3]
    scene.report(ZERO, 0, 1, 2, 3, clock=2)
    assert drained(scene)


def test_a_pool_whose_warm_start_is_its_fraction_ends():
    scene = scene_of(ZERO, epoch=began(4, warm=3, fraction=0.5, pooled=True))
    scene.ask(ZERO, 9)
    scene.enter(DrainAsked(1))
    (ended,) = scene.report(ZERO, 0, 1, 2)
    assert isinstance(ended, EpochEnded)
    assert ended.counts.skipped_groups == ((3, 4),)
