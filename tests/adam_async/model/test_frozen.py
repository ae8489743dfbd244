"""Frozen layers keep their weights, and the other layers train as without them."""

import numpy as np
import pytest

from adam_async.errors import SpecError
from adam_async.model import InPlaceStep
from adam_async.model.gradcheck import check_network
from adam_async.model.keyed_random import Dice
from adam_async.model.named import digits
from adam_async.model.network import Network
from adam_async.model.rules import Adam, Sgd
from adam_async.model.spec import LayerSpec, ModelSpec
from tests.adam_async.model.passes import gradients_of

KERNELS = ["numpy", "numba"]


def spec_of(*frozen: str) -> ModelSpec:
    """The digits network with some layers frozen."""
    whole = digits()
    layers = tuple(
        LayerSpec.of(
            layer.name, layer.kind, inputs=layer.inputs, **dict(layer.options), frozen=layer.name in frozen
        )
        if layer.name in ("conv1", "fc1", "fc2") and (frozen or layer.name == "fc2")
        else layer
        for layer in whole.layers
    )
    return ModelSpec(name="frozen", input_shape=whole.input_shape, layers=layers)


def images_of(count: int):
    dice = np.random.default_rng(2)
    return dice.random((count, 1, 8, 8)), dice.integers(0, 10, count)


def gradients(network, weights):
    context = network.context(6)
    context.load(*images_of(6))
    network.forward(weights, context)
    network.backward(weights, context)
    return gradients_of(network, context)


def test_frozen_layers_cost_fewer_operations():
    def passes(*frozen):
        network = Network(spec_of(*frozen))
        costs = {layer.name: layer.multiply_adds for layer in network.layers if layer.multiply_adds}
        assert set(costs) == {"conv1", "fc1", "fc2"}
        return network.operations, costs

    trained, costs = passes()
    assert trained == 2 * (2 * costs["conv1"] + 3 * costs["fc1"] + 3 * costs["fc2"])
    # No layer before fc1 needs an error gradient, so fc1 computes none.
    assert passes("conv1")[0] == 2 * (costs["conv1"] + 2 * costs["fc1"] + 3 * costs["fc2"])
    assert passes("fc2")[0] == 2 * (2 * costs["conv1"] + 3 * costs["fc1"] + 2 * costs["fc2"])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("frozen", [("conv1",), ("fc1",), ("fc2",), ("conv1", "fc2")], ids=str)
def test_other_layers_keep_their_gradients(frozen, kernels):
    whole = Network(digits(), dtype="float64", kernels=kernels)
    part = Network(spec_of(*frozen), dtype="float64", kernels=kernels)
    weights = whole.initial_weights(Dice(4))
    expected, found = gradients(whole, weights), gradients(part, weights)
    assert {name for name in expected if name.partition(".")[0] not in frozen} == found.keys()
    assert part.frozen == expected.keys() - found.keys()
    for name, gradient in found.items():
        np.testing.assert_array_equal(gradient, expected[name])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("update", [Sgd(), Adam()], ids=lambda rule: rule.name)
def test_training_in_place_leaves_frozen_tensors_and_their_rule_state_unchanged(update, kernels):
    network = Network(spec_of("conv1", "fc2"), kernels=kernels)
    step = InPlaceStep(network, update)
    weights = network.initial_weights(Dice(4))
    state = {p.name: update.new_state(p.shape, network.dtype) for p in network.parameters}
    before = {name: values.copy() for name, values in weights.items()}
    context, scratch = network.context(6), step.new_scratch()
    context.load(*images_of(6))
    step.train(weights, state, context, scratch, rate=0.1)
    changed = {name for name, values in weights.items() if not np.array_equal(values, before[name])}
    assert changed == {"fc1.weight", "fc1.bias"}
    assert not any(array.any() for name in network.frozen for array in state[name].values())


def test_backward_computes_nothing_before_the_first_trained_layer():
    network = Network(spec_of("conv1", "fc1"))
    context = network.context(2)
    held = [context.slots(number).output_error is not None for number in range(len(network.layers))]
    names = [layer.name for layer, error in zip(network.layers, held, strict=True) if error]
    assert names == ["fc2"]


def test_the_check_of_gradients_skips_frozen_tensors():
    network = Network(spec_of("fc1"), dtype="float64")
    check_network(network, network.initial_weights(Dice(4)), *images_of(3), Dice(4))


def test_frozen_is_refused_without_parameters_and_if_nothing_is_left_to_train():
    dense = LayerSpec.of("fc", "dense", outputs=3, frozen=True)
    relu = LayerSpec.of("relu", "relu", frozen=True)
    loss = LayerSpec.of("loss", "softmax_cross_entropy")

    def network_of(*layers: LayerSpec) -> Network:
        return Network(ModelSpec(name="m", input_shape=(4,), layers=layers))

    with pytest.raises(SpecError, match=r"layer 'relu' .* has no parameters, so option 'frozen'"):
        network_of(LayerSpec.of("fc", "dense", outputs=3), relu, loss)
    with pytest.raises(SpecError, match=r"every layer with parameters is frozen \(fc\)"):
        network_of(dense, loss)
    with pytest.raises(SpecError, match="option 'frozen' must be true or false, not 1"):
        network_of(LayerSpec.of("fc", "dense", outputs=3, frozen=1), loss)
