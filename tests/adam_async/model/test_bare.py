"""The bare training step is serial SGD, and learns."""

import numpy as np
import pytest

from adam_async.model import Adam, Network, Sgd, StepBuffers, mlp, named_model, new_rule_state, train_step
from adam_async.model.keyed_random import Dice


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


def groups(count, sizes=(5, 3)):
    for number in range(count):
        size = sizes[number % len(sizes)]
        x = Dice(1).normal("x", keys=(number,), count=size * 8, dtype=float).reshape(size, 8)
        yield x, Dice(1).permutation("labels", size, keys=(number,)) % 3


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.01)])
def test_network_and_rule_equal_serial_sgd(momentum, decay):
    network = Network(mlp((8, 6, 3), input_shape=(8,)), np.float64)
    weights = network.initial_weights(Dice(1))
    expected = serial_sgd(weights, groups(40), momentum=momentum, decay=decay, rate=0.1)
    rule = Sgd(momentum=momentum, weight_decay=decay)
    state, context, buffers = (
        new_rule_state(network, rule),
        network.context(5),
        StepBuffers.of(network.trained, network.dtype),
    )
    for x, labels in groups(40):
        context.load(x, labels)
        train_step(network, weights, state, context, buffers, rule, rate=0.1)

    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value, rtol=1e-9, atol=1e-12)


def bars(count, seed):
    """Images of 8x8 with a bar, its class being its position (five rows, five columns), in noise."""
    labels = Dice(seed).permutation("labels", count) % 10
    images = Dice(seed).normal("noise", count=count * 64).reshape(count, 8, 8) * 0.4
    for image, label in zip(images, labels, strict=True):
        if label < 5:
            image[label + 1] += 1
        else:
            image[:, label - 4] += 1
    return images.clip(0, 1), labels


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "rate"), [(Sgd(momentum=0.9), 0.02), (Adam(), 0.002)])
def test_the_digits_model_learns_in_a_few_hundred_steps(rule, rate):
    network = Network(named_model("digits"))
    weights = network.initial_weights(Dice(1))
    state, context, buffers = (
        new_rule_state(network, rule),
        network.context(16),
        StepBuffers.of(network.trained, network.dtype),
    )
    images, labels = bars(1600, seed=1)
    for epoch in range(3):
        order = Dice(1).permutation("order", 1600, keys=(epoch,))
        for start in range(0, 1600, 16):
            picked = order[start : start + 16]
            context.load(images[picked], labels[picked])
            train_step(network, weights, state, context, buffers, rule, rate=rate)
    test_images, test_labels = bars(500, seed=2)

    assert np.mean(network.predict(weights, test_images) == test_labels) > 0.97
