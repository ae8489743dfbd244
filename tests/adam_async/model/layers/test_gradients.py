"""Every layer passes the finite-difference check, alone."""

import numpy as np
import pytest

from adam_async.model import BUILTIN_LAYERS, GradientMismatchError, LayerSpec, Loss
from adam_async.model.gradcheck import check_layer
from adam_async.model.keyed_random import Dice

IMAGE = (3, 7, 6)

CASES = [
    ("conv2d", {"filters": 4, "kernel": 3}, (IMAGE,)),
    ("conv2d", {"filters": 4, "kernel": 3, "stride": 2}, (IMAGE,)),
    ("conv2d", {"filters": 2, "kernel": 3, "stride": 2, "padding": 1}, (IMAGE,)),
    ("conv2d", {"filters": 2, "kernel": 2, "stride": 3, "padding": 2}, (IMAGE,)),
    ("conv2d", {"filters": 5, "kernel": 1}, (IMAGE,)),
    ("max_pool", {"kernel": 2}, ((3, 6, 8),)),
    ("max_pool", {"kernel": 2}, (IMAGE,)),
    ("max_pool", {"kernel": 3, "stride": 2}, (IMAGE,)),
    ("max_pool", {"kernel": 2, "stride": 3}, (IMAGE,)),
    ("max_pool", {"kernel": 1}, (IMAGE,)),
    ("locally_connected", {"filters": 4, "kernel": 3}, (IMAGE,)),
    ("locally_connected", {"filters": 2, "kernel": 3, "stride": 2, "padding": 1}, (IMAGE,)),
    ("locally_connected", {"filters": 2, "kernel": 2, "stride": 3, "padding": 2}, (IMAGE,)),
    ("locally_connected", {"filters": 1, "kernel": 1}, (IMAGE,)),
    ("average_pool", {"kernel": 2}, ((3, 6, 8),)),
    ("average_pool", {"kernel": 3, "stride": 2}, (IMAGE,)),
    ("average_pool", {"kernel": 2, "stride": 3}, (IMAGE,)),
    ("average_pool", {"kernel": 1}, (IMAGE,)),
    ("dropout", {"rate": 0.3}, (IMAGE,)),
    ("dropout", {"rate": 0.0}, ((9,),)),
    ("local_response_norm", {"size": 3, "alpha": 0.5}, ((5, 4, 3),)),
    ("local_response_norm", {"size": 4, "alpha": 2, "beta": 0.5, "k": 2.0}, ((6, 2, 3),)),
    ("local_response_norm", {"size": 9, "alpha": 1.0}, (IMAGE,)),
    ("dense", {"outputs": 5}, ((7,),)),
    ("relu", {}, (IMAGE,)),
    ("relu", {}, ((9,),)),
    ("sigmoid", {}, (IMAGE,)),
    ("tanh", {}, ((9,),)),
    ("flatten", {}, (IMAGE,)),
    ("add", {}, (IMAGE, IMAGE, IMAGE)),
    ("concatenate", {}, (IMAGE, (1, 7, 6), IMAGE)),
    ("concatenate", {}, ((4,), (3,))),
    ("softmax_cross_entropy", {}, ((5,),)),
    ("softmax_cross_entropy", {"class_weights": (0.5, 2, 0, 1.0, 3)}, ((5,),)),
    ("mean_squared_error", {}, ((5,),)),
    ("mean_squared_error", {}, (IMAGE,)),
]


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize(("kind", "options", "shapes"), CASES)
def test_the_gradient_is_that_of_the_output(kind, options, shapes, images):
    layer = BUILTIN_LAYERS[kind](LayerSpec.of("it", kind, **options), shapes)
    labels = None
    if kind == "softmax_cross_entropy":
        labels = np.arange(images) % 5
    elif isinstance(layer, Loss):
        labels = Dice(2).normal("labels", count=images * int(np.prod(shapes[0])), dtype=float)
        labels = labels.reshape(images, *shapes[0])

    check_layer(layer, Dice(1), images=images, labels=labels)


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
