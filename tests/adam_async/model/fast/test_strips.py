"""Backward of a convolution near its edges, for groups with images for whole vectors."""

import numpy as np
import pytest

pytest.importorskip("numba", reason="compiled kernels need numba")

from adam_async.model import LayerSpec, ModelSpec, Network
from adam_async.model.fast.sliding import LANES
from adam_async.model.keyed_random import Dice
from tests.adam_async.model.passes import error_of

of = LayerSpec.of


@pytest.mark.parametrize("images", [LANES - 1, LANES, 2 * LANES + 1])
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize(("kernel", "stride"), [(5, 1), (3, 2), (2, 3), (1, 2)])
def test_pixels_near_an_edge_get_the_errors_of_the_positions_that_read_them(kernel, stride, padding, images):
    layers = (
        of("first", "conv2d", filters=3, kernel=1),
        of("second", "conv2d", filters=4, kernel=kernel, stride=stride, padding=padding),
        of("flat", "flatten"),
        of("scores", "dense", outputs=5),
        of("loss", "softmax_cross_entropy"),
    )
    spec = ModelSpec(name="edges", input_shape=(2, 8, 9), layers=layers)
    x = Dice(1).normal("x", count=images * 2 * 8 * 9, dtype=float).reshape(images, 2, 8, 9)
    labels = np.arange(images) % 5
    found = {}
    for kernels in ("numpy", "numba"):
        network = Network(spec, np.float64, kernels=kernels)
        weights, context = network.initial_weights(Dice(2)), network.context(images)
        context.load(x, labels)
        network.forward(weights, context)
        network.backward(weights, context)
        found[kernels] = error_of(network, context, "first").copy()
    np.testing.assert_allclose(found["numba"], found["numpy"], rtol=1e-9, atol=1e-13)
    assert np.abs(found["numpy"]).max() > 0
