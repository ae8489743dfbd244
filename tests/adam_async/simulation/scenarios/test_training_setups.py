"""How seeds of a training cluster are set up: what is drawn can be run, and everything is drawn."""

import pytest

from adam_async.errors import ConfigError
from adam_async.simulation.dice import Dice
from adam_async.simulation.scenarios.training import TRAINING
from adam_async.simulation.scenarios.training_setups import (
    CUTS,
    EXTRAS,
    MODES,
    PACE,
    PACE_CUT,
    RULES,
    draw_setup,
    setup_of,
)

DRAWN = [draw_setup(Dice(f"{seed}"), TRAINING) for seed in range(600)]


def test_every_draw_is_a_run_that_can_be() -> None:
    for settings in DRAWN:
        setup = setup_of(settings, TRAINING)
        assert not (setup.resumed and (setup.config.record or setup.config.evaluation == "concurrent"))


def test_a_quarter_trains_plainly_and_each_alternative_is_drawn() -> None:
    assert 0.2 < DRAWN.count({}) / len(DRAWN) < 0.3
    for wanted in (*MODES, *CUTS, *RULES, *EXTRAS, {"resumed": True}):
        assert any(wanted.items() <= settings.items() for settings in DRAWN), wanted
    assert any("late_s" in settings for settings in DRAWN)


def test_a_plan_without_settings_trains_plainly() -> None:
    setup = setup_of({}, TRAINING)

    assert (setup.config, setup.resumed, setup.late_s, setup.pace) == (TRAINING, False, 0.0, PACE)


def test_what_is_cut_has_a_faster_worker() -> None:
    assert setup_of(CUTS[0], TRAINING).pace == PACE_CUT


def test_options_that_cannot_be_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="pull_every"):
        setup_of({"consistency": "bsp", "pull_every": 2}, TRAINING)
