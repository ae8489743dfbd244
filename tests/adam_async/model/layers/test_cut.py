"""Layers cut into blocks compute together the results of the whole layer, forward and backward."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from adam_async.model import BUILTIN_LAYERS, Layer, LayerSpec, ModelError, ParameterSpec, SpecError
from adam_async.model.gradcheck import lone_slots
from adam_async.model.keyed_random import Dice
from adam_async.model.layer import extent
from tests.adam_async.model.layer_cases import SQUARES, kinds_of, windows

IMAGES = st.tuples(st.integers(1, 4), st.integers(2, 11), st.integers(1, 6))
ROWS = st.tuples(st.integers(2, 30))
WINDOWS = windows(filters=9, padding=4)
NORMS = st.fixed_dictionaries({"size": st.integers(1, 7), "alpha": st.floats(0, 2), "beta": st.floats(0, 2)})
NOTHING = st.just({})
CUTTABLE = {
    "conv2d": (WINDOWS, IMAGES),
    "locally_connected": (WINDOWS, IMAGES),
    "max_pool": (SQUARES, IMAGES),
    "average_pool": (SQUARES, IMAGES),
    "dense": (st.fixed_dictionaries({"outputs": st.integers(2, 30)}), ROWS),
    "relu": (NOTHING, IMAGES | ROWS),
    "sigmoid": (NOTHING, IMAGES | ROWS),
    "tanh": (NOTHING, IMAGES | ROWS),
    "dropout": (st.fixed_dictionaries({"rate": st.floats(0, 0.9)}), IMAGES | ROWS),
    "local_response_norm": (NORMS, IMAGES),
    "add": (NOTHING, IMAGES | ROWS),
    "concatenate": (NOTHING, IMAGES),
}
WHOLE = {
    "flatten": ((3, 7, 6),),
    "concatenate": ((4,), (3,)),
    "softmax_cross_entropy": ((5,),),
    "mean_squared_error": ((3, 7, 6),),
}
EXACT = {*CUTTABLE} - {"conv2d", "locally_connected", "dense"}
"""Kinds of layers with the same bits when cut; products of matrices may add up in another order."""


def layer_of(kind, *shapes, kernels="numpy", **options):
    return kinds_of(kernels)[kind](LayerSpec.of("it", kind, **options), shapes)


@st.composite
def described(draw, kind):
    """Options and input shapes of a layer of this kind, and the cuts of its output."""
    options, shapes = CUTTABLE[kind]
    shape, chosen = draw(shapes), draw(options)
    more = draw(st.integers(1, 2)) if kind in ("add", "concatenate") else 0
    shapes = (shape,) * (1 + more)
    if kind == "concatenate":
        shapes = (shape, *((draw(st.integers(1, 3)), *shape[1:]) for _ in range(more)))
    try:
        size = extent(layer_of(kind, *shapes, **chosen).output_shape)
    except SpecError:
        assume(False)
    assume(size > 1)
    ends = draw(st.sets(st.integers(1, size - 1), min_size=1, max_size=3))
    bounds = [0, *sorted(ends), size]
    return chosen, shapes, [range(*ends) for ends in pairwise(bounds)]


def part(array, block):
    """Block of an activation, batch last: rows of an image, or features."""
    return (
        (slice(None), slice(block.start, block.stop)) if array.ndim == 4 else slice(block.start, block.stop)
    )


def numbers(name, shape):
    return Dice(3).normal(name, count=int(np.prod(shape)), dtype=float).reshape(shape)


def passes(layer, inputs, error, weights):
    """Output, input errors and gradients of a layer by name, with factors multiplied."""
    slots = lone_slots(layer, inputs)
    for array in (*slots.scratch.values(), slots.output, *slots.input_errors):
        array.fill(7)  # values of an earlier group must have no effect
    if layer.DRAWS:
        layer.draw(slots, Dice(5), (1, 2))
    layer.forward(weights, slots)
    slots.error[...] = error
    layer.backward(weights, slots)
    gradients = {}
    for parameter in layer.parameters:
        gradients[parameter.name] = out = np.full(parameter.shape, 7.0)
        layer.delta(slots, parameter.kind, out)
        factors = layer.factors(slots, parameter.kind)
        if factors is not None:
            np.testing.assert_allclose(factors[1].T @ factors[0], out, rtol=1e-9, atol=1e-12)
    return slots.output, slots.input_errors, gradients


def check_blocks(layer, blocks, images):
    inputs = [numbers(f"x{n}", (*shape, images)) for n, shape in enumerate(layer.input_shapes)]
    error = numbers("error", (*layer.output_shape, images))
    weights = {p.name: numbers(p.name, p.shape) for p in layer.parameters}
    output, input_errors, gradients = passes(layer, inputs, error, weights)
    outputs, pieces = [], []
    error_sums = [np.zeros_like(value) for value in inputs]
    found = {name: np.zeros_like(value) for name, value in gradients.items()}
    for block in blocks:
        piece = layer.cut(block)
        needed = [layer.needs(block, position) for position in range(len(inputs))]
        read = [np.ascontiguousarray(x[part(x, rows)]) for x, rows in zip(inputs, needed, strict=True)]
        assert [value.shape[:-1] for value in read] == list(piece.input_shapes)
        rows = {p.name: slice(p.first_row, p.first_row + p.shape[0]) for p in piece.parameters}
        held = {name: weights[name][kept] for name, kept in rows.items()}
        result, errors, deltas = passes(piece, read, error[part(error, block)], held)
        assert result.shape[:-1] == piece.output_shape
        for total, value, taken in zip(error_sums, errors, needed, strict=True):
            total[part(total, taken)] += value
        for name, value in deltas.items():
            found[name][rows[name]] += value
        outputs.append(result)
        pieces.append(piece)
    joined = np.concatenate(outputs, axis=1 if output.ndim == 4 else 0)
    if layer.spec.kind in EXACT:
        np.testing.assert_array_equal(joined, output)
    close = {"rtol": 1e-9, "atol": 1e-11}
    np.testing.assert_allclose(joined, output, **close)
    for total, value in zip(error_sums, input_errors, strict=True):
        np.testing.assert_allclose(total, value, **close)
    for name, value in gradients.items():
        np.testing.assert_allclose(found[name], value, err_msg=name, **close)
    assert sum(piece.multiply_adds for piece in pieces) == layer.multiply_adds


@pytest.mark.thorough
@pytest.mark.parametrize("kernels", ["numpy", "numba"])
@pytest.mark.parametrize("kind", CUTTABLE)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), images=st.sampled_from([1, 2, 5, 17]))
def test_blocks_computed_alone_make_the_whole_layer(kernels, kind, data, images):
    options, shapes, blocks = data.draw(described(kind))

    check_blocks(layer_of(kind, *shapes, kernels=kernels, **options), blocks, images)


@pytest.mark.parametrize("kernels", ["numpy", "numba"])
@pytest.mark.parametrize("kind", CUTTABLE)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_a_cut_layer_can_be_cut_again(kernels, kind, data):
    options, shapes, blocks = data.draw(described(kind))
    layer = layer_of(kind, *shapes, kernels=kernels, **options)
    outer = range(blocks[0].start, blocks[-1].stop - 1)
    inner = range(len(outer) - 1, len(outer))
    assume(len(outer) < blocks[-1].stop)

    once, twice = layer.cut(range(outer.stop - 1, outer.stop)), layer.cut(outer).cut(inner)

    assert vars(once) == vars(twice)


@pytest.mark.parametrize("kernels", ["numpy", "numba"])
@pytest.mark.parametrize("kind", BUILTIN_LAYERS)
def test_the_class_decides_the_cut_and_the_whole_is_the_layer_itself(kind, kernels):
    shapes = {"add": ((3, 7, 6),) * 2, "dense": ((7,),)} | WHOLE
    options = {"dense": {"outputs": 5}, "max_pool": {"kernel": 2}, "average_pool": {"kernel": 2}}
    options |= {sliding: {"filters": 2, "kernel": 3} for sliding in ("conv2d", "locally_connected")}
    layer = layer_of(kind, *shapes.get(kind, ((3, 7, 6),)), kernels=kernels, **options.get(kind, {}))
    before = dict(vars(layer))

    if kind in WHOLE:
        assert layer.cut_by == "whole"
    else:
        assert layer.cut_by == layer.CUT
        assert layer.cut(range(1, 3)).name == layer.name
    assert layer.moves == (kind in ("flatten", "concatenate"))
    assert layer.partial == (kind in ("conv2d", "locally_connected"))
    assert layer.cut(range(extent(layer.output_shape))) is layer
    assert vars(layer) == before


def test_images_joined_by_channels_are_cut_by_rows_and_sent():
    layer = layer_of("concatenate", (1, 5, 2), (3, 5, 2))

    assert (layer.cut_by, layer.moves) == ("rows", False)
    assert layer.needs(range(1, 3), 1) == range(1, 3)


@pytest.mark.parametrize(("kind", "shapes"), WHOLE.items())
def test_a_layer_that_may_not_be_cut_needs_all_of_every_input(kind, shapes):
    layer = layer_of(kind, *shapes)

    for position, shape in enumerate(shapes):
        assert layer.needs(range(1), position) == range(extent(shape))
        assert layer.needs(range(0), position) == range(0)
    if extent(layer.output_shape) > 1:
        with pytest.raises(ModelError, match=rf"'it' \({kind}\) may not be cut, but range\(0, 1\)"):
            layer.cut(range(1))


def test_a_users_layer_is_not_cut_unless_it_names_its_cut():
    class Own(Layer):
        forward = backward = None

    layer = Own(LayerSpec.of("it", "own"), ((4, 6, 2),))

    assert (layer.cut_by, layer.moves, layer.partial) == ("whole", False, False)
    with pytest.raises(ModelError, match=r"'it' \(own\) may not be cut"):
        layer.cut(range(2))


@pytest.mark.parametrize(
    "block", [range(0), range(2, 2), range(5, 8), range(-1, 2), range(0, 4, 2), range(7, 9)]
)
def test_blocks_that_are_empty_or_outside_are_refused(block):
    for layer in (layer_of("relu", (3, 7, 6)), layer_of("dense", (4,), outputs=7)):
        with pytest.raises(ModelError, match=r"'it' .* is no block of its output .* 0 to 6"):
            layer.cut(block)


def test_convolutions_are_padded_at_the_borders_of_the_image_only():
    layer = layer_of("conv2d", (3, 9, 5), filters=2, kernel=3, padding=1)
    pieces = [layer.cut(block) for block in (range(3), range(3, 6), range(6, 9))]

    assert [piece.input_shapes[0] for piece in pieces] == [(3, 4, 5), (3, 5, 5), (3, 4, 5)]
    assert [(piece.top, piece.bottom) for piece in pieces] == [(1, 0), (0, 0), (0, 1)]
    assert all(piece.parameters == layer.parameters for piece in pieces)


def test_rows_that_read_only_padding_need_nothing_of_the_image():
    layer = layer_of("conv2d", (1, 2, 2), filters=1, kernel=2, padding=3)

    assert [len(layer.needs(range(row, row + 1))) for row in range(7)] == [0, 0, 1, 2, 1, 0, 0]
    check_blocks(layer, [range(2), range(2, 6), range(6, 7)], 3)


def test_a_cut_dense_layer_has_rows_of_the_weights_and_their_start_values():
    layer = layer_of("dense", (6,), outputs=9)
    piece = layer.cut(range(4, 7))

    assert [(p.name, p.shape, p.first_row, p.of_rows) for p in piece.parameters] == [
        ("it.weight", (3, 6), 4, 9),
        ("it.bias", (3,), 4, 9),
    ]
    whole, rows = (
        of.parameters[0].initial_values(Dice(1), 0, of.output_shape[0], np.dtype(float))
        for of in (layer, piece)
    )
    np.testing.assert_array_equal(rows, whole[4:7])
    assert [(p.first_row, p.of_rows) for p in layer.parameters] == [(0, 0), (0, 0)]


def test_rows_of_rows_of_a_tensor_are_counted_from_the_whole():
    whole = ParameterSpec(name="it.weight", shape=(9, 2), layer="it", kind="weight", bound=1.0)

    assert whole.rows(range(2, 8)).rows(range(1, 3)) == whole.rows(range(3, 5))


@pytest.mark.parametrize(("shape", "size"), [((3, 7, 6), 7), ((4,), 4), ((), 1)])
def test_extent_counts_rows_of_images_and_features(shape, size):
    assert extent(shape) == size
