"""Whole runs in one loop: every cadence ends, every end is clean, every image is trained once."""

import asyncio
import re
import traceback
import warnings

import msgspec
import numpy as np
import pytest

from adam_async.data_server.dataset import Dataset
from adam_async.data_server.sources.datasets import load_dataset
from adam_async.errors import AdamError, ConfigError, DataError, Diverged, RoleDied, RunFailed, first_cause
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.model.named import digits, mlp
from adam_async.model.network import Network
from adam_async.model.spec import LayerSpec, ModelSpec
from adam_async.report.evaluate import evaluate
from adam_async.report.stream import texts
from adam_async.run.cluster_map import NUMERICS
from adam_async.run.config import Config, Waits
from adam_async.run.counts import ControllerCounts
from adam_async.runtime.disk import Disk
from adam_async.runtime.machine import apply_numerics
from adam_async.worker.copy_mode import CopyMode
from adam_async.worker.in_place_mode import InPlaceMode
from dataflow import NodeFailed
from tests.adam_async.own_layer import OWN_LAYERS
from tests.adam_async.runs import NETWORKS, SHARDED, cluster_of, tiny_dataset, turns, until

QUICK = Waits(
    dial_s=30.0, call_s=30.0, patience_s=30.0, prepare_s=30.0, grace_s=0.05, replica_s=0.3, drain_s=30.0
)
"""Deadlines: a lost role is soon missed; a live role is waited for on any slow machine."""


EITHER = ["local", pytest.param("tcp", marks=pytest.mark.thorough)]
"""Networks for tests that hardly depend on them."""


def config_of(**options):
    return Config(**{"epochs": 2, "threads": 1, "rate": 0.05, "images_per_group": 4, **options})


async def digits_dataset():
    async with Disk() as disk:
        return await load_dataset("digits", disk)


async def test_each_server_publishes_the_numerics_of_its_process():
    async with cluster_of(config_of(servers=2, epochs=1)) as cluster:
        await cluster.train()
        nodes = cluster.controller.map.nodes
        assert [nodes[f"ps-{number}"].info[NUMERICS] for number in range(2)] == [apply_numerics()] * 2


@pytest.mark.parametrize(
    ("flow", "least"),
    [({"threads": 1, "in_flight": 1}, 0.9), ({"threads": 2}, 0.5)],
    ids=["serial", "asynchronous"],
)
async def test_a_cluster_learns_the_digits(flow, least):
    # One group after the other has the same result every time; several in flight vary.
    async with cluster_of(Config(epochs=3, **flow), dataset=await digits_dataset()) as cluster:
        seen = []
        result = await cluster.train(seen.append)
    assert [epoch.images for epoch in seen] == [1437] * 3
    assert seen == list(result.epochs)
    assert result.test_accuracy > least
    assert result.epochs[-1].train_loss < 0.75 * result.epochs[0].train_loss
    assert result.weights.keys() == {p.name for p in Network(digits()).parameters}


CADENCES = {
    "defaults": {},
    "copy": {"weights": "copy"},
    "copy-in-flight-1": {"weights": "copy", "in_flight": 1},
    "copy-replicas-and-servers": {"weights": "copy", "replicas": 2, **SHARDED},
    "one-in-flight": {"in_flight": 1},
    "many-in-flight": {"in_flight": 9},
    "one-image": {"images_per_group": 1},
    "short-last-group": {"images_per_group": 7},
    "one-large-group": {"images_per_group": 100},
    "push-3": {"push_every": 3},
    "push-3-in-flight-1": {"push_every": 3, "in_flight": 1},
    "pull-4": {"pull_every": 4},
    "pull-4-in-flight-1": {"pull_every": 4, "in_flight": 1},
    "push-4-pull-2": {"push_every": 4, "pull_every": 2, "images_per_group": 7},
    "push-more-than-an-epoch": {"push_every": 100},
    "replicas-and-servers": {"replicas": 2, **SHARDED},
    "more-replicas-than-groups": {"replicas": 4, "images_per_group": 30},
    "more-servers-than-shards": {"servers": 9},
    "factors": {"protocol": "factors", "replicas": 2, **SHARDED},
    "delta": {"protocol": "delta", "push_every": 2, **SHARDED},
    "adam": {"rule": "adam", "rate": 0.001, "replicas": 2, **SHARDED},
    "momentum": {"momentum": 0.9, "rate": 0.01, "push_every": 2, "pull_every": 2, "replicas": 2},
    "read-one-ahead": {"read_ahead": 1, "in_flight": 4},
    "read-all-ahead": {"read_ahead": 1000, "images_per_group": 1},
    "concurrent-evaluation": {"evaluation": "concurrent"},
    "float64": {"dtype": "float64", **SHARDED},
    "tiny-shards": {"shard_bytes": 64, "servers": 2, "epochs": 1, "images_per_group": 20},
}


FEW = {"defaults", "copy-replicas-and-servers", "push-4-pull-2", "factors", "adam", "tiny-shards"}
"""Cadences that every change is tried with; the others are for the thorough tier."""


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(
    "cadence", [pytest.param(name, marks=[pytest.mark.thorough] * (name not in FEW)) for name in CADENCES]
)
async def test_every_cadence_trains_every_image_once_per_epoch(cadence, network):
    config = config_of(**CADENCES[cadence])
    async with cluster_of(config, NETWORKS[network]()) as cluster:
        result = await cluster.train()
        cluster.data.state.check_invariants()
        cluster.controller.replicated_state.state.check_invariants()
        for server in cluster.servers:
            if server.state is not None:
                server.state.check_invariants()
    assert [epoch.images for epoch in result.epochs] == [60] * config.epochs
    data = result.statistics["data-0"]
    assert (data.returned, data.late_reports) == (0, 0)
    assert all(np.isfinite(values).all() for values in result.weights.values())
    assert all(epoch.train_s > 0 or epoch.images_per_s == 0 for epoch in result.epochs)
    assert result.events == ()


@pytest.mark.parametrize("network", EITHER)
async def test_two_clusters_live_side_by_side_in_one_loop(network):
    alone = []
    for seed in (1, 2):
        async with cluster_of(config_of(seed=seed, in_flight=1), NETWORKS[network]()) as cluster:
            alone.append(await cluster.train())
    async with (
        cluster_of(config_of(seed=1, in_flight=1), NETWORKS[network]()) as one,
        cluster_of(config_of(seed=2, in_flight=1), NETWORKS[network]()) as other,
        asyncio.TaskGroup() as group,
    ):
        together = [group.create_task(cluster.train()) for cluster in (one, other)]
    for task, expected in zip(together, alone, strict=True):
        for name, values in expected.weights.items():
            np.testing.assert_array_equal(task.result().weights[name], values)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(
    "moment",
    [0, 2, 5, 10, 20, 40, 160, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 80, 320, 640))],
)
async def test_a_cancelled_run_leaves_nothing_behind(network, moment):
    async def train():
        config = config_of(epochs=1000, replicas=2, waits=QUICK, **SHARDED)
        async with cluster_of(config, NETWORKS[network]()) as cluster:
            await cluster.train()

    task = asyncio.create_task(train(), name="train")
    await turns(moment)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_second_cancellation_ends_a_cluster_whose_driver_still_leaves(monkeypatch):
    opened, leaves = asyncio.Event(), asyncio.Event()

    async def never_leave(membership):
        leaves.set()
        await asyncio.Event().wait()

    async def train():
        async with cluster_of(config_of(epochs=1000, waits=QUICK)) as cluster:
            monkeypatch.setattr(cluster.driver._membership, "leave", never_leave.__get__(cluster.driver))
            opened.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(train(), name="train")
    await opened.wait()
    task.cancel()
    await leaves.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def run(cluster):
    async with cluster:
        return await cluster.train()


async def test_a_role_that_fails_ends_the_block_with_its_error():
    good = tiny_dataset()
    spoilt = Dataset(
        name="spoilt",
        source="made by a test",
        train_images=good.train_images,
        train_labels=np.where(np.arange(60) == 30, 99, good.train_labels),
        test_images=good.test_images,
        test_labels=good.test_labels,
        num_classes=10,
    )
    waits = msgspec.structs.replace(QUICK, patience_s=0.6)
    with pytest.raises(Exception, match=r"labels go from \d to 99, expected 0 to 9") as failure:
        await run(cluster_of(config_of(waits=waits), dataset=spoilt))
    assert not isinstance(failure.value, BaseExceptionGroup)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (mlp(), r"model 'mlp' takes images of \(1, 28, 28\)"),
        (mlp((64, 4), input_shape=(1, 8, 8)), "tells 4 classes apart, but tiny has 10"),
    ],
)
async def test_a_model_that_does_not_fit_the_data_is_refused_before_anything_is_trained(spec, message):
    with pytest.raises(ConfigError, match=message):
        await run(cluster_of(config_of(), spec=spec))


def test_an_address_for_copies_is_refused_for_roles_in_one_process():
    with pytest.raises(ConfigError, match=r"copies_bind=.* train with processes, or leave copies_bind out"):
        cluster_of(config_of(copies_bind="tcp://127.0.0.2:0"))


async def test_training_stops_early_once_it_is_good_enough():
    async with cluster_of(config_of(epochs=100, until_accuracy=0.15, in_flight=1)) as cluster:
        result = await cluster.train()
        assert cluster.controller.map.run.phase == "finished"
    assert len(result.epochs) < 100
    assert result.test_accuracy >= 0.15
    assert all(epoch.test_accuracy < 0.15 for epoch in result.epochs[:-1])


async def test_concurrent_evaluation_reports_each_epoch_as_it_was():
    async with cluster_of(config_of(epochs=5, evaluation="concurrent")) as cluster:
        result = await cluster.train()
    assert [(epoch.epoch, epoch.images) for epoch in result.epochs] == [(n, 60) for n in range(1, 6)]
    assert all(epoch.train_loss > 0 for epoch in result.epochs)


async def fails(train, message, kind=RunFailed):
    """Expect that the run fails, and well before anybody's patience is over."""
    begin = asyncio.get_running_loop().time()
    with pytest.raises(ExceptionGroup) as failure:
        await train
    cause = first_cause(failure.value)
    assert isinstance(cause, kind)
    assert re.search(message, str(cause))
    assert asyncio.get_running_loop().time() - begin < QUICK.patience_s - 1


async def test_the_death_of_a_needed_role_fails_the_run_with_its_name():
    async def train():
        async with cluster_of(config_of(epochs=10_000, waits=QUICK)) as cluster, asyncio.TaskGroup() as group:
            training = group.create_task(cluster.train(), name="train")
            await until(lambda: bool(cluster.controller.map.results))
            await cluster.servers[0].__aexit__(None, None, None)
            await training

    await fails(train(), "ps-0 died: with it went the only copy of its shards", RoleDied)


@pytest.mark.slow  # the driver looks again once a second
@pytest.mark.parametrize(
    ("victim", "message", "kind"),
    [
        ("workers", r"no replica was live for 0\.3 s", RunFailed),
        ("data_servers", r"the data server died: no other was live for 0\.3 s", RoleDied),
    ],
)
async def test_without_any_worker_or_data_server_left_the_run_fails_after_its_patience(victim, message, kind):
    async def train():
        async with cluster_of(config_of(epochs=10_000, waits=QUICK)) as cluster, asyncio.TaskGroup() as group:
            training = group.create_task(cluster.train(), name="train")
            await until(lambda: bool(cluster.controller.map.results))
            await getattr(cluster, victim)[0].__aexit__(None, None, None)
            await training

    await fails(train(), message, kind)


OWN_SPEC = ModelSpec(
    name="own",
    input_shape=(1, 8, 8),
    layers=(
        LayerSpec.of("flat", "flatten"),
        LayerSpec.of("twice", "doubled"),
        LayerSpec.of("fc", "dense", outputs=10),
        LayerSpec.of("loss", "softmax_cross_entropy"),
    ),
)


@pytest.mark.parametrize("network", NETWORKS)
async def test_all_roles_know_a_layer_of_the_caller(network):
    cluster = cluster_of(config_of(), NETWORKS[network](), spec=OWN_SPEC, layers=OWN_LAYERS)
    async with cluster:
        result = await cluster.train()
    assert [epoch.images for epoch in result.epochs] == [60] * 2
    assert list(result.weights) == ["fc.weight", "fc.bias"]


class Broken(Layer):
    """A layer of a user with a mistake in it."""

    def forward(self, weights, slots):
        try:
            {}["scale"]
        except KeyError as error:
            raise ValueError("no scale") from error

    def backward(self, weights, slots):
        raise NotImplementedError


@pytest.mark.parametrize("options", [{}, {"weights": "copy"}], ids=["in-place", "copy"])
async def test_an_error_in_a_layer_of_the_caller_keeps_its_cause_and_its_traceback(options):
    layers = {**BUILTIN_LAYERS, "doubled": Broken}
    message = r"layer 'twice' \(doubled\) failed in forward: ValueError: no scale"
    with pytest.raises(NodeFailed, match=message) as failure:
        await run(cluster_of(config_of(**options), spec=OWN_SPEC, layers=layers))
    trace = "".join(traceback.format_exception(failure.value))
    assert "in forward" in trace
    assert "KeyError: 'scale'" in trace
    assert isinstance(failure.value.__cause__.__cause__, ValueError)
    assert isinstance(failure.value.__cause__.__cause__.__cause__, KeyError)


async def test_an_error_in_a_transform_of_the_caller_keeps_its_cause_and_its_traceback():
    def spoil(image, draws):
        try:
            return image["red"]
        except IndexError as error:
            raise ValueError("no red") from error

    with pytest.raises(DataError, match="the function 'spoil' failed: ValueError") as failure:
        await run(
            cluster_of(config_of(augment=True), transforms=[{"kind": "spoil"}], functions={"spoil": spoil})
        )
    trace = "".join(traceback.format_exception(failure.value))
    assert "in spoil" in trace
    assert "IndexError" in trace


async def test_a_layer_that_only_the_caller_knows_is_refused_by_name():
    with pytest.raises(AdamError, match="doubled"):
        await run(cluster_of(config_of(), spec=OWN_SPEC))


async def test_a_diverging_run_that_keeps_going_warns_once():
    config = config_of(rate=1e30, images_per_group=10, in_flight=1, keep_going=True)
    async with cluster_of(config) as cluster:
        seen = []
        cluster.driver.events.listen(texts(seen.append))
        result = await cluster.train(lambda epoch: seen.append(epoch.epoch))
    assert not np.isfinite(result.epochs[-1].train_loss)
    (event,) = result.events
    assert event["event"].startswith("training diverges: the loss of epoch 1 is not finite; try a lower rate")
    assert seen == [event["event"], 1, 2]


@pytest.mark.parametrize("options", [{}, {"weights": "copy"}, {"consistency": "bsp"}])
async def test_numbers_that_overflow_are_no_warnings_of_numpy_and_leave_finite_weights(options):
    config = config_of(rate=1e12, keep_going=True, kernels="numpy", **options)
    data = tiny_dataset()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        async with cluster_of(config, dataset=data) as cluster:
            result = await cluster.train()
        result.model.predict(result.weights, data.test_images)
        await evaluate(result.model, result.weights, data, threads=1)
    assert [each for each in warned if issubclass(each.category, RuntimeWarning)] == []
    assert not result.epochs[-1].train_loss < 1e9
    assert all(np.isfinite(values).all() for values in result.weights.values())


@pytest.mark.parametrize("network", EITHER)
async def test_the_error_of_a_diverging_run_names_remedies(network):
    message = r"training diverges: the loss .*; try a lower rate \(--rate 1e\+11, it was 1e\+12\)"
    with pytest.raises(Diverged, match=message) as caught:
        async with cluster_of(config_of(rate=1e12, epochs=1000), NETWORKS[network]()) as cluster:
            await cluster.train()
    assert caught.value.exit_code == 9
    assert cluster.controller.map.run.phase == "failed"
    assert "training diverges" in cluster.controller.map.run.reason
    assert cluster.driver.progress.phase == "failed"


@pytest.mark.parametrize("network", EITHER)
async def test_training_with_copies_goes_on_without_a_server(network):
    config = config_of(epochs=30, replicas=2, servers=3, copies=3, shard_bytes=64, waits=QUICK)
    async with cluster_of(config, NETWORKS[network]()) as cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")

        def whole():
            bundles = cluster.controller.map.bundles.values()
            trains = cluster.driver.progress.epoch > 1
            return trains and bundles and all(len(bundle.in_sync) == 3 for bundle in bundles)

        await until(whole)
        await cluster.servers[1].__aexit__(None, None, None)
        result = await training
    assert [epoch.images for epoch in result.epochs] == [60] * 30
    assert any("moved from ps-1" in event["event"] for event in result.events)


@pytest.mark.parametrize("weights", ["aliased", "copy"])
async def test_too_little_memory_is_an_error_with_the_needed_size(monkeypatch, weights):
    def full(*_, **__):
        raise MemoryError("no room")

    way = InPlaceMode if weights == "aliased" else CopyMode
    monkeypatch.setattr(way, "new_scratch" if weights == "aliased" else "new_context", full)
    message = (
        "not enough memory for 3 groups in flight of 4 images each, with 1 threads .no room.; lower in_flight"
    )
    with pytest.raises(Exception) as failure:
        async with cluster_of(config_of(in_flight=3, weights=weights)) as cluster:
            await cluster.train()
    cause = first_cause(failure.value)
    assert isinstance(cause, ConfigError)
    assert re.search(message, str(cause))


@pytest.mark.parametrize("network", EITHER)
async def test_a_paced_worker_computes_less_and_the_first_event_names_it(network):
    slow = ("worker-1:0.05", "worker-0~ps-0:2ms")
    config = config_of(replicas=2, slow=slow, weights="copy")
    async with cluster_of(config, NETWORKS[network]()) as cluster:
        result = await cluster.train()
        again = await cluster.train()
    paced = [result.statistics[f"worker-{number}"].pool.paced_s for number in range(2)]
    assert paced[0] == 0.0 < paced[1]
    assert [epoch.images for epoch in result.epochs] == [60, 60]
    slowed = "worker-1 computes 0.05 of the time, messages between worker-0 and ps-0 are 2 ms late"
    for events in (result.events, again.events):
        assert [event["event"] for event in events] == [f"slowed on purpose: {slowed}"]


async def test_one_worker_of_a_replica_may_be_slow_and_so_may_the_way_between_two():
    slow = ("worker-1:0.05", "worker-0~worker-1:1ms")
    config = config_of(partitions=2, slow=slow, weights="copy", epochs=1)
    async with cluster_of(config) as cluster:
        result = await cluster.train()
    paced = [result.statistics[f"worker-{number}"].pool.paced_s for number in range(2)]
    assert paced[0] == 0.0 < paced[1]
    assert result.epochs[0].images == 60


@pytest.mark.parametrize("network", EITHER)
async def test_over_a_slow_link_every_step_takes_the_way_there_and_back(network):
    config = config_of(consistency="bsp", replicas=2, slow=("worker-1~ps-0:10ms",), epochs=1)
    async with cluster_of(config, NETWORKS[network]()) as cluster:
        result = await cluster.train()
    steps = 60 // 4 // 2
    assert result.epochs[0].train_s >= 0.02 * steps


@pytest.mark.parametrize("slow", ["worker-2:0.5", "worker-0~ps-1:1ms"])
async def test_an_unknown_slow_node_is_refused(slow):
    with pytest.raises(
        ConfigError, match=r"slow: there is no (worker 'worker-2'|node 'ps-1') here; there are"
    ):
        cluster_of(config_of(replicas=2, slow=(slow,)))


@pytest.mark.parametrize("network", EITHER)
async def test_three_controllers_have_the_result_of_one(network):
    async with cluster_of(config_of(controllers=3, replicas=2), NETWORKS[network]()) as cluster:
        result = await cluster.train()
        leading = cluster.controller
        assert [each for each in cluster.controllers if each.group.leads] == [leading]
        assert leading.map.run.phase == "finished"
    assert [epoch.images for epoch in result.epochs] == [60] * 2
    counts = {name: node for name, node in result.statistics.items() if isinstance(node, ControllerCounts)}
    assert sorted(counts) == ["controller-1", "controller-2", "controller-3"]
    assert sorted(each.role for each in counts.values()) == ["follower", "follower", "leader"]
    assert {each.group for each in counts.values()} == {leading.replicated_state.group}


@pytest.mark.parametrize("network", NETWORKS)
async def test_two_data_servers_feed_a_cluster_together(network):
    config = config_of(data_servers=2, replicas=2)
    async with cluster_of(config, NETWORKS[network]()) as cluster:
        result = await cluster.train()
        assert cluster.controller.map.dealer.term == 1
    assert [epoch.images for epoch in result.epochs] == [60] * 2
    terms = [result.statistics[f"data-{number}"].term for number in range(2)]
    assert sorted(terms) == [0, 1]
