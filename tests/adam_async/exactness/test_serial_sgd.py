"""One worker, one thread, one group in flight, a pull after every push: that is serial SGD, exactly."""

import numpy as np
import pytest

from adam_async.data_server.epoch import EpochOrders
from adam_async.model.keyed_random import Dice
from adam_async.model.named import digits
from adam_async.model.network import Network
from adam_async.model.spec import LayerSpec, ModelSpec
from adam_async.run.config import Config
from tests.adam_async.exactness.serial import RULES, assert_close, order_of, rule_step
from tests.adam_async.model.passes import gradients_of
from tests.adam_async.runs import NETWORKS, SHARDED, tiny_dataset, train

SERIAL = {
    "threads": 1,
    "in_flight": 1,
    "push_every": 1,
    "pull_every": 1,
    "replicas": 1,
    "seed": 5,
    "schedule": "constant",
}
COPY = {"weights": "copy"}


def serial_sgd(config, dataset, spec=None):
    """Train on one thread, one group after the other, without any of the system."""
    model = Network(spec or digits(), dtype=config.dtype)
    weights = model.initial_weights(Dice(config.seed))
    context = model.context(config.images_per_group)
    memory = {name: {} for name in weights}
    t = 0
    for epoch in range(1, config.epochs + 1):
        for number, chosen in enumerate(order_of(config, dataset, epoch)):
            images, labels = dataset.train_images[chosen], dataset.train_labels[chosen]
            context.load(images, labels, dice=Dice(config.seed), keys=(epoch, number))
            model.forward(weights, context)
            model.backward(weights, context)
            t += 1
            for name, gradient in gradients_of(model, context).items():
                p = weights[name]
                weights[name] = rule_step(config, p, gradient, memory[name], t).astype(p.dtype)
    return weights, t


def serial(**options):
    """Groups of eight images in float64; `options` come first."""
    return Config(**{"images_per_group": 8, "dtype": "float64", **SERIAL, **options})


async def steps_of_equal_runs(config, network="local", *, spec=None, close=1e-9):
    """A run has the weights of serial SGD; return the number of its steps."""
    result = await train(config, NETWORKS[network](), spec=spec)
    expected, steps = serial_sgd(config, tiny_dataset(), spec)
    assert_close(result.weights, expected, close)
    return steps


@pytest.mark.parametrize(
    "sharding", [pytest.param({}, marks=pytest.mark.thorough), SHARDED], ids=["whole", "sharded"]
)
@pytest.mark.parametrize(
    "options", [{"protocol": "delta"}, {"protocol": "factors"}, {"weights": "aliased"}], ids=str
)
@pytest.mark.parametrize("rule", RULES)
async def test_training_equals_serial_sgd_in_float64(rule, options, sharding):
    # The last group of each epoch is short.
    assert await steps_of_equal_runs(serial(epochs=2, **options, **RULES[rule], **sharding)) == 16


@pytest.mark.parametrize("protocol", ["delta", "factors", "auto"])
async def test_training_over_sockets_equals_serial_sgd_in_float64(protocol):
    await steps_of_equal_runs(serial(epochs=1, protocol=protocol, **RULES["momentum"], **SHARDED), "tcp")


@pytest.mark.parametrize(
    ("network", "weights", "epochs", "close"),
    [
        *(pytest.param(name, "copy", 1, 1e-5, marks=pytest.mark.thorough) for name in NETWORKS),
        *(pytest.param("local", kind, 20, 1e-4, marks=pytest.mark.slow) for kind in ("copy", "aliased")),
    ],
)
@pytest.mark.parametrize("rule", RULES)
async def test_steps_in_float32_stay_close(rule, network, weights, epochs, close):
    config = Config(epochs=epochs, images_per_group=6, weights=weights, **RULES[rule], **SERIAL, **SHARDED)
    assert await steps_of_equal_runs(config, network, close=close) == 10 * epochs


@pytest.mark.parametrize("weights", ["copy", "aliased"])
async def test_dropout_drops_what_seed_epoch_and_number_of_the_group_say(weights):
    *before, score, loss = digits().layers
    dropout = LayerSpec.of("drop", "dropout", rate=0.4)
    layers = (*before, dropout, LayerSpec.of("fc2", "dense", **dict(score.options)), loss)
    spec = ModelSpec(name="dropping", input_shape=(1, 8, 8), layers=layers)
    await steps_of_equal_runs(serial(epochs=2, weights=weights, **RULES["momentum"]), spec=spec)


async def test_one_image_per_group_is_the_flow_of_the_paper_and_equals_serial_sgd():
    config = serial(epochs=1, images_per_group=1, **RULES["sgd"], **SHARDED, **COPY)
    assert await steps_of_equal_runs(config) == 60


async def test_a_step_of_several_groups_applies_the_sum_of_their_gradients_once():
    config = serial(epochs=1, images_per_group=6, push_every=10, **RULES["sgd"], **SHARDED)
    result = await train(config)
    model, dataset = Network(digits(), dtype="float64"), tiny_dataset()
    weights = model.initial_weights(Dice(config.seed))
    sums = {name: np.zeros_like(values) for name, values in weights.items()}
    order = EpochOrders(Dice(config.seed), num_images=60, images_per_group=6).order(1)
    context = model.context(6)
    for number in range(10):
        chosen = order.group(number)
        context.load(dataset.train_images[chosen], dataset.train_labels[chosen])
        model.forward(weights, context)
        model.backward(weights, context)
        for name, gradient in gradients_of(model, context).items():
            sums[name] += gradient
    expected = {name: values - config.rate * sums[name] for name, values in weights.items()}
    assert_close(result.weights, expected, 1e-9)
