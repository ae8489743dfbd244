"""A locally connected layer is a convolution with separate weights at every output pixel."""

import numpy as np
import pytest

from adam_async.model import BUILTIN_LAYERS, LayerSpec, SpecError
from adam_async.model.gradcheck import lone_slots
from adam_async.model.keyed_random import Dice

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
    spread = np.ascontiguousarray(
        np.broadcast_to(weight[:, None, None], local.parameters[0].shape),
    )
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


@pytest.mark.parametrize("kind", ["conv2d", "locally_connected"])
def test_flat_inputs_are_refused(kind):
    with pytest.raises(SpecError, match=r"needs an input of \[channels, height, width\], not \[9\]"):
        layer_of(kind, (9,))
