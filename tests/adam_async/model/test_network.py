"""Whole networks: gradients, contexts, start values, predictions."""

from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pytest

from adam_async.errors import LayerFailed
from adam_async.model import (
    BUILTIN_LAYERS,
    NAMED_MODELS,
    Adagrad,
    Layer,
    LayerSpec,
    ModelError,
    ModelSpec,
    Network,
    Sgd,
    SpecError,
    StepBuffers,
    mlp,
    named_model,
    new_rule_state,
    train_step,
)
from adam_async.model.gradcheck import check_network
from adam_async.model.keyed_random import Dice
from tests.adam_async.model.passes import gradients_of
from tests.adam_async.own_layer import OWN_LAYERS

of = LayerSpec.of

BRANCHES = ModelSpec(
    name="branches",
    input_shape=(2, 6, 6),
    layers=(
        of("stem", "conv2d", filters=3, kernel=3, padding=1),
        of("bend", "relu"),
        of("left", "conv2d", filters=3, kernel=3, padding=1, inputs=("bend",)),
        of("left_tanh", "tanh"),
        of("right", "conv2d", filters=3, kernel=1, inputs=("bend",)),
        of("right_relu", "relu"),
        of("sum", "add", inputs=("left_tanh", "right_relu", "bend")),
        of("sum_relu", "relu"),
        of("both", "concatenate", inputs=("sum_relu", "left_tanh", "input")),
        of("pool", "max_pool", kernel=2),
        of("flat", "flatten"),
        of("flat_relu", "relu"),
        of("hidden", "dense", outputs=6),
        of("squash", "sigmoid"),
        of("squash_relu", "relu"),
        of("twice", "add", inputs=("squash_relu", "squash_relu")),
        of("out", "dense", outputs=4),
        of("loss", "softmax_cross_entropy"),
    ),
)


def draw(network, images, seed=1):
    shape = (images, *network.spec.input_shape)
    x = Dice(seed).normal("x", count=int(np.prod(shape)), dtype=np.float64).reshape(shape)
    classes = network.layers[-1].input_shapes[0][0]
    return x, Dice(seed).permutation("labels", images) % classes


def gradients(network, weights, context):
    network.backward(weights, context)
    return gradients_of(network, context)


@pytest.mark.parametrize("images", [1, 3])
def test_gradients_of_a_branching_network_are_right(images):
    network = Network(BRANCHES, np.float64)
    images, labels = draw(network, images)

    check_network(network, network.initial_weights(Dice(3)), images, labels, Dice(4))


@pytest.mark.parametrize("name", NAMED_MODELS)
def test_gradients_of_the_named_models_are_right(name):
    network = Network(named_model(name), np.float64)
    images, labels = draw(network, 2)

    check_network(network, network.initial_weights(Dice(3)), images, labels, Dice(4), directions=1)


@pytest.mark.parametrize("spec", [named_model("mnist-adam"), BRANCHES], ids=lambda spec: spec.name)
def test_a_group_gradient_is_the_mean_of_those_of_its_images(spec):
    network = Network(spec, np.float64)
    images, labels = draw(network, 5)
    weights = network.initial_weights(Dice(1))
    context = network.context(5)
    context.load(images, labels)
    loss, found = network.forward(weights, context), gradients(network, weights, context)

    single = network.context(1)
    losses, singles = [], []
    for image, label in zip(images, labels, strict=True):
        single.load(image[None], label[None])
        losses.append(network.forward(weights, single))
        singles.append(gradients(network, weights, single))
    assert loss == pytest.approx(np.mean(losses), rel=1e-12)
    for name, value in found.items():
        np.testing.assert_allclose(value, np.mean([g[name] for g in singles], axis=0), rtol=1e-9, atol=1e-13)


def test_slices_of_start_values_equal_the_whole():
    network = Network(named_model("mnist-adam"))
    for parameter in network.parameters:
        whole = network.initial_values(Dice(1), parameter.name)
        assert whole.shape == parameter.shape
        assert np.all(np.abs(whole) <= parameter.bound)
        np.testing.assert_array_equal(network.initial_values(Dice(1), parameter.name, 3, 7), whole[3:7])
    with pytest.raises(ModelError, match=r"rows 5 to 11 of 'fc3.bias' do not exist: it has 10 rows"):
        network.initial_values(Dice(1), "fc3.bias", 5, 11)


def test_factors_multiply_to_the_delta_and_only_dense_weights_have_them():
    network = Network(named_model("digits"), np.float64)
    images, labels = draw(network, 6)
    weights = network.initial_weights(Dice(1))
    context = network.context(8)
    context.load(images, labels)
    network.forward(weights, context)
    found = gradients(network, weights, context)

    for parameter in network.parameters:
        factors = network.factors(context, parameter.name)
        assert (factors is not None) == (parameter.name in ("fc1.weight", "fc2.weight"))
        if factors is not None:
            x_BI, errors_BO = factors
            assert (x_BI.shape[0], errors_BO.shape[0]) == (6, 6)
            np.testing.assert_allclose(errors_BO.T @ x_BI, found[parameter.name], rtol=1e-12, atol=1e-15)


def test_images_may_be_bytes_or_floats_of_several_shapes():
    network = Network(mlp((12, 3), input_shape=(3, 2, 2)))
    images = np.arange(48, dtype=np.uint8).reshape(4, 3, 2, 2)
    context = network.context(4)
    context.load(images)
    as_bytes = np.moveaxis(context.input, -1, 0).copy()

    np.testing.assert_array_equal(as_bytes, images.astype(np.float32) / np.float32(255))
    for given in (images / 255, images.reshape(4, 12)):
        context.load(given)
        np.testing.assert_array_equal(np.moveaxis(context.input, -1, 0), as_bytes)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((5, 8, 8)), None, "holds 1 to 4 images, not 5"),
        (np.zeros((0, 8, 8)), None, "holds 1 to 4 images, not 0"),
        (np.zeros((2, 7, 8)), None, r"shape \[1, 8, 8\], not \[7, 8\]"),
        (np.zeros((2, 8, 8), int), None, "uint8 or floating point, not int64"),
        (np.zeros((2, 8, 8)), np.zeros(3, int), r"'loss' needs 2 class numbers, not int64 of shape \(3,\)"),
        (np.zeros((2, 8, 8)), np.zeros(2), r"'loss' needs 2 class numbers, not float64 of shape \(2,\)"),
        (np.zeros((2, 8, 8)), np.array([0, 10]), "has 10 classes, but labels go from 0 to 10"),
        (np.zeros((2, 8, 8)), np.array([-1, 0]), "has 10 classes, but labels go from -1 to 0"),
    ],
)
def test_groups_that_do_not_fit_are_refused(images, labels, message):
    with pytest.raises(ModelError, match=message):
        Network(named_model("digits")).context(4).load(images, labels)


def test_mean_squared_error_takes_values_or_classes():
    spec = ModelSpec(
        name="m", input_shape=(3,), layers=(of("out", "dense", outputs=2), of("loss", "mean_squared_error"))
    )
    network = Network(spec, np.float64)
    weights = network.initial_weights(Dice(1))
    x = np.eye(3)
    context = network.context(3)
    context.load(x, np.array([0, 1, 1]))
    loss = network.forward(weights, context)
    targets = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    expected = np.mean((network.scores(weights, x) - targets) ** 2)

    assert loss == pytest.approx(expected, rel=1e-12)
    context.load(x, targets)
    assert network.forward(weights, context) == loss
    for labels, message in (
        (np.zeros((3, 3)), r"targets of shape \(3, 2\), not \(3, 3\)"),
        (np.array([0, 1, 2]), "has 2 features, but labels go from 0 to 2"),
    ):
        with pytest.raises(ModelError, match=message):
            context.load(x, labels)


def test_scores_beyond_the_range_of_exp_give_finite_losses_and_gradients():
    network = Network(mlp((2, 3), input_shape=(2,)))
    weights = network.initial_weights(Dice(1))
    weights["fc1.weight"][...] = [[1e4, 0], [-1e4, 0], [0, 1e4]]
    context = network.context(2)
    context.load(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([1, 2]))

    assert network.forward(weights, context) == pytest.approx(1e4)
    assert all(np.isfinite(value).all() for value in gradients(network, weights, context).values())


def test_threads_share_a_network_and_run_segments_of_it():
    network = Network(named_model("mnist-adam"), np.float64)
    weights = network.initial_weights(Dice(1))
    middle, end = range(6), range(6, len(network.layers))

    def work(seed):
        context = network.context(3)
        context.load(*draw(network, 3, seed))
        for segment in (middle, end):
            network.forward_layers(weights, context, segment)
        for segment in (end, middle):
            network.backward_layers(weights, context, segment)
        out = np.empty((10, 1, 5, 5))
        network.deltas(context, {"conv1.weight": out})
        return out

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(8)))
    for seed, value in enumerate(found):
        np.testing.assert_array_equal(value, work(seed))


def test_predictions_do_not_depend_on_the_batch():
    network = Network(named_model("digits"), np.float64)
    weights = network.initial_weights(Dice(1))
    images = draw(network, 23)[0].clip(0, 1)

    scores = network.scores(weights, images, 5)
    assert scores.shape == (23, 10)
    np.testing.assert_allclose(scores, network.scores(weights, images), rtol=1e-12)
    np.testing.assert_array_equal(network.predict(weights, images), scores.argmax(axis=1))


def test_wrong_uses_are_refused_by_name():
    network = Network(named_model("digits"))
    weights = network.initial_weights(Dice(1))
    context = network.context(2)
    with pytest.raises(ModelError, match=r"no parameter is named 'fc9'; known names: conv1\.weight"):
        network.deltas(context, {"fc9": np.zeros(1)})
    with pytest.raises(ModelError, match="needs a C-contiguous float32 array"):
        network.deltas(context, {"fc1.bias": np.zeros(64)})
    with pytest.raises(ModelError, match="at least 1 image, not 0"):
        network.context(0)
    with pytest.raises(ModelError, match="training=False"):
        network.backward(weights, network.context(2, training=False))
    with pytest.raises(ModelError, match="checked in float64"):
        check_network(network, weights, np.zeros((1, 8, 8)), np.zeros(1, int), Dice(1))


def test_a_user_adds_a_layer_by_writing_a_class():
    spec = ModelSpec(
        name="m",
        input_shape=(3,),
        layers=(
            of("a", "dense", outputs=4),
            of("twice", "doubled"),
            of("b", "dense", outputs=2),
            of("loss", "softmax_cross_entropy"),
        ),
    )
    network = Network(spec, np.float64, layers=OWN_LAYERS)
    images, labels = draw(network, 3)

    check_network(network, network.initial_weights(Dice(1)), images, labels, Dice(2))


def test_networks_and_contexts_describe_themselves():
    network = Network(named_model("mnist-adam"))

    assert repr(network) == "<Network mnist-adam 298090 parameters, 756000 multiply-adds, float32 numpy>"
    assert repr(network.context(4)).startswith("<Context training 4 of 4 images")
    assert repr(network.layers[0]) == "<conv2d 'conv1' [1, 28, 28] to [10, 24, 24]>"


@pytest.mark.parametrize(
    "spec", [named_model(name) for name in ("mnist-adam", "digits", "cifar-conv")], ids=lambda s: s.name
)
def test_losses_and_gradients_equal_those_of_pytorch(spec):
    torch = pytest.importorskip("torch")
    network = Network(spec, np.float64)
    images, labels = draw(network, 4)
    weights = network.initial_weights(Dice(1))
    context = network.context(4)
    context.load(images, labels)
    loss = network.forward(weights, context)
    found = gradients(network, weights, context)

    tensors = {name: torch.tensor(value, requires_grad=True) for name, value in weights.items()}
    x = torch.tensor(images)
    for layer in spec.layers[:-1]:
        options, functional = dict(layer.options), torch.nn.functional
        weight, bias = (tensors.get(f"{layer.name}.{kind}") for kind in ("weight", "bias"))
        match layer.kind:
            case "conv2d":
                x = functional.conv2d(x, weight, bias, padding=options.get("padding", 0))
            case "dense":
                x = functional.linear(x, weight, bias)
            case "relu":
                x = functional.relu(x)
            case "max_pool":
                x = functional.max_pool2d(x, options["kernel"])
            case "average_pool":
                x = functional.avg_pool2d(x, options["kernel"])
            case "flatten":
                x = x.flatten(1)
    expected = torch.nn.functional.cross_entropy(x, torch.tensor(labels))
    expected.backward()

    assert loss == pytest.approx(expected.item(), rel=1e-10)
    for name, value in found.items():
        np.testing.assert_allclose(value, tensors[name].grad.numpy(), rtol=1e-8, atol=1e-12)


def test_a_model_of_absurd_size_is_refused_before_anything_is_made() -> None:
    huge = mlp((64, 50_000, 50_000, 10), input_shape=(1, 8, 8))
    with pytest.raises(SpecError, match=r"layer 'fc2' has 2500050000 parameters.*may have 2147483648"):
        Network(huge)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((1, 4, 5, 3), np.uint8), r"\[3, 4, 5\], not \[4, 5, 3\]; images\.transpose\(0, 3, 1, 2\)"),
        (np.zeros((1, 3, 5, 4), np.uint8), r"\[3, 4, 5\], not \[3, 5, 4\]$"),
        (np.full((1, 3, 4, 5), 255.0), "must lie between 0 and 1, not between 255 and 255: divide"),
        (np.full((1, 3, 4, 5), -0.5), "must lie between 0 and 1, not between -0.5 and -0.5"),
        (np.full((1, 3, 4, 5), np.nan), "some of their values are NaN"),
        (np.where(np.arange(60) == 9, np.nan, 0.5).reshape(1, 3, 4, 5), "some of their values are NaN"),
    ],
)
def test_images_of_another_layout_or_range_than_in_training_are_refused(images, message):
    network = Network(mlp((60, 3), input_shape=(3, 4, 5)))

    with pytest.raises(ModelError, match=message):
        network.predict(network.initial_weights(Dice(1)), images)


def test_one_image_has_one_score_in_every_layout_and_scale_that_is_taken():
    network = Network(mlp((20, 3), input_shape=(1, 4, 5)))
    weights = network.initial_weights(Dice(1))
    pixels = np.arange(0, 240, 12, dtype=np.uint8).reshape(1, 1, 4, 5)

    expected = network.scores(weights, pixels)
    for same in (pixels[:, 0], pixels.reshape(1, 4, 5, 1), pixels.reshape(1, 20), pixels / np.float32(255)):
        np.testing.assert_allclose(network.scores(weights, same), expected, rtol=1e-6)


class Scaled(Layer):
    """A user's layer: its input times one value, with a mistake in the method `at`."""

    def __init__(self, spec, input_shapes):
        super().__init__(spec, input_shapes)
        self.parameters = (self.tensor("weight", (1,), bound=1.0),)

    at: ClassVar[str] = ""

    def forward(self, weights, slots):
        self._fail("forward")

    def backward(self, weights, slots):
        self._fail("backward")

    def _fail(self, method):
        if method == self.at:
            raise ValueError("oops")


class Measured(Scaled):
    """A `Scaled` layer with a gradient."""

    def delta(self, slots, kind, out):
        out.fill(0)
        self._fail("delta")


def scaled_step(kind, kernels, rule):
    spec = ModelSpec(
        name="own",
        input_shape=(1, 2, 2),
        layers=(
            LayerSpec.of("flat", "flatten"),
            LayerSpec.of("fc", "dense", outputs=3),
            LayerSpec.of("scale1", "scale"),
            LayerSpec.of("loss", "softmax_cross_entropy"),
        ),
    )
    network = Network(spec, kernels=kernels, layers={**BUILTIN_LAYERS, "scale": kind})
    weights = network.initial_weights(Dice(1))
    context = network.context(2)
    context.load(np.zeros((2, 1, 2, 2), np.uint8), np.zeros(2, np.int64))
    train_step(
        network,
        weights,
        new_rule_state(network, rule),
        context,
        StepBuffers.of(network.trained, network.dtype),
        rule,
        rate=0.1,
    )


@pytest.mark.parametrize("rule", [Sgd(), Adagrad()], ids=repr)
@pytest.mark.parametrize("kernels", ["numpy", "auto"])
@pytest.mark.parametrize("method", ["forward", "backward", "delta"])
def test_a_layer_that_fails_is_named_with_its_method(method, kernels, rule, monkeypatch):
    monkeypatch.setattr(Scaled, "at", method)
    with pytest.raises(
        LayerFailed, match=rf"^layer 'scale1' \(scale\) failed in {method}: ValueError: oops$"
    ) as failure:
        scaled_step(Measured, kernels, rule)
    assert type(failure.value.__cause__) is ValueError


@pytest.mark.parametrize("kernels", ["numpy", "auto"])
def test_the_error_of_a_layer_without_a_gradient_names_the_method_to_add(kernels):
    with pytest.raises(ModelError, match=r"define a method delta\(slots, kind, out\) in class Scaled"):
        scaled_step(Scaled, kernels, Sgd())
