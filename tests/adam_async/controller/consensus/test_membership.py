"""Groups change by one node at a time, and majorities of groups one step apart share a node."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.controller.consensus import Members, MembershipError, Step, identity

NODES = "abcdefg"


def majorities(members):
    return [set(some) for some in combinations(members.voters, members.quorum)]


@given(
    st.sets(st.sampled_from(NODES), min_size=1),
    st.sampled_from(NODES),
    st.sampled_from(["promote", "remove"]),
)
def test_majorities_of_groups_one_step_apart_share_a_node(voters, node, kind):
    learners = set(NODES) - voters
    before = Members(tuple(sorted(voters)), tuple(sorted(learners)))
    try:
        after = before.changed(Step(kind, node))
    except MembershipError:
        return
    assert all(one & two for one in majorities(before) for two in majorities(after))


@pytest.mark.parametrize(
    ("kind", "node", "voters", "learners"),
    [
        ("add", "z", "ab", "cz"),
        ("promote", "c", "abc", ""),
        ("remove", "b", "a", "c"),
        ("remove", "c", "ab", ""),
    ],
)
def test_each_step_does_one_thing(kind, node, voters, learners):
    after = Members(("a", "b"), ("c",)).changed(Step(kind, node))
    assert after == Members(tuple(voters), tuple(learners))


@pytest.mark.parametrize(
    ("kind", "node", "reason"),
    [
        ("add", "a", "a is in the group already"),
        ("promote", "z", "z is not in the group a, b; add it first"),
        ("promote", "a", "a is a voter already"),
        ("remove", "a", "a is the only voter"),
    ],
)
def test_a_step_that_does_not_fit_is_refused_with_the_reason(kind, node, reason):
    with pytest.raises(MembershipError, match=reason):
        Members(("a",), ("b",)).changed(Step(kind, node))


@pytest.mark.parametrize(
    ("values", "decided"), [((5,), 5), ((5, 3, 1), 3), ((1, 2, 3, 4), 2), ((1, 2, 3, 4, 5), 3)]
)
def test_decided_is_what_a_majority_has_reached(values, decided):
    members = Members(tuple(NODES[: len(values)]), ("z",))
    assert members.decided({**dict(zip(NODES, values, strict=False)), "z": 99}) == decided


def test_two_lives_of_a_disk_have_two_identities():
    assert identity("controller-0", 10) == "controller-0/a"
    assert identity("controller-0", 11) != identity("controller-0", 10)
