"""Training within a bound of the others: lockstep is serial SGD on all images of a step, whoever is fast."""

import msgspec
import numpy as np
import pytest

from adam_async.config import Config
from adam_async.data_server.order import epoch_order
from adam_async.dice import Dice
from adam_async.model.named import digits
from adam_async.model.network import Network as Model
from adam_async.model.rules import make_rule, new_scratch
from tests.adam_async.runs import NETWORKS, PATIENT, SHARDED, cluster_of, tiny_dataset

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
            context.load(dataset.train_images[chosen], dataset.train_labels[chosen])
            model.forward(read, context)
            model.backward(read, context)
            for parameter in model.trained:
                gradient = np.empty(parameter.shape, model.dtype)
                model.delta(context, parameter.name, out=gradient)
                name = parameter.name
                rule.apply(weights[name], state[name], gradient, rate=config.rate, scratch=scratch)
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
