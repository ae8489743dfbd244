"""A curve has at most so many points, evenly spaced, with the first and the newest one."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from adam_async.dashboard.curve import MOST_POINTS, Curve


@given(st.integers(2, 40), st.integers(0, 500))
def test_kept_points_are_evenly_spaced_and_end_with_the_newest(most: int, number: int) -> None:
    curve = Curve(most)
    for x in range(number):
        curve.add(x, 2.0 * x)
        assert curve.points[0] == (0, 0.0)
        assert curve.points[-1] == (x, 2.0 * x)
    points = [x for x, _ in curve.points]
    assert len(points) <= most
    gaps = [b - a for a, b in pairwise(points)]
    assert len(set(gaps[:-1])) <= 1
    assert not gaps[:-1] or gaps[-1] <= gaps[0]


def test_a_long_run_has_a_thousand_points_and_keeps_half_of_them_at_least() -> None:
    curve = Curve()
    for x in range(100_000):
        curve.add(x, None)
    assert MOST_POINTS // 2 <= len(curve.points) <= MOST_POINTS
