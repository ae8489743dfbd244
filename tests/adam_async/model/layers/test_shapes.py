"""Layers of any shape, and networks of any form, have the gradients of their outputs (float64)."""

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from adam_async.model import BUILTIN_LAYERS, LayerSpec, ModelSpec, Network, SpecError
from adam_async.model.gradcheck import check_layer, check_network
from adam_async.model.keyed_random import Dice
from tests.adam_async.model.layer_cases import SQUARES, labels_of, windows

of = LayerSpec.of
KINKED = {"relu", "max_pool"}
"""Fixed examples: if a kink lies within the step of a finite difference, the check must fail."""

IMAGES = st.tuples(st.integers(1, 4), st.integers(1, 8), st.integers(1, 8))
ROWS = st.tuples(st.integers(1, 9))
WINDOWS = windows(filters=4, padding=3)
NORMS = st.fixed_dictionaries(
    {"size": st.integers(1, 7), "alpha": st.floats(0, 2), "beta": st.floats(0, 2), "k": st.floats(0.5, 2)}
)
RATES = st.fixed_dictionaries({"rate": st.floats(0, 0.9)})
NOTHING = st.just({})
SINGLE = {
    "conv2d": (WINDOWS, IMAGES),
    "locally_connected": (WINDOWS, IMAGES),
    "max_pool": (SQUARES, IMAGES),
    "average_pool": (SQUARES, IMAGES),
    "dense": (st.fixed_dictionaries({"outputs": st.integers(1, 6)}), ROWS),
    "relu": (NOTHING, IMAGES | ROWS),
    "sigmoid": (NOTHING, IMAGES | ROWS),
    "tanh": (NOTHING, IMAGES | ROWS),
    "dropout": (RATES, IMAGES | ROWS),
    "local_response_norm": (NORMS, IMAGES),
    "flatten": (NOTHING, IMAGES | ROWS),
    "softmax_cross_entropy": (NOTHING, ROWS),
    "mean_squared_error": (NOTHING, IMAGES | ROWS),
}


@st.composite
def lone_layers(draw, kinds):
    """Draw a layer with options that fit its shape, and labels for a loss."""
    kind = draw(st.sampled_from(kinds))
    options, shapes = SINGLE[kind]
    shape, chosen = draw(shapes), dict(draw(options))
    if kind == "softmax_cross_entropy" and draw(st.booleans()):
        chosen["class_weights"] = tuple(
            draw(st.lists(st.floats(0.1, 9), min_size=shape[0], max_size=shape[0]))
        )
    try:
        return BUILTIN_LAYERS[kind](of("it", kind, **chosen), (shape,))
    except SpecError:
        assume(False)


def check(layer, seed, images):
    labels = labels_of(layer.spec.kind, layer.input_shapes[0], images)
    check_layer(layer, Dice(seed), images=images, labels=labels, directions=1)


@settings(max_examples=150)
@given(layer=lone_layers(sorted(SINGLE.keys() - KINKED)), seed=st.integers(0, 999), images=st.integers(1, 4))
def test_smooth_layers_of_any_shape_have_the_gradient_of_their_output(layer, seed, images):
    check(layer, seed, images)


@settings(max_examples=40, derandomize=True)
@given(layer=lone_layers(sorted(KINKED)), images=st.integers(1, 4))
def test_kinked_layers_of_any_shape_have_the_gradient_of_their_output(layer, images):
    check(layer, 1, images)


UNARY = [
    ("tanh", {}),
    ("sigmoid", {}),
    ("dropout", {"rate": 0.25}),
    ("local_response_norm", {"size": 3, "alpha": 0.5}),
    ("conv2d", {"filters": 2, "kernel": 3, "padding": 1}),
    ("conv2d", {"filters": 3, "kernel": 1}),
    ("locally_connected", {"filters": 2, "kernel": 3, "padding": 1}),
    ("average_pool", {"kernel": 1}),
]


@st.composite
def graphs(draw):
    """Acyclic networks: each node reads any nodes before it; the end joins outputs without a reader."""
    channels, layers, unread = {"input": 2}, [], set()
    for number in range(draw(st.integers(1, 8))):
        name, known = f"n{number}", sorted(channels)
        action = draw(st.sampled_from(["unary", "unary", "add", "concatenate"]))
        if action == "unary":
            kind, options = draw(st.sampled_from(UNARY))
            inputs = [draw(st.sampled_from(known))]
            channels[name] = options.get("filters", channels[inputs[0]])
        else:
            kind, options, inputs = action, {}, draw(st.lists(st.sampled_from(known), min_size=2, max_size=3))
            if kind == "add":
                inputs = [source for source in inputs if channels[source] == channels[inputs[0]]]
                inputs = inputs if len(inputs) > 1 else inputs * 2
            total = sum(channels[source] for source in inputs)
            channels[name] = channels[inputs[0]] if kind == "add" else total
        layers.append(of(name, kind, inputs=tuple(inputs), **options))
        unread = (unread | {name}) - set(inputs)
    ends = sorted(unread)
    if len(ends) > 1:
        layers.append(of("all", "concatenate", inputs=tuple(ends)))
        ends = ["all"]
    layers += [
        of("flat", "flatten", inputs=tuple(ends)),
        of("out", "dense", outputs=3),
        of("loss", "softmax_cross_entropy", class_weights=(1, 2, 0.5)),
    ]
    return ModelSpec(name="graph", input_shape=(2, 3, 4), layers=tuple(layers))


@settings(max_examples=60)
@given(spec=graphs(), seed=st.integers(0, 999), images=st.integers(1, 3))
def test_networks_of_any_form_have_the_gradients_of_their_loss(spec, seed, images):
    network = Network(spec, np.float64)
    x = Dice(seed).normal("x", count=images * 24, dtype=float).reshape(images, 2, 3, 4)

    check_network(
        network,
        network.initial_weights(Dice(seed)),
        x,
        Dice(seed).permutation("labels", images) % 3,
        Dice(seed),
        directions=1,
    )
