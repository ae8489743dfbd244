"""A client of a healed core that waits too long is reported, and so is a change of leader."""

import pytest

from adam_async.simulation.checkers.progress import Progress
from adam_async.simulation.scenario import Violation


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_the_time_limit_of_an_answer_begins_with_the_healing(clock):
    progress = Progress(clock, 10.0)
    progress.begin("a")
    clock.now = 100.0
    progress.check()
    progress.heal(["a"])
    clock.now = 110.0
    progress.check()
    progress.end("a", answered=True)
    assert progress.answered == 1


@pytest.mark.parametrize("pays", [True, False])
def test_a_late_or_missing_answer_is_reported(clock, pays):
    progress = Progress(clock, 10.0)
    progress.begin("a")
    progress.heal(["a"])
    clock.now = 10.5
    with pytest.raises(Violation, match=r"I15: a has waited for 10\.500 s"):
        progress.end("a", answered=True) if pays else progress.check()


def test_clients_outside_the_core_may_wait_for_ever(clock):
    progress = Progress(clock, 10.0)
    progress.begin("a")
    progress.begin("b")
    progress.heal(["a"])
    progress.end("a", answered=True)
    clock.now = 100.0
    progress.check()


def test_giving_up_is_no_answer(clock):
    progress = Progress(clock, 10.0)
    progress.heal(["a"])
    progress.begin("a")
    progress.end("a", answered=False)
    assert progress.answered == 0


def test_another_leader_is_reported(clock):
    progress = Progress(clock, 10.0)
    progress.leads(("controller-1", 3))
    progress.leads(("controller-1", 3))
    with pytest.raises(Violation, match="I15: the leader of a healed core changed from"):
        progress.leads(("controller-1", 4))
