"""A dealer that follows another one: the workers keep what they hold, and it deals out the rest."""

from dataclasses import replace

import pytest

from adam_async.data_server.state import DrainAsked
from adam_async.messages import HeldLease
from adam_async.run.ids import Replica
from tests.adam_async.data_server.scene import Scene, began, contents, turns

ZERO, ONE, TWO = map(Replica, range(3))


def scene_of(epoch, *, replicas=(ZERO, ONE), partitions=1):
    scene = Scene(partitions=partitions)
    scene.live(*replicas)
    scene.enter(epoch)
    return scene


def finish(scene, *replicas):
    """Train all groups; return those that each replica gets from now on, and the result."""
    groups, effects = {replica: [] for replica in replicas}, []
    while not effects:
        for replica in replicas:
            answer = scene.ask(replica, 1)
            fresh = [number for number, _ in answer.groups] if answer is not None else []
            groups[replica] += fresh
            effects += scene.report(replica, *fresh)
    return groups, effects[0]


@pytest.mark.parametrize("pooled", [False, True])
def test_what_the_workers_hold_stays_with_them_and_the_rest_is_dealt_out(pooled):
    epoch = began(8, {ZERO: (0, 4), ONE: (4, 8)}, pooled=pooled, step=9)
    scene = scene_of(epoch)
    held = {replica: scene.leased(replica, 2) for replica in (ZERO, ONE)}
    scene.report(ZERO, 0)
    scene.follow(replace(epoch, finished=((0, 1),)))
    assert [number for number, _ in held[ZERO]] == [0, 1]
    assert scene.state.statistics().finished == 1
    left = scene.leased(ZERO, 9) + scene.leased(ONE, 9) if not pooled else scene.leased(ZERO, 9)
    assert sorted(number for number, _ in left) == sorted({*range(1, 8)} - {1} - {n for n, _ in held[ONE]})
    scene.report(ZERO, 1, *(number for number, _ in left if pooled or number < 4))
    (ended,) = scene.report(ONE, *{*range(8)} - {*range(4)} if not pooled else [n for n, _ in held[ONE]])
    assert ended.counts.images == 32


@pytest.mark.parametrize("received", [(0, 0), (2, 0), (3, 4), (6, 6)])
def test_rounds_go_on_with_the_same_groups_clocks_and_end(received):
    """The replicas have received some groups, of which all shards have some."""

    def run(follows):
        epoch = turns(14, clock=5)
        scene = scene_of(epoch)
        for replica, count in zip((ZERO, ONE), received, strict=True):
            if count:
                scene.ask(replica, count)
        if received[0]:
            scene.report(ZERO, 0, clock=6)
        if follows:
            done, clock = (((0, 1),), 6) if received[0] else ((), 5)
            scene.follow(replace(epoch, finished=done, clock=clock))
        for replica, numbers in ((ZERO, (0, 1, 4, 5, 8, 9)), (ONE, (2, 3, 6, 7, 10, 11))):
            count = received[replica]
            scene.report(replica, *[n for n in numbers[:count] if n], clock=6)
        groups, ended = finish(scene, ZERO, ONE)
        return groups, ended.counts.clock, ended.counts.images

    assert run(follows=True) == run(follows=False)


def test_after_a_warm_start_the_rounds_go_on_at_its_end():
    epoch = turns(12, warm=4)
    scene = scene_of(epoch)
    scene.ask(ZERO, 9)
    assert contents(scene.ask(ONE, 9)) == ([], True, 0, 2)
    scene.report(ZERO, 0, 1, 2, 3, clock=2)
    assert contents(scene.ask(ZERO, 1)) == ([4], False, 2, 0)
    scene.follow(replace(epoch, finished=((0, 4),), clock=2))
    assert contents(scene.ask(ONE, 9)) == ([6, 7, 10, 11], True, 2, 4)
    assert contents(scene.ask(ZERO, 9)) == ([5, 8, 9], True, 2, 4)


def test_a_part_that_is_behind_gets_the_groups_of_the_other_part_and_both_finish_them():
    epoch = turns(4, replicas=(ZERO,))
    scene = scene_of(epoch, replicas=(ZERO,), partitions=2)
    assert scene.leased(ZERO, 3, part=0) == ((0, 1), (1, 1), (2, 1))
    assert scene.leased(ZERO, 1, part=1) == ((0, 1),)
    scene.report(ZERO, 0, part=0)
    scene.follow(epoch)
    scene.report(ZERO, 0, 1, 2, part=0)
    assert scene.leased(ZERO, 9, part=1) == ((1, 1), (2, 1), (3, 1))
    scene.report(ZERO, 0, 1, 2, 3, part=1)
    assert scene.leased(ZERO, 9, part=0) == ((3, 1),)
    (ended,) = scene.report(ZERO, 3, part=0)
    assert ended.counts.images == 16


def test_the_groups_of_a_replica_that_has_told_and_is_lost_return():
    epoch = turns(8)
    scene = scene_of(epoch)
    scene.ask(ZERO, 2)
    scene.ask(ONE, 2)
    scene.follow(epoch)
    scene.reads = False
    scene.live(ZERO)
    scene.read({2}, {3}, clock=1)
    assert scene.leased(ZERO, 9) == ((4, 1), (5, 1), (3, 2), (6, 1), (7, 1))


def test_a_stop_waits_for_what_the_workers_hold():
    epoch = turns(16)
    scene = scene_of(epoch)
    scene.ask(ZERO, 4)
    scene.follow(epoch)
    scene.enter(DrainAsked(1))
    assert not scene.state.statistics().drained
    scene.report(ZERO, 0, 1, 4, 5, clock=2)
    assert scene.leased(ONE, 9) == ((2, 1), (3, 1), (6, 1), (7, 1))
    scene.report(ONE, 2, 3, 6, 7, clock=2)
    assert scene.state.statistics().drained


def test_a_worker_tells_again_if_the_dealer_has_not_begun_in_time():
    scene = Scene()
    scene.replica_generations = {ZERO: 7}
    scene.state = type(scene.state)(follows=True)
    scene.enter(scene.change())
    scene.enter(scene.worker(ZERO).question(0))
    assert not scene.state.lacks_held
    scene.tick(99.0)
    assert scene.worker(ZERO).answer.settled == -1
    assert scene.state.lacks_held


def test_workers_get_no_more_groups_than_they_can_hold(monkeypatch):
    monkeypatch.setattr("adam_async.data_server.replica_leases.MOST_HELD", 3)
    scene = scene_of(began(9, {ZERO: (0, 9)}), replicas=(ZERO,))
    assert scene.leased(ZERO, 9) == ((0, 1), (1, 1), (2, 1))
    scene.report(ZERO, 1)
    assert scene.leased(ZERO, 9) is None, "group 0 is not finished"
    scene.report(ZERO, 0)
    assert scene.worker(ZERO).answer.groups == ((3, 1), (4, 1))
    assert scene.worker(ZERO).answer.settled == 2


def test_two_workers_that_tell_the_same_group_and_one_that_no_epoch_has_harm_nothing():
    epoch = began(4, {ZERO: (0, 2), ONE: (2, 4)})
    scene = scene_of(epoch)
    scene.ask(ZERO, 1)
    scene.ask(ONE, 1)
    for replica in (ZERO, ONE):
        worker = scene.worker(replica)
        worker.held = [HeldLease(number, 1) for number in (0, 9)]
        worker.position = 2
    scene.follow(epoch)
    scene.state.check_invariants()
    assert len(scene.state._epoch.leases) == 1
