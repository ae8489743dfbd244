"""Messages that leave while the rest of their step is computed change when things happen, nothing else."""

import numpy as np
import pytest

from adam_async.model.keyed_random import Dice
from adam_async.model.named import mlp
from adam_async.model.network import Network
from adam_async.run.config import Config
from adam_async.run.partition import table_of
from adam_async.worker import push_plan
from adam_async.worker.push_plan import PushBuffer, plan_pushes, plan_sections
from tests.adam_async.exactness.serial import RULES, assert_close, assert_equal_bits, lockstep_sgd
from tests.adam_async.runs import NETWORKS, SHARDED, check_replay, cluster_of, tiny_dataset

pytestmark = pytest.mark.thorough

DEEP = mlp((64, 40, 40, 40, 10), input_shape=(1, 8, 8), name="deep")


@pytest.fixture
def apart(monkeypatch):
    """Let each of the large tensors have messages of its own."""
    monkeypatch.setattr(push_plan, "MESSAGE_BYTES", 12 << 10)


@pytest.fixture
def eager(apart, monkeypatch):
    """Let messages of any size leave ahead."""
    monkeypatch.setattr(push_plan, "EARLY_BYTES", 1)


def config_of(**options):
    return Config(**{"epochs": 2, "images_per_group": 4, "replicas": 2, "threads": 2, **SHARDED, **options})


async def train(config, network=None):
    """The weights, and how many messages left ahead."""
    async with cluster_of(config, network, spec=DEEP, dataset=tiny_dataset(train=59)) as cluster:
        result = await cluster.train()
        ahead = sum(getattr(values, "left_ahead", 0) for values in result.statistics.values())
        return result.weights, ahead


def planned(**options):
    model = Network(DEEP, dtype="float64")
    table = table_of(model, shard_bytes=4096)
    return model, plan_pushes(model, table, ["ps-0", "ps-1", "ps-2", "ps-3"] * 16, images=4, **options)


@pytest.mark.parametrize("protocol", ["delta", "factors"])
def test_sections_are_the_backward_pass_once_and_each_message_is_in_the_first_that_completes_it(
    eager, protocol
):
    model, plan = planned(wanted=protocol)
    sections = plan_sections(model, plan)
    assert len(sections) > 1
    layers = [number for section in sections for number in reversed(section.layers)]
    assert layers == list(reversed(range(len(model.layers))))
    assert sorted(index for section in sections for index in section.messages) == list(
        range(len(plan.messages))
    )
    layer_of = {p.name: number for number, layer in enumerate(model.layers) for p in layer.parameters}
    for section in sections:
        for index in section.messages:
            lowest = min(layer_of[shard.tensor] for shard in plan.messages[index].specs)
            assert lowest in section.layers


def test_small_messages_do_not_leave_by_themselves():
    assert len(plan_sections(*planned())) == 1


@pytest.mark.parametrize("protocol", ["delta", "factors", "auto"])
def test_a_buffer_filled_message_by_message_equals_one_filled_at_once(protocol):
    model, plan = planned(wanted=protocol)
    dataset = tiny_dataset()
    weights, context = model.initial_weights(Dice(3)), model.context(4)
    context.load(dataset.train_images[:4], dataset.train_labels[:4])
    model.forward(weights, context)
    model.backward(weights, context)
    whole, pieces = (PushBuffer(model, plan, 4) for _ in range(2))
    whole.fill(context)
    pieces.images = 4
    for index in range(len(plan.messages)):
        pieces.fill_messages(context, (index,))
    for index in range(len(plan.messages)):
        for one, other in zip(whole.tensors(index), pieces.tensors(index), strict=True):
            assert np.array_equal(one, other)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("mode", [{"consistency": "bsp"}, {"consistency": "bsp", "lag": 1}], ids=str)
async def test_lockstep_has_the_same_bits_whether_messages_leave_ahead_or_not(
    mode, network, apart, monkeypatch
):
    config = config_of(dtype="float64", seed=5, **mode)
    patient, none = await train(config, NETWORKS[network]())
    assert none == 0
    monkeypatch.setattr(push_plan, "EARLY_BYTES", 1)
    hasty, ahead = await train(config, NETWORKS[network]())
    assert ahead > 0
    assert_equal_bits(hasty, patient)


@pytest.mark.parametrize("rule", RULES)
async def test_lockstep_with_messages_ahead_equals_serial_sgd(rule, eager):
    options = {"schedule": "constant", "replicas": 3, "dtype": "float64", "seed": 5, "consistency": "bsp"}
    config = config_of(**options, **RULES[rule])
    weights, ahead = await train(config)
    assert ahead > 0
    expected, _ = lockstep_sgd(config, tiny_dataset(train=59), DEEP)
    assert_close(weights, expected, 1e-9)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("kernels", ["numpy", "auto"])
async def test_one_worker_with_one_group_in_flight_makes_the_same_steps_with_messages_ahead(
    kernels, network, monkeypatch
):
    options = {"replicas": 1, "threads": 1, "in_flight": 1, "weights": "copy", "seed": 5}
    config = config_of(kernels=kernels, **options, **RULES["momentum"])
    patient, _ = await train(config, NETWORKS[network]())
    monkeypatch.setattr(push_plan, "EARLY_BYTES", 1)
    hasty, ahead = await train(config, NETWORKS[network]())
    assert ahead > 0
    assert_equal_bits(hasty, patient)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("mode", ["asp", "ssp:2"])
async def test_every_group_is_trained_once_where_messages_leave_ahead(mode, network, eager):
    config = config_of(epochs=3, in_flight=4, weights="copy", consistency=mode, rate=0.01)
    async with cluster_of(config, NETWORKS[network](), spec=DEEP, dataset=tiny_dataset(train=59)) as cluster:
        result = await cluster.train()
        for server in cluster.servers:
            server.state.check_invariants()
    assert [epoch.images for epoch in result.epochs] == [59, 59, 59]
    assert sum(getattr(values, "left_ahead", 0) for values in result.statistics.values()) > 0


@pytest.mark.parametrize("protocol", ["delta", "factors"])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("mode", ["asp", "ssp:2"])
async def test_a_recorded_run_with_messages_ahead_is_repeated_to_the_last_bit(mode, network, protocol, eager):
    config = config_of(threads=1, weights="copy", consistency=mode, protocol=protocol, rate=0.01, record=True)
    dataset = tiny_dataset(train=59)
    async with cluster_of(config, NETWORKS[network](), spec=DEEP, dataset=dataset) as cluster:
        result = await cluster.train()
    statistics = result.statistics
    workers = [statistics[f"worker-{n}"] for n in range(2)]
    assert all(worker.left_ahead > 0 for worker in workers)
    servers = [counted for node, counted in statistics.items() if node.startswith("ps-")]
    pushes = 0
    for counted in servers:
        versions = counted.versions.values()
        assert sum(versions) == sum(counted.staleness.values())
        pushes += sum(versions)
    assert pushes == sum(worker.parameters.acknowledged for worker in workers) > 0

    assert isinstance(result.record, bytes)
    assert_equal_bits(check_replay(result.record, dataset).weights(), result.weights)
