"""Epochs that end when enough is done: what is skipped, and that it comes first in the next one."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adam_async.data_server.epoch import EpochBegan, EpochOrders
from adam_async.data_server.state import EpochEnded
from adam_async.messages import MOST_HELD
from adam_async.model.keyed_random import Dice
from adam_async.run.epoch_shares import share_out
from adam_async.run.ids import Replica
from tests.adam_async.data_server.scene import Scene, contents

FOUR = tuple(map(Replica, range(4)))
ZERO, ONE, TWO, THREE = FOUR


def scene_of(groups=16, *, replicas=FOUR, fraction=0.75, partitions=1, **more):
    """An epoch of live replicas, shared out as the controller does."""
    scene = Scene(partitions=partitions)
    scene.live(*replicas)
    shares = share_out(replicas, groups=groups, round_groups=0, carried=more.get("carried", 0))
    own = {Replica(int(replica)): share for replica, share in shares.items()}
    scene.enter(EpochBegan(1, groups, own, fraction=fraction, **more))
    return scene


def train(scene, replica, count=99):
    """Train what a replica is given, until it is told that nothing more waits or has trained so many."""
    effects = []
    trained = 0
    while trained < count and (answer := scene.ask(replica, 1)) is not None and answer.groups:
        numbers = [number for number, _ in answer.groups]
        effects += scene.report(replica, *numbers)
        trained += len(numbers)
    return effects


def test_an_epoch_ends_when_three_of_four_replicas_have_finished_their_shares():
    scene = scene_of()
    assert train(scene, THREE, 1) == []
    assert train(scene, ZERO) == train(scene, ONE) == []
    (ended,) = train(scene, TWO)
    assert (ended.counts.skipped_groups, ended.counts.behind) == (((13, 16),), (THREE,))
    assert ended.counts.images == 13 * 4
    assert contents(scene.ask(THREE)) == ([], True, 0, 0)


def test_groups_that_are_leased_when_it_closes_are_finished_and_count():
    scene = scene_of()
    assert scene.leased(THREE, 2) == ((12, 1), (13, 1))
    for replica in (ZERO, ONE, TWO):
        assert train(scene, replica) == []
    assert contents(scene.ask(THREE)) == ([], True, 0, 0)
    assert scene.report(THREE, 12) == []
    (ended,) = scene.report(THREE, 13)
    assert (ended.counts.skipped_groups, ended.counts.images) == (((14, 16),), 14 * 4)
    assert scene.trained == ((0, 14),)


def test_a_waiting_replica_learns_at_once_that_an_epoch_has_closed():
    scene = scene_of()
    scene.leased(THREE, 2)
    for replica in (ZERO, ONE):
        train(scene, replica)
    waiting = scene.worker(THREE)
    assert waiting.heard == -1
    train(scene, TWO)
    assert contents(scene.ask(THREE)) == ([], True, 0, 0)


@pytest.mark.parametrize(("replicas", "skips"), [(1, False), (2, False), (3, False), (4, True), (8, True)])
def test_up_to_three_replicas_train_all_of_an_epoch(replicas, skips):
    names = tuple(map(Replica, range(replicas)))
    scene = scene_of(16, replicas=names)
    ended = []
    for replica in names:
        ended += train(scene, replica)
    assert bool(ended[0].counts.skipped_groups) == skips


def test_with_fewer_groups_than_replicas_those_without_any_are_not_counted():
    scene = scene_of(2)
    assert train(scene, ONE) == []
    (ended,) = train(scene, THREE)
    assert ended.counts.skipped_groups == ()


def test_leases_of_a_replica_lost_after_the_closing_are_skipped():
    scene = scene_of()
    scene.leased(THREE, 2)
    for replica in (ZERO, ONE, TWO):
        train(scene, replica)
    (ended,) = scene.live(ZERO, ONE, TWO)
    assert (ended.counts.skipped_groups, ended.counts.behind) == (((12, 16),), (THREE,))
    assert scene.live(ZERO, ONE) == [], "an epoch ends once"


def test_a_returned_lease_that_the_closing_skips_is_not_trained_again():
    last = Replica(4)
    scene = scene_of(20, replicas=(*FOUR, last))
    assert scene.leased(last, 2) == ((16, 1), (17, 1))
    assert scene.leased(ZERO, 1) == ((0, 1),)
    scene.live(*FOUR)
    for replica in (ONE, TWO, THREE):
        assert train(scene, replica) == []
    (ended,) = scene.report(ZERO, 0)
    assert ended.counts.skipped_groups == ((1, 4), (16, 20))


def test_leases_of_a_lost_replica_are_trained_by_its_successor_first():
    scene = scene_of()
    scene.leased(THREE, 2)
    scene.live(ZERO, ONE, TWO)
    for replica in (ONE, TWO):
        assert train(scene, replica) == []
    (ended,) = train(scene, ZERO)
    assert ended.counts.skipped_groups == ()


def test_carried_groups_come_first_and_to_other_replicas_than_those_behind():
    scene = scene_of(carried=6, behind=(THREE,))
    firsts = {replica: scene.leased(replica, 3) for replica in FOUR}
    assert firsts == {
        ZERO: ((0, 1), (1, 1), (6, 1)),
        ONE: ((2, 1), (3, 1), (8, 1)),
        TWO: ((4, 1), (5, 1), (11, 1)),
        THREE: ((13, 1), (14, 1), (15, 1)),
    }


def test_an_epoch_does_not_end_before_what_was_carried_is_trained():
    scene = scene_of(carried=6)
    assert scene.leased(THREE, 1) == ((4, 1),)
    for replica in (ZERO, ONE):
        assert train(scene, replica) == []
    # When it closes the carried group that waits for the slow one goes to one that has finished.
    assert train(scene, TWO) == []
    assert scene.worker(ZERO).answer.groups == ((5, 1),)
    assert scene.report(ZERO, 5) == []
    (ended,) = scene.report(THREE, 4)
    assert ended.counts.skipped_groups == ((13, 16),)


def test_a_carried_group_of_a_lost_replica_is_trained_though_the_epoch_has_closed():
    scene = scene_of(carried=6)
    assert scene.leased(THREE, 3) == ((4, 1), (5, 1), (13, 1))
    for replica in (ZERO, ONE, TWO):
        assert train(scene, replica) == []
    assert scene.live(ZERO, ONE, TWO) == []
    assert scene.worker(ZERO).answer.groups == ((4, 2),)
    assert scene.leased(ZERO) == ((5, 2),)
    (ended,) = scene.report(ZERO, 4, 5)
    assert ended.counts.skipped_groups == ((13, 16),)


def test_every_replica_takes_the_next_group_of_a_pool_until_the_fraction_is_leased():
    scene = scene_of(10, fraction=0.75, pooled=True, step=9)
    assert scene.leased(TWO, 3) == ((0, 1), (1, 1), (2, 1))
    assert scene.leased(ZERO, 2) == ((3, 1), (4, 1))
    assert contents(scene.ask(ONE, 9)) == ([5, 6, 7], True, 0, 0)
    assert contents(scene.ask(THREE)) == ([], True, 0, 0)
    scene.report(ZERO, 3, 4)
    scene.report(TWO, 0, 1, 2)
    (ended,) = scene.report(ONE, 5, 6, 7)
    assert (ended.counts.skipped_groups, ended.counts.behind, ended.counts.images) == (((8, 10),), (), 32)


@pytest.mark.parametrize("step", [1, 4])
def test_a_piece_of_a_pool_is_a_quarter_of_an_equal_share_of_what_is_left_and_at_least_a_step(step):
    scene = scene_of(200, fraction=0.8, pooled=True, step=step)  # four replicas
    sizes = [len(scene.leased(replica, 99)) for replica in (ZERO, ONE, TWO, THREE, ZERO, ONE)]
    assert sizes == [10, 9, 8, 8, 7, 7]
    rest = []
    while scene.state._epoch.has_work(ZERO):
        rest.append(len(scene.leased(ZERO, 99)))
    assert set(rest[-4:-1]) == {step}
    assert sum(sizes + rest) == 160


def test_leases_of_a_lost_replica_go_back_into_the_pool():
    scene = scene_of(8, fraction=0.5, pooled=True, step=9)
    scene.leased(ZERO, 2)
    assert contents(scene.ask(ONE, 9)) == ([2, 3], True, 0, 0)
    assert scene.leased(ONE) is None
    scene.live(ONE)
    assert scene.worker(ONE).answer.groups == ((0, 2), (1, 2))
    (ended,) = scene.report(ONE, 0, 1, 2, 3)
    assert ended.counts.skipped_groups == ((4, 8),)


def test_a_pool_of_which_all_is_wanted_shares_the_work():
    scene = scene_of(10, fraction=1.0, pooled=True)
    assert train(scene, ONE, 9) == []
    (ended,) = train(scene, ZERO)
    assert (ended.counts.images, ended.counts.skipped_groups) == (40, ())


def test_more_that_was_carried_than_the_fraction_is_trained_all_the_same():
    scene = scene_of(10, fraction=0.25, pooled=True, carried=7)
    (ended,) = train(scene, ZERO)
    assert ended.counts.skipped_groups == ((7, 10),)


# --- many epochs -------------------------------------------------------------------------------

IMAGES, SIZE, EPOCHS = 150, 4, 20


class Run:
    """Epochs of replicas that are of any speed, die and come back."""

    def __init__(self, seed, *, fraction, pooled, replicas, partitions):
        self.chance = random.Random(seed)
        self.fraction, self.pooled = fraction, pooled
        self.scene = Scene(partitions=partitions)
        self.partitions = partitions
        self.everybody = tuple(map(Replica, range(replicas)))
        self.speeds = {replica: self.chance.choice([1, 2, 20]) for replica in self.everybody}
        self.orders = EpochOrders(Dice(seed), num_images=IMAGES, images_per_group=SIZE)
        self.skipped = []
        self.now = 0.0
        self.scene.live(*self.everybody)

    def epoch(self, number, behind):
        """Train one; returns what came of it, and its order."""
        order = self.orders.order(number, self.skipped)
        carried = -(-order.carried // SIZE)
        live = tuple(sorted(self.scene.replica_generations)) or self.everybody
        shares = share_out(live, groups=order.num_groups, round_groups=0, carried=carried)
        for asker in self.scene.askers.values():
            asker.attempts.clear()
        effects = self.scene.enter(
            EpochBegan(
                number,
                order.num_groups,
                {Replica(int(replica)): share for replica, share in shares.items()},
                carried=carried,
                behind=behind,
                fraction=self.fraction,
                pooled=self.pooled,
            )
        )
        while not effects:
            effects = self.round_groups(order)
        (ended,) = effects
        assert isinstance(ended, EpochEnded)
        self.skipped.append(ended.counts.skipped_groups)
        return ended, order

    def round_groups(self, order):
        """Something happens: mostly somebody trains a group."""
        self.now += 0.1
        live = sorted(self.scene.replica_generations)
        what = self.chance.random()
        if not live or (what < 0.01 and len(live) < len(self.everybody)):
            away = [replica for replica in self.everybody if replica not in live]
            return self.scene.live(*live, self.chance.choice(away))
        if what < 0.02:
            return self.scene.live(*(replica for replica in live if replica != self.chance.choice(live)))
        (replica,) = self.chance.choices(live, [self.speeds[each] for each in live])
        part = self.chance.randrange(self.partitions)
        asker = self.scene.worker(replica, part)
        if not asker.attempts:
            self.scene.ask(replica, 3, part=part, now=self.now)
        if not asker.attempts:
            return []
        number = min(asker.attempts)
        about = {"epoch": order.epoch, "images": len(order.group(number))}
        effects = self.scene.report(replica, number, part=part, now=self.now, **about)
        asker.attempts.pop(number, None)
        return effects


@pytest.mark.thorough
@given(
    seed=st.integers(0, 1 << 30),
    fraction=st.sampled_from([0.25, 0.5, 0.75, 0.9, 1.0]),
    pooled=st.booleans(),
    replicas=st.integers(1, 6),
    partitions=st.integers(1, 2),
)
@settings(max_examples=30, deadline=None)
def test_no_image_is_skipped_twice_in_a_row_whichever_replicas_are_slow_or_lost(
    seed, fraction, pooled, replicas, partitions
):
    run = Run(seed, fraction=fraction, pooled=pooled, replicas=replicas, partitions=partitions)
    trained = np.zeros(IMAGES, int)
    before = np.zeros(IMAGES, bool)
    behind = ()
    for number in range(1, EPOCHS + 1):
        ended, order = run.epoch(number, behind)
        behind = ended.counts.behind
        groups = [group for start, stop in ended.counts.skipped_groups for group in range(start, stop)]
        skipped = np.zeros(IMAGES, bool)
        for group in groups:
            skipped[order.group(group)] = True
        assert ended.counts.images + skipped.sum() == IMAGES
        assert not (skipped & before).any()
        assert fraction < 1 or not groups
        trained += ~skipped
        before = skipped
    assert trained.min() >= EPOCHS // 2


@pytest.mark.parametrize("pooled", [False, True])
def test_groups_that_an_earlier_run_has_skipped_stay_skipped(pooled):
    done = {"finished": ((0, 3),), "skipped": ((5, 7), (13, 16))}
    scene = scene_of(**done, fraction=1.0, pooled=pooled, images_per_group=4)
    ended = [effect for replica in FOUR for effect in train(scene, replica)]
    assert [(each.counts.skipped_groups, each.counts.behind) for each in ended] == [(((5, 7), (13, 16)), ())]
    assert ended[0].counts.images == 11 * 4
    scene.state.check_invariants()


def test_an_epoch_of_which_an_earlier_run_has_trained_all_other_groups_is_over_at_once():
    scene = scene_of(finished=((0, 13),), skipped=((13, 16),), fraction=1.0)
    assert scene.state.outcome.counts.skipped_groups == ((13, 16),)
    assert contents(scene.ask(ZERO)) == ([], True, 0, 0)


def test_a_worker_that_only_asks_holds_a_bounded_part_of_a_pool_and_others_train_the_rest():
    scene = scene_of(3000, fraction=1.0, pooled=True)
    while scene.leased(ZERO, 512):
        pass
    assert scene.state.leased == MOST_HELD
    train(scene, ONE, 3000)
    assert scene.state.statistics().finished == 3000 - MOST_HELD
    assert scene.state.outcome is None
    scene.live(ONE, TWO, THREE)
    scene.read()
    assert scene.state.returned == MOST_HELD


@pytest.mark.parametrize("fraction", [1e-12, 5e-324])
def test_an_epoch_from_a_pool_trains_a_group_however_small_its_fraction(fraction):
    scene = scene_of(10, fraction=fraction, pooled=True)
    train(scene, ZERO)
    assert scene.state.outcome.counts.images == 4
