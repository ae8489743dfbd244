"""Every layer passes the finite-difference check, alone."""

import pytest

from adam_async.model import BUILTIN_LAYERS, GradientMismatchError, LayerSpec
from adam_async.model.gradcheck import check_layer
from adam_async.model.keyed_random import Dice
from tests.adam_async.model.layer_cases import CASES, IMAGE, kinds_of, labels_of


@pytest.mark.parametrize("kernels", ["numpy", "numba"])
@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize(("kind", "options", "shapes"), CASES)
def test_the_gradient_is_that_of_the_output(kind, options, shapes, images, kernels):
    layer = kinds_of(kernels)[kind](LayerSpec.of("it", kind, **options), shapes)

    check_layer(layer, Dice(1), images=images, labels=labels_of(kind, shapes[0], images))


def test_every_built_in_layer_is_checked():
    assert {kind for kind, _, _ in CASES} == set(BUILTIN_LAYERS)


def test_a_wrong_gradient_is_found():
    class WrongTanh(BUILTIN_LAYERS["tanh"]):
        def backward(self, weights, slots):
            super().backward(weights, slots)
            slots.input_errors[0][...] *= 1.001

    with pytest.raises(GradientMismatchError, match="it input 0"):
        check_layer(WrongTanh(LayerSpec.of("it", "tanh"), ((4,),)), Dice(1))


@pytest.mark.parametrize(
    ("kind", "options", "shape", "rows", "needed"),
    [
        ("conv2d", {"filters": 1, "kernel": 5}, (1, 28, 28), range(12), range(16)),
        ("conv2d", {"filters": 1, "kernel": 3, "padding": 1}, (1, 8, 8), range(4), range(5)),
        ("conv2d", {"filters": 1, "kernel": 3, "padding": 1}, (1, 8, 8), range(4, 8), range(3, 8)),
        ("conv2d", {"filters": 1, "kernel": 3, "stride": 2}, (1, 9, 9), range(1, 3), range(2, 7)),
        ("max_pool", {"kernel": 2}, (1, 8, 8), range(1, 3), range(2, 6)),
        ("max_pool", {"kernel": 2}, (1, 8, 8), range(0), range(0)),
        ("conv2d", {"filters": 1, "kernel": 1, "padding": 2}, (1, 8, 8), range(2), range(0)),
        ("relu", {}, (1, 8, 8), range(1, 3), range(1, 3)),
        ("relu", {}, (1, 8, 8), range(0), range(0)),
        ("dense", {"outputs": 5}, (7,), range(1, 3), range(7)),
        ("flatten", {}, (3, 7, 6), range(1, 3), range(7)),
        ("softmax_cross_entropy", {}, (5,), range(1), range(5)),
    ],
)
def test_layers_return_the_input_rows_that_a_block_needs(kind, options, shape, rows, needed):
    layer = BUILTIN_LAYERS[kind](LayerSpec.of("it", kind, **options), (shape,))

    assert layer.needs(rows) == needed


def test_joins_refuse_shapes_that_do_not_fit_and_name_them():
    for kind in ("add", "concatenate"):
        spec = LayerSpec.of("it", kind, inputs=("a", "b"))
        with pytest.raises(ValueError, match=r"a \[3, 7, 6\], b \[3, 6, 7\]"):
            BUILTIN_LAYERS[kind](spec, (IMAGE, (3, 6, 7)))
    with pytest.raises(ValueError, match="two or more inputs, but reads 1"):
        BUILTIN_LAYERS["add"](LayerSpec.of("it", "add", inputs=("a",)), (IMAGE,))
