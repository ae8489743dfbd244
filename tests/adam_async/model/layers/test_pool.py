"""Pooling equals the naive loops; max pooling gives each gradient to exactly one input."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adam_async.model import BUILTIN_LAYERS, LayerSpec, ModelSpec, Network, SpecError
from adam_async.model.gradcheck import lone_slots
from adam_async.model.keyed_random import Dice
from tests.adam_async.model.passes import error_of, output_of


def pooled(x_BCHW, kernel, stride):
    spec = ModelSpec(
        name="it",
        input_shape=x_BCHW.shape[1:],
        layers=(
            LayerSpec.of("conv", "conv2d", filters=x_BCHW.shape[1], kernel=1),
            LayerSpec.of("pool", "max_pool", kernel=kernel, stride=stride),
            LayerSpec.of("loss", "mean_squared_error"),
        ),
    )
    network = Network(spec, np.float64)
    channels = x_BCHW.shape[1]
    weights = {
        "conv.weight": np.eye(channels).reshape(channels, channels, 1, 1),
        "conv.bias": np.zeros(channels),
    }
    context = network.context(x_BCHW.shape[0])
    context.load(x_BCHW)
    network.forward_layers(weights, context, range(2))
    return network, weights, context


@settings(max_examples=60)
@given(
    height=st.integers(3, 9),
    width=st.integers(3, 9),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 4),
    images=st.integers(1, 3),
    few=st.booleans(),
)
def test_max_pooling_equals_the_naive_loops_both_ways(height, width, kernel, stride, images, few):
    x = Dice(2).normal("x", count=images * 2 * height * width, dtype=float).reshape(images, 2, height, width)
    if few:  # many equal values
        x = np.round(x)
    network, weights, context = pooled(x, kernel, stride)
    y = output_of(network, context, "pool")
    error = error_of(network, context, "pool")
    error[...] = Dice(3).normal("e", count=error.size, dtype=float).reshape(error.shape)
    kept = error.copy()
    network.backward_layers(weights, context, range(1, 2))

    expected_y, expected_error = np.empty(y.shape), np.zeros(x.shape)
    for index in np.ndindex(y.shape):
        image, channel, row, column = index
        top, left = row * stride, column * stride
        patch = x[image, channel, top : top + kernel, left : left + kernel]
        expected_y[index] = patch.max()
        across, down = divmod(int(patch.T.argmax()), kernel)  # leftmost column first, topmost row in it
        expected_error[image, channel, top + down, left + across] += kept[index]
    np.testing.assert_array_equal(y, expected_y)
    np.testing.assert_allclose(error_of(network, context, "conv"), expected_error, rtol=1e-12, atol=1e-12)


@given(
    height=st.integers(3, 9),
    width=st.integers(3, 9),
    kernel=st.integers(1, 3),
    stride=st.integers(0, 4),
    images=st.integers(1, 3),
)
def test_average_pooling_equals_the_naive_loops(height, width, kernel, stride, images):
    x = Dice(2).normal("x", count=2 * height * width * images, dtype=float).reshape(2, height, width, images)
    spec = LayerSpec.of("it", "average_pool", kernel=kernel, stride=stride)
    layer = BUILTIN_LAYERS["average_pool"](spec, (x.shape[:3],))
    slots, step = lone_slots(layer, [x]), stride or kernel
    layer.forward({}, slots)

    rows, columns = (range(0, size - kernel + 1, step) for size in (height, width))
    expected = np.array(
        [
            [x[:, top : top + kernel, left : left + kernel].mean(axis=(1, 2)) for left in columns]
            for top in rows
        ]
    )
    np.testing.assert_allclose(slots.output, expected.transpose(2, 0, 1, 3), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": 0}, "option 'kernel' must be a whole number of at least 1, not 0"),
        ({"kernel": 2, "stride": -1}, "option 'stride' must be a whole number of at least 0, not -1"),
        ({}, "option 'kernel' is missing; known options: kernel, stride"),
        ({"kernel": 6}, "a kernel of 6 does not fit an input of 4x7"),
    ],
)
@pytest.mark.parametrize("kind", ["average_pool", "max_pool"])
def test_options_that_do_not_fit_are_refused_by_name(kind, options, message):
    with pytest.raises(SpecError, match=rf"layer 'it' \({kind}\): {message}"):
        BUILTIN_LAYERS[kind](LayerSpec.of("it", kind, **options), ((1, 4, 7),))
