"""Convolution equals the naive loops, for odd shapes, strides and padding."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from adam_async.model import LayerSpec, ModelSpec, Network
from adam_async.model.keyed_random import Dice


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
    np.testing.assert_allclose(context.output("conv"), expected, rtol=1e-12, atol=1e-12)
