"""A loop of pushes and pulls is the same loop in NumPy, in float64 to 1e-12, with every rule."""

from contextlib import asynccontextmanager

import numpy as np
import pytest

from adam_async.model.rules import Adagrad, Adam, AdamW, Sgd
from adam_async.store.arrays import Factors
from adam_async.store.store import ParameterStore
from tests.adam_async.exactness.serial import rule_step
from tests.adam_async.store.servers import store_servers

ROWS, INPUTS, CLASSES = 64, 1000, 10
SHARD_BYTES = 16 << 10
STEPS = 12

RULES = [
    Sgd(rate=0.5),
    Sgd(rate=0.1, momentum=0.9),
    Sgd(rate=0.1, momentum=0.9, nesterov=True),
    Sgd(rate=0.5, weight_decay=0.01),
    Sgd(rate=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    Adagrad(rate=0.1),
    Adagrad(rate=0.1, weight_decay=0.01, initial_accumulator_value=0.5),
    Adam(rate=0.01),
    Adam(rate=0.01, weight_decay=0.01),
    AdamW(rate=0.01, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-6),
]


def examples():
    dice = np.random.default_rng(5)
    images = dice.normal(size=(ROWS, INPUTS))
    return images, np.argmax(images @ dice.normal(size=(INPUTS, CLASSES)), axis=1)


IMAGES, LABELS = examples()


def first_values():
    dice = np.random.default_rng(6)
    return {"weights": dice.normal(size=(CLASSES, INPUTS)) * 0.01, "bias": np.zeros(CLASSES)}


def errors_of(values):
    """The gradient of the loss by the scores, (rows, classes), of multinomial logistic regression."""
    scores = IMAGES @ values["weights"].T + values["bias"]
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    shares[np.arange(ROWS), LABELS] -= 1
    return shares / ROWS


def numpy_loop(rule):
    values, memory = first_values(), {"weights": {}, "bias": {}}
    for t in range(1, STEPS + 1):
        errors = errors_of(values)
        gradients = {"weights": errors.T @ IMAGES, "bias": errors.sum(axis=0)}
        values = {name: rule_step(rule, p, gradients[name], memory[name], t) for name, p in values.items()}
    return values


@asynccontextmanager
async def places(where):
    """Yield an address for `ParameterStore.open`, and a check that each server has shards."""
    if where == "local":
        yield where, lambda: True
        return
    async with store_servers() as cluster:
        yield cluster.address, lambda: [bool(state.shards) for state in cluster.states()] == [True] * 3


@pytest.mark.parametrize("factors", [False, True], ids=["dense", "factors"])
@pytest.mark.parametrize("where", ["local", "tcp"])
async def test_logistic_regression_on_a_store_equals_the_loop_in_numpy(where, factors):
    async with places(where) as (address, is_spread):
        for number, rule in enumerate(RULES):
            async with ParameterStore.open(
                address, first_values(), name=f"store-{number}", rule=rule, shard_bytes=SHARD_BYTES
            ) as store:
                values = await store.pull()
                assert is_spread()
                for _ in range(STEPS):
                    errors = errors_of(values)
                    weights = Factors(IMAGES, errors) if factors else errors.T @ IMAGES
                    gradients = {"weights": weights, "bias": errors.sum(axis=0)}
                    values = await store.push_pull(gradients, read=values)
                expected = numpy_loop(rule)
                for name, array in expected.items():
                    np.testing.assert_allclose(
                        values[name], array, rtol=1e-12, atol=1e-12, err_msg=f"{rule} {name}"
                    )
                await store.delete()


async def test_arrays_of_one_store_have_rules_of_their_own():
    rules = {
        "weights": AdamW(rate=0.01, weight_decay=0.1),
        "bias": Sgd(rate=0.1, momentum=0.9, nesterov=True),
    }
    values, memory = first_values(), {"weights": {}, "bias": {}}
    async with ParameterStore.open("local", values, rule=rules, shard_bytes=SHARD_BYTES) as store:
        for t in range(1, STEPS + 1):
            errors = errors_of(values)
            gradients = {"weights": errors.T @ IMAGES, "bias": errors.sum(axis=0)}
            found = await store.push_pull(gradients)
            values = {
                name: rule_step(rules[name], p, gradients[name], memory[name], t)
                for name, p in values.items()
            }
            for name, array in values.items():
                np.testing.assert_allclose(found[name], array, rtol=1e-12, atol=1e-12, err_msg=name)


async def test_a_rate_of_a_push_replaces_that_of_the_rule():
    async with ParameterStore.open("local", {"w": np.ones(3)}, rule=AdamW(weight_decay=0.5)) as store:
        await store.push({"w": np.zeros(3)}, rate=0.5)
        np.testing.assert_array_equal((await store.pull())["w"], np.full(3, 0.75))
