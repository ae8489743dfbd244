"""Workers get places so that as many replicas as can be are complete."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from adam_async.controller.worker_assignment import assign_workers

NONE = (-1, 0)


def test_gaps_are_filled_before_a_replica_begins_and_who_is_left_over_has_no_place():
    known = {"a": (0, 1), "b": (1, 0), "c": (1, 1), "d": NONE, "e": NONE}
    assert assign_workers(known, 2) == {**known, "d": (0, 0)}
    assert assign_workers({**known, "f": NONE}, 2) == {**known, "d": (0, 0), "e": (2, 0), "f": (2, 1)}


def test_a_number_that_no_replica_has_is_given_again_the_lowest_first():
    assert assign_workers({"a": (1, 0), "b": NONE, "c": NONE}, 1) == {"a": (1, 0), "b": (0, 0), "c": (2, 0)}


@st.composite
def some_places(draw):
    partitions = draw(st.integers(1, 4))
    spots = st.tuples(st.integers(0, 4), st.integers(0, partitions - 1))
    taken = draw(st.lists(spots, unique=True, max_size=8))
    free = [NONE] * draw(st.integers(0, 6))
    return {
        f"w{number}": place for number, place in enumerate(draw(st.permutations(taken + free)))
    }, partitions


@given(some_places())
def test_as_many_replicas_are_complete_as_there_are_workers_for_and_those_that_were_keep_theirs(given_places):
    before, partitions = given_places
    after = assign_workers(before, partitions)
    assert after.keys() == before.keys()
    taken = Counter(place for place in after.values() if place != NONE)
    assert set(taken.values()) <= {1}
    sizes = Counter(replica for replica, _ in taken)
    complete = sum(size == partitions for size in sizes.values())
    assert complete == len(before) // partitions
    was = Counter(replica for replica, _ in before.values() if replica >= 0)
    for name, place in before.items():
        if was[place[0]] == partitions:
            assert after[name] == place
    assert assign_workers(after, partitions) == after
