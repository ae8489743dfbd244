"""The line search fulfils the strong Wolfe conditions, and ends whatever the function."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.lbfgs.line_search import CURVATURE, DECREASE, MOST_TRIES, LineSearch


def run(phi, step=1.0):
    """Search along a function of the value and the slope; return the verdict, the step and the tries."""
    value, slope = phi(0.0)
    search = LineSearch.begin(value, slope, step)
    while True:
        at = search.step
        verdict = search.take(*phi(at))
        assert search.tries <= MOST_TRIES
        if verdict != "evaluate":
            return verdict, at, search.tries


@given(minimum=st.floats(1e-3, 1e3), step=st.floats(1e-2, 1e2), bend=st.floats(0.1, 10))
def test_a_step_of_a_convex_function_fulfils_both_conditions(minimum, step, bend):
    def phi(t):
        return bend * (t - minimum) ** 2 + (t - minimum) ** 4, 2 * bend * (t - minimum) + 4 * (
            t - minimum
        ) ** 3

    verdict, t, _ = run(phi, step)
    value, slope = phi(0.0)

    assert verdict == "accept"
    assert phi(t)[0] <= value + DECREASE * t * slope
    assert abs(phi(t)[1]) <= -CURVATURE * slope


def test_a_first_step_that_is_far_too_long_is_shortened():
    def phi(t):
        return math.cosh(min(t - 1, 700)), math.sinh(min(t - 1, 700))

    verdict, t, _ = run(phi, 1e3)

    assert verdict == "accept"
    assert 0 < t < 3


def test_values_that_are_not_finite_count_as_too_large():
    def phi(t):
        return (math.nan, math.nan) if t > 0.01 else ((t - 0.005) ** 2, 2 * (t - 0.005))

    verdict, t, _ = run(phi, 1.0)

    assert verdict == "accept"
    assert 0 < t <= 0.01


def test_a_first_step_below_the_rounding_of_the_value_is_lengthened():
    def phi(t):
        return 1e9 + (t - 1) ** 2, 2 * (t - 1)

    verdict, t, _ = run(phi, 1e-6)

    assert verdict == "accept"
    assert 0 < t < 2


def test_a_function_that_only_rises_fails():
    verdict, _, tries = run(lambda t: (t, -1.0))

    assert verdict == "fail"
    assert tries <= MOST_TRIES


def test_a_function_that_falls_for_ever_ends_with_its_longest_step():
    verdict, t, tries = run(lambda t: (-t, -1.0))

    assert verdict == "accept"
    assert t >= 2 ** (MOST_TRIES - 3)
    assert tries == MOST_TRIES


@pytest.mark.parametrize("kink", [0.3, 1.7])
def test_a_kink_without_a_flat_slope_ends_with_the_best_decrease(kink):
    def phi(t):
        return abs(t - kink), -1.0 if t < kink else 1.0

    verdict, t, _ = run(phi)

    assert verdict == "accept"
    assert phi(t)[0] < kink
