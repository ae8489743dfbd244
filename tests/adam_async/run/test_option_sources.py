"""Layers of options are merged in order, and a wrong value is an error with its option and origin."""

import pytest

from adam_async.errors import ConfigError
from adam_async.run.config import FIELDS, Config, Waits
from adam_async.run.option_sources import (
    COMMAND_LINE,
    ENVIRONMENT,
    PLAIN,
    check_variables,
    for_children,
    from_environment,
    from_toml,
    known_keys,
    make_config,
)


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
    defaults = {name: str(getattr(Config(), name)) for name in plain}
    defaults |= {"slow": "", "memory": "", "rule": "adam", "betas": "0.9,0.95"}
    values = from_environment({f"ADAM_{name.upper()}": text for name, text in defaults.items()})
    assert sorted(values) == sorted(plain)
    assert make_config(values) == Config(rule="adam", betas=(0.9, 0.95))


def test_stragglers_are_a_list_in_a_file_and_separated_by_commas_in_the_environment():
    wanted = ("worker-1:0.2", "worker-0~worker-1:5ms")
    file = from_toml('slow = ["worker-1:0.2", "worker-0~worker-1:5ms"]', source="adam.toml")
    environment = from_environment({"ADAM_SLOW": "worker-1:0.2,worker-0~worker-1:5ms,"})
    assert make_config(file).slow == make_config(environment).slow == Config(slow=wanted).slow == wanted


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
    ("layers", "said"),
    [
        (({"epochs": "x"}, {}, {}), "epochs must be a whole number, not 'x' (set in adam.toml)"),
        (({"epochs": 1}, {"epochs": "x"}, {}), "epochs must be a whole number, not 'x' (set by ADAM_EPOCHS)"),
        (
            ({"betas": [0.9, 1.0]}, {}, {}),
            "betas must be two numbers, each at least 0 and below 1, not [0.9, 1.0] (set in adam.toml)",
        ),
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
        (
            {"plan": "layers"},
            "--plan layers has no effect with --partitions 1, only with a cut model: give --partitions 2",
        ),
        ({"halo": "exchange"}, "--halo exchange has no effect with --partitions 1"),
        (
            {"partitions": 2, "plan": "layers", "halo": "recompute"},
            "--halo recompute has no effect with --plan layers, only with plan vertical",
        ),
        (
            {"consistency": "bsp", "epoch_rule": "images"},
            "--epoch-rule images has no effect with --consistency bsp, only with asp, because ssp and bsp",
        ),
    ],
)
def test_options_without_their_mode_are_refused_on_the_command_line(typed, said):
    with pytest.raises(ConfigError) as failure:
        make_config({}, typed, sources=("adam.toml", COMMAND_LINE))
    assert said in str(failure.value)
    # The same from a file may be for other runs too, and old checkpoints hold it.
    assert make_config(typed, {}, sources=("adam.toml", COMMAND_LINE)) == Config(**typed)
    assert make_config(typed) == Config(**typed)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (({"keep_best": True}, {}, {}), "keep_best=True (set in adam.toml) has no effect without validation"),
        (({"keep_best": True}, {}, {}), "such as validation=5000, or leave keep_best out"),
        (({}, {"lag": "1"}, {}), "lag=1 (set by ADAM_LAG) has no effect with consistency=asp, only with bsp"),
        (({}, {}, {"keep_best": True}), "--keep-best has no effect without validation images, because test"),
        (({}, {}, {"keep_best": True}), "such as --validation 5000, or leave --keep-best out"),
        (
            ({}, {}, {"transforms": "x"}),
            "--transforms x has no effect without augmented images: give --augment",
        ),
        (({}, {}, {"consistency": "bsp", "pull_every": 2}), "; --push-every makes steps longer; leave"),
        (({"consistency": "bsp"}, {}, {"pull_every": 2}), "--pull-every 2 excludes --consistency bsp: every"),
        (({}, {}, {"clip": 1, "weights": "aliased"}), "or leave --weights at auto"),
    ],
)
def test_an_option_without_effect_is_spelled_as_its_source_has_it(layers, said):
    with pytest.raises(ConfigError) as failure:
        make_config(*layers, sources=("adam.toml", ENVIRONMENT, COMMAND_LINE))
    assert said in str(failure.value)


@pytest.mark.parametrize(
    ("file", "typed"),
    [
        ({}, {"plan": "vertical", "halo": "auto"}),
        ({}, {"partitions": 2, "plan": "layers", "halo": "auto"}),
        ({"partitions": 2}, {"plan": "layers"}),
        ({"plan": "layers"}, {"partitions": 2, "plan": "vertical", "halo": "exchange"}),
    ],
)
def test_options_of_a_cut_with_partitions_or_with_default_values_are_accepted(file, typed):
    assert make_config(file, typed, sources=("adam.toml", COMMAND_LINE)) == Config(**{**file, **typed})


def test_known_keys_are_the_fields_and_the_waits():
    assert {"epochs", "seed", "waits.dial_s"} <= set(known_keys())
    assert len(known_keys()) == len(set(known_keys()))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ADAM_EPOCH", "ADAM_EPOCH sets no option; did you mean ADAM_EPOCHS?"),
        ("ADAM_epochs", "did you mean ADAM_EPOCHS?"),
        ("ADAM_IMAGE_PER_GROUP", "did you mean ADAM_IMAGES_PER_GROUP?"),
        ("ADAM_DATADIR", "did you mean ADAM_DATA_DIR?"),
        ("ADAM_WAITS", "waits are the table [waits] of a file"),
    ],
)
def test_a_variable_that_resembles_an_option_is_refused_with_the_nearest(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        from_environment({name: "5"})
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "name",
    [
        "ADAM_DATA_DIR",
        "ADAM_TOKEN",
        "ADAM_TRACEBACK",
        "ADAM_VECTORS",
        "ADAM_TEST_EPOCHS",
        "ADAM_BENCH_LINK",
        "ADAM_HOME",
        "EPOCH",
    ],
)
def test_a_variable_of_another_purpose_is_left_alone(name: str) -> None:
    check_variables({name: "1"}, PLAIN)


def test_roles_of_a_cluster_have_no_options_and_no_token_in_their_environment() -> None:
    given = {"ADAM_THREADS": "4", "ADAM_TOKEN": "x", "ADAM_DATA_DIR": "/data", "PATH": "/bin"}
    assert for_children(given) == {"ADAM_DATA_DIR": "/data", "PATH": "/bin"}
