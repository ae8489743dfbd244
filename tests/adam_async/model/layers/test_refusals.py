"""Refusals name the layer, the wrong value and the values that are allowed."""

import pytest

from adam_async.model import BUILTIN_LAYERS, LayerSpec, ModelError, SpecError

IMAGE = (3, 4, 5)
JOINS = {kind for kind, layer in BUILTIN_LAYERS.items() if layer.NUM_INPUTS is None}
REQUIRED = {
    kind: {name: 1 for name, default in layer.OPTIONS.items() if default is None}
    for kind, layer in BUILTIN_LAYERS.items()
}


def fitting(kind):
    """Make a layer of this kind, with an input that fits it."""
    for shapes in ((IMAGE,), ((6,),), (IMAGE, IMAGE)):
        try:
            return BUILTIN_LAYERS[kind](LayerSpec.of("it", kind, **REQUIRED[kind]), shapes)
        except SpecError:
            continue
    raise AssertionError(f"no shape fits {kind}")


@pytest.mark.parametrize("kind", BUILTIN_LAYERS)
def test_unknown_options_are_refused_and_the_known_ones_named(kind):
    known = ", ".join(BUILTIN_LAYERS[kind].OPTIONS) or "none"
    with pytest.raises(
        SpecError, match=rf"layer 'it' \({kind}\): unknown option 'size_of'.*options: {known}$"
    ):
        BUILTIN_LAYERS[kind](LayerSpec.of("it", kind, size_of=3), (IMAGE,))


@pytest.mark.parametrize("kind", sorted(kind for kind, options in REQUIRED.items() if options))
def test_a_missing_option_is_named(kind):
    name = next(iter(REQUIRED[kind]))
    with pytest.raises(SpecError, match=rf"layer 'it' \({kind}\): option '{name}' is missing"):
        BUILTIN_LAYERS[kind](LayerSpec.of("it", kind), (IMAGE,))


@pytest.mark.parametrize("kind", sorted(BUILTIN_LAYERS.keys() - JOINS))
def test_layers_of_one_input_refuse_two(kind):
    spec = LayerSpec.of("it", kind, inputs=("a", "b"), **REQUIRED[kind])
    with pytest.raises(SpecError, match=rf"layer 'it' \({kind}\): needs 1 input, but reads 2: a, b"):
        BUILTIN_LAYERS[kind](spec, (IMAGE, IMAGE))


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        ("dense", IMAGE, r"needs a flat input, not \[3, 4, 5\]; put a flatten layer before it"),
        ("softmax_cross_entropy", IMAGE, r"needs one score per class, not an input of \[3, 4, 5\]"),
        *(
            (kind, (6,), r"needs an input of \[channels, height, width\], not \[6\]")
            for kind in ("conv2d", "locally_connected", "max_pool", "average_pool", "local_response_norm")
        ),
    ],
)
def test_an_input_of_the_wrong_form_is_refused(kind, shape, message):
    with pytest.raises(SpecError, match=rf"layer 'it' \({kind}\): {message}"):
        BUILTIN_LAYERS[kind](LayerSpec.of("it", kind, **REQUIRED[kind]), (shape,))


@pytest.mark.parametrize("value", [0, -3, 2.0, True, "5", (5,)])
def test_a_number_of_outputs_is_a_whole_number_of_at_least_one(value):
    with pytest.raises(SpecError, match="option 'outputs' must be a whole number of at least 1, not "):
        BUILTIN_LAYERS["dense"](LayerSpec.of("it", "dense", outputs=value), ((6,),))


@pytest.mark.parametrize("kind", BUILTIN_LAYERS)
def test_a_gradient_of_no_parameter_is_refused(kind):
    layer = fitting(kind)
    with pytest.raises(ModelError, match="layer 'it' has no parameter of kind 'slope'"):
        layer.delta(None, "slope", None)
