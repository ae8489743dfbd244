"""The default rate suits mode, cut and data, and a schedule is a function of progress alone."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.errors import ConfigError
from adam_async.run.config import Config
from adam_async.run.learning_rate import (
    FIRST_SHARE,
    USUAL_NORM,
    Schedule,
    decide,
    default_rate,
    squared_norm_of,
)


def constant_rate(groups_in_flight=0, **options):
    return default_rate(Config(schedule="constant", **options), groups_in_flight)


def test_each_rule_has_a_rate_of_its_own_and_momentum_makes_it_smaller():
    assert default_rate(Config(rate=0.3)) == 0.3
    assert constant_rate() == 0.06
    assert constant_rate(momentum=0.9) == pytest.approx(0.006)
    assert constant_rate(images_per_group=1) == pytest.approx(0.06 / 16)
    assert constant_rate(images_per_group=64) == pytest.approx(0.12)
    assert constant_rate(images_per_group=256) == pytest.approx(0.12)
    assert constant_rate(groups_in_flight=1) == 0.06
    assert constant_rate(groups_in_flight=4) == pytest.approx(0.025)
    assert constant_rate(groups_in_flight=10) == pytest.approx(0.01)
    assert constant_rate(weights="aliased", groups_in_flight=10) == 0.06
    assert (default_rate(Config(rule="adagrad")), default_rate(Config(rule="adam"))) == (0.01, 0.001)


def test_a_rate_that_rises_and_falls_has_a_higher_peak_and_less_so_if_its_gradients_are_stale():
    assert default_rate(Config()) == pytest.approx(0.12)
    assert default_rate(Config(consistency="bsp", replicas=2), 4) == pytest.approx(0.12 * 2**0.5)
    assert default_rate(Config(weights="aliased"), groups_in_flight=4) == pytest.approx(0.12)
    for bounded in ({}, {"partitions": 2}):
        assert default_rate(Config(replicas=2, consistency="ssp:4", **bounded), 4) == pytest.approx(0.08)
        assert default_rate(Config(replicas=2, consistency="ssp:4", **bounded), 8) == pytest.approx(0.04)
    for free in ({}, {"replicas": 2}, {"replicas": 2, "processes": True}):
        assert default_rate(Config(**free), 4) == pytest.approx(0.04)
        assert default_rate(Config(**free), 8) == pytest.approx(0.02)
    for cut in (Config(partitions=2), Config(partitions=2, replicas=2)):
        rates = [default_rate(cut, groups) for groups in (4, 8, 16)]
        assert rates == pytest.approx([0.04, 0.04, 0.02])
    assert default_rate(Config(schedule="cosine", warm_up=0.5), 8) == default_rate(Config(), 8)
    for lasting in ({"until_accuracy": 0.99}, {"schedule": "step"}, {"schedule": "cosine"}):
        assert default_rate(Config(**lasting), 8) == constant_rate(8)


def test_in_lockstep_the_rate_goes_by_the_images_of_everybody_and_nothing_is_stale():
    together = Config(consistency="bsp", replicas=2, push_every=2)
    assert together.images_per_update == 64
    assert default_rate(together, groups_in_flight=8) == default_rate(Config(images_per_group=64))
    assert default_rate(Config(consistency="bsp"), groups_in_flight=4) == default_rate(Config())


def test_a_bound_on_clocks_bounds_how_stale_a_gradient_can_be():
    loose, tight = {"consistency": "ssp:100", "replicas": 2}, {"consistency": "ssp:0", "replicas": 2}
    assert constant_rate(8, **loose) == constant_rate(8, replicas=2)
    assert constant_rate(8, **tight) == constant_rate(2, replicas=2)


RISES = {
    "in place": ({"weights": "aliased"}, 0.1),
    "in place, a quarter of an epoch": ({"weights": "aliased", "warm_up": 0.25}, 0.25),
    "copies": ({"weights": "copy", "replicas": 2}, 1.0),
    "copies, one epoch": ({"weights": "copy", "epochs": 1}, 1 / 3),
    "as processes": ({"processes": True, "replicas": 2}, 1.0),
    "ssp": ({"consistency": "ssp:4", "replicas": 2}, 1.0),
    "ssp:0, one replica": ({"consistency": "ssp:0"}, 0.1),
    "bsp": ({"consistency": "bsp", "replicas": 2}, 0.1),
    "bsp with lag": ({"consistency": "bsp", "lag": 1}, 0.1),
    "Downpour": ({"replicas": 2, "push_every": 4, "pull_every": 4}, 1.0),
    "adagrad": ({"rule": "adagrad"}, 1.0),
    "adam in place": ({"rule": "adam", "weights": "aliased"}, 0.1),
    "recorded": ({"record": True}, 1.0),
    "cut": ({"partitions": 2}, 1.0),
    "cut by layers": ({"partitions": 2, "plan": "layers"}, 1.0),
    "cut, as processes": ({"partitions": 2, "processes": True}, 1.0),
    "cut, ssp": ({"partitions": 2, "replicas": 2, "consistency": "ssp:4"}, 1.0),
    "cut, bsp": ({"partitions": 2, "consistency": "bsp"}, 0.1),
}
"""Options, and the epochs over which schedule ``auto`` lets their rate rise."""


@pytest.mark.parametrize("case", RISES)
def test_in_every_mode_and_plan_the_rate_falls_to_nothing_if_the_last_epoch_is_known(case):
    options, rise = RISES[case]
    decided = decide(Config(**options), groups_in_flight=4)
    assert decided.schedule == "cosine"
    assert decided.warm_up == pytest.approx(rise)
    assert decided.rate == default_rate(Config(**options), 4)
    assert decide(decided, groups_in_flight=9) == decided, "it is decided once"


@pytest.mark.parametrize("case", RISES)
def test_a_run_that_may_end_at_any_epoch_has_a_constant_rate_in_every_mode_and_plan(case):
    options, _ = RISES[case]
    decided = decide(Config(**options, until_accuracy=0.99), groups_in_flight=4)
    assert decided.schedule == "constant"
    assert decided.warm_up == options.get("warm_up", 0.0)


def test_a_schedule_that_is_asked_for_stays_as_it_is():
    for options in ({"schedule": "constant"}, {"schedule": "cosine"}, {"schedule": "step", "decay": 0.1}):
        decided = decide(Config(**options), groups_in_flight=4)
        assert (decided.schedule, decided.warm_up) == (options["schedule"], 0.0)


def test_epochs_that_are_left_open_go_by_the_data():
    for options, images, epochs in (
        ({}, 60_000, 3),
        ({}, 8_000, 3),
        ({}, 7_984, 4),
        ({}, 1_437, 17),
        ({}, 240, 100),
        ({}, 31, 100),
        ({}, 1, 100),
        ({}, 0, 3),
        ({"images_per_group": 64}, 1_437, 66),
        ({"push_every": 4}, 1_437, 66),
        ({"replicas": 4}, 1_437, 17),
        ({"replicas": 4, "consistency": "bsp"}, 1_437, 66),
        ({"epochs": 5}, 1_437, 5),
    ):
        decided = decide(Config(**options), 1, images)
        assert decided.epochs == epochs
        assert decide(decided, 1, 10 * images).epochs == epochs, "it is decided once"
    with pytest.raises(ConfigError, match=r"warm_up=3.5 leaves nothing of epochs=3"):
        decide(Config(warm_up=3.5), 1, 60_000)


def test_the_open_rate_is_lower_for_larger_and_brighter_images():
    usual = decide(Config(), 4).rate
    assert decide(Config(), 4, squared_norm=USUAL_NORM).rate == usual
    assert decide(Config(), 4, squared_norm=10 * USUAL_NORM).rate == pytest.approx(usual / 10)
    assert decide(Config(rate=0.3), 4, squared_norm=10 * USUAL_NORM).rate == 0.3
    adam = Config(rule="adam")
    assert decide(adam, 4, squared_norm=10 * USUAL_NORM).rate == default_rate(adam)


@pytest.mark.parametrize("said", [None, "100", True, -1.0, 785.0, math.nan, math.inf])
def test_a_squared_norm_that_makes_no_sense_changes_no_rate(said):
    data = {"shape": [1, 28, 28]}
    norm = squared_norm_of({**data, "squared_norm": said} if said is not None else data)
    assert decide(Config(), 4, squared_norm=norm).rate == decide(Config(), 4).rate


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


def test_the_model_for_photographs_has_adam_unless_an_option_of_sgd_is_given():
    def decided(**options):
        config = decide(Config(**options), 0, photographs=True)
        return config.rule, config.rate

    assert decided() == decided(rule="adam") == ("adam", 0.003)
    assert decided(rule="adam", rate=0.5) == ("adam", 0.5)
    assert decided(rate=0.5) == ("sgd", 0.5)
    assert decided(momentum=0.5)[0] == decided(layer_rate=0.1)[0] == decided(rule="sgd")[0] == "sgd"
    assert decide(Config(), 0).rule == "sgd"


def test_few_photographs_come_in_small_groups_one_in_flight_at_twice_the_rate():
    def of(images, photographs=True, **options):
        found = decide(Config(**options), 0, images, photographs=photographs)
        return found.images_per_group, found.in_flight, found.rate, found.epochs

    assert of(40) == (4, 1, 0.006, 100)
    assert of(90) == (6, 1, 0.006, 100)
    assert of(239) == (15, 1, 0.006, 94)
    assert of(240) == (16, 0, 0.003, 100)
    assert of(50_000) == of(0) == (16, 0, 0.003, 3)
    assert of(240, push_every=2) == (8, 1, 0.006, 100)
    assert of(240, consistency="bsp", replicas=4) == (4, 1, 0.006, 100)
    assert of(40, rule="adam") == (16, 0, 0.003, 100)
    assert of(40, images_per_group=8) == (8, 0, 0.003, 100)
    assert of(40, in_flight=2) == (16, 2, 0.003, 100)
    assert of(40, rate=0.1) == (16, 0, 0.1, 100)
    assert of(40, photographs=False)[:2] == (16, 0)
