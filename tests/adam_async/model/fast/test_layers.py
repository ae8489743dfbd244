"""The compiled layers equal the NumPy ones at any shape."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba", reason="compiled kernels need numba")

from adam_async.model import BUILTIN_LAYERS, LayerSpec, ModelError, Slots
from adam_async.model.fast.layers import FAST_LAYERS
from adam_async.model.keyed_random import Dice
from tests.adam_async.model.layer_cases import CASES, labels_of

KINDS = {kind: FAST_LAYERS[layer] for kind, layer in BUILTIN_LAYERS.items() if layer in FAST_LAYERS}


def draw(name, shape, dtype):
    return Dice(3).normal(name, count=int(np.prod(shape)), dtype=dtype).reshape(shape)


def slots_of(layer, inputs, error):
    images = inputs[0].shape[-1]
    slots = Slots(
        images=images,
        inputs=inputs,
        output=np.empty((*layer.output_shape, images), inputs[0].dtype),
        output_error=error,
        input_errors=tuple(np.full_like(value, np.nan) for value in inputs),
        scratch={
            # Values of an earlier group must have no effect.
            name: np.full(shape, 7, dtype or inputs[0].dtype)
            for name, (shape, dtype) in layer.scratch(images).items()
        },
    )
    layer.prepare(slots)
    return slots


def make_ready(layer, slots, labels):
    if layer.DRAWS:
        layer.draw(slots, Dice(5), (1, 2))
    if labels is not None:
        layer.load_targets(slots, labels)


def passes(layer, inputs, error, weights, labels=None):
    """Outputs, input errors and gradients of one layer, by name."""
    slots = slots_of(layer, inputs, None if error is None else error.copy())
    make_ready(layer, slots, labels)
    layer.forward(weights, slots)
    layer.backward(weights, slots)
    errors = {f"input error {number}": value for number, value in enumerate(slots.input_errors)}
    found = {"output": slots.output, **errors}
    for parameter in layer.parameters:
        out = np.empty(parameter.shape, slots.output.dtype)
        layer.delta(slots, parameter.kind, out)
        found[parameter.name] = out
    return found


def check_equal(kind, options, shapes, images, dtype=np.float64):
    spec = LayerSpec.of("it", kind, **options)
    layers = BUILTIN_LAYERS[kind](spec, shapes), KINDS[kind](spec, shapes)
    inputs = tuple(draw(f"x{n}", (*shape, images), dtype) for n, shape in enumerate(shapes))
    labels, error = labels_of(kind, shapes[0], images), None
    if labels is None:
        error = draw("error", (*layers[0].output_shape, images), dtype)
    weights = {p.name: draw(p.name, p.shape, dtype) for p in layers[0].parameters}
    expected, found = (passes(layer, inputs, error, weights, labels) for layer in layers)
    close = {"rtol": 1e-10, "atol": 1e-11} if dtype == np.float64 else {"rtol": 2e-4, "atol": 2e-4}
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, err_msg=name, **close)


@pytest.mark.parametrize("images", [1, 3, 17])
@pytest.mark.parametrize(("kind", "options", "shapes"), CASES)
def test_a_compiled_layer_equals_the_numpy_layer(kind, options, shapes, images):
    check_equal(kind, options, shapes, images)
    check_equal(kind, options, shapes, images, np.float32)


def test_every_layer_of_the_package_has_compiled_kernels():
    assert set(FAST_LAYERS) == set(BUILTIN_LAYERS.values())


@settings(max_examples=80, deadline=None)
@given(
    channels=st.integers(1, 4),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    filters=st.integers(1, 14),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 4),
    padding=st.integers(0, 3),
    images=st.sampled_from([1, 2, 7, 16, 33]),
    kind=st.sampled_from(["conv2d", "locally_connected"]),
)
def test_sliding_kernels_of_any_shape_equal_the_numpy_ones(
    channels, height, width, filters, kernel, stride, padding, images, kind
):
    height, width = (max(size, kernel - 2 * padding) for size in (height, width))
    options = {"filters": filters, "kernel": kernel, "stride": stride, "padding": padding}
    check_equal(kind, options, ((channels, height, width),), images)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)),
    kernel=st.integers(1, 4),
    stride=st.integers(0, 5),
    images=st.sampled_from([1, 2, 7, 16, 33]),
)
def test_pools_of_any_shape_equal_the_numpy_ones(shape, kernel, stride, images):
    shape = (shape[0], max(shape[1], kernel), max(shape[2], kernel))
    for kind in ("max_pool", "average_pool"):
        check_equal(kind, {"kernel": kernel, "stride": stride}, (shape,), images)


@settings(max_examples=40, deadline=None)
@given(inputs=st.integers(1, 600), outputs=st.integers(1, 40), images=st.sampled_from([1, 2, 7, 16, 33, 300]))
def test_dense_layers_of_any_shape_equal_the_numpy_ones(inputs, outputs, images):
    check_equal("dense", {"outputs": outputs}, ((inputs,),), images)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 12), st.integers(1, 9), st.integers(1, 9)),
    size=st.integers(1, 14),
    beta=st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, 1.75, 2.0, 2.25, 0.6]),
    images=st.sampled_from([1, 7, 33]),
)
def test_response_norms_of_any_shape_and_power_equal_the_numpy_ones(shape, size, beta, images):
    check_equal("local_response_norm", {"size": size, "alpha": 0.5, "beta": beta}, (shape,), images)


@settings(max_examples=40, deadline=None)
@given(
    firsts=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    rest=st.sampled_from([(), (3, 2), (1, 7)]),
    images=st.sampled_from([1, 2, 17]),
)
def test_joins_of_any_shape_equal_the_numpy_ones(firsts, rest, images):
    check_equal("concatenate", {}, tuple((first, *rest) for first in firsts), images)


@settings(max_examples=40, deadline=None)
@given(
    features=st.integers(1, 70),
    images=st.sampled_from([1, 2, 7, 16, 33]),
    kind=st.sampled_from(["sigmoid", "tanh", "dropout", "relu", "mean_squared_error"]),
)
def test_elementwise_layers_equal_numpy_at_any_size(features, images, kind):
    check_equal(kind, {}, ((features,),), images)
    check_equal(kind, {}, ((features,),), images, np.float32)


def test_dropout_changes_nothing_in_evaluation():
    layer = KINDS["dropout"](LayerSpec.of("it", "dropout"), ((9,),))
    slots = slots_of(layer, (draw("x", (9, 4), float),), None)
    slots.training = False
    layer.forward({}, slots)

    np.testing.assert_array_equal(slots.output, slots.inputs[0])


def test_among_equal_values_the_same_one_receives_the_gradient():
    spec, shapes = LayerSpec.of("it", "max_pool", kernel=3, stride=2), ((2, 7, 7),)
    inputs = (np.round(draw("x", (2, 7, 7, 5), float)),)
    error = draw("error", (2, 3, 3, 5), float)
    expected, found = (
        passes(kind(spec, shapes), inputs, error, {})
        for kind in (BUILTIN_LAYERS["max_pool"], KINDS["max_pool"])
    )

    np.testing.assert_array_equal(found["input error 0"], expected["input error 0"])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("kind", "options", "shapes"), CASES)
def test_values_that_are_not_finite_are_not_hidden(kind, options, shapes, bad):
    spec = LayerSpec.of("it", kind, **options)
    inputs = tuple(draw(f"x{n}", (*shape, 3), np.float32) for n, shape in enumerate(shapes))
    inputs[0][0] = bad
    weights = {
        p.name: draw(p.name, p.shape, np.float32) for p in BUILTIN_LAYERS[kind](spec, shapes).parameters
    }
    outputs = []
    for layer in (BUILTIN_LAYERS[kind](spec, shapes), KINDS[kind](spec, shapes)):
        slots = slots_of(layer, inputs, None)
        make_ready(layer, slots, labels_of(kind, shapes[0], 3))
        with np.errstate(all="ignore"):
            layer.forward(weights, slots)
        outputs.append(slots.output)

    np.testing.assert_array_equal(np.isnan(outputs[1]), np.isnan(outputs[0]))
    np.testing.assert_array_equal(np.isinf(outputs[1]), np.isinf(outputs[0]))


def test_arrays_that_do_not_fit_are_refused_and_named():
    layer = KINDS["dense"](LayerSpec.of("it", "dense", outputs=5), ((7,),))
    slots = slots_of(layer, (draw("x", (7, 3), np.float32),), np.zeros((5, 3), np.float32))
    bias = np.zeros(5, np.float32)
    for wrong in (np.zeros((5, 7)), np.zeros((7, 5), np.float32), np.zeros((7, 5), np.float32).T):
        with pytest.raises(ModelError, match=r"'it\.weight' as a C-contiguous float32 array"):
            layer.forward({"it.weight": wrong, "it.bias": bias}, slots)
