"""Convolution equals the naive loops, for odd shapes, strides and padding."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adam_async.model import BUILTIN_LAYERS, LayerSpec, ModelSpec, Network, SpecError
from adam_async.model.gradcheck import lone_slots
from adam_async.model.keyed_random import Dice
from tests.adam_async.model.passes import output_of


def naive_convolution(x_BCHW, weights, bias, stride, padding):
    x = np.pad(x_BCHW, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    filters, _, kernel, _ = weights.shape
    rows, columns = ((size - kernel) // stride + 1 for size in x.shape[2:])
    y = np.empty((x.shape[0], filters, rows, columns))
    for row in range(rows):
        for column in range(columns):
            top, left = row * stride, column * stride
            patch = x[:, :, top : top + kernel, left : left + kernel]
            y[:, :, row, column] = np.einsum("bchw,ochw->bo", patch, weights) + bias
    return y


@settings(max_examples=60)
@given(
    channels=st.integers(1, 3),
    height=st.integers(3, 9),
    width=st.integers(3, 9),
    filters=st.integers(1, 4),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 4),
    padding=st.integers(0, 3),
    images=st.integers(1, 4),
)
def test_convolution_equals_the_naive_loops(
    channels, height, width, filters, kernel, stride, padding, images
):
    spec = ModelSpec(
        name="it",
        input_shape=(channels, height, width),
        layers=(
            LayerSpec.of("conv", "conv2d", filters=filters, kernel=kernel, stride=stride, padding=padding),
            LayerSpec.of("loss", "mean_squared_error"),
        ),
    )
    network = Network(spec, np.float64)
    weights = network.initial_weights(Dice(1))
    weights["conv.bias"][...] = np.arange(filters)
    x = Dice(2).normal("x", count=images * channels * height * width, dtype=float)
    x = x.reshape(images, *spec.input_shape)
    context = network.context(4)
    context.load(x)
    network.forward_layers(weights, context, range(1))

    expected = naive_convolution(x, weights["conv.weight"], weights["conv.bias"], stride, padding)
    np.testing.assert_allclose(output_of(network, context, "conv"), expected, rtol=1e-12, atol=1e-12)


OPTIONS = {"filters": 3, "kernel": 3, "stride": 2, "padding": 1}
SHAPE = (2, 7, 6)


def layer_of(kind, shape=SHAPE, **options):
    return BUILTIN_LAYERS[kind](LayerSpec.of("it", kind, **{**OPTIONS, **options}), (shape,))


def test_with_equal_weights_everywhere_it_is_a_convolution():
    local, convolution = layer_of("locally_connected"), layer_of("conv2d")
    x = Dice(1).normal("x", count=2 * 7 * 6 * 4, dtype=float).reshape(*SHAPE, 4)
    weight = Dice(1).normal("w", count=3 * 18, dtype=float).reshape(3, 2, 3, 3)
    bias = np.arange(3.0)
    pixels = local.output_shape[1:]
    spread = np.ascontiguousarray(np.broadcast_to(weight[:, None, None], local.parameters[0].shape))
    everywhere = np.ascontiguousarray(np.broadcast_to(bias[:, None, None], (3, *pixels)))
    found, expected = lone_slots(local, [x]), lone_slots(convolution, [x])

    local.forward({"it.weight": spread, "it.bias": everywhere}, found)
    convolution.forward({"it.weight": weight, "it.bias": bias}, expected)

    np.testing.assert_allclose(found.output, expected.output, rtol=1e-12, atol=1e-12)


def test_each_pixel_reads_its_own_weights_only():
    local = layer_of("locally_connected")
    slots = lone_slots(local, [np.ones((*SHAPE, 1))])
    weights = {p.name: np.zeros(p.shape) for p in local.parameters}
    weights["it.weight"][1, 2, 0] = 1
    local.forward(weights, slots)

    (touched,) = np.argwhere(slots.output)
    assert touched.tolist() == [1, 2, 0, 0]


def test_it_states_shape_parameters_and_multiply_adds():
    local = layer_of("locally_connected")

    assert local.output_shape == (3, 4, 3)
    assert [p.shape for p in local.parameters] == [(3, 4, 3, 2, 3, 3), (3, 4, 3)]
    assert local.multiply_adds == local.parameters[0].size
    assert local.needs(range(1, 3)) == range(1, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"filters": 0}, "option 'filters' must be a whole number of at least 1, not 0"),
        ({"kernel": 12}, "a kernel of 12 does not fit an input of 7x6 padded by 1"),
        ({"stride": 1.5}, r"option 'stride' must be a whole number of at least 1, not 1\.5"),
        ({"padding": -1}, "option 'padding' must be a whole number of at least 0, not -1"),
        ({"init": "best"}, "option 'init' must be one of he, lecun, zero, not 'best'"),
        ({"groups": 2}, "unknown option 'groups'; known options: filters, kernel, stride, padding, init"),
    ],
)
@pytest.mark.parametrize("kind", ["conv2d", "locally_connected"])
def test_options_that_do_not_fit_are_refused_by_name(kind, options, message):
    with pytest.raises(SpecError, match=rf"layer 'it' \({kind}\): {message}"):
        layer_of(kind, **options)
