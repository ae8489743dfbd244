"""The clock of a simulated machine: wrong as it may be, no timer rings before its time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.host import Host

TIMES = st.floats(0.0, 1e7)
RATES = st.floats(0.5, 2.0)


@given(now=TIMES, time=TIMES, rate=RATES, wait=st.floats(0.0, 1e5))
def test_a_timer_is_due_when_the_clock_shows_its_time_and_no_sooner_than_rounding_asks(now, time, rate, wait):
    host = Host("a", now=now, time=time, rate=rate)

    due = host.when_shows(time + wait)

    assert host.time_at(due) >= time + wait
    assert host.time_at(due) == pytest.approx(time + wait, abs=1e-6)


def test_a_clock_that_is_set_goes_on_from_there():
    host = Host("a", time=100.0, rate=2.0)
    assert host.time_at(10.0) == 120.0
    host.set_clock(now=10.0, time=host.time_at(10.0), rate=0.5)
    assert host.time_at(20.0) == 125.0
    assert host.when_shows(125.0) == 20.0


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_clock_that_cannot_run_is_refused(rate):
    with pytest.raises(ValueError, match="cannot run at rate"):
        Host("a", rate=rate)
