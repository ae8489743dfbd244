"""Settled tags are kept exactly, and in little memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.jobs import Tag
from dataflow.scheduler import SettledTags


@given(
    st.lists(st.builds(Tag, st.integers(3, 4), st.integers(-5, 20), st.integers(1, 2))),
    st.builds(Tag, st.integers(3, 4), st.integers(-6, 21), st.integers(1, 2)),
)
def test_settled_tags_equal_a_set_within_the_epochs_kept(added: list[Tag], asked: Tag) -> None:
    settled = SettledTags(keep_epochs=2)
    for tag in added:
        settled.add(tag)

    assert (asked in settled) == (asked in added)
    assert all(tag in settled for tag in added)


@given(st.permutations(range(30)))
def test_consecutive_numbers_leave_nothing_loose(numbers: list[int]) -> None:
    settled = SettledTags(keep_epochs=1)
    for number in numbers:
        settled.add(Tag(1, number))

    assert [run.others for run in settled._runs.values()] == [set()]


def test_little_disorder_costs_little() -> None:
    settled = SettledTags(keep_epochs=2)
    most = 0
    for number in range(0, 1000, 4):
        for late in (number + 2, number, number + 3, number + 1):
            settled.add(Tag(1, late))
            most = max(most, *(len(run.others) for run in settled._runs.values()))

    assert most <= 3


def test_older_epochs_are_over_as_a_whole() -> None:
    settled = SettledTags(keep_epochs=2)
    settled.add(Tag(1, 5))
    assert Tag(-1, 0) in settled
    settled.add(Tag(2, 0))
    assert Tag(1, 6) not in settled
    settled.add(Tag(3, 0))

    assert Tag(1, 6) in settled
    assert Tag(2, 1) not in settled


def test_a_second_attempt_is_another_tag() -> None:
    settled = SettledTags(keep_epochs=2)
    settled.add(Tag(1, 5))

    assert Tag(1, 5, 2) not in settled


def test_keep_epochs_is_checked() -> None:
    with pytest.raises(ValueError, match="keep_epochs must be at least 1, not 0"):
        SettledTags(keep_epochs=0)
