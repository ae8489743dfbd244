"""A thread at a pace never does more than its share, and rests no longer than it owes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.pace import CREDIT_S, Pace

JOBS = st.lists(
    st.tuples(
        st.floats(0, 1),  # CPU time of a job
        st.floats(0, 1),  # time in which it waited for something else
        st.floats(0, 0.1),  # how much longer than asked the rest was
    ),
    min_size=1,
    max_size=50,
)
SHARES = st.floats(0.01, 1)


@given(SHARES, JOBS)
def test_no_thread_uses_more_than_its_share_but_for_a_bounded_credit(share, jobs):
    pace, cpu_s, wall_s = Pace(share), 0.0, 0.0
    for worked_s, waited_s, late_s in jobs:
        rest_s = pace.worked(cpu_s=worked_s, wall_s=worked_s + waited_s)
        if rest_s:
            pace.rested(rest_s + late_s)
            rest_s += late_s
        cpu_s += worked_s
        wall_s += worked_s + waited_s + rest_s
        assert wall_s >= cpu_s / share - CREDIT_S - 1e-9


@given(SHARES, JOBS)
def test_whoever_computes_all_the_time_has_its_share(share, jobs):
    pace, cpu_s, wall_s = Pace(share), 0.0, 0.0
    for worked_s, _, late_s in jobs:
        rest_s = pace.worked(cpu_s=worked_s, wall_s=worked_s)
        if rest_s:
            late_s = min(late_s, CREDIT_S)
            pace.rested(rest_s + late_s)
            rest_s += late_s
        cpu_s += worked_s
        wall_s += worked_s + rest_s
        assert wall_s <= cpu_s / share + CREDIT_S + 1e-9


def test_a_rest_that_was_cut_short_is_added_to_the_next():
    pace = Pace(0.25)
    assert pace.worked(cpu_s=1.0, wall_s=1.0) == 3.0
    pace.rested(1.0)
    assert pace.worked(cpu_s=1.0, wall_s=1.0) == 5.0


def test_a_job_that_waited_long_enough_needs_no_rest_and_saves_nothing_up():
    pace = Pace(0.5)
    assert pace.worked(cpu_s=1.0, wall_s=100.0) == 0.0
    assert pace.worked(cpu_s=1.0, wall_s=1.0) == 1.0


@pytest.mark.parametrize("share", [0, -1, 1.1, float("nan")])
def test_a_pace_is_a_share(share):
    with pytest.raises(ValueError, match="a share of a core's time, above 0 and up to 1, not"):
        Pace(share)
