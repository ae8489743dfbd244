"""Schedules: bounds, pieces that only rise or only fall, and nothing that jumps but a step."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.run.config import Config
from adam_async.run.rate_schedule import FIRST_SHARE, Schedule


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    epochs = draw(st.integers(1, 50))
    return Schedule(
        kind=draw(st.sampled_from(["constant", "step", "cosine"])),
        peak=draw(st.floats(1e-6, 10.0)),
        warm_up=draw(st.integers(0, 99)) / 100 * epochs,
        decay=draw(st.floats(0.01, 1.0)),
        decay_every=draw(st.floats(0.01, 10.0)),
        epochs=epochs,
    )


SHARES = st.floats(0.0, 1.0, exclude_max=True)


@given(schedules(), SHARES)
def test_the_rate_lies_between_zero_and_its_peak(schedule: Schedule, share: float) -> None:
    assert 0 <= schedule.rate(share * schedule.epochs) <= schedule.peak


@given(schedules(), SHARES, SHARES)
def test_the_rate_rises_during_the_warm_up_and_never_after_it(
    schedule: Schedule, one: float, other: float
) -> None:
    early, late = sorted((one, other))
    rising = [schedule.rate(share * schedule.warm_up) for share in (early, late)]
    length = schedule.epochs - schedule.warm_up
    falling = [schedule.rate(schedule.warm_up + share * length) for share in (early, late)]

    if schedule.warm_up:
        assert rising[0] <= rising[1]
    assert falling[0] >= falling[1]


@given(schedules())
def test_the_warm_up_ends_where_the_schedule_begins(schedule: Schedule) -> None:
    assert schedule.rate(schedule.warm_up) == schedule.peak
    if schedule.warm_up:
        assert schedule.rate(math.nextafter(schedule.warm_up, 0.0)) == pytest.approx(schedule.peak)


@given(schedules())
def test_no_group_of_a_warm_up_is_computed_in_vain(schedule: Schedule) -> None:
    assert schedule.rate(0.0) >= schedule.peak * FIRST_SHARE


def test_a_constant_rate_is_what_was_given_or_the_default_of_the_rule() -> None:
    assert Schedule.of(Config(rate=0.25)).rate(2.9) == 0.25
    assert Schedule.of(Config(rule="adam")).rate(0.0) == 0.001


def test_a_warm_up_rises_in_proportion() -> None:
    schedule = Schedule.of(Config(rate=0.2, warm_up=2.0))

    assert [schedule.rate(progress) for progress in (0.0, 0.5, 1.0, 2.0, 2.9)] == pytest.approx(
        [0.0002, 0.05, 0.1, 0.2, 0.2]
    )


def test_steps_fall_by_the_factor_at_each_boundary_counted_from_the_end_of_the_warm_up() -> None:
    schedule = Schedule.of(
        Config(rate=0.8, epochs=5, schedule="step", decay=0.5, decay_every=1.0, warm_up=0.5)
    )

    rates = [schedule.rate(progress) for progress in (0.5, 1.25, 1.5, 2.25, 2.5, 4.5)]
    assert rates == pytest.approx([0.8, 0.8, 0.4, 0.4, 0.2, 0.05])


def test_a_cosine_is_half_way_in_the_middle_and_zero_at_the_end_and_after_it() -> None:
    schedule = Schedule.of(Config(rate=0.4, epochs=5, schedule="cosine", warm_up=1.0))

    rates = [schedule.rate(progress) for progress in (1.0, 2.0, 3.0, 5.0, 6.0)]
    assert rates == pytest.approx([0.4, 0.2 * (1 + math.cos(math.pi / 4)), 0.2, 0.0, 0.0])


@given(schedules(), SHARES)
def test_a_fixed_rate_is_that_of_every_group(schedule: Schedule, share: float) -> None:
    constant = schedule.kind == "constant" and not schedule.warm_up
    assert (schedule.fixed is not None) == constant
    if constant:
        assert schedule.fixed == schedule.rate(share * schedule.epochs)
