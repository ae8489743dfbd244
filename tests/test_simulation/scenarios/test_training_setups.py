"""Setups of a training cluster: every drawn one is valid, and every option is drawn."""

from collections.abc import Mapping
from functools import cache

import pytest

from adam_async.errors import ConfigError
from adam_async.model.network import Network
from adam_async.run.partition import table_of
from adam_async.run.shard_table import assign_buckets
from adam_async.worker.push_plan import plan_pushes, plan_sections
from tests.simulation.plan import Setting
from tests.simulation.random_streams import RandomStream
from tests.simulation.scenarios.training import TRAINING
from tests.simulation.scenarios.training_cluster import SERVERS
from tests.simulation.scenarios.training_setups import (
    CUTS,
    EXTRAS,
    MODES,
    NETWORKS,
    PACE,
    PACE_CUT,
    RULES,
    WHOLE,
    WIDE,
    draw_setup,
    setup_of,
)


@cache
def drawn() -> list[Mapping[str, Setting]]:
    """The settings of many seeds."""
    return [draw_setup(RandomStream(f"{seed}"), TRAINING) for seed in range(600)]


def test_every_draw_is_a_run_that_can_be() -> None:
    for settings in drawn():
        setup = setup_of(settings, TRAINING)
        assert not (setup.resumed and (setup.config.record or setup.config.evaluation == "concurrent"))


def test_some_train_plainly_and_each_alternative_is_drawn() -> None:
    assert 0.02 < drawn().count({}) / len(drawn()) < 0.1
    for wanted in (*MODES, *CUTS, WIDE, *RULES, *EXTRAS, {"resumed": 1}, {"resumed": 2}, {"profiled": True}):
        assert any(wanted.items() <= settings.items() for settings in drawn()), wanted
    assert any("late_s" in settings for settings in drawn())


def test_a_plan_without_settings_trains_plainly() -> None:
    setup = setup_of({}, TRAINING)

    assert (setup.config, setup.resumed, setup.late_s, setup.pace) == (TRAINING, 0, 0.0, PACE)
    assert (setup.spec, setup.profiled) == (NETWORKS[""], False)


def test_a_setup_is_plain_without_drawn_options_and_network() -> None:
    for settings in ({}, {"profiled": True}, {"late_s": 3.0}, {"servers": 3, "copies": 2}):
        assert setup_of(settings, TRAINING).plain, settings
    for settings in (*MODES, *CUTS, WIDE, *RULES, *EXTRAS):
        assert setup_of(settings, TRAINING).plain == (not settings), settings


def test_messages_of_a_wide_network_leave_while_the_rest_of_its_step_is_computed() -> None:
    model = Network(NETWORKS["wide"])
    table = table_of(model, shard_bytes=int(WIDE["shard_bytes"]))
    buckets = assign_buckets(table, SERVERS)
    pushes = plan_pushes(model, table, buckets, images=int(WIDE["images_per_group"]), wanted="delta")

    assert len(plan_sections(model, pushes)) == 2
    assert not any(settings.get("network") == "wide" and set(WHOLE) & set(settings) for settings in drawn())


def test_a_partitioned_model_has_faster_workers() -> None:
    assert setup_of(CUTS[0], TRAINING).pace == PACE_CUT


def test_options_that_cannot_be_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="pull_every"):
        setup_of({"consistency": "bsp", "pull_every": 2}, TRAINING)
