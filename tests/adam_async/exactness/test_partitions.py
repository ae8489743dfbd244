"""A model cut over several workers learns the same weights as uncut; with whole layers to the last bit."""

import asyncio
from functools import cache

import msgspec
import pytest

from adam_async.cluster.local import LocalCluster
from adam_async.model.keyed_random import Dice
from adam_async.model.named import digits, mnist_adam
from adam_async.model.network import Network
from adam_async.model.partition.network import Partition
from adam_async.model.spec import LayerSpec, ModelSpec
from adam_async.run.config import Config
from adam_async.run.partition import plan_run
from adam_async.runtime.machine import pinned_cpus
from tests.adam_async.exactness.serial import RULES, assert_close, assert_equal_bits, lockstep_sgd
from tests.adam_async.runs import IMPATIENT, NETWORKS, SHARDED, Rough, cluster_of, tiny_dataset, with_frozen
from tests.transport.testing import Faults

pytestmark = pytest.mark.thorough

of = LayerSpec.of

PLANS = {
    "exchange": {"plan": "vertical", "halo": "exchange"},
    "recompute": {"plan": "vertical", "halo": "recompute"},
    "layers": {"plan": "layers"},
}

CADENCES = {
    "push-1": {"rule": "sgd", "rate": 0.1, "kernels": "numpy"},
    "push-2": {**RULES["momentum"], "push_every": 2, "kernels": "numba"},
}

IMAGES = 59
"""The last group is a short one."""

BRANCHES = ModelSpec(
    name="branches",
    input_shape=(1, 8, 8),
    layers=(
        of("conv1", "conv2d", filters=4, kernel=3, padding=1),
        of("relu1", "relu"),
        of("conv2", "conv2d", filters=3, kernel=3, padding=1),
        of("beside", "conv2d", inputs=("relu1",), filters=3, kernel=1),
        of("sum", "add", inputs=("conv2", "beside")),
        of("norm", "local_response_norm", size=3, alpha=0.1),
        of("pool", "average_pool", kernel=3, stride=2),
        of("own", "locally_connected", filters=2, kernel=2),
        of("flat", "flatten"),
        of("fc1", "dense", outputs=13),
        of("tanh", "tanh"),
        of("fc2", "dense", outputs=10),
        of("loss", "softmax_cross_entropy"),
    ),
)

PAST = ModelSpec(
    name="past",
    input_shape=(1, 8, 8),
    layers=(
        of("pixels", "flatten"),
        of("conv1", "conv2d", inputs=("input",), filters=5, kernel=3, stride=2),
        of("relu1", "relu"),
        of("pool1", "max_pool", kernel=2, stride=1),
        of("features", "flatten"),
        of("all", "concatenate", inputs=("features", "pixels")),
        of("fc1", "dense", outputs=20),
        of("sigmoid", "sigmoid"),
        of("drop", "dropout", rate=0.3),
        of("fc2", "dense", outputs=10),
        of("loss", "softmax_cross_entropy"),
    ),
)

MODELS = {"branches": BRANCHES, "past": PAST}


def config_of(**options):
    return Config(
        **{
            "epochs": 1,
            "images_per_group": 6,
            "dtype": "float64",
            "weights": "copy",
            "consistency": "bsp",
            "threads": 1,
            "seed": 5,
            "schedule": "constant",
            **SHARDED,
            **options,
        }
    )


async def train(config, network=None, **options):
    dataset = tiny_dataset(train=IMAGES)
    async with cluster_of(config, network, dataset=dataset, **options) as cluster:
        result = await cluster.train()
        cluster.data.state.check_invariants()
        cluster.controller.replicated_state.state.check_invariants()
    assert [epoch.images for epoch in result.epochs] == [IMAGES] * config.epochs
    data = result.statistics["data-0"]
    assert (data.returned, data.late_reports) == (0, 0)
    return result


UNCUT = {}
"""Weights of the same runs uncut."""


async def assert_learns_the_same(config, result, spec=None):
    """Compare with the uncut run: whole layers bit by bit."""
    uncut = msgspec.structs.replace(
        config, partitions=1, plan="vertical", halo="auto", threads=1, in_flight=0
    )
    key = (str(uncut), spec.name if spec else "")
    if key not in UNCUT:
        UNCUT[key] = await train(uncut, spec=spec)
    expected = UNCUT[key]
    if config.plan == "layers":
        assert_equal_bits(result.weights, expected.weights)
        assert [e.train_loss for e in result.epochs] == [e.train_loss for e in expected.epochs]
    else:
        assert_close(result.weights, expected.weights, 1e-9)


@cache
def serial(cadence, replicas):
    config = config_of(**CADENCES[cadence], replicas=replicas)
    return lockstep_sgd(config, tiny_dataset(train=IMAGES))[0]


@pytest.mark.parametrize("cadence", CADENCES)
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("plan", PLANS)
async def test_a_cut_model_learns_what_serial_sgd_does(plan, workers, cadence):
    config = config_of(partitions=workers, **PLANS[plan], **CADENCES[cadence])
    result = await train(config)
    assert_close(result.weights, serial(cadence, 1), 1e-9)
    await assert_learns_the_same(config, result)


@pytest.mark.parametrize("cadence", CADENCES)
@pytest.mark.parametrize("plan", PLANS)
async def test_two_replicas_that_are_cut_learn_what_serial_sgd_does_on_the_batch_of_both(plan, cadence):
    config = config_of(partitions=2, replicas=2, **PLANS[plan], **CADENCES[cadence])
    result = await train(config)
    assert_close(result.weights, serial(cadence, 2), 1e-9)
    await assert_learns_the_same(config, result)


@pytest.mark.parametrize(("threads", "network"), [(1, "tcp"), (3, "tcp"), (3, "local")])
@pytest.mark.parametrize("plan", PLANS)
async def test_neither_links_nor_threads_change_what_a_cut_model_learns(plan, network, threads):
    # With steps of 5 groups, and values that may be a step old, many are on their way at once.
    options = {"threads": threads, "in_flight": 8, "push_every": 5, "lag": 1, "images_per_group": 2}
    config = config_of(partitions=3, **PLANS[plan], **RULES["momentum"], **options)
    result = await train(config, NETWORKS[network]())
    await assert_learns_the_same(config, result)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", MODELS)
async def test_models_of_any_form_learn_cut_what_they_learn_uncut(model, plan, workers):
    config = config_of(partitions=workers, **PLANS[plan], **RULES["adam"])
    result = await train(config, spec=MODELS[model])
    await assert_learns_the_same(config, result, MODELS[model])


@pytest.mark.parametrize("consistency", ["bsp", "ssp:2"])
@pytest.mark.parametrize("plan", PLANS)
async def test_frozen_layers_stay_as_they_are_on_whichever_worker_they_are(plan, consistency):
    spec = with_frozen(digits(), "conv2d")
    config = config_of(partitions=2, consistency=consistency, **PLANS[plan], **RULES["sgd"])
    result = await train(config, spec=spec)
    if consistency == "bsp":
        await assert_learns_the_same(config, result, spec)
    start = result.model.initial_weights(Dice(config.seed))
    assert result.model.frozen
    for name in result.model.frozen:
        assert result.weights[name].tobytes() == start[name].tobytes()


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("plan", PLANS)
async def test_asynchronous_workers_of_a_cut_model_learn(plan, workers):
    flow = {"in_flight": 1, "epochs": 6, "dtype": "float32", "rate": 0.1, "schedule": "constant"}
    result = await train(config_of(partitions=workers, **PLANS[plan], **flow))
    assert result.epochs[-1].train_loss < 0.3 * result.epochs[0].train_loss


def blocks_sent(result, source, target):
    """Bytes of all blocks that one worker sent another, as its links counted them."""
    rows = result.statistics[f"worker-{source}"].traffic
    return sum(
        row.payload_bytes for row in rows if (row.receiver, row.type) == (f"worker-{target}", "Blocks")
    )


def crossings_of(config, spec):
    network = Network(spec, dtype=config.dtype)
    return Partition(network, plan_run(network, config), 0).layout.crossings


@pytest.mark.parametrize(("workers", "network"), [(2, "local"), (3, "tcp"), (4, "local")])
@pytest.mark.parametrize("plan", PLANS)
async def test_the_bytes_over_each_cut_are_those_of_the_plan(plan, workers, network):
    config = config_of(partitions=workers, dtype="float32", rate=0.01, **PLANS[plan])
    result = await train(config, NETWORKS[network]())
    groups = -(-IMAGES // config.images_per_group)
    for source in range(workers):
        for target in range(workers):
            said = 4 * sum(
                crossing.values * (groups if crossing.kind == "gradient" else IMAGES)
                for crossing in crossings_of(config, digits())
                if (crossing.source, crossing.target) == (source, target)
            )
            assert blocks_sent(result, source, target) == said


async def test_two_halves_of_the_paper_model_send_1605_values_per_image_each_way():
    config = config_of(partitions=2, dtype="float32", rate=0.01, **PLANS["exchange"])
    dataset = tiny_dataset(train=IMAGES, shape=(1, 28, 28))
    async with cluster_of(config, dataset=dataset, spec=mnist_adam()) as cluster:
        result = await cluster.train()
    (sums,) = [c for c in crossings_of(config, mnist_adam()) if c.kind == "gradient"]
    assert (sums.source, sums.target) == (0, 1)
    assert sums.values == Network(mnist_adam()).num_parameters - (
        320 * 400 + 400 + 400 * 400 + 400 + 400 * 10 + 10
    )
    assert blocks_sent(result, 0, 1) == 4 * (1605 * IMAGES + sums.values * 10)
    assert blocks_sent(result, 1, 0) == 4 * 1605 * IMAGES


class LostThenCut:
    """A network failure: messages are lost, and a moment later all links end."""

    delay_s = 0.002

    def __init__(self, network):
        self._network = network

    def draw(self, dice):
        if dice.random() > 0.1:
            return ""
        asyncio.get_running_loop().call_later(self.delay_s, self._network.cut_all)
        return "drop"


def rough(network, faults):
    """Links that misbehave between workers, and nowhere else."""
    made = Rough(NETWORKS[network](), Faults(), towards="worker")
    made.faults = LostThenCut(made) if faults is None else faults
    return made


def talk_of(result):
    """Statistics of each worker's exchange with each other one."""
    return {
        (node, other): told
        for node, counted in result.statistics.items()
        for other, told in getattr(counted, "neighbours", {}).items()
    }


def assert_each_group_once(config, result):
    groups = -(-IMAGES // config.images_per_group) * config.epochs
    for number in range(config.workers):
        engine = result.statistics[f"worker-{number}"].engine
        assert (engine.admitted, engine.finished) == (groups, groups)
        assert (engine.abandoned, engine.failed, engine.dropped_tokens) == (0, 0, 0)
        assert (engine.live, engine.early_tokens) == (0, 0)
    crossings = crossings_of(config, digits())
    for (node, other), told in talk_of(result).items():
        ways = [(f"worker-{c.source}", f"worker-{c.target}") for c in crossings]
        assert told.blocks_received == groups * ways.count((other, node))


ROUGH = {
    "cut": Faults(cut=0.1),
    "delayed": Faults(delay=0.3, delay_s=0.002),
    "lost": None,
    "all": Faults(cut=0.05, delay=0.1, delay_s=0.002),
}


@pytest.mark.parametrize(
    ("plan", "faults", "network"),
    [
        ("layers", "cut", "local"),
        ("layers", "lost", "tcp"),
        ("exchange", "cut", "tcp"),
        ("exchange", "lost", "local"),
        ("exchange", "delayed", "local"),
        ("recompute", "all", "tcp"),
    ],
)
async def test_links_that_fail_between_workers_change_nothing_of_what_is_learnt(plan, faults, network):
    config = config_of(partitions=3, images_per_group=4, waits=IMPATIENT, **PLANS[plan], **RULES["momentum"])
    result = await train(config, rough(network, ROUGH[faults]))
    assert_each_group_once(config, result)
    talk = talk_of(result)
    assert sum(told.links for told in talk.values()) > len(talk)
    smooth = await train(config)
    assert all(told.links == 1 for told in talk_of(smooth).values())
    assert_equal_bits(result.weights, smooth.weights)


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
async def test_a_link_that_is_cut_hundreds_of_times_costs_nothing_but_time(network):
    flow = {"epochs": 3, "images_per_group": 1, "in_flight": 6, "waits": IMPATIENT}
    config = config_of(partitions=2, **PLANS["exchange"], **RULES["sgd"], **flow)
    smooth = await train(config)
    result = await train(config, rough(network, Faults(cut=0.4)))
    assert_each_group_once(config, result)
    assert_equal_bits(result.weights, smooth.weights)
    talk = talk_of(result)
    assert min(told.links for told in talk.values()) > 200
    assert sum(told.blocks_resent for told in talk.values()) > 0


async def test_each_part_in_one_process_keeps_to_cores_of_its_own():
    config = config_of(partitions=2, pin_threads=True)
    async with LocalCluster(config, dataset=tiny_dataset(train=IMAGES), spec=digits()) as cluster:
        result = await cluster.train()
    assert [epoch.images for epoch in result.epochs] == [IMAGES]
    for part in range(2):
        expected = pinned_cpus(threads=1, first=part)
        assert expected is None or result.statistics[f"worker-{part}"].cpus == expected
