"""The states that disks give back: states that servers gave to them, and none older than before."""

import pytest

from adam_async.persistence.keys import State, StateKey
from adam_async.simulation.checkers.saved_states import SavedStates
from adam_async.simulation.scenario import Violation


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
