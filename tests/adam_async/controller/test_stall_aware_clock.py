"""The time of a core: it passes as the loop's does, and not while the process stands still."""

from dataclasses import dataclass

import pytest

from adam_async.controller.consensus import Role
from adam_async.controller.consensus_node import LATE_S, PAUSE_S, CoreClock

FOLLOWERS = [Role.FOLLOWER, Role.PROBER, Role.CANDIDATE]


@dataclass
class Waiting:
    """All that a clock asks a core."""

    deadline: float
    role: Role = Role.FOLLOWER

    def next_deadline(self):
        return self.deadline


class Scene:
    def __init__(self, deadline, role):
        self.loop_s = 100.0
        self.core = Waiting(deadline, role)
        self.clock = CoreClock(lambda: self.loop_s)


@pytest.mark.parametrize("role", list(Role))
def test_time_passes_as_that_of_the_loop_does(role):
    scene = Scene(102.0, role)
    for _ in range(20):
        scene.loop_s += 0.1
        assert scene.clock.event_time(scene.core) == scene.clock.now() == pytest.approx(scene.loop_s)
    assert scene.clock.by_the_loop(102.0) == 102.0


@pytest.mark.parametrize("role", FOLLOWERS)
def test_one_that_did_not_run_hears_what_came_before_its_deadline_comes(role):
    scene = Scene(101.0, role)
    scene.loop_s = 500.0
    assert scene.clock.begins_pause(scene.core)
    assert scene.clock.now() == pytest.approx(101.0 - PAUSE_S)
    assert scene.clock.by_the_loop(101.0) == pytest.approx(500.0 + PAUSE_S)


def test_a_process_late_for_the_same_deadline_again_goes_on():
    scene = Scene(101.0, Role.FOLLOWER)
    scene.loop_s = 500.0
    assert scene.clock.begins_pause(scene.core)
    scene.loop_s = 600.0
    assert not scene.clock.begins_pause(scene.core)
    scene.clock.reached(101.0)
    assert scene.clock.now() == pytest.approx(101.0)


def test_a_leader_speaks_without_a_pause():
    scene = Scene(101.0, Role.LEADER)
    scene.loop_s = 500.0
    assert not scene.clock.begins_pause(scene.core)
    assert scene.clock.now() == pytest.approx(101.0)


def test_a_deadline_that_rings_early_by_rounding_has_come():
    scene = Scene(100.5, Role.FOLLOWER)
    scene.loop_s = 100.5 - 1e-9
    scene.clock.reached(100.5)
    assert scene.clock.event_time(scene.core) == 100.5


def test_the_time_of_the_core_never_goes_back():
    scene = Scene(101.0, Role.FOLLOWER)
    scene.loop_s = 100.9
    told = scene.clock.event_time(scene.core)
    scene.loop_s = 400.0
    assert scene.clock.begins_pause(scene.core)
    assert scene.clock.now() == told
    assert scene.clock.event_time(scene.core) == told


def test_a_little_lateness_is_no_stall():
    scene = Scene(101.0, Role.FOLLOWER)
    scene.loop_s = 101.0 + LATE_S * 0.9
    assert not scene.clock.begins_pause(scene.core)
    scene.clock.reached(101.0)
    assert scene.clock.now() == pytest.approx(scene.loop_s)
