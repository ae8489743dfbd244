"""Options: which layer wins, and what a wrong one is told."""

import math

import msgspec
import pytest

from adam_async.errors import ConfigError
from adam_async.run.config import (
    COMMAND_LINE,
    ENVIRONMENT,
    FIELDS,
    MOST,
    USUAL_NORM,
    Config,
    Waits,
    default_in_flight,
    from_environment,
    from_toml,
    known_keys,
    make_config,
    replica_in_flight,
    squared_norm_of,
)
from adam_async.run.shard_table import NUM_BUCKETS


def test_later_layers_win_and_none_means_not_given():
    config = make_config({"epochs": 5, "seed": 1}, {"epochs": "7", "seed": None}, {"rate": 0.5})
    assert (config.epochs, config.seed, config.rate) == (7, 1, 0.5)


def test_defaults_file_environment_and_command_line_rank_in_that_order():
    file = from_toml('epochs = 2\nservers = 2\nrule = "adam"\n[waits]\ncall_s = 3', source="adam.toml")
    environment = from_environment({"ADAM_SERVERS": "3", "ADAM_RULE": "adagrad", "PATH": "/bin"})
    config = make_config(file, environment, {"rule": "sgd"})
    assert (config.replicas, config.epochs, config.servers, config.rule) == (1, 2, 3, "sgd")
    assert config.waits == Waits(call_s=3.0)


def test_every_plain_option_has_an_environment_variable():
    plain = [name for name in FIELDS if name != "waits"]
    defaults = {**{name: str(getattr(Config(), name)) for name in plain}, "slow": ""}
    values = from_environment({f"ADAM_{name.upper()}": text for name, text in defaults.items()})
    assert sorted(values) == sorted(plain)
    assert make_config(values) == Config()


def test_who_is_slow_is_a_list_in_a_file_and_separated_by_commas_in_the_environment():
    wanted = ("worker-1:0.2", "worker-0~worker-1:5ms")
    file = from_toml('slow = ["worker-1:0.2", "worker-0~worker-1:5ms"]', source="adam.toml")
    environment = from_environment({"ADAM_SLOW": "worker-1:0.2,worker-0~worker-1:5ms,"})
    assert make_config(file).slow == make_config(environment).slow == Config(slow=wanted).slow == wanted


@pytest.mark.parametrize(
    ("slow", "said"),
    [
        ("worker-1:0.2", r"slow must be a list of texts, not 'worker-1:0.2' \(set in adam.toml\)"),
        ([0.2], r"slow must be a list of texts, not \[0.2\] \(set in adam.toml\)"),
        (["worker-1=0.2"], "slow 'worker-1=0.2' is not of the form NODE:SHARE, as in worker-1:0.2, or NODE~"),
    ],
)
def test_who_is_slow_is_refused_with_the_right_form(slow, said):
    with pytest.raises(ConfigError, match=said):
        make_config({"slow": slow}, sources=("adam.toml",))


def test_the_environment_is_an_argument_and_foreign_variables_are_left_alone():
    assert from_environment({"ADAM_DATA_DIR": "/data", "ADAM_NOTHING": "1", "EPOCHS": "3"}) == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("epocs = 3", "adam.toml: unknown key 'epocs'; did you mean 'epochs'?"),
        ("[waits]\nanswers_s = 3", "unknown key 'waits.answers_s'; did you mean 'waits.answer_s'?"),
        ("zzzzzzzzz = 3", "unknown key 'zzzzzzzzz'; known keys: model, data, damaged, augment"),
        ("[run]\nepochs = 3", "unknown key 'run'"),
        ("epochs = ", "adam.toml is not TOML"),
        ("waits = 3", "adam.toml: waits is a table; write [waits]"),
    ],
)
def test_a_file_with_a_wrong_key_is_told_the_nearest(text, said):
    with pytest.raises(ConfigError, match=r"adam\.toml") as failure:
        from_toml(text, source="adam.toml")
    assert said in str(failure.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"epochs": -1}, "epochs must be a number of at least 0, not -1"),
        ({"images_per_group": 0}, "images_per_group"),
        ({"in_flight": -1}, "in_flight"),
        ({"shard_bytes": 63}, "shard_bytes must be a number of at least 64, not 63"),
        ({"shard_bytes": 1 << 26}, "shard_bytes must be at most 33554432, not 67108864"),
        ({"controllers": 2}, "controllers must be 1, 3 or 5, of which none, one or two may be lost"),
        ({"controllers": 7}, "(an even number bears no more losses), not 7"),
        ({"controllers": "three"}, "controllers must be a whole number, not 'three'"),
        ({"read_ahead": 2000}, "read_ahead must be at most 1024, not 2000"),
        ({"rate": -0.1}, "rate must be a number of at least 0.0, not -0.1"),
        ({"rate": float("nan")}, "rate must be a number of at least 0.0, not nan"),
        ({"rate": "inf"}, "rate must be a number of at least 0.0, not inf"),
        ({"weight_decay": float("nan")}, "weight_decay"),
        ({"momentum": 1.0}, "momentum must be in [0, 1), not 1.0"),
        ({"momentum": float("nan")}, "momentum must be in [0, 1), not nan"),
        ({"momentum": 0.5, "rule": "adam"}, "momentum belongs to rule sgd"),
        ({"partitions": 0}, "partitions must be a number of at least 1, not 0"),
        ({"partitions": 65}, "partitions must be at most 64, not 65"),
        ({"partitions": 2, "clip": 1}, "clip cannot be with partitions=2: no worker has the whole gradient"),
        ({"partitions": 2, "layer_rate": 0.1}, "layer_rate cannot be with partitions=2: no worker has"),
        ({"partitions": 2, "record": True}, "record cannot be with partitions=2: no record holds"),
        ({"partitions": 2, "weights": "aliased"}, "weights=aliased needs partitions=1"),
        ({"plan": "diagonal"}, "plan must be one of vertical, layers, not 'diagonal'"),
        ({"epoch_fraction": 0}, "epoch_fraction must be above 0 and at most 1, not 0.0"),
        ({"epoch_fraction": 1.5}, "epoch_fraction must be above 0 and at most 1, not 1.5"),
        ({"epoch_rule": "time"}, "epoch_rule must be one of replicas, images, not 'time'"),
        ({"until_accuracy": 98.7}, "until_accuracy is a share between 0 and 1, not 98.7"),
        ({"rule": "newton"}, "rule must be one of sgd, adagrad, adam, not 'newton'"),
        ({"dtype": "float16"}, "dtype must be one of float32, float64, not 'float16'"),
        ({"epochs": "three"}, "epochs must be a whole number, not 'three'"),
        ({"epochs": 1.5}, "epochs must be a whole number, not 1.5"),
        ({"processes": "perhaps"}, "processes must be true or false, not 'perhaps'"),
        ({"rate": "much"}, "rate must be a number, not 'much'"),
        ({"data": 3}, "data must be text, not 3"),
        ({"waits": 3}, "waits must be a table of seconds, not 3"),
        ({"waits": {"call_s": "long"}}, "waits.call_s must be a number, not 'long'"),
        ({"images_per_group": 65_537}, "images_per_group must be at most 65536, not 65537"),
        ({"in_flight": 4097}, "in_flight must be at most 4096, not 4097"),
        ({"replicas": 1025}, "replicas must be at most 1024, not 1025"),
        ({"servers": 65}, "servers must be at most 64, not 65"),
        ({"consistency": "ssp"}, "consistency must be asp, ssp:S with a whole number S of steps, or bsp"),
        ({"consistency": "ssp:-1"}, "not 'ssp:-1'"),
        ({"lag": 1}, "lag=1 belongs to consistency bsp, not asp"),
        ({"lag": 2, "consistency": "bsp"}, "lag must be at most 1, not 2"),
        ({"pull_every": 2, "consistency": "bsp"}, "leave pull_every at 1; push_every makes steps longer"),
        ({"scale_by_staleness": True, "consistency": "bsp"}, "leave it off, and lower the rate"),
        (
            {"epochs": 3, "warm_up": 3},
            "warm_up=3.0 leaves nothing of epochs=3: lower warm_up or train longer",
        ),
        ({"warm_up": -1}, "warm_up must be a number of at least 0.0, not -1.0"),
        ({"warm_start": -1}, "warm_start must be a number of at least 0, not -1"),
        ({"schedule": "linear"}, "schedule must be one of auto, constant, step, cosine, not 'linear'"),
        ({"schedule": "step", "decay": 0}, "give a factor above 0 and up to 1"),
        ({"schedule": "step", "decay": 1.5}, "decay must be at most 1.0, not 1.5"),
        ({"schedule": "step", "decay_every": 0}, "decay_every must be a number of at least 0.001"),
        ({"decay": 0.1}, "decay=0.1 belongs to schedule step, not auto: give schedule step too"),
        ({"decay_every": 2, "schedule": "cosine"}, "or leave decay_every out"),
        ({"clip": -1}, "clip must be a number of at least 0.0"),
        ({"layer_rate": 0.002, "rule": "adagrad"}, "layer_rate=0.002 belongs to rule sgd"),
        ({"checkpoint_every": -1}, "checkpoint_every must be a number of at least 0"),
        ({"weights": "aliased", "consistency": "bsp"}, "weights=aliased needs consistency=asp"),
        ({"weights": "aliased", "clip": 1}, "weights=aliased needs clip=0.0"),
        ({"weights": "aliased", "record": True}, "weights=aliased needs record=False"),
        ({"colour": "red"}, "colour"),
        ({"waits": {"answer_s": 0}}, "waits.answer_s must be a positive number of seconds, not 0.0"),
        ({"waits": {"grace_s": "nan"}}, "waits.grace_s"),
        ({"waits": {"other_s": 1}}, "other_s"),
    ],
)
def test_a_wrong_value_is_named_with_its_option(values, said):
    with pytest.raises(ConfigError) as failure:
        make_config(values)
    assert said in str(failure.value)


def test_a_config_survives_the_cluster_map():
    config = make_config({"rule": "adam", "waits": {"call_s": 1.5}, "until_accuracy": 0.5})
    assert make_config(msgspec.json.decode(msgspec.json.encode(config))) == config


@pytest.mark.parametrize(
    ("values", "slack", "synchronous"),
    [
        ({}, None, False),
        ({"consistency": "ssp:3"}, 3, False),
        ({"consistency": "ssp:0"}, 0, False),
        ({"consistency": "bsp"}, 0, True),
        ({"consistency": "bsp", "lag": 1}, 1, True),
    ],
)
def test_the_slack_of_a_mode_is_a_number_of_steps_and_only_asp_has_none(values, slack, synchronous):
    config = make_config(values)
    assert (config.slack, config.synchronous) == (slack, synchronous)


def test_a_step_may_be_longer_than_what_is_in_flight_in_every_mode():
    for consistency in ("asp", "ssp:2", "bsp"):
        assert make_config({"consistency": consistency, "push_every": 8, "in_flight": 1}).push_every == 8


@pytest.mark.parametrize(
    ("consistency", "fraction", "pooled"), [("asp", 0.5, True), ("ssp:3", 1.0, False), ("bsp", 1.0, False)]
)
def test_where_clocks_meet_at_its_end_all_of_an_epoch_is_trained(consistency, fraction, pooled):
    config = Config(consistency=consistency, epoch_fraction=0.5, epoch_rule="images")
    assert (config.fraction_in_force, config.pooled) == (fraction, pooled)


@pytest.mark.parametrize(
    "values",
    [{"consistency": "ssp:9"}, {"clip": 1}, {"scale_by_staleness": True}, {"partitions": 2}],
)
def test_what_needs_a_copy_is_not_trained_in_place_unless_asked_for(values):
    assert make_config({}).weights_in(one_process=True) == "aliased"
    assert make_config(values).weights_in(one_process=True) == "copy"


def test_threads_share_the_cores_and_never_fall_to_zero():
    assert Config().threads_per_worker(8) == 8
    assert Config(replicas=3).threads_per_worker(8) == 2
    assert Config(replicas=3).threads_per_worker(2) == 1
    assert Config(threads=5, replicas=3).threads_per_worker(2) == 5


@pytest.mark.parametrize(("threads", "replicas"), [(17, 1), (6, 3), (0, 17), (10**9, 1), (1, 1000)])
def test_more_threads_than_make_sense_are_refused_with_the_limit(threads, replicas):
    claim = (
        f"threads={threads or 1} for each of replicas={replicas} is more than 8 per core on 2 cores; "
        "lower threads or replicas, to at most 16 threads together"
    )
    with pytest.raises(ConfigError, match=claim):
        Config(threads=threads, replicas=replicas).threads_per_worker(2)


def test_there_is_a_bucket_for_each_server():
    assert MOST["servers"] == NUM_BUCKETS


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (({"epochs": "x"}, {}, {}), "epochs must be a whole number, not 'x' (set in adam.toml)"),
        (({"epochs": 1}, {"epochs": "x"}, {}), "epochs must be a whole number, not 'x' (set by ADAM_EPOCHS)"),
        (({}, {"in_flight": "1"}, {"in_flight": 1.5}), "not 1.5 (set by --in-flight)"),
        (({"waits": {"call_s": "x"}}, {}, {}), "waits.call_s must be a number, not 'x' (set in adam.toml)"),
    ],
)
def test_a_value_of_the_wrong_type_is_named_with_where_it_comes_from(layers, said):
    with pytest.raises(ConfigError) as failure:
        make_config(*layers, sources=("adam.toml", ENVIRONMENT, COMMAND_LINE))
    assert str(failure.value).endswith(said)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ({"plan": "layers"}, "--plan layers has no force with partitions=1"),
        ({"halo": "exchange"}, "--halo exchange has no force with partitions=1"),
        (
            {"partitions": 2, "plan": "layers", "halo": "recompute"},
            "--halo recompute belongs to plan vertical",
        ),
    ],
)
def test_what_is_typed_of_a_cut_that_is_not_made_is_refused(typed, said):
    with pytest.raises(ConfigError) as failure:
        make_config({}, typed, sources=("adam.toml", COMMAND_LINE))
    assert said in str(failure.value)
    # The same from a file may be for other runs too, and old checkpoints hold it.
    assert make_config(typed, {}, sources=("adam.toml", COMMAND_LINE)) == Config(**typed)
    assert make_config(typed) == Config(**typed)


@pytest.mark.parametrize(
    ("file", "typed"),
    [
        ({}, {"plan": "vertical", "halo": "auto"}),
        ({}, {"partitions": 2, "plan": "layers", "halo": "auto"}),
        ({"partitions": 2}, {"plan": "layers"}),
        ({"plan": "layers"}, {"partitions": 2, "plan": "vertical", "halo": "exchange"}),
    ],
)
def test_what_is_typed_of_a_cut_that_is_made_or_is_the_default_is_taken(file, typed):
    assert make_config(file, typed, sources=("adam.toml", COMMAND_LINE)) == Config(**{**file, **typed})


def constant_rate(groups_in_flight=0, **options):
    return Config(schedule="constant", **options).default_rate(groups_in_flight)


def test_each_rule_has_a_rate_of_its_own_and_momentum_makes_it_smaller():
    assert Config(rate=0.3).default_rate() == 0.3
    assert constant_rate() == 0.06
    assert constant_rate(momentum=0.9) == pytest.approx(0.006)
    assert constant_rate(images_per_group=1) == pytest.approx(0.06 / 16)
    assert constant_rate(images_per_group=64) == pytest.approx(0.12)
    assert constant_rate(images_per_group=256) == pytest.approx(0.12)
    assert constant_rate(groups_in_flight=1) == 0.06
    assert constant_rate(groups_in_flight=4) == pytest.approx(0.025)
    assert constant_rate(groups_in_flight=10) == pytest.approx(0.01)
    assert constant_rate(weights="aliased", groups_in_flight=10) == 0.06
    assert (Config(rule="adagrad").default_rate(), Config(rule="adam").default_rate()) == (0.01, 0.001)


def test_a_rate_that_rises_and_falls_has_a_higher_peak_and_less_so_if_its_gradients_are_stale():
    assert Config().default_rate() == pytest.approx(0.12)
    assert Config(consistency="bsp", replicas=2).default_rate(4) == pytest.approx(0.12 * 2**0.5)
    assert Config(weights="aliased").default_rate(groups_in_flight=4) == pytest.approx(0.12)
    for bounded in ({}, {"partitions": 2}):
        assert Config(replicas=2, consistency="ssp:4", **bounded).default_rate(4) == pytest.approx(0.08)
        assert Config(replicas=2, consistency="ssp:4", **bounded).default_rate(8) == pytest.approx(0.04)
    for free in ({}, {"replicas": 2}, {"replicas": 2, "processes": True}):
        assert Config(**free).default_rate(4) == pytest.approx(0.04)
        assert Config(**free).default_rate(8) == pytest.approx(0.02)
    for cut in (Config(partitions=2), Config(partitions=2, replicas=2)):
        rates = [cut.default_rate(groups) for groups in (4, 8, 16)]
        assert rates == pytest.approx([0.04, 0.04, 0.02])
    assert Config(schedule="cosine", warm_up=0.5).default_rate(8) == Config().default_rate(8)
    for lasting in ({"until_accuracy": 0.99}, {"schedule": "step"}, {"schedule": "cosine"}):
        assert Config(**lasting).default_rate(8) == constant_rate(8)


def test_in_lockstep_the_rate_goes_by_the_images_of_everybody_and_nothing_is_stale():
    together = Config(consistency="bsp", replicas=2, push_every=2)
    assert together.images_per_update == 64
    assert together.default_rate(groups_in_flight=8) == Config(images_per_group=64).default_rate()
    assert Config(consistency="bsp").default_rate(groups_in_flight=4) == Config().default_rate()


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
    decided = Config(**options).decided(groups_in_flight=4)
    assert decided.schedule == "cosine"
    assert decided.warm_up == pytest.approx(rise)
    assert decided.rate == Config(**options).default_rate(4)
    assert decided.decided(groups_in_flight=9) == decided, "it is decided once"


@pytest.mark.parametrize("case", RISES)
def test_a_run_that_may_end_at_any_epoch_has_a_constant_rate_in_every_mode_and_plan(case):
    options, _ = RISES[case]
    decided = Config(**options, until_accuracy=0.99).decided(groups_in_flight=4)
    assert decided.schedule == "constant"
    assert decided.warm_up == options.get("warm_up", 0.0)


def test_a_schedule_that_is_asked_for_stays_as_it_is():
    for options in ({"schedule": "constant"}, {"schedule": "cosine"}, {"schedule": "step", "decay": 0.1}):
        decided = Config(**options).decided(groups_in_flight=4)
        assert (decided.schedule, decided.warm_up) == (options["schedule"], 0.0)


def test_epochs_that_are_left_open_go_by_the_data():
    assert Config().decided(1, "mnist").epochs == 3
    assert Config().decided(1, "digits").epochs == 12
    assert Config(epochs=5).decided(1, "digits").epochs == 5
    with pytest.raises(ConfigError, match=r"warm_up=3.5 leaves nothing of epochs=3"):
        Config(warm_up=3.5).decided(1, "mnist")


def test_known_keys_are_the_fields_and_the_waits():
    assert {"epochs", "seed", "waits.dial_s"} <= set(known_keys())
    assert len(known_keys()) == len(set(known_keys()))


def test_a_recorded_run_has_one_thread_per_worker() -> None:
    assert Config(record=True).threads_per_worker(cores=8) == 1
    with pytest.raises(ConfigError, match="set threads to 1, not 2"):
        Config(record=True, threads=2)


def test_what_depends_on_more_than_a_record_holds_is_not_recorded() -> None:
    local = {"record": True, "pull_every": 4, "push_every": 2}

    with pytest.raises(ConfigError, match="layer_rate depends on how far local steps are"):
        Config(**local, layer_rate=0.1)
    with pytest.raises(ConfigError, match="scale_by_staleness depends on how far local steps are"):
        Config(**local, scale_by_staleness=True)
    assert Config(**local, clip=1.0).record
    assert Config(record=True, push_every=2, layer_rate=0.1, scale_by_staleness=True).record


def test_all_workers_of_a_replica_have_as_many_groups_in_flight_as_the_one_with_the_fewest():
    assert replica_in_flight([{"threads": 6}, {"threads": 1}], 2) == default_in_flight(1, 2)
    assert replica_in_flight([{"threads": 1, "in_flight": 32}, {"threads": 1, "in_flight": 2}], 2) == 2
    assert replica_in_flight([{"threads": 2, "in_flight": 0}], 1) == default_in_flight(2, 1)


def test_the_open_rate_is_lower_for_larger_and_brighter_images():
    usual = Config().decided(4).rate
    assert Config().decided(4, squared_norm=USUAL_NORM).rate == usual
    assert Config().decided(4, squared_norm=10 * USUAL_NORM).rate == pytest.approx(usual / 10)
    assert Config(rate=0.3).decided(4, squared_norm=10 * USUAL_NORM).rate == 0.3
    adam = Config(rule="adam")
    assert adam.decided(4, squared_norm=10 * USUAL_NORM).rate == adam.default_rate()


@pytest.mark.parametrize("said", [None, "100", True, -1.0, 785.0, math.nan, math.inf])
def test_a_squared_norm_that_makes_no_sense_changes_no_rate(said):
    data = {"shape": [1, 28, 28]}
    norm = squared_norm_of({**data, "squared_norm": said} if said is not None else data)
    assert Config().decided(4, squared_norm=norm).rate == Config().decided(4).rate
