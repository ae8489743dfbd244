"""A run whose options contradict one another, or are out of range, is an error that names them."""

import msgspec
import pytest

from adam_async.errors import ConfigError
from adam_async.messages.body import MOST_RANGES
from adam_async.run.config import (
    MOST,
    MOST_GROUPS_OF_STEP,
    SUMS_BYTES,
    Config,
    default_in_flight,
    replica_in_flight,
)
from adam_async.run.option_sources import make_config
from adam_async.run.store_record import NUM_BUCKETS


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"epochs": -1}, "epochs must be a number of at least 0, not -1"),
        ({"images_per_group": 0}, "images_per_group"),
        ({"in_flight": -1}, "in_flight"),
        ({"shard_bytes": 63}, "shard_bytes must be within 64 and 33554432, not 63"),
        ({"shard_bytes": 1 << 26}, "shard_bytes must be within 64 and 33554432, not 67108864"),
        ({"controllers": 2}, "controllers must be 1, 3 or 5, of which none, one or two may be lost"),
        ({"controllers": 7}, "(an even number survives no more losses), not 7"),
        ({"controllers": "three"}, "controllers must be a whole number, not 'three'"),
        ({"read_ahead": 2000}, "read_ahead must be within 1 and 1024, not 2000"),
        ({"rate": -0.1}, "rate must be a number of at least 0, not -0.1"),
        ({"rate": float("nan")}, "rate must be a number of at least 0, not nan"),
        ({"rate": "inf"}, "rate must be a number of at least 0, not inf"),
        ({"weight_decay": float("nan")}, "weight_decay"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, not 1.0"),
        ({"momentum": float("nan")}, "momentum must be at least 0 and below 1, not nan"),
        ({"momentum": 0.5, "rule": "adam"}, "momentum=0.5 has no effect with rule=adam"),
        ({"nesterov": True}, "nesterov needs a momentum above 0: set momentum"),
        ({"nesterov": True, "rule": "adamw"}, "nesterov=True has no effect with rule=adamw"),
        ({"partitions": 0}, "partitions must be within 1 and 64, not 0"),
        ({"partitions": 65}, "partitions must be within 1 and 64, not 65"),
        (
            {"partitions": 2, "clip": 1},
            "clip=1.0 excludes partitions=2: it is about the norm of a whole gradient",
        ),
        ({"partitions": 2, "layer_rate": 0.1}, "layer_rate=0.1 excludes partitions=2: it is about"),
        ({"partitions": 2, "record": True}, "record=True excludes partitions=2: no record has"),
        (
            {"partitions": 2, "weights": "aliased"},
            "partitions=2 excludes weights=aliased: threads apply each whole gradient at once",
        ),
        ({"plan": "diagonal"}, "plan must be one of vertical, layers, not 'diagonal'"),
        ({"epoch_fraction": 0}, "epoch_fraction must be above 0 and at most 1, not 0.0"),
        ({"epoch_fraction": 1.5}, "epoch_fraction must be above 0 and at most 1, not 1.5"),
        ({"epoch_rule": "time"}, "epoch_rule must be one of replicas, images, not 'time'"),
        ({"until_accuracy": 98.7}, "until_accuracy must be within 0 and 1, not 98.7"),
        ({"rule": "newton"}, "rule must be auto, sgd, adagrad, adam, adamw, or package.module:Class"),
        ({"dtype": "float16"}, "dtype must be one of float32, float64, not 'float16'"),
        ({"epochs": "three"}, "epochs must be a whole number, not 'three'"),
        ({"epochs": 1.5}, "epochs must be a whole number, not 1.5"),
        ({"processes": "perhaps"}, "processes must be true or false, not 'perhaps'"),
        ({"rate": "much"}, "rate must be a number, not 'much'"),
        ({"data": 3}, "data must be text, not 3"),
        ({"waits": 3}, "waits must be a table of seconds, not 3"),
        ({"waits": {"call_s": "long"}}, "waits.call_s must be a number, not 'long'"),
        ({"images_per_group": 65_537}, "images_per_group must be within 1 and 65536, not 65537"),
        ({"in_flight": 4097}, "in_flight must be within 0 and 4096, not 4097"),
        ({"replicas": 1025}, "replicas must be within 1 and 1024, not 1025"),
        ({"servers": 65}, "servers must be within 1 and 64, not 65"),
        (
            {"copies_bind": "10.1.0.1:0"},
            "copies_bind: address '10.1.0.1:0' is not of the form tcp://host:port",
        ),
        (
            {"consistency": "ssp"},
            "consistency must be asp, ssp:S with a whole number S of steps up to 1048576, or bsp",
        ),
        ({"consistency": "ssp:-1"}, "not 'ssp:-1'"),
        ({"lag": 1}, "lag=1 has no effect with consistency=asp, only with bsp: give consistency=bsp too"),
        ({"lag": 2, "consistency": "bsp"}, "lag must be within 0 and 1, not 2"),
        (
            {"pull_every": 2, "consistency": "bsp"},
            "pull_every=2 excludes consistency=bsp: every step reads the sum of the one before",
        ),
        ({"scale_by_staleness": True, "consistency": "bsp"}, "lower the rate; leave scale_by_staleness out"),
        (
            {"epochs": 3, "warm_up": 3},
            "warm_up=3.0 leaves nothing of epochs=3: lower warm_up or train longer",
        ),
        ({"warm_up": -1}, "warm_up must be a number of at least 0, not -1"),
        ({"warm_start": -1}, "warm_start must be a number of at least 0, not -1"),
        ({"schedule": "linear"}, "schedule must be one of auto, constant, step, cosine, not 'linear'"),
        ({"schedule": "step", "decay": 0}, "decay must be above 0 and at most 1, not 0.0"),
        ({"schedule": "step", "decay": 1.5}, "decay must be above 0 and at most 1, not 1.5"),
        ({"schedule": "step", "decay_every": 0}, "decay_every must be a number of at least 0.001"),
        (
            {"decay": 0.1},
            "decay=0.1 has no effect with schedule=auto, only with schedule step: give schedule=step",
        ),
        ({"decay_every": 2, "schedule": "cosine"}, "or leave decay_every out"),
        ({"clip": -1}, "clip must be a number of at least 0"),
        (
            {"layer_rate": 0.002, "rule": "adagrad"},
            "layer_rate=0.002 has no effect with rule=adagrad, only with rule sgd, because other",
        ),
        ({"checkpoint_every": -1}, "checkpoint_every must be a number of at least 0"),
        ({"keep": 0}, "keep must be within 1 and 1000000, not 0"),
        ({"keep": 1_000_001}, "keep must be within 1 and 1000000, not 1000001"),
        (
            {"weights": "aliased", "consistency": "bsp"},
            "consistency=bsp excludes weights=aliased: threads apply each whole gradient at once",
        ),
        ({"weights": "aliased", "clip": 1}, "clip=1.0 excludes weights=aliased"),
        ({"weights": "aliased", "record": True}, "record=True excludes weights=aliased"),
        ({"colour": "red"}, "colour"),
        ({"waits": {"answer_s": 0}}, "waits.answer_s must be a number of seconds above 0, not 0.0"),
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
    "values", [{"consistency": "ssp:9"}, {"clip": 1}, {"scale_by_staleness": True}, {"partitions": 2}]
)
def test_options_that_need_a_copy_exclude_training_in_place_by_default(values):
    assert make_config({}).weights_in("") == "aliased"
    assert make_config(values).weights_in("") == "copy"


@pytest.mark.parametrize(
    ("options", "place", "chosen"),
    [
        ({}, {}, "delta"),
        ({"consistency": "ssp:2"}, {}, "delta"),
        ({"protocol": "factors"}, {}, "factors"),
        ({"consistency": "bsp"}, {}, "auto"),
        ({"push_every": 2}, {}, "auto"),
        ({"partitions": 2}, {}, "auto"),
        ({"weights": "auto"}, {}, "auto"),
        ({"servers": 3, "controllers": 3, "copies": 2}, {}, "auto"),
        ({}, {"one_process": False}, "auto"),
        ({}, {"model_bytes": SUMS_BYTES + 1}, "auto"),
    ],
)
def test_workers_of_one_process_send_sums_if_fewer_bytes_would_gain_nothing(options, place, chosen):
    config = Config(**{"weights": "copy", **options})
    assert config.protocol_in(**{"one_process": True, "model_bytes": SUMS_BYTES, **place}) == chosen


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


def test_a_recorded_run_has_one_thread_per_worker() -> None:
    assert Config(record=True).threads_per_worker(cores=8) == 1
    with pytest.raises(ConfigError, match="set threads to 1, not 2"):
        Config(record=True, threads=2)


def test_a_run_that_depends_on_more_than_a_record_has_is_not_recorded() -> None:
    local = {"record": True, "pull_every": 4, "push_every": 2}

    with pytest.raises(ConfigError, match="layer_rate depends on the local steps"):
        Config(**local, layer_rate=0.1)
    with pytest.raises(ConfigError, match="scale_by_staleness depends on the local steps"):
        Config(**local, scale_by_staleness=True)
    assert Config(**local, clip=1.0).record
    assert Config(record=True, push_every=2, layer_rate=0.1, scale_by_staleness=True).record


def test_all_workers_of_a_replica_have_as_many_groups_in_flight_as_the_one_with_the_fewest():
    assert replica_in_flight([{"threads": 6}, {"threads": 1}], 2) == default_in_flight(1, 2)
    assert replica_in_flight([{"threads": 1, "in_flight": 32}, {"threads": 1, "in_flight": 2}], 2) == 2
    assert replica_in_flight([{"threads": 2, "in_flight": 0}], 1) == default_in_flight(2, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"copies": 2}, "copies=2 needs as many servers, and there is 1: raise servers"),
        (
            {"servers": 3, "copies": 2, "min_in_sync": 3},
            "min_in_sync=3 needs as many copies, and there are 2",
        ),
        ({"min_in_sync": 2}, "min_in_sync=2 needs as many copies, and there is 1"),
        (
            {"servers": 2, "copies": 2, "weights": "aliased"},
            "copies=2 excludes weights=aliased: all roles share one memory; leave copies out, or leave",
        ),
        (
            {"servers": 3, "copies": 2, "ack": "durable", "record": True},
            "ack=durable excludes record=True: it is about pushes, each of which goes to the disk",
        ),
        (
            {"servers": 3, "copies": 2, "ack": "durable", "consistency": "bsp"},
            "ack=durable excludes consistency=bsp: the disks keep all shards at one clock",
        ),
        (
            {"servers": 3, "controllers": 3, "min_in_sync": 2, "weights": "aliased"},
            "min_in_sync=2 needs as many copies, and there is 1 with weights=aliased: leave one of them out",
        ),
        ({"servers": 9, "copies": 9}, "copies must be within 0 and 8, not 9"),
        ({"copies": -1}, "copies must be within 0 and 8, not -1"),
        ({"min_in_sync": -1}, "min_in_sync must be within 0 and 8, not -1"),
    ],
)
def test_copies_that_cannot_be_kept_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Config(**options)


def test_a_run_in_place_keeps_one_copy_by_default():
    cluster = {"servers": 3, "controllers": 3}
    assert Config(**cluster).copies_in_force == 3
    assert Config(**cluster, record=True).copies_in_force == 3
    assert Config(**cluster, weights="aliased").copies_in_force == 1
    assert Config(**cluster).weights_in("") == "copy"
    assert Config(**cluster, copies=1).weights_in("") == "aliased"


def test_a_push_can_name_all_groups_of_the_largest_step() -> None:
    assert MOST_GROUPS_OF_STEP == MOST_RANGES
