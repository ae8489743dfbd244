"""One network of all kinds of layers: contexts of any size, both precisions, steady state without arrays."""

import numpy as np
import pytest

from adam_async.model import (
    BUILTIN_LAYERS,
    LayerSpec,
    ModelSpec,
    Network,
    Sgd,
    StepBuffers,
    new_rule_state,
    train_step,
)
from adam_async.model.keyed_random import Dice
from tests.adam_async.model.passes import gradients_of, peak_growth

of = LayerSpec.of

LAYERS = (
    of("conv", "conv2d", filters=6, kernel=3, padding=1),
    of("conv_relu", "relu"),
    of("norm", "local_response_norm", size=3, alpha=0.1),
    of("pool", "max_pool", kernel=3, stride=2),
    of("local", "locally_connected", filters=6, kernel=3, padding=1),
    of("bend", "tanh"),
    of("drop", "dropout", rate=0.25),
    of("sum", "add", inputs=("drop", "pool")),
    of("both", "concatenate", inputs=("sum", "pool")),
    of("means", "average_pool", kernel=2),
    of("flat", "flatten"),
    of("hidden", "dense", outputs=20),
    of("squash", "sigmoid"),
    of("drop2", "dropout"),
    of("out", "dense", outputs=5),
)
ENDS = {
    "softmax_cross_entropy": of("loss", "softmax_cross_entropy", class_weights=(1, 2, 0.5, 1, 1)),
    "mean_squared_error": of("loss", "mean_squared_error"),
}


def network_of(end, dtype, kernels="numpy"):
    if kernels == "numba":
        pytest.importorskip("numba", reason="compiled kernels need numba")
    spec = ModelSpec(name="all", input_shape=(2, 10, 9), layers=(*LAYERS, ENDS[end]))
    return Network(spec, dtype, kernels=kernels)


def group_of(images):
    pixels = Dice(1).normal("x", count=images * 180, dtype=float).reshape(images, 2, 10, 9)
    return pixels, np.arange(images) % 5


def gradients(network, weights, context, group):
    """The gradients of a group, by name, and its loss."""
    context.load(*group, dice=Dice(4), keys=(1, 2))
    loss = network.forward(weights, context)
    network.backward(weights, context)
    return {**gradients_of(network, context), "its loss": np.array(loss)}


def test_the_network_has_every_layer():
    assert {layer.kind for layer in (*LAYERS, *ENDS.values())} == set(BUILTIN_LAYERS)


@pytest.mark.parametrize("kernels", ["numpy", "numba"])
@pytest.mark.parametrize("end", ENDS)
def test_gradients_do_not_depend_on_the_size_of_the_context_or_on_what_was_in_it(end, kernels):
    network = network_of(end, np.float64, kernels)
    weights = network.initial_weights(Dice(1))
    roomy, tight = network.context(7), network.context(5)
    gradients(network, weights, roomy, group_of(7))

    used = gradients(network, weights, roomy, group_of(5))

    for name, value in gradients(network, weights, tight, group_of(5)).items():
        np.testing.assert_array_equal(used[name], value)
        assert np.any(value), name


@pytest.mark.parametrize("kernels", ["numpy", "numba"])
@pytest.mark.parametrize("end", ENDS)
def test_float32_agrees_with_float64_of_numpy(end, kernels):
    wide, narrow = network_of(end, np.float64), network_of(end, np.float32, kernels)
    weights = wide.initial_weights(Dice(1))
    exact = gradients(wide, weights, wide.context(6), group_of(6))

    rounded = {name: value.astype(np.float32) for name, value in weights.items()}
    for name, value in gradients(narrow, rounded, narrow.context(6), group_of(6)).items():
        assert np.linalg.norm(value - exact[name]) <= 1e-4 * np.linalg.norm(exact[name]), name


# The rest is NumPy's own buffers for strided operands and mixed dtypes: they do not grow with the group.
@pytest.mark.parametrize(("dtype", "limit_bytes"), [(np.float32, 256 << 10), (np.float64, 512 << 10)])
@pytest.mark.parametrize("kernels", ["numpy", "numba"])
@pytest.mark.parametrize("end", ENDS)
def test_steady_state_allocates_no_tensors(end, kernels, dtype, limit_bytes):
    network, rule = network_of(end, dtype, kernels), Sgd(momentum=0.9, weight_decay=1e-4)
    weights, context = network.initial_weights(Dice(1)), network.context(1024)
    state, buffers = new_rule_state(network, rule), StepBuffers.of(network.trained, network.dtype)
    images, labels = group_of(1024)
    images, dice = images.astype(dtype), Dice(4)

    def group(count):
        context.load(images[:count], labels[:count], dice=dice, keys=(1, count))
        train_step(network, weights, state, context, buffers, rule, rate=0.001)

    group(1024)
    group(900)
    assert peak_growth(group, (1024, 1024, 1024, 900, 1024)) < limit_bytes
