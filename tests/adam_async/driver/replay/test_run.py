"""A replay ends with the weights of its run, to the last bit, for any order of events."""

import asyncio
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adam_async.controller.role import Role
from adam_async.driver.replay.decode import make_recording, read_recording
from adam_async.driver.replay.recording import RecordedEpoch, Recording
from adam_async.driver.replay.run import ORDERS_KEPT, Replay, ReplayDiffers
from adam_async.errors import ConfigError, RecordError
from adam_async.model.named import digits
from adam_async.model.spec import LayerSpec, ModelSpec
from adam_async.run.config import Config
from adam_async.worker.service import ModelWorker
from tests.adam_async.cluster.test_elastic import elastic, in_the_middle, joiner, trained
from tests.adam_async.driver.replay.simulated_run import SimulatedRun
from tests.adam_async.runs import (
    IMPATIENT,
    NETWORKS,
    SHARDED,
    Rough,
    check_replay,
    cluster_of,
    tiny_dataset,
    until,
    with_frozen,
)
from tests.transport.testing import Faults

pytestmark = pytest.mark.thorough

DATA = tiny_dataset(52)
"""The last of its groups is short."""

EVALUATED = {"epoch": 1, "images": 52, "train_loss": None, "test_accuracy": 0.5}

layer = LayerSpec.of

DRAWING = ModelSpec(
    name="drawing",
    input_shape=(1, 8, 8),
    layers=(
        layer("flat", "flatten"),
        layer("fc1", "dense", outputs=20),
        layer("relu", "relu"),
        layer("drop", "dropout", rate=0.3),
        layer("fc2", "dense", outputs=10),
        layer("loss", "softmax_cross_entropy"),
    ),
)
"""Draws masks, so that a group has to be trained under its own name."""


def replayed(recording: Recording, dataset=DATA) -> Replay:
    replay = Replay(recording, dataset)
    for _ in replay.steps():
        pass
    return replay


def assert_same(replay: Replay, weights) -> None:
    for name, values in replay.weights().items():
        np.testing.assert_array_equal(values.view(np.uint8), weights[name].view(np.uint8), err_msg=name)


def simulated(seed: int, *, losses: float = 0.0, **options) -> tuple[SimulatedRun, Recording]:
    config = Config(
        **{"rate": 0.05, "images_per_group": 4, "record": True, "weights": "copy", "epochs": 2, **options}
    )
    run = SimulatedRun(seed, config, DRAWING, DATA, losses)
    return run, make_recording(run.header, run.logs, run.network)


RULES = {
    "sgd": {},
    "momentum": {"momentum": 0.5},
    "decay": {"weight_decay": 0.01},
    "adagrad": {"rule": "adagrad", "rate": 0.01},
    "adam": {"rule": "adam", "rate": 0.002},
    "adamw": {"rule": "adamw", "rate": 0.002, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "nesterov": True, "rate": 0.02},
    "scaled": {"scale_by_staleness": True},
    "limited": {"clip": 0.5, "layer_rate": 0.1},
    "scheduled": {"schedule": "cosine", "warm_up": 0.5},
    "diverged": {"rate": 1e25},  # soon nothing is finite any more, and pushes are refused
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@settings(max_examples=5)
@given(
    seed=st.integers(0, 10**6),
    replicas=st.integers(1, 3),
    servers=st.integers(1, 3),
    push_every=st.integers(1, 3),
    shard_bytes=st.sampled_from([1 << 20, 1024, 200]),
    protocol=st.sampled_from(["delta", "factors"]),
)
def test_a_replay_of_any_asynchronous_run_is_bit_equal(
    rules, seed, replicas, servers, push_every, shard_bytes, protocol
):
    run, recording = simulated(
        seed,
        replicas=replicas,
        servers=servers,
        push_every=push_every,
        shard_bytes=shard_bytes,
        protocol=protocol,
        **rules,
    )

    replay = replayed(recording)

    assert_same(replay, run.weights)
    replay.check()


@settings(max_examples=15)
@given(
    seed=st.integers(0, 10**6),
    push_every=st.integers(1, 2),
    pull_every=st.integers(2, 4),
    protocol=st.sampled_from(["delta", "factors"]),
    clip=st.sampled_from([0.0, 0.5]),
    rate=st.sampled_from([0.05, 1e25]),
)
def test_local_steps_go_into_the_copies_that_they_went_into(
    seed, push_every, pull_every, protocol, clip, rate
):
    run, recording = simulated(
        seed,
        replicas=2,
        servers=2,
        shard_bytes=1024,
        push_every=push_every,
        pull_every=pull_every,
        protocol=protocol,
        clip=clip,
        rate=rate,
    )

    assert_same(replayed(recording), run.weights)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 10**6),
    replicas=st.integers(1, 3),
    servers=st.integers(1, 3),
    push_every=st.integers(1, 3),
    pull_every=st.integers(1, 3),
    shard_bytes=st.sampled_from([1 << 20, 1024, 200]),
)
def test_a_run_that_loses_workers_is_replayed_with_all_that_the_shards_took(
    seed, replicas, servers, push_every, pull_every, shard_bytes
):
    run, recording = simulated(
        seed,
        losses=3.0,
        replicas=replicas,
        servers=servers,
        push_every=push_every,
        pull_every=pull_every,
        shard_bytes=shard_bytes,
    )

    assert_same(replayed(recording), run.weights)


def test_steps_that_only_some_shards_took_are_replayed_there_alone() -> None:
    generations = ragged = known = 0
    for seed in range(8):
        run, recording = simulated(seed, losses=3.0, replicas=2, servers=3)
        assert_same(replayed(recording), run.weights)
        generations += len(recording.reads) - 2
        known += sum(int(order.skipped.sum()) for order in recording.orders)
        lasts = [
            [int(order.clocks[order.clients == client].max(initial=0)) for order in recording.orders]
            for client in recording.reads
        ]
        ragged += sum(len({*each}) > 1 for each in lasts)

    assert generations > 20
    assert known > 10, "few shards refused groups that they had"
    assert ragged > 5, "few workers were lost in the middle of a step"


def test_the_simulated_runs_have_the_hard_cases_of_a_replay() -> None:
    joined = refused = moved = stale = 0
    for seed in range(8):
        options = {"replicas": 3, "protocol": "factors", "pull_every": 2}
        _, recording = simulated(seed, **options)
        _, diverged = simulated(seed, **options, rate=1e25)
        joined += sum(int((np.diff(order.bounds) > 1).sum()) for order in recording.orders)
        refused += sum(int(order.refused.sum()) for order in diverged.orders)
        for reads in recording.reads.values():
            replaced = np.diff(reads.versions, axis=0) > 0  # each tensor is one shard
            moved += int((replaced & (reads.steps[1:] == 1)).sum())
            stale += int((reads.steps > 1).sum())

    assert joined > 20
    assert refused > 20
    assert moved > 20, "few local steps went into copies that came while their groups were computed"
    assert stale > 20


CLUSTERS = [
    {},
    {"push_every": 2, "servers": 3, "shard_bytes": 16 << 10, "kernels": "numpy"},
    {"pull_every": 3, "protocol": "factors"},
    {"consistency": "ssp:2", "push_every": 2},
    {"consistency": "bsp", "push_every": 2, "servers": 2, "momentum": 0.5},
    {"consistency": "bsp", "lag": 1, "protocol": "factors", "kernels": "numpy"},
    {"evaluation": "concurrent", "rule": "adam", "rate": 0.002},
    {"augment": True},
]


@pytest.mark.parametrize("options", CLUSTERS, ids=lambda each: "-".join(map(str, each.values())) or "plain")
@pytest.mark.parametrize("network", NETWORKS)
async def test_a_run_of_a_cluster_is_repeated_with_its_weights_and_accuracies(network, options):
    config = Config(**{"replicas": 2, "epochs": 2, "record": True, "images_per_group": 4, **options})
    async with cluster_of(config, NETWORKS[network](), dataset=DATA) as cluster:
        result = await cluster.train()
    assert isinstance(result.record, bytes)
    recording = read_recording(result.record, origin="it")
    replay = Replay(recording, DATA)

    for epoch, was in zip(recording.header.epochs, result.epochs, strict=True):
        for _ in replay.steps(epoch):
            pass
        assert replay.accuracy(epoch) == epoch.test_accuracy == was.test_accuracy
    for _ in replay.steps():
        pass

    assert_same(replay, result.weights)
    replay.check()


@pytest.mark.parametrize("options", [{}, {"consistency": "bsp", "protocol": "factors"}], ids=["asp", "bsp"])
@pytest.mark.parametrize("network", NETWORKS)
async def test_links_that_fail_leave_nothing_twice_in_a_record(network, options) -> None:
    rough = Rough(NETWORKS[network](), Faults(cut=0.03, drop_reply=0.03))
    config = Config(
        replicas=2, record=True, epochs=1, images_per_group=2, waits=IMPATIENT, **SHARDED, **options
    )
    async with cluster_of(config, rough, dataset=DATA) as cluster:
        result = await cluster.train()
    assert isinstance(result.record, bytes)
    assert sum(getattr(node, "duplicates", 0) for node in result.statistics.values()) > 0

    assert_same(replayed(read_recording(result.record, origin="it")), result.weights)


async def test_a_record_takes_at_most_64_bytes_for_each_push_and_shard() -> None:
    config = Config(replicas=2, servers=2, epochs=2, record=True, images_per_group=4)
    async with cluster_of(config, dataset=tiny_dataset(200)) as cluster:
        result = await cluster.train()
    assert isinstance(result.record, bytes)
    recording = read_recording(result.record, origin="it")
    pushes = sum(len(order.clocks) for order in recording.orders)

    assert pushes == 100 * len(recording.orders)
    assert len(result.record) <= 64 * pushes


async def test_a_worker_that_joins_is_in_the_record() -> None:
    cluster = elastic(epochs=3, record=True)
    async with cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        await until(in_the_middle(cluster))
        async with joiner(cluster, "worker-9"):
            result = await training
    assert isinstance(result.record, bytes)
    recording = read_recording(result.record, origin="it")

    assert sorted(recording.reads) == [0, 1]
    replayed(recording, cluster.dataset).check()


LOSSES = {
    "asp": {},
    "asp-local-steps": {"pull_every": 3},
    "asp-scaled": {"scale_by_staleness": True, "schedule": "cosine"},
    "ssp": {"consistency": "ssp:2", "push_every": 2},
    "bsp": {"consistency": "bsp"},
    "bsp-lag": {"consistency": "bsp", "lag": 1, "push_every": 3},
}


@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES)
async def test_a_run_that_loses_a_worker_and_gets_another_one_is_replayed(options, monkeypatch) -> None:
    monkeypatch.setattr(ModelWorker, "_goodbye", Role._goodbye)
    cluster = elastic(epochs=3, replicas=2, read_ahead=4, record=True, **SHARDED, **options)
    async with cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        await until(in_the_middle(cluster))
        await cluster.workers[1].__aexit__(None, None, None)
        async with joiner(cluster, "worker-9") as worker:
            await until(lambda: training.done() or trained(worker) > 3)
            joined = trained(worker)
            result = await training
    assert isinstance(result.record, bytes)

    replay = check_replay(result.record, cluster.dataset)

    assert joined > 3
    assert len(read_recording(result.record, origin="it").reads) == 3
    assert replay.groups >= sum(-(-epoch.images // 2) for epoch in result.epochs)


async def test_a_frozen_layer_is_replayed_as_it_was() -> None:
    config = Config(replicas=2, servers=2, epochs=2, record=True, images_per_group=4, consistency="ssp:1")
    async with cluster_of(config, dataset=DATA, spec=with_frozen(digits(), "conv2d")) as cluster:
        result = await cluster.train()
    assert isinstance(result.record, bytes)

    assert_same(replayed(read_recording(result.record, origin="it")), result.weights)


# --- refused replays -------------------------------------------------------------------------------


def test_other_data_than_those_of_the_run_are_refused() -> None:
    _, recording = simulated(1)

    with pytest.raises(RecordError, match="train_images 52 there, 56 here; name its data by --data"):
        Replay(recording, tiny_dataset(56))


def test_a_record_of_another_version_is_refused() -> None:
    _, recording = simulated(1)
    header = msgspec.structs.replace(recording.header, config={**recording.header.config, "colour": "red"})

    with pytest.raises(RecordError, match=r"has other options than this version: .*colour"):
        Replay(Recording(header=header, reads=recording.reads, orders=recording.orders), DATA)


def test_a_replay_with_other_weights_is_an_error() -> None:
    _, recording = simulated(1)
    header = msgspec.structs.replace(recording.header, config={**recording.header.config, "seed": 9})
    other = Recording(header=header, reads=recording.reads, orders=recording.orders)

    with pytest.raises(ReplayDiffers, match="ended with other weights than the run"):
        replayed(other).check()


def test_a_push_that_is_finite_here_and_was_refused_there_is_named() -> None:
    _, recording = simulated(1)
    recording.orders[2].refused[3] = True
    order = recording.orders[2]
    push = f"replica {recording.reads[order.clients[3]].replica} with clock {order.clocks[3]}"

    with pytest.raises(ReplayDiffers, match=f"shard 2 refused the push of {push} in the run, and here"):
        replayed(recording)


def test_impossible_local_steps_are_named() -> None:
    _, recording = simulated(1, pull_every=3)
    reads = recording.reads[0]
    reads.steps[2, 0] += 7

    with pytest.raises(RecordError, match=r"the record is damaged: group \d+ .* with [789] steps, but only"):
        replayed(recording)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"buckets": ()}, "its header is not that of a model with 8 shards in 64 buckets"),
        ({"epochs": (RecordedEpoch(**EVALUATED, versions=(0,)),)}, "not that of a model with 8 shards"),
        ({"validation": 52}, "validation=52 leaves nothing of the 52 training images"),
    ],
)
def test_a_header_of_another_model_or_without_images_is_refused(fields, text) -> None:
    _, recording = simulated(1, shard_bytes=1024)
    header = recording.header
    if "validation" in fields:
        fields = {"config": {**header.config, **fields}}

    with pytest.raises(ConfigError, match=text):
        Replay(replace(recording, header=msgspec.structs.replace(header, **fields)), DATA)


def test_versions_that_the_pushes_do_not_make_are_refused() -> None:
    _, recording = simulated(3, replicas=2, servers=2, push_every=2, shard_bytes=1024)
    recording.orders[0].skipped[0] = True  # although it was applied

    with pytest.raises(RecordError, match=r"the record is damaged: shard 0 has no version \d+ here"):
        replayed(recording)


def test_groups_of_many_epochs_take_the_memory_of_few() -> None:
    _, recording = simulated(1)
    groups = len(recording.reads[0].epochs)
    recording.reads[0].epochs[:] = range(1, groups + 1)

    assert groups > ORDERS_KEPT
    assert len(replayed(recording)._orders) == ORDERS_KEPT


def test_a_group_that_its_epoch_does_not_have_is_refused() -> None:
    _, recording = simulated(1)
    recording.reads[0].numbers[-1] = 13

    with pytest.raises(RecordError, match=r"a step has group 13 of epoch \d, which has 13 groups"):
        replayed(recording)
