"""Controllers that have nothing become one group, whoever answers first; and nobody founds one beside it."""

from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.controller.bootstrap import Bootstrap, group_name, name_of
from adam_async.controller.consensus import identity

NAMES = tuple(f"controller-{number}" for number in range(1, 6))
SELF = {name: identity(name, number) for number, name in enumerate(NAMES, start=10)}


def founder_of(names, *, me=None):
    return Bootstrap(me or SELF[names[0]], name=names[0], names=names)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_the_first_by_name_founds_the_group_whatever_the_order_of_answers(count):
    names = NAMES[:count]
    for order in permutations(names[1:]):
        founding = founder_of(names)
        for heard, name in enumerate(order):
            assert not founding.is_decided
            assert founding.missing == sorted(order[heard:])
            founding.introduced(name, SELF[name], belongs=False)
        assert founding.is_decided
        assert not founding.joins
        assert founding.voters == tuple(sorted(SELF[name] for name in names))
        assert founding.missing == []


def test_the_order_in_which_names_were_given_changes_nothing():
    for names in permutations(NAMES[:3]):
        founders = [name for name in names if not Bootstrap(SELF[name], name=name, names=names).joins]
        assert founders == ["controller-1"]


@pytest.mark.parametrize("name", NAMES[1:3])
def test_others_wait_for_a_leader_and_found_nothing_whatever_they_hear(name):
    founding = Bootstrap(SELF[name], name=name, names=NAMES[:3])
    for other in NAMES[:3]:
        founding.introduced(other, SELF[other], belongs=False)
    assert founding.is_decided
    assert founding.joins
    assert founding.voters == ()


def test_a_first_controller_that_lost_its_disk_joins_the_group_of_the_others():
    """The order of introductions does not matter: the others were asked before it, or never."""
    for order, belongs in product(permutations(NAMES[1:3]), product([False, True], repeat=2)):
        founding = founder_of(NAMES[:3], me=identity(NAMES[0], 99))
        for name, one in zip(order, belongs, strict=True):
            founding.introduced(name, SELF[name], belongs=one)
        assert founding.joins == any(belongs)
        assert bool(founding.voters) != any(belongs)


def test_one_that_comes_with_a_new_disk_before_the_group_is_founded_is_taken_with_that():
    founding = founder_of(NAMES[:3])
    founding.introduced("controller-2", identity("controller-2", 1), belongs=False)
    founding.introduced("controller-2", identity("controller-2", 2), belongs=False)
    founding.introduced("controller-3", SELF["controller-3"], belongs=False)
    assert identity("controller-2", 2) in founding.voters
    assert identity("controller-2", 1) not in founding.voters


@given(
    st.lists(st.tuples(st.sampled_from((*NAMES, "stranger")), st.integers(0, 2), st.booleans()), max_size=12)
)
def test_a_decision_stays_and_needs_an_answer_of_each(answers):
    founding = founder_of(NAMES[:3])
    heard, decided = {}, None
    for name, disk, belongs in answers:
        founding.introduced(name, identity(name, disk), belongs=belongs)
        if decided is None and name in NAMES[1:3]:
            heard[name] = identity(name, disk)
            if belongs:
                decided = (True, ())
            elif len(heard) == 2:
                decided = (False, tuple(sorted((SELF[NAMES[0]], *heard.values()))))
        assert founding.is_decided == (decided is not None)
        if decided is not None:
            assert (founding.joins, founding.voters) == decided


def test_a_group_has_the_name_of_its_voters_in_any_order():
    voters = [SELF[name] for name in NAMES[:3]]
    assert {group_name(order) for order in permutations(voters)} == {group_name(voters)}
    assert group_name([*voters[:2], identity("controller-3", 99)]) != group_name(voters)


@pytest.mark.parametrize("name", ["controller-1", "a/b", "a b"])
def test_the_name_of_an_identity_is_the_one_it_was_made_of(name):
    assert name_of(identity(name, 7)) == name
