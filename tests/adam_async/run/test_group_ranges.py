"""Sets of groups as ranges: equal to Python's sets, in one form, within bounds."""

import random

import numpy as np
import pytest

from adam_async.messages.group_sets import KEPT_EPOCHS, MOST_BOUNDS
from adam_async.run import group_ranges
from adam_async.run.group_ranges import (
    common,
    common_and_others,
    groups_fault,
    has_groups,
    merging,
    name_groups,
    united,
    with_groups,
    with_groups_each,
    without,
)


def numbers_of(ranges):
    assert not ranges or groups_fault((1, *ranges)) == "", "ranges have one form"
    return {n for start, stop in zip(ranges[::2], ranges[1::2], strict=True) for n in range(start, stop)}


def random_ranges(dice, most=30):
    return name_groups(1, [dice.randrange(most) for _ in range(dice.randrange(12))])[1:]


@pytest.mark.parametrize("seed", range(20))
def test_ranges_are_those_of_sets(seed):
    dice = random.Random(seed)
    for _ in range(100):
        one, other = random_ranges(dice), random_ranges(dice)
        start = dice.randrange(30)
        stop = start + 1 + dice.randrange(10)
        span = set(range(start, stop))
        assert numbers_of(united(one, other)) == numbers_of(one) | numbers_of(other)
        assert numbers_of(common(one, start, stop)) == numbers_of(one) & span
        assert numbers_of(without(one, other)) == numbers_of(one) - numbers_of(other)


@pytest.mark.parametrize(
    ("ranges", "start", "stop", "expected"),
    [
        ((), 3, 5, (3, 5)),
        ((3, 5), 5, 7, (3, 7)),
        ((3, 5), 1, 3, (1, 5)),
        ((3, 5, 7, 9), 5, 7, (3, 9)),
        ((3, 5, 7, 9), 0, 20, (0, 20)),
        ((3, 5, 7, 9), 4, 8, (3, 9)),
        ((3, 9), 4, 6, (3, 9)),
        ((3, 5), 3, 5, (3, 5)),
        ((0, 1), (1 << 32) - 2, (1 << 32) - 1, (0, 1, (1 << 32) - 2, (1 << 32) - 1)),
    ],
)
def test_a_range_joins_those_that_it_overlaps_or_touches(ranges, start, stop, expected):
    assert united(ranges, (start, stop)) == expected


def test_a_step_names_its_groups_in_any_order():
    assert name_groups(2, [7, 1, 0]) == name_groups(2, (0, 1, 7)) == (2, 0, 2, 7, 8)
    assert name_groups(1, [4]) == (1, 4, 5)


@pytest.mark.parametrize("named", [(), (1, 0, 1), (1, 0, 2, 3, 4), (9, 5, 6, 7, 1 << 32)])
def test_correct_names_have_no_fault(named):
    assert groups_fault(named) == ""


@pytest.mark.parametrize(
    "named",
    [
        (1,),
        (1, 0),
        (1, 0, 1, 2),
        (0, 0, 1),
        (1, 1, 1),
        (1, 2, 1),
        (1, 0, 2, 2, 3),
        (1, 0, 4, 2, 6),
        (1, 4, 6, 0, 2),
        (1, 0, 2, 0, 2),
    ],
)
def test_a_tuple_that_names_no_groups_has_a_fault(named):
    assert groups_fault(named)


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ((1, 0, 4), True),
        ((1, 1, 2, 8, 10), True),
        ((1, 4, 8), False),
        ((1, 10, 12), False),
        ((1, 4, 6, 12, 13), False),
        ((1, 3, 5), None),
        ((1, 0, 10), None),
        ((1, 0, 2, 4, 5), None),
        ((1, 9, 11), None),
        ((2, 0, 4), False),
    ],
)
def test_sets_have_all_some_or_none_of_the_groups(named, expected):
    assert has_groups({1: (0, 4, 8, 10)}, named) is expected


@pytest.mark.parametrize("seed", range(10))
def test_what_sets_have_is_what_sets_of_numbers_have(seed):
    dice = random.Random(seed)
    for _ in range(200):
        ranges, named = random_ranges(dice), random_ranges(dice)
        if named:
            known, numbers = numbers_of(ranges), numbers_of(named)
            expected = True if numbers <= known else None if numbers & known else False
            assert has_groups({1: ranges}, (1, *named)) is expected


def test_an_epoch_whose_set_is_dropped_is_over():
    sets = dict.fromkeys((3, 4, 5), (0, 4))
    assert has_groups(sets, (2, 9, 10)) is True
    assert has_groups(sets, (6, 0, 1)) is False
    assert has_groups({5: (0, 4)}, (2, 9, 10)) is False, "the shard may not have seen the epoch yet"


@pytest.mark.parametrize("seed", range(10))
def test_sets_have_all_groups_that_were_named(seed):
    dice, sets, counted = random.Random(seed), {}, set()
    for _ in range(60):
        named = name_groups(1, [dice.randrange(40) for _ in range(1 + dice.randrange(5))])
        before = sets
        copy = dict(before)
        sets = with_groups(sets, named)
        assert before == copy, "sets are never changed in place"
        counted |= numbers_of(named[1:])
        assert has_groups(sets, named)
    assert numbers_of(sets[1]) == counted


def test_the_newest_epochs_are_kept():
    sets = {}
    for epoch in range(1, 20):
        sets = with_groups(sets, (epoch, 0, epoch))
    assert sorted(sets) == [17, 18, 19]
    assert len(sets) == KEPT_EPOCHS
    assert with_groups(sets, (3, 0, 1)) is sets, "the set of an older epoch is dropped"
    assert with_groups(sets, (18, 40, 41))[18] == (0, 18, 40, 41)


def test_groups_in_order_and_in_any_order_give_one_range():
    numbers = list(range(1000))
    for seed in range(3):
        sets = {}
        for number in numbers:
            sets = with_groups(sets, (1, number, number + 1))
        assert sets == {1: (0, 1000)}
        random.Random(seed).shuffle(numbers)


def test_a_full_set_stays_as_it_is_and_other_epochs_go_on():
    full = {1: tuple(range(MOST_BOUNDS - 2))}
    assert with_groups(full, (1, MOST_BOUNDS, MOST_BOUNDS + 1)) is full
    assert with_groups(full, (2, 0, 1))[2] == (0, 1)


def test_equal_neighbours_share_the_set_with_further_groups():
    several = [{1: (0, 4)}, {1: (0, 4)}, {1: (0, 2)}]
    found = list(with_groups_each(several, (1, 4, 6)))
    assert found == [{1: (0, 6)}, {1: (0, 6)}, {1: (0, 2, 4, 6)}]
    assert found[0] is found[1]
    assert several == [{1: (0, 4)}, {1: (0, 4)}, {1: (0, 2)}]


@pytest.mark.parametrize("seed", range(20))
def test_groups_of_all_and_of_some_sets_are_those_of_sets_of_numbers(seed):
    dice = random.Random(seed)
    for _ in range(50):
        several = {random_ranges(dice) for _ in range(dice.randrange(5))}
        every, some = (tuple(ranges.tolist()) for ranges in common_and_others(several))
        numbers = [numbers_of(ranges) for ranges in several]
        common_ones = set.intersection(*numbers) if numbers else set()
        assert numbers_of(every) == common_ones
        assert numbers_of(some) == set().union(*numbers) - common_ones


@pytest.mark.parametrize("seed", range(10))
def test_sets_are_merged_in_bounded_pieces_with_the_same_result(seed, monkeypatch):
    dice = random.Random(seed)
    several = [name_groups(1, dice.sample(range(4000), 300))[1:] for _ in range(6)]
    whole = common_and_others(several)
    monkeypatch.setattr(group_ranges, "WINDOW_BOUNDS", 256)
    pieces = sum(1 for _ in merging(several))
    assert pieces > sum(map(len, several)) // 256
    for one, other in zip(common_and_others(several), whole, strict=True):
        np.testing.assert_array_equal(one, other)
