"""A step in place is serial SGD: gradient, then rule; a gradient that is not finite changes nothing."""

import threading
from importlib.util import find_spec

import numpy as np
import pytest

from adam_async.model import (
    Adagrad,
    Adam,
    AdamW,
    InPlaceStep,
    Network,
    Sgd,
    StepBuffers,
    mlp,
    named_model,
    new_rule_state,
    new_scratch,
    train_step,
)
from adam_async.model.keyed_random import Dice
from tests.adam_async.model.passes import gradients_of

KERNELS = [
    "numpy",
    pytest.param("numba", marks=pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")),
]
RULES = [
    Sgd(),
    Sgd(weight_decay=0.01),
    Sgd(momentum=0.9),
    Sgd(momentum=0.9, weight_decay=0.01),
    Sgd(momentum=0.9, nesterov=True, weight_decay=0.01),
    Adagrad(),
    Adam(weight_decay=0.01),
    AdamW(weight_decay=0.01),
]


def group(network, images, *, number=0):
    shape = (images, *network.spec.input_shape)
    x = Dice(1).normal("x", keys=(number,), count=int(np.prod(shape)), dtype=float).reshape(shape)
    return x, Dice(1).permutation("labels", images, keys=(number,)) % 10


def step_by_step(network, rule, weights, state, context, rate):
    """The textbook: all gradients first, then the rule."""
    loss = network.forward(weights, context)
    network.backward(weights, context)
    for name, gradient in gradients_of(network, context).items():
        rule.apply(weights[name], state[name], gradient, rate=rate, scratch=new_scratch(network.dtype))
    return loss


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("images", [1, 5])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_step_in_place_equals_gradients_and_then_the_rule(rule, images, kernels):
    network = Network(named_model("digits"), np.float64, kernels=kernels)
    expected, found = (network.initial_weights(Dice(1)) for _ in range(2))
    expected_state, found_state = (new_rule_state(network, rule) for _ in range(2))
    step, context = InPlaceStep(network, rule), network.context(5)
    scratch = step.new_scratch()
    for number in range(4):
        context.load(*group(network, images, number=number))
        loss = step_by_step(network, rule, expected, expected_state, context, 0.1)
        outcome = step.train(found, found_state, context, scratch, rate=0.1)

        assert outcome.loss == pytest.approx(loss, rel=1e-9)
        assert outcome.refused == ()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-12)
        for key, kept in expected_state[name].items():
            np.testing.assert_allclose(found_state[name][key], kept, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("images", [1, 4])
def test_a_gradient_that_is_not_finite_leaves_tensor_and_state_as_they_were(rule, images, kernels):
    network = Network(mlp((8, 6, 10), input_shape=(8,)), kernels=kernels)
    weights, state = network.initial_weights(Dice(1)), new_rule_state(network, rule)
    step, context = InPlaceStep(network, rule), network.context(4)
    scratch = step.new_scratch()
    x, labels = group(network, images)
    x[0, 3] = np.inf
    before = {name: value.copy() for name, value in weights.items()}
    kept = {name: {key: array.copy() for key, array in arrays.items()} for name, arrays in state.items()}
    context.load(x, labels)
    with np.errstate(all="ignore"):
        outcome = step.train(weights, state, context, scratch, rate=0.1)

    assert not np.isfinite(outcome.loss)
    assert sorted(outcome.refused) == sorted(weights)
    for name, value in before.items():
        np.testing.assert_array_equal(weights[name], value)
        for key, array in kept[name].items():
            np.testing.assert_array_equal(state[name][key], array)

    x[0, 3] = 1.0
    context.load(x, labels)
    assert step.train(weights, state, context, scratch, rate=0.1).refused == ()
    assert all(np.isfinite(value).all() for value in weights.values())


@pytest.mark.parametrize("kernels", KERNELS)
def test_only_the_tensors_with_a_bad_gradient_are_refused(kernels):
    network = Network(mlp((8, 6, 10), input_shape=(8,)), kernels=kernels)
    weights, state = network.initial_weights(Dice(1)), new_rule_state(network, Sgd())
    # Every hidden value is 1 and the scores are finite, but an input of 1e30 times an error of 1e10 is not.
    for name, value in (("fc1.weight", 0.0), ("fc1.bias", 1.0), ("fc2.weight", 0.0)):
        weights[name][:] = value
    weights["fc2.weight"][0] = 1e10
    before = {name: value.copy() for name, value in weights.items()}
    step, context = InPlaceStep(network, Sgd()), network.context(4)
    context.load(np.full((4, 8), 1e30), np.full(4, 1))
    with np.errstate(all="ignore"):
        outcome = step.train(weights, state, context, step.new_scratch(), rate=0.1)

    assert outcome.refused == ("fc1.weight",)
    assert np.array_equal(weights["fc1.weight"], before["fc1.weight"])
    assert not np.array_equal(weights["fc1.bias"], before["fc1.bias"])
    assert not np.array_equal(weights["fc2.weight"], before["fc2.weight"])


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_gradient_near_the_end_of_the_number_range_is_applied(kernels):
    network = Network(mlp((8, 6, 10), input_shape=(8,)), kernels=kernels)
    weights, state = network.initial_weights(Dice(1)), new_rule_state(network, Sgd())
    for name, value in (("fc1.weight", 0.0), ("fc1.bias", 1.0), ("fc2.weight", 0.0)):
        weights[name][:] = value
    weights["fc2.weight"][0] = 1e10
    step, context = InPlaceStep(network, Sgd()), network.context(4)
    context.load(np.full((4, 8), 2e28), np.full(4, 1))
    outcome = step.train(weights, state, context, step.new_scratch(), rate=1e-38)

    assert outcome.refused == ()
    np.testing.assert_allclose(weights["fc1.weight"], -2.0, rtol=1e-5)


@pytest.mark.parametrize("kernels", KERNELS)
def test_threads_may_step_over_the_same_weights(kernels):
    network = Network(mlp((8, 16, 10), input_shape=(8,)), kernels=kernels)
    rule = Sgd(momentum=0.5)
    weights, state = network.initial_weights(Dice(1)), new_rule_state(network, rule)
    step = InPlaceStep(network, rule)
    x, labels = group(network, 4)
    losses = {}

    def train(number):
        context, scratch = network.context(4), step.new_scratch()
        context.load(x, labels)
        losses[number] = [step.train(weights, state, context, scratch, rate=0.02).loss for _ in range(100)]

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert all(found[-1] < 0.5 * found[0] for found in losses.values())


def serial_sgd(weights, groups, *, momentum, decay, rate):
    """Two dense layers with a ReLU, softmax and cross-entropy: the textbook, in plain NumPy."""
    w = {name: value.copy() for name, value in weights.items()}
    buffer = {name: np.zeros_like(value) for name, value in w.items()}
    for x, labels in groups:
        hidden = np.maximum(x @ w["fc1.weight"].T + w["fc1.bias"], 0)
        scores = hidden @ w["fc2.weight"].T + w["fc2.bias"]
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        out = (shares - np.eye(scores.shape[1])[labels]) / len(x)
        back = (out @ w["fc2.weight"]) * (hidden > 0)
        gradient = {
            "fc1.weight": back.T @ x,
            "fc1.bias": back.sum(axis=0),
            "fc2.weight": out.T @ hidden,
            "fc2.bias": out.sum(axis=0),
        }
        for name, value in w.items():
            buffer[name] = momentum * buffer[name] + gradient[name] + decay * value
            w[name] = value - rate * buffer[name]
    return w


def groups_of_rows(count, sizes=(5, 3)):
    for number in range(count):
        size = sizes[number % len(sizes)]
        x = Dice(1).normal("x", keys=(number,), count=size * 8, dtype=float).reshape(size, 8)
        yield x, Dice(1).permutation("labels", size, keys=(number,)) % 3


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.01)])
def test_network_and_rule_equal_serial_sgd(momentum, decay):
    network = Network(mlp((8, 6, 3), input_shape=(8,)), np.float64)
    weights = network.initial_weights(Dice(1))
    expected = serial_sgd(weights, groups_of_rows(40), momentum=momentum, decay=decay, rate=0.1)
    rule = Sgd(momentum=momentum, weight_decay=decay)
    state, context, buffers = (
        new_rule_state(network, rule),
        network.context(5),
        StepBuffers.of(network.trained, network.dtype),
    )
    for x, labels in groups_of_rows(40):
        context.load(x, labels)
        train_step(network, weights, state, context, buffers, rule, rate=0.1)

    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value, rtol=1e-9, atol=1e-12)
