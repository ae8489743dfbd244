"""The benchmark of stores on disks gives the median ratio of its pairs an interval."""

import statistics

import pytest

from benchmarks.store_disk import median_interval


def test_the_interval_of_a_median_holds_it_and_lies_within_the_ratios():
    ratios = [0.82, 0.97, 1.14, 0.9, 0.95, 1.02]
    low, high = median_interval(ratios)
    assert min(ratios) <= low < statistics.median(ratios) < high <= max(ratios)
    assert median_interval(ratios) == (low, high)


def test_equal_pairs_have_an_interval_of_no_width():
    assert median_interval([0.97] * 6) == (0.97, 0.97)


def test_more_pairs_narrow_the_interval():
    few = [0.9, 1.0, 1.1]
    widths = [high - low for low, high in map(median_interval, (few, few * 10))]
    assert widths[1] < widths[0]


def test_a_single_pair_has_its_own_ratio_as_the_interval():
    assert median_interval([0.88]) == pytest.approx((0.88, 0.88))
