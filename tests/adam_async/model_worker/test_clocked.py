"""Training within a bound of the others: lockstep is serial SGD on all images of a step, whoever is fast."""

import asyncio
import threading
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest

from adam_async.config import Config
from adam_async.data_server.order import epoch_order
from adam_async.dice import Dice
from adam_async.errors import DeadlineExceeded
from adam_async.model.named import digits
from adam_async.model.network import Network as Model
from adam_async.model.rules import make_rule, new_scratch
from adam_async.model.spec import LayerSpec, ModelSpec
from adam_async.model_worker.copied import Copied
from adam_async.schedule import Schedule
from tests.adam_async.runs import NETWORKS, PATIENT, SHARDED, cluster_of, tiny_dataset, until

RULES = {
    "sgd": {"rule": "sgd", "rate": 0.1},
    "momentum": {"rule": "sgd", "rate": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "adagrad": {"rule": "adagrad", "rate": 0.01},
    "adam": {"rule": "adam", "rate": 0.002},
}
WAITS = msgspec.structs.replace(PATIENT, clock_s=20.0)
BSP = {"consistency": "bsp", "replicas": 2, "threads": 2, "images_per_group": 4, "epochs": 2, "waits": WAITS}


def lockstep(config, dataset, *, spec=None):
    """Serial SGD on all images of a step, whose gradients are of values `lag` steps behind."""
    model = Model(spec or digits(), dtype=config.dtype)
    weights = model.initial_weights(Dice(config.seed))
    rule = make_rule(config.rule, momentum=config.momentum, weight_decay=config.weight_decay)
    state = {p.name: rule.new_state(p.shape, model.dtype) for p in model.parameters}
    scratch = new_scratch(model.dtype)
    step_images = config.replicas * config.push_every * config.images_per_group
    context = model.context(step_images)
    for epoch in range(1, config.epochs + 1):
        history = [{name: values.copy() for name, values in weights.items()}]
        order = epoch_order(
            Dice(config.seed),
            epoch=epoch,
            num_images=len(dataset.train_labels),
            images_per_group=config.images_per_group,
        )
        groups = [order.group(number) for number in range(order.num_groups)]
        of_a_step = config.replicas * config.push_every
        for first in range(0, len(groups), of_a_step):
            chosen = np.concatenate(groups[first : first + of_a_step])
            read = history[max(0, len(history) - 1 - config.lag)]
            rate = Schedule.of(config).rate(epoch - 1 + first / len(groups))
            total = 0.0
            context.load(dataset.train_images[chosen], dataset.train_labels[chosen])
            model.forward(read, context)
            model.backward(read, context)
            gradients = {p.name: np.empty(p.shape, model.dtype) for p in model.trained}
            for name, gradient in gradients.items():
                model.delta(context, name, out=gradient)
                total += np.sum(gradient**2)
            for name, gradient in gradients.items():
                if config.clip:
                    gradient *= min(1.0, config.clip / np.sqrt(total))
                if config.layer_rate and read[name].any():
                    local = config.layer_rate * np.linalg.norm(read[name]) / np.linalg.norm(gradient)
                    gradient *= min(1.0, local / rate)
                rule.apply(weights[name], state[name], gradient, rate=rate, scratch=scratch)
            history.append({name: values.copy() for name, values in weights.items()})
    return weights


def assert_close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        distance = np.linalg.norm(found[name] - values) / np.linalg.norm(values)
        assert distance <= tolerance, f"{name} is off by {distance:.2e}"


async def train(config, network="local", **options):
    async with cluster_of(config, NETWORKS[network](), **options) as cluster:
        return await cluster.train()


@pytest.mark.parametrize("protocol", ["delta", "factors"])
@pytest.mark.parametrize("push_every", [1, 3])
@pytest.mark.parametrize("rule", RULES)
async def test_lockstep_is_serial_sgd_on_all_images_of_a_step(rule, push_every, protocol):
    config = Config(
        dtype="float64", protocol=protocol, push_every=push_every, **RULES[rule], **BSP, **SHARDED
    )
    result = await train(config)
    assert_close(result.weights, lockstep(config, tiny_dataset()), 1e-9)


@pytest.mark.parametrize("push_every", [1, 2])
async def test_a_short_last_group_counts_by_its_images(push_every):
    dataset = tiny_dataset(train=59)
    config = Config(dtype="float64", push_every=push_every, **RULES["momentum"], **{**BSP, "replicas": 3})
    result = await train(config, dataset=dataset)
    assert_close(result.weights, lockstep(config, dataset), 1e-9)


@pytest.mark.parametrize("push_every", [1, 3])
@pytest.mark.parametrize("network", NETWORKS)
async def test_sums_that_lag_are_applied_to_gradients_of_one_step_before(network, push_every):
    config = Config(dtype="float64", lag=1, push_every=push_every, **RULES["momentum"], **BSP, **SHARDED)
    result = await train(config, network)
    assert_close(result.weights, lockstep(config, tiny_dataset()), 1e-9)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("push_every", [1, 3])
async def test_lockstep_gives_the_same_bits_in_every_run_and_over_sockets(push_every, lag):
    config = Config(lag=lag, push_every=push_every, **RULES["momentum"], **BSP, **SHARDED)
    first = await train(config)
    for network in ("local", "tcp"):
        again = await train(config, network)
        for name, values in first.weights.items():
            np.testing.assert_array_equal(again.weights[name], values)


@pytest.mark.parametrize("push_every", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "cosine", "warm_up": 0.5},
        {"schedule": "step", "decay": 0.5, "decay_every": 0.5},
        {"clip": 1.0},
        {"layer_rate": 0.01},
        {"clip": 0.5, "layer_rate": 0.02, "protocol": "factors"},
    ],
    ids=str,
)
async def test_rates_and_limits_are_those_of_serial_sgd(options, push_every):
    config = Config(
        dtype="float64", push_every=push_every, **RULES["sgd"], **options, **{**BSP, "replicas": 1}, **SHARDED
    )
    result = await train(config)
    free = Config(dtype="float64", push_every=push_every, **RULES["sgd"], **{**BSP, "replicas": 1})
    expected, unlimited = lockstep(config, tiny_dataset()), lockstep(free, tiny_dataset())
    assert_close(result.weights, expected, 1e-9)
    assert any(not np.allclose(expected[name], values) for name, values in unlimited.items())


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "aliased"},
        {"weights": "copy", "pull_every": 2},
        {"consistency": "ssp:0"},
        {"consistency": "bsp"},
        {"consistency": "bsp", "lag": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("frozen", ["conv1", "fc1"])
async def test_frozen_layers_stay_as_they_are_and_hold_nobody_up(frozen, options):
    layers = tuple(
        LayerSpec.of(layer.name, layer.kind, inputs=layer.inputs, **dict(layer.options), frozen=True)
        if layer.name == frozen
        else layer
        for layer in digits().layers
    )
    spec = ModelSpec(name="frozen", input_shape=(1, 8, 8), layers=layers)
    config = Config(**RULES["sgd"], **{**BSP, "consistency": "asp", **options}, **SHARDED)
    async with cluster_of(config, spec=spec) as cluster:
        result = await cluster.train()
        shards = [shard for server in cluster.servers for shard in server.state.shards.values()]
    initial = Model(spec).initial_weights(Dice(config.seed))
    for name, values in result.weights.items():
        assert np.array_equal(values, initial[name]) == name.startswith(frozen)
    still = [shard for shard in shards if shard.spec.tensor.startswith(frozen)]
    assert {int(shard.version) for shard in still} == {0}
    if config.slack is not None:
        clocks = {shard.applied_clock() for shard in shards}
        assert clocks == {cluster.workers[0].statistics()["clock"]}


class Brake:
    """Holds up the compute threads of one worker until it is released."""

    def __init__(self, trainer):
        self._train, self._released = trainer.train_admitted, threading.Event()

    def train(self, firing, admitted):
        self._released.wait(10.0)
        return self._train(firing, admitted)

    def release(self):
        self._released.set()


@asynccontextmanager
async def braked(monkeypatch, **options):
    """A cluster in training of which replica 1 is held up."""
    brakes = []
    new_graph = Copied.graph

    def graph(self, landed):
        if self._session.replica == 1:
            brake = Brake(self._trainer)
            brakes.append(brake)
            monkeypatch.setattr(self._trainer, "train_admitted", brake.train)
        return new_graph(self, landed)

    monkeypatch.setattr(Copied, "graph", graph)
    config = Config(**RULES["sgd"], **{**BSP, "threads": 1, **options})
    async with cluster_of(config) as cluster:
        try:
            yield cluster, lambda: [brake.release() for brake in brakes]
        finally:
            for brake in brakes:
                brake.release()


def waiting(cluster):
    told = [worker.statistics() for worker in cluster.workers]
    return {each["waiting_for"] for each in told if "waiting_for" in each}


@pytest.mark.parametrize(
    ("options", "clock"),
    [({"consistency": "bsp"}, 1), ({"consistency": "bsp", "lag": 1}, 1), ({"consistency": "ssp:3"}, 4)],
    ids=str,
)
async def test_who_is_waited_for_is_named_and_the_run_goes_on(options, clock, monkeypatch):
    waits = msgspec.structs.replace(WAITS, answer_s=0.1)
    async with braked(monkeypatch, **options, waits=waits) as (cluster, release):
        training = asyncio.create_task(cluster.train(), name="training")
        await until(lambda: "replica 1 at clock 0" in waiting(cluster))
        told = cluster.workers[0].statistics()
        assert told["clock"] == clock
        assert told["clock_waits"] == 1
        release()
        result = await training
        assert [epoch.images for epoch in result.epochs] == [60, 60]
        assert sum(worker.statistics()["clock_wait_s"] for worker in cluster.workers) > 0
        assert waiting(cluster) == {""}


async def test_a_replica_that_never_advances_is_named_when_patience_ends(monkeypatch):
    waits = msgspec.structs.replace(WAITS, answer_s=0.1, clock_s=0.5)
    claim = "waited 0.5 s for replica 1 at clock 0: step 1 needs the values of clock 1"
    with pytest.raises(DeadlineExceeded, match=claim):
        async with braked(monkeypatch, waits=waits) as (cluster, _):
            await cluster.train()


@pytest.mark.parametrize("slack", [0, 2])
@pytest.mark.parametrize("network", NETWORKS)
async def test_bounded_training_of_one_replica_without_slack_is_serial_sgd(network, slack):
    config = Config(
        dtype="float64",
        **RULES["momentum"],
        **{**BSP, "replicas": 1, "threads": 1, "in_flight": 1, "consistency": f"ssp:{slack}"},
    )
    result = await train(config, network)
    assert_close(result.weights, lockstep(config, tiny_dataset()), 1e-9)


@pytest.mark.parametrize("pull_every", [1, 3])
@pytest.mark.parametrize("push_every", [1, 2])
async def test_bounded_training_ends_with_all_clocks_where_all_meet(push_every, pull_every):
    config = Config(
        push_every=push_every,
        pull_every=pull_every,
        **RULES["sgd"],
        **{**BSP, "consistency": "ssp:1", "replicas": 3, "in_flight": 5},
        **SHARDED,
    )
    async with cluster_of(config) as cluster:
        result = await cluster.train()
        shards = [shard for server in cluster.servers for shard in server.state.shards.values()]
        clocks = {clock for shard in shards for clock in shard.clocks.values()}
    assert clocks == {2 * -(-15 // (3 * push_every))}
    assert [epoch.images for epoch in result.epochs] == [60, 60]
