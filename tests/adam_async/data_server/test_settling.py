"""Leases of lost replicas, settled by the groups that the shards have; and a dealer that follows another."""

import pytest

from adam_async.data_server.epoch import SetsRead
from adam_async.data_server.state import DrainAsked, EpochEnded
from adam_async.run.counts import EpochCounts
from adam_async.run.ids import Replica
from tests.adam_async.data_server.scene import Scene, began, contents, turns

ZERO, ONE, TWO, THREE = map(Replica, range(4))
HALVES = {ZERO: (0, 4), ONE: (4, 8)}


def scene_of(*replicas, epoch, partitions=1):
    """Replicas that are live, and then an epoch; the test reads the sets itself."""
    scene = Scene(reads=False, partitions=partitions)
    scene.live(*replicas)
    scene.enter(epoch)
    return scene


def test_a_group_that_every_shard_has_is_finished_and_its_loss_counts():
    scene = scene_of(ZERO, ONE, epoch=began(3, {ZERO: (0, 1), ONE: (1, 3)}))
    scene.ask(ZERO)
    scene.ask(ONE)
    scene.report(ZERO, 0, now=2.0)
    scene.report(ONE, 1, now=3.0)
    scene.losses = 12, 60.0
    scene.live(ZERO)
    assert scene.state.statistics().finished == 2
    assert scene.read({0, 1, 2}, now=9.0) == [EpochEnded(1, EpochCounts(12, 5.0, 12, 9.0))]
    assert (scene.state.returned, scene.state.lost_at) == (0, 0)


def test_a_group_that_no_shard_or_only_some_have_returns_as_a_step_of_its_own():
    scene = scene_of(ZERO, ONE, epoch=began(8, HALVES))
    assert scene.leased(ONE, 3) == ((4, 1), (5, 1), (6, 1))
    scene.ask(ZERO, 4)
    scene.live(ZERO)
    assert scene.leased(ZERO) is None, "what may return is older than what follows"
    assert scene.read({5}, {6}) == []
    assert scene.worker(ZERO).answer.groups == ((4, 2), (6, 2))
    assert scene.leased(ZERO) == ((7, 1),)
    (ended,) = scene.report(ZERO, 0, 1, 2, 3, 4, 6, 7)
    assert (ended.counts.images, ended.counts.skipped_groups) == (32, ())


def test_an_epoch_does_not_end_while_a_lease_is_unsettled():
    scene = scene_of(ZERO, ONE, epoch=began(2, {ZERO: (0, 1), ONE: (1, 2)}))
    scene.ask(ZERO)
    scene.ask(ONE)
    scene.live(ZERO)
    assert scene.report(ZERO, 0) == []
    assert scene.trained == ((0, 1),)
    assert [type(effect) for effect in scene.read({1})] == [EpochEnded]


def four(groups=16, **more):
    shares = {Replica(each): (groups // 4 * each, groups // 4 * (each + 1)) for each in range(4)}
    return scene_of(ZERO, ONE, TWO, THREE, epoch=began(groups, shares, **{"fraction": 0.75, **more}))


def train(scene, replica):
    effects = []
    while (answer := scene.ask(replica, 1)) is not None and answer.groups:
        effects += scene.report(replica, answer.groups[0][0])
    return effects


def test_an_epoch_does_not_close_while_a_lease_is_unsettled():
    scene = four(fraction=0.5)
    scene.leased(THREE, 4)
    scene.live(ZERO, ONE, TWO)
    for replica in (ZERO, ONE):
        assert train(scene, replica) == []
    assert scene.state.statistics().skipped_groups == ()
    (ended,) = scene.read({12, 13, 14, 15})
    assert (ended.counts.skipped_groups, ended.counts.images) == (((8, 12),), 12 * 4)


def test_of_a_closed_epoch_groups_that_no_shard_has_are_skipped_and_ragged_ones_are_trained():
    scene = four()
    scene.leased(THREE, 3)
    for replica in (ZERO, ONE, TWO):
        assert train(scene, replica) == []
    scene.live(ZERO, ONE, TWO)
    assert scene.read({12}, {13}) == []
    assert scene.worker(ZERO).answer.groups == ((13, 2),)
    (ended,) = scene.report(ZERO, 13)
    assert (ended.counts.skipped_groups, ended.counts.behind) == (((14, 16),), (THREE,))


def test_a_ragged_group_of_a_pool_is_leased_beyond_its_fraction():
    scene = scene_of(ZERO, ONE, epoch=began(8, fraction=0.5, pooled=True, step=9))
    assert scene.leased(ZERO, 2) == ((0, 1), (1, 1))
    assert contents(scene.ask(ONE, 9)) == ([2, 3], True, 0, 0)
    assert scene.leased(ONE) is None
    scene.live(ONE)
    assert scene.leased(ONE) is None, "an unsettled lease counts"
    scene.report(ONE, 2)
    scene.read((), {1})
    assert scene.worker(ONE).answer.groups == ((0, 2), (1, 2))
    (ended,) = scene.report(ONE, 0, 1, 3)
    assert ended.counts.skipped_groups == ((4, 8),)


def test_sets_of_an_older_map_settle_older_losses_only():
    scene = scene_of(ZERO, ONE, TWO, epoch=began(3, {ZERO: (0, 1), ONE: (1, 2), TWO: (2, 3)}))
    for replica in (ZERO, ONE, TWO):
        scene.ask(replica)
    scene.live(ZERO, ONE)
    first = scene.version
    scene.live(ZERO)
    assert scene.state.lost_at == first + 1
    assert scene.read({1}, version=first) == []
    assert scene.leased(ZERO) == ((2, 2),)
    assert scene.state.statistics().finished == 0
    scene.read({1})
    counts = scene.state.statistics()
    assert counts.finished == 1
    assert (counts.images > 0, counts.loss_images) == (True, 0), "the loss of its images is unknown"


def test_sets_of_another_epoch_settle_nothing():
    scene = scene_of(ZERO, ONE, epoch=began(2, {ZERO: (0, 1), ONE: (1, 2)}, number=2))
    scene.ask(ONE)
    scene.live(ZERO)
    version = scene.state.lost_at
    late = SetsRead(epoch=1, version=version, every=frozenset({0, 1}), some=frozenset())
    scene.state.handle(late, now=0.0)
    assert scene.state.lost_at == version


def test_a_new_generation_gets_its_own_groups_back_after_the_reading():
    scene = scene_of(ZERO, epoch=began(3))
    assert scene.leased(ZERO) == ((0, 1), (1, 1))
    scene.live(ZERO, anew=[ZERO])
    assert scene.leased(ZERO, 1) == ((2, 1),)
    scene.read({0})
    assert scene.leased(ZERO) == ((1, 2),)


def test_a_warm_start_is_not_over_while_its_leases_are_unsettled():
    scene = scene_of(ZERO, ONE, epoch=began(8, HALVES, warm=2))
    assert scene.leased(ZERO) == ((0, 1), (1, 1))
    assert contents(scene.ask(ONE)) == ([], True, 0, 0)
    assert scene.leased(ONE) is None
    scene.live(ONE)
    scene.read({0}, {1})
    assert scene.worker(ONE).answer.groups == ((1, 2),)
    scene.report(ONE, 1)
    assert scene.leased(ONE, 9) == ((4, 1), (5, 1), (6, 1), (7, 1), (2, 1), (3, 1))


# --- stops -------------------------------------------------------------------------------------


def test_a_stop_waits_for_the_sets_and_trains_ragged_groups():
    scene = scene_of(ZERO, ONE, epoch=began(8, HALVES))
    scene.ask(ZERO, 1)
    scene.ask(ONE, 3)
    scene.enter(DrainAsked(1))
    scene.report(ZERO, 0)
    scene.live(ZERO)
    assert not scene.state.statistics().drained
    scene.read({4}, {5})
    assert not scene.state.statistics().drained, "the values of some shards have group 5"
    assert scene.leased(ZERO, 9) == ((5, 2),)
    scene.report(ZERO, 5)
    assert scene.state.statistics().drained
    assert scene.trained == ((0, 1), (4, 6))


def test_a_ragged_group_that_waits_when_a_stop_is_asked_comes_before_others():
    scene = scene_of(ZERO, ONE, epoch=began(8, HALVES))
    scene.ask(ONE, 1)
    scene.live(ZERO)
    scene.read((), {4})
    scene.enter(DrainAsked(1))
    assert scene.leased(ZERO, 9) == ((4, 2),)
    scene.report(ZERO, 4)
    assert scene.state.statistics().drained


def test_a_stop_waits_for_a_replica_that_trains_the_ragged_groups():
    scene = scene_of(ZERO, epoch=began(8))
    scene.ask(ZERO, 2)
    scene.enter(DrainAsked(1))
    scene.live()
    scene.read({0}, {1})
    assert not scene.state.statistics().drained, "no replica is live, and some shards have group 1"
    scene.live(ONE)
    assert scene.leased(ONE, 9) == ((1, 2),)
    scene.report(ONE, 1)
    assert scene.state.statistics().drained


def test_a_dealer_of_a_run_that_stops_waits_for_a_replica_for_its_ragged_groups():
    scene = scene_of(epoch=began(8, finished=((0, 1),), ragged={0, 1}))
    scene.enter(DrainAsked(1))
    assert not scene.state.statistics().drained
    scene.live(ZERO)
    assert scene.leased(ZERO, 9) == ((1, 2),)
    scene.report(ZERO, 1)
    assert scene.state.statistics().drained


def test_a_ragged_group_of_a_replica_that_is_lost_during_a_stop_comes_before_groups_of_its_successor():
    scene = scene_of(ZERO, ONE, TWO, epoch=began(12, {**HALVES, TWO: (8, 12)}))
    scene.ask(TWO, 1)
    scene.enter(DrainAsked(1))
    scene.live(ZERO, ONE)
    scene.read((), {8})
    scene.live(ONE)
    assert scene.leased(ONE, 9) == ((8, 2),)
    scene.report(ONE, 8)
    assert scene.state.statistics().drained


def test_with_rounds_a_stop_ends_after_the_ragged_groups_and_the_clocks_of_the_sets():
    scene = scene_of(ZERO, ONE, epoch=turns(16))
    assert scene.granted(ZERO, 2) == ([0, 1], False, 0, 0)
    assert scene.granted(ONE, 4) == ([2, 3, 6, 7], False, 0, 0)
    scene.live(ZERO)
    scene.enter(DrainAsked(1))
    scene.read({2, 3}, {6}, clock=2)
    numbers, last, _, end = scene.granted(ZERO, 9)
    assert numbers[0] == 6
    assert last
    # A bundle has a contribution of clock 2, whose sum needs the other replica there.
    assert end >= 2
    scene.report(ZERO, 0, 1, clock=1)
    scene.report(ZERO, *numbers, clock=end)
    assert scene.state.statistics().drained


# --- clocks ------------------------------------------------------------------------------------


def test_the_clock_of_the_sets_raises_the_end_of_all():
    scene = scene_of(ZERO, ONE, epoch=turns(8))
    scene.ask(ZERO, 9)
    scene.ask(ONE, 2)
    scene.live(ZERO)
    scene.read({2, 3}, clock=7)
    assert scene.state.statistics().clock >= 7


# --- another dealer's epoch ----------------------------------------------------------------------


@pytest.mark.parametrize("pooled", [False, True])
def test_a_dealer_goes_on_with_the_groups_that_not_all_shards_have(pooled):
    epoch = began(8, HALVES, finished=((0, 2), (5, 6)), ragged={3, 6}, pooled=pooled, step=9, num_images=31)
    scene = scene_of(ZERO, ONE, epoch=epoch)
    assert scene.trained == ((0, 2), (5, 6))
    assert scene.state.statistics().images == 12
    first = scene.leased(ZERO, 2)
    assert first == ((2, 1), (3, 2))
    assert scene.leased(ONE, 9) == ((4, 1), (6, 2), (7, 1))
    scene.losses = 31, 93.0
    scene.report(ZERO, 2, 3)
    (ended,) = [*scene.report(ONE, 4, 6), *scene.report(ONE, 7, images=3)]
    assert (ended.counts.images, ended.counts.loss) == (31, 3.0)


def test_the_loss_of_a_group_that_only_some_shards_had_counts_once():
    epoch = began(4, finished=((0, 2),), ragged={2}, loss_images=12, loss_sum=24.0)
    scene = scene_of(ZERO, epoch=epoch)
    scene.leased(ZERO, 2)
    scene.losses = 16, 32.0
    (ended,) = scene.report(ZERO, 2, 3, loss=2.0)
    assert (ended.counts.images, ended.counts.loss, ended.counts.loss_images) == (16, 2.0, 16)


def test_a_dealer_of_rounds_goes_on_from_the_clock_of_the_sets():
    scene = scene_of(ZERO, ONE, epoch=turns(8, clock=3, finished=((0, 4),), ragged={5}))
    # Step 4 has group 4, step 5 the ragged one.
    assert scene.granted(ZERO, 9) == ([4, 5], True, 3, 5)
    assert scene.granted(ONE, 9) == ([6, 7], True, 3, 5)


def test_an_epoch_of_which_all_shards_have_every_group_ends_at_once():
    scene = Scene(reads=False)
    scene.live(ZERO)
    scene.losses = 30, 15.0
    (ended,) = scene.enter(began(8, finished=((0, 8),), num_images=30))
    assert (ended.counts.images, ended.counts.loss, ended.counts.loss_images) == (30, 0.5, 30)
