"""A listener closes connections of the fullest source, silent ones first, oldest first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.entrance import Admission, source_of

MEMBER, FLOOD = "10.0.0.1", "10.0.0.2"


def filled(limit: int, silent: int, proving: int = 0) -> Admission[str]:
    """Return an admission with connections of one source, the proving ones older."""
    admission = Admission[str](limit)
    for number in range(proving):
        admission.arrived(f"proving-{number}", FLOOD)
        admission.introduced(f"proving-{number}")
    for number in range(silent):
        admission.arrived(f"silent-{number}", FLOOD)
    return admission


def test_no_connection_is_closed_up_to_the_limit() -> None:
    admission = filled(4, silent=4)
    assert not admission.over_limit
    assert admission.take_excess() == []
    assert len(admission) == 4


def test_the_oldest_silent_connection_of_the_fullest_source_is_closed() -> None:
    admission = Admission[str](3)
    for name, source in (("m", MEMBER), ("a", FLOOD), ("b", FLOOD), ("c", FLOOD), ("d", FLOOD)):
        admission.arrived(name, source)
    assert admission.take_excess() == ["a", "b"]
    assert len(admission) == 3


def test_a_proving_connection_outlives_older_and_younger_silent_ones() -> None:
    admission = filled(3, silent=3)
    admission.introduced("silent-0")
    admission.arrived("newest", FLOOD)
    assert admission.take_excess() == ["silent-1"]


def test_a_new_connection_stays_if_all_others_are_proving() -> None:
    admission = filled(4, silent=0, proving=4)
    admission.arrived("member", FLOOD)
    assert admission.take_excess() == ["proving-0"]
    admission.arrived("another", FLOOD)
    assert admission.take_excess() == ["proving-1"]


def test_the_places_of_connections_that_left_are_free() -> None:
    admission = filled(2, silent=1, proving=1)
    admission.left("silent-0")
    admission.left("silent-0")
    admission.left("proving-0")
    assert len(admission) == 0
    admission.arrived("a", FLOOD)
    admission.arrived("b", MEMBER)
    assert admission.take_excess() == []


@given(
    limit=st.integers(1, 8),
    steps=st.lists(st.tuples(st.sampled_from(["arrive", "introduce", "leave", "tidy"]), st.integers(0, 5))),
)
def test_the_limit_holds_and_no_source_with_a_fair_share_loses_a_connection(
    limit: int, steps: list[tuple[str, int]]
) -> None:
    admission = Admission[int](limit)
    here: dict[int, tuple[int, bool]] = {}
    for number, (step, choice) in enumerate(steps):
        silent = [one for one, (_, proving) in here.items() if not proving]
        if step == "arrive":
            admission.arrived(number, str(choice))
            here[number] = (choice, False)
        elif step == "introduce" and silent:
            one = silent[choice % len(silent)]
            admission.introduced(one)
            here[one] = (here[one][0], True)
        elif step == "leave" and here:
            one = list(here)[choice % len(here)]
            admission.left(one)
            del here[one]
        elif step == "tidy":
            for one in admission.take_excess():
                source = here[one][0]
                sizes = [sum(of == other for of, _ in here.values()) for other in range(6)]
                assert sizes[source] == max(sizes)
                del here[one]
            assert len(here) <= limit
        assert len(admission) == len(here)
        assert admission.over_limit == (len(here) > limit)


def test_a_source_is_a_host_or_the_network_that_one_host_may_use() -> None:
    assert source_of("10.0.0.1") == source_of("::ffff:10.0.0.1") == "10.0.0.1"
    assert source_of("2001:db8::1") == source_of("2001:db8::ffff:2") != source_of("2001:db8:0:1::1")
    assert source_of("fe80::1%eth0") == source_of("fe80::2")
    assert source_of("server") == "server"


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="limit must be at least 1"):
        Admission[str](0)
