"""The loss of networks, of steps in NumPy and of PyTorch modules as an objective; random ones are refused."""

import numpy as np
import pytest

from adam_async import LBFGS, ImageLoss, ParameterStore
from adam_async.errors import ConfigError
from adam_async.model.keyed_random import Dice
from adam_async.model.network import Network
from adam_async.model.spec import LayerSpec, ModelSpec
from tests.test_examples import load

KINDS = [
    ("flatten", {}),
    ("dense", {"outputs": 8}),
    ("tanh", {}),
    ("dense", {"outputs": 2}),
    ("softmax_cross_entropy", {}),
]


def images_of(count=60, side=4):
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (count, 1, side, side), np.uint8)
    return images, (images.reshape(count, -1).mean(1) > 127).astype(np.int64)


def network_of(kinds, **options):
    layers = [LayerSpec.of(f"{kind}{at}", kind, **given, **options) for at, (kind, given) in enumerate(kinds)]
    return Network(ModelSpec(name="small", input_shape=(1, 4, 4), layers=tuple(layers)), np.float64)


async def minimum(loss, arrays, name):
    async with ParameterStore.open("local", arrays, name=name) as store:
        return await LBFGS(store, loss, loss.batches, workers=2).minimise(60)


def test_the_parts_of_the_batches_are_the_loss_and_gradient_of_all_images():
    network, (images, labels) = network_of(KINDS), images_of()
    loss = ImageLoss(network, images, labels, batch=16)
    weights = network.initial_weights(Dice(1))
    parts = [loss(weights, batch) for batch in loss.batches]

    value, gradient = ImageLoss(network, images, labels, batch=60)(
        weights, loss.batches[0].__class__(images, labels)
    )

    assert [len(batch) for batch in loss.batches] == [16, 16, 16, 12]
    assert sum(part for part, _ in parts) == pytest.approx(value, rel=1e-12)
    for name, whole in gradient.items():
        np.testing.assert_allclose(sum(each[name] for _, each in parts), whole, rtol=1e-9, atol=1e-15)


class Taken(list):
    """Contexts that another thread has taken since this one has seen them."""

    def __bool__(self):
        return True


def test_a_thread_that_finds_the_last_context_taken_makes_another():
    network = network_of(KINDS)
    loss, weights = ImageLoss(network, *images_of(), batch=16), network.initial_weights(Dice(1))
    loss._contexts = Taken()
    first, _ = loss(weights, loss.batches[0])

    assert len(loss._contexts) == 1
    assert loss(weights, loss.batches[0])[0] == first


async def test_a_network_is_minimised():
    network = network_of(KINDS)
    result = await minimum(
        ImageLoss(network, *images_of(), batch=16), network.initial_weights(Dice(1)), "network"
    )

    assert result.value < 0.01


async def test_a_step_in_numpy_is_minimised():
    step = load("numpy_step.py").mlp(hidden=8)
    loss = ImageLoss(step, *images_of(side=8), batch=16)
    first = sum(loss(step.initial(1), batch)[0] for batch in loss.batches)
    result = await minimum(loss, step.initial(1), "step")

    assert result.value < first / 10


async def test_a_module_of_pytorch_is_minimised_and_one_with_dropout_refused():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")
    from adam_async.torch import TorchStep

    def module(*more):
        nn = torch.nn
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), *more, nn.Linear(8, 2)).double()

    step = TorchStep(
        lambda: module(), torch.nn.functional.cross_entropy, forward=lambda m, b: m(b.images.double() / 255)
    )
    loss = ImageLoss(step, *images_of(), batch=16)
    result = await minimum(loss, step.initial(1), "torch")

    assert result.value < 0.05
    drops = TorchStep(
        lambda: module(torch.nn.Dropout(0.5)),
        torch.nn.functional.cross_entropy,
        forward=lambda m, b: m(b.images.double() / 255),
    )
    with pytest.raises(ConfigError, match=r"uses the random streams of PyTorch.* Leave dropout out"):
        ImageLoss(drops, *images_of())


def test_dropout_frozen_layers_and_no_images_are_refused():
    images, labels = images_of()
    with pytest.raises(ConfigError, match="layer 'dropout2' is dropout, which draws random numbers"):
        ImageLoss(network_of([*KINDS[:2], ("dropout", {}), *KINDS[2:]]), images, labels)
    with pytest.raises(ConfigError, match=r"'dense1\..*' is frozen"):
        ImageLoss(
            network_of([KINDS[0], ("dense", {"outputs": 8, "frozen": True}), *KINDS[2:]]), images, labels
        )
    with pytest.raises(ConfigError, match="0 images"):
        ImageLoss(network_of(KINDS), images[:0], labels[:0])
