"""The pushes to a store that comes back from disks: which may be lost, and how often each may count."""

import numpy as np
import pytest

from adam_async.persistence.records import State, StateKey
from tests.simulation.checkers.saved_pushes import Losses, SavedPushes, SavedStates
from tests.simulation.checkers.store_pushes import Pulled
from tests.simulation.scenario import Violation


class Store:
    """One array of a store over its returns, with a clock by hand."""

    def __init__(self, permitted_s=1.0, *, summed=False):
        self.now = 0.0
        self.losses = Losses(permitted_s=permitted_s, now=lambda: self.now)
        self.summed = summed
        self.array = SavedPushes("store-0", "a", rows=2, columns=8, losses=self.losses, summed=summed)
        self.returns = 0

    def push(self, at_s, clock=0):
        self.now = at_s
        column = self.array.begin("client", clock=clock)
        self.array.acknowledged(column, ())
        return column

    def come_back(self):
        self.returns += 1
        id = f"store-{self.returns}"
        self.array = SavedPushes(
            id, "a", rows=2, columns=8, losses=self.losses, summed=self.summed, before=self.array
        )

    def restart(self, at_s):
        """End the store, and open it again from the disks."""
        self.now = at_s
        self.losses.ended(f"store-{self.returns}")
        self.come_back()

    def pull(self, *columns, versions=(0, 0), times=1.0, bound=0):
        rows = np.zeros((2, 8))
        rows[:, list(columns)] = times
        self.array.pulled("client", self.array.before(), Pulled(rows=rows, versions=versions, bound=bound))


def test_a_recent_push_may_be_lost_and_counts():
    store = Store()
    store.push(1.0)
    store.push(5.0)
    store.restart(5.5)
    store.pull(0)
    assert (store.losses.lost, store.losses.recovered) == (2, 1)


def test_an_older_push_may_not_be_lost():
    store = Store()
    store.push(1.0)
    store.restart(2.5)
    with pytest.raises(Violation, match=r"loss bound.*1\.500 s before the loss; 1 s are permitted"):
        store.pull()


def test_no_durable_push_may_be_lost():
    store = Store(permitted_s=None)
    store.push(1.0)
    store.restart(1.0)
    with pytest.raises(Violation, match="durable"):
        store.pull()


def test_no_push_may_be_lost_without_a_loss_of_servers():
    store = Store()
    store.push(1.0)
    store.come_back()
    with pytest.raises(Violation, match="were not lost"):
        store.pull()


def test_the_permitted_time_ends_where_disks_get_into_trouble():
    store = Store()
    store.push(1.0)
    store.now = 1.5
    store.losses.troubled()
    store.push(8.0)
    store.restart(9.0)
    store.pull()
    assert store.losses.lost == 4


def test_a_push_comes_back_once():
    store = Store()
    store.push(1.0)
    store.restart(1.0)
    with pytest.raises(Violation, match=r"I2.*push 0 2 times"):
        store.pull(0, times=2.0)


def test_pushes_that_came_back_stay_as_they_are():
    store = Store()
    store.push(1.0)
    store.push(1.0)
    store.restart(1.0)
    store.pull(0)
    mine = store.push(2.0)
    store.pull(0, mine, versions=(1, 1))
    with pytest.raises(Violation, match="push 1 of an earlier store"):
        store.pull(0, 1, mine, versions=(1, 1))


def test_new_pushes_are_checked_as_in_any_store():
    store = Store()
    store.push(1.0)
    store.restart(1.0)
    store.push(2.0)
    with pytest.raises(Violation, match=r"I1.*without push 1"):
        store.pull(0)


def test_a_loss_is_judged_once():
    store = Store()
    store.push(1.0)
    store.restart(1.5)
    store.pull()
    store.restart(9.0)
    store.pull()
    assert store.losses.lost == 2


def stepped():
    """A store in bsp with two complete steps of two pushes each, and a push to the third."""
    store = Store(summed=True)
    for clock in (1, 2):
        store.push(1.0, clock)
        store.push(1.0, clock)
        store.pull(*range(2 * clock), versions=(clock, clock), times=0.5, bound=clock)
    store.push(1.0, 3)
    return store


def test_a_step_in_progress_ends_with_its_store_whenever_it_was_acknowledged():
    store = stepped()
    store.restart(9.0)
    store.pull(0, 1, 2, 3, times=0.5)
    assert store.losses.lost == 2


def test_a_step_that_was_pulled_may_be_lost_as_long_as_other_pushes():
    store = stepped()
    store.restart(1.5)
    store.pull(0, 1, times=0.5)

    store = stepped()
    store.restart(9.0)
    with pytest.raises(Violation, match=r"loss bound.*push 2 .*8\.000 s before the loss"):
        store.pull(0, 1, times=0.5)


def test_no_earlier_step_than_one_that_came_back_may_be_lost():
    store = stepped()
    store.restart(1.5)
    with pytest.raises(Violation, match=r"push 0 .*with its step, or a later one"):
        store.pull(2, 3, times=0.5)


def test_a_step_comes_back_as_a_whole():
    store = stepped()
    store.restart(1.5)
    with pytest.raises(Violation, match=r"push 1 .*with its step, or a later one"):
        store.pull(0)

    store = stepped()
    store.restart(1.5)
    with pytest.raises(Violation, match=r"I2.*step 1 of store-0/a has the shares"):
        store.pull(0, 1, times=1.0)


def test_the_steps_of_a_store_that_came_back_are_checked_apart_from_earlier_ones():
    store = stepped()
    store.restart(1.5)
    store.pull(0, 1, times=0.5)
    first = store.push(2.0, 1)
    rows = np.zeros((2, 8))
    rows[:, [0, 1]], rows[:, first] = 0.5, 1.0
    store.array.pulled("client", store.array.before(), Pulled(rows=rows, versions=(1, 1), bound=1))


def lose_a_primary(store, at_s, until_s):
    """Let a shard lack its primary for a time, with a look every 0.1 s."""
    for tenth in range(round(at_s * 10), round(until_s * 10)):
        store.now = tenth / 10
        store.losses.looked(all_led=False)


def test_a_push_before_the_loss_of_a_primary_may_be_lost_until_another_one_leads():
    store = Store()
    store.losses.looked(all_led=True)
    store.push(2.0)
    store.losses.looked(all_led=True)
    lose_a_primary(store, 2.1, 4.0)
    store.restart(4.0)
    store.pull()
    assert store.losses.lost == 2


def test_an_older_push_may_not_be_lost_with_a_primary():
    store = Store()
    store.push(0.5)
    store.now = 2.0
    store.losses.looked(all_led=True)
    lose_a_primary(store, 2.1, 4.0)
    store.restart(4.0)
    with pytest.raises(Violation, match=r"loss bound.*1\.500 s before the loss"):
        store.pull()


def test_a_push_may_not_be_lost_once_another_primary_has_led_for_a_while():
    store = Store()
    store.push(2.0)
    store.losses.looked(all_led=True)
    lose_a_primary(store, 2.1, 4.0)
    for now in (4.0, 5.1):
        store.now = now
        store.losses.looked(all_led=True)
    store.restart(5.2)
    with pytest.raises(Violation, match="loss bound"):
        store.pull()


def state_at(position, content=b"values"):
    return State(StateKey("ps-0", 1, 1, position, 0), [content])


def opened(states, state):
    states.opened("ps-0", "store", [(state.key, state.parts)])


def test_a_state_that_a_server_had_comes_back():
    states = SavedStates()
    states.taken(state_at(3), "store")
    opened(states, state_at(3))
    assert states.compared == 1


@pytest.mark.parametrize("found", [state_at(3, b"other"), state_at(2)])
def test_no_other_state_comes_back(found):
    states = SavedStates()
    states.taken(state_at(3), "store")
    with pytest.raises(Violation, match="recovered state"):
        opened(states, found)


def test_no_older_state_comes_back_later():
    states = SavedStates()
    for position in (3, 4):
        states.taken(state_at(position), "store")
    opened(states, state_at(4))
    with pytest.raises(Violation, match="older state"):
        opened(states, state_at(3))
    states.forget("ps-0")
    opened(states, state_at(3))
