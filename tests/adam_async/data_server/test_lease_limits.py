"""How many groups a replica may hold in an epoch that ends early."""

import pytest

from adam_async.data_server.epoch import EpochBegan
from adam_async.data_server.replica_leases import RECORDED, LeaseLimits
from adam_async.run.ids import Replica
from tests.adam_async.data_server.scene import Scene

QUICK, SLOW, OTHER = map(Replica, range(3))


def limits_of(rates, *, held=64, step=1):
    """After ten seconds, of replicas that each hold groups and have finished so many per second."""
    limits = LeaseLimits(step)
    for replica, rate in rates.items():
        limits.leased(replica, held, 0.0)
        for _ in range(10 * rate):
            limits.leased(replica, 1, 5.0)
            limits.finished(replica)
    return limits


def test_a_replica_as_quick_as_half_the_quickest_is_given_what_it_asks_for():
    limits = limits_of({QUICK: 20, OTHER: 10})
    assert limits.room(QUICK, 10.0) is None
    assert limits.room(OTHER, 10.0) is None


def test_a_slow_replica_is_given_nothing_while_it_holds_more_than_its_rate_allows():
    limits = limits_of({QUICK: 40, SLOW: 8})
    assert limits.room(SLOW, 10.0) == 0
    for _ in range(60):
        limits.finished(SLOW)
    assert limits.room(SLOW, 10.0) == 23 - 4  # of 65 what 14 per second are of 40


def test_no_replica_is_limited_before_its_rate_is_known():
    limits = limits_of({QUICK: 40})
    limits.leased(SLOW, 64, 0.0)
    for _ in range(7):
        limits.finished(SLOW)
    assert limits.room(SLOW, 10.0) is None
    limits.finished(SLOW)
    assert limits.room(SLOW, 10.0) == 0
    assert limits.room(OTHER, 10.0) is None


@pytest.mark.parametrize("step", [1, RECORDED, 20])
def test_a_slow_replica_may_hold_more_than_a_step_for_before_its_end_nothing_is_reported(step):
    limits = limits_of({QUICK: 1000, SLOW: 1}, step=step)
    for _ in range(64):
        limits.finished(SLOW)
    assert limits.room(SLOW, 1e6) > max(step, RECORDED)


def test_a_new_generation_begins_anew():
    limits = limits_of({QUICK: 40, SLOW: 4})
    limits.keep((QUICK,))
    assert limits.room(SLOW, 10.0) is None


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_where_an_epoch_ends_early_a_slow_replica_is_given_more_when_it_reports(fraction):
    scene = Scene()
    scene.live(QUICK, SLOW)
    shares = {QUICK: (0, 500), SLOW: (500, 1000)}
    scene.enter(EpochBegan(1, 1000, shares, fraction=fraction))
    first = [number for number, _ in scene.ask(SLOW, 64).groups]
    quick = [number for number, _ in scene.ask(QUICK, 400).groups]
    scene.report(QUICK, *quick)
    scene.report(SLOW, *first[:16])
    answer = scene.ask(SLOW, 16, now=1.0)
    if fraction == 1.0:
        assert len(answer.groups) == 16
        return
    assert answer is None
    scene.report(SLOW, *first[16:60])
    assert 0 < len(scene.worker(SLOW).answer.groups) < 16


def test_a_replica_that_waits_for_room_is_answered_by_the_report_that_makes_it_quick_enough():
    scene = Scene()
    scene.live(QUICK, SLOW)
    scene.enter(EpochBegan(1, 1000, {QUICK: (0, 500), SLOW: (500, 1000)}, fraction=0.9))
    slow = [number for number, _ in scene.ask(SLOW, 64).groups]
    quick = [number for number, _ in scene.ask(QUICK, 40).groups]
    scene.report(QUICK, *quick, now=1.0)
    scene.report(SLOW, *slow[:8], now=1.0)
    assert scene.ask(SLOW, 16, now=1.0) is None
    # The quickest one pauses, so that its rate sinks: by now it is 10 a second, and that of the other 6.
    assert scene.report(SLOW, *slow[8:24], now=4.0) == []
    assert len(scene.worker(SLOW).answer.groups) == 16
