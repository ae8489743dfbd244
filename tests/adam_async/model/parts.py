"""All parts of a cut network in one thread, segment by segment; and networks of any form to cut."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from hypothesis import strategies as st

from adam_async.model import BUILTIN_LAYERS, Layer, LayerSpec, ModelError, ModelSpec, Network, SpecError
from adam_async.model.keyed_random import Dice
from adam_async.model.partition.network import Partition
from adam_async.model.partition.plan import Layout
from adam_async.model.partition.planner import layers_plan, vertical_plan
from tests.adam_async.model.passes import gradients_of

of = LayerSpec.of
DICE, KEYS = Dice(4), (1, 2)


class Mirror(Layer):
    """A user's layer that names no cut: reverses the order of rows or features."""

    def forward(self, weights, slots):
        np.copyto(slots.output, np.flip(slots.inputs[0], axis=slots.output.ndim // 4))

    def backward(self, weights, slots):
        np.copyto(slots.input_errors[0], np.flip(slots.error, axis=slots.error.ndim // 4))


KINDS = {**BUILTIN_LAYERS, "mirror": Mirror}


def network_of(spec, kernels="numpy", dtype=np.float64):
    """Make a network that may have a `Mirror`; skips the test if the kernels are missing."""
    if kernels == "numba":
        pytest.importorskip("numba", reason="compiled kernels need numba")
    return Network(spec, dtype, kernels=kernels, layers=KINDS)


def layout_of(network, plan):
    """Derive the layout of a plan."""
    return Layout(network.topology, network.input_shape, plan)


def plans_of(network, workers):
    """Make all kinds of plans that exist for this number of workers, by name."""
    makers = {halo: partial(vertical_plan, halo=halo) for halo in ("exchange", "recompute", "auto")}
    found = {}
    for name, make in {**makers, "layers": layers_plan}.items():
        try:
            found[name] = make(network, workers)
        except ModelError as error:
            if workers == 1 or "use fewer partitions" not in str(error):
                raise
    return found


def group_of(network, images, seed=1):
    """Draw images, and targets for the loss."""
    shape = (images, *network.spec.input_shape)
    x = Dice(seed).normal("x", count=int(np.prod(shape)), dtype=float).reshape(shape).astype(network.dtype)
    loss = network.layers[-1]
    if loss.spec.kind == "softmax_cross_entropy":
        return x, Dice(seed).permutation("labels", images) % loss.input_shapes[0][0]
    shape = (images, *loss.input_shapes[0])
    return x, Dice(seed).normal("labels", count=int(np.prod(shape)), dtype=float).reshape(shape)


def weights_of(network, seed=1):
    """Draw start values without zeros: a bias of 0 hides a worker that adds it twice."""
    weights = network.initial_weights(Dice(seed))
    for name, value in weights.items():
        if not np.any(value):
            value[...] = Dice(seed).uniform("bias", keys=(name,), count=value.size).reshape(value.shape)
    return weights


@dataclass
class Found:
    """Results of a group, from the uncut network or from all parts together."""

    loss: float
    gradients: dict
    errors: dict
    """Error gradients of outputs by the numbers of their layers, if no other layer uses their memory."""


def run_whole(network, weights, images, labels):
    """Compute the results of the uncut network."""
    context = network.context(len(images))
    context.load(images, labels, dice=DICE, keys=KEYS)
    loss = network.forward(weights, context)
    network.backward(weights, context)
    return Found(loss, gradients_of(network, context), _errors(network, context))


def _errors(network, context):
    return {
        number: context.slots(number).error
        for number, shared in enumerate(network.topology.shares)
        if not shared and context.slots(number).output_error is not None
    }


class Parts:
    """All parts of a cut network.

    Args:
        network: The whole network.
        plan: Cut of the network.
        weights: Weights of the whole.
    """

    def __init__(self, network, plan, weights):
        self.whole = network
        self.parts = [Partition(network, plan, worker) for worker in range(plan.workers)]
        self.layout = self.parts[0].layout
        self.weights = [
            {p.name: weights[p.name][_rows_of(p)].copy() for p in part.network.parameters}
            for part in self.parts
        ]

    def contexts(self, images):
        """Make a context per part, for up to this number of images."""
        return [part.network.context(images) for part in self.parts]

    def cut(self, images):
        """Cut out the rows that each part reads; None for a part that reads none."""
        found = []
        for rows in self.layout.input_rows:
            cut = slice(rows.start, rows.stop)
            mine = images[:, :, cut] if images.ndim == 4 else images[:, cut]
            found.append(np.ascontiguousarray(mine) if rows else None)
        return found

    def load(self, contexts, cut, labels):
        """Load each part's rows, and the labels."""
        for context, images in zip(contexts, cut, strict=True):
            context.load(images, labels, dice=DICE, keys=KEYS)

    def arrays(self, images):
        """Make an array per crossing."""
        shape_of = self.parts[0].wire_shape
        return {c.number: np.empty(shape_of(c, images), self.whole.dtype) for c in self.layout.crossings}

    def run_segments(self, contexts, wires, choose=min, trace=None):
        """Run every segment after the arrival of its crossings.

        Args:
            contexts: Contexts with the group.
            wires: Arrays from `arrays`.
            choose: Picks one of the workers that can run.
            trace: Called with worker, segment and wires after each segment.
        """
        arrived, at = set(), [0] * len(self.parts)
        while ready := self._ready(at, arrived):
            worker = choose(ready)
            part = self.parts[worker]
            segment = part.segments[at[worker]]
            at[worker] += 1
            mine = {number: wires[number] for number in (*segment.receives, *segment.sends)}
            part.run(self.weights[worker], contexts[worker], segment, mine)
            assert arrived.isdisjoint(segment.sends), "something is sent twice"
            arrived.update(segment.sends)
            if trace is not None:
                trace(worker, segment, wires)
        assert at == [len(part.segments) for part in self.parts], "no worker can run"
        assert arrived == {c.number for c in self.layout.crossings if c.kind != "gradient"}

    def _ready(self, at, arrived):
        return [
            worker
            for worker, part in enumerate(self.parts)
            if at[worker] < len(part.segments) and arrived.issuperset(part.segments[at[worker]].receives)
        ]

    def run(self, images, labels, choose=min, contexts=None):
        """Run one group. Received arrays are overwritten after each segment, as a link's buffers are."""
        contexts = contexts or self.contexts(len(images))
        wires = self.arrays(len(images))
        for array in wires.values():
            array.fill(np.nan)

        def lose(worker, segment, wires):
            for number in segment.receives:
                wires[number].fill(np.nan)

        self.load(contexts, self.cut(images), labels)
        self.run_segments(contexts, wires, choose, lose)
        losses = [
            part.network.loss(context)
            for part, context in zip(self.parts, contexts, strict=True)
            if part.has_loss
        ]
        assert len(losses) == 1
        return Found(losses[0], self._gradients(contexts), self._whole_errors(contexts))

    def _gradients(self, contexts):
        """Join the gradients of whole tensors from rows, and from sums in the order of the workers."""
        sums = {}
        for part, context in zip(self.parts, contexts, strict=True):
            for crossing in part.partial:
                out = np.full(self.parts[0].wire_shape(crossing, context.images), np.nan, self.whole.dtype)
                part.write_partial(context, crossing, out)
                sizes = [self.whole.parameter(name).size for name in crossing.tensors]
                pieces = np.split(out, np.cumsum(sizes)[:-1])
                for name, piece in zip(crossing.tensors, pieces, strict=True):
                    sums[name, part.worker] = piece.reshape(self.whole.parameter(name).shape)
        found = {p.name: np.full(p.shape, np.nan, self.whole.dtype) for p in self.whole.trained}
        for part, context in zip(self.parts, contexts, strict=True):
            for parameter in part.network.trained:
                if parameter.name not in part.owned:
                    continue
                own = np.full(parameter.shape, np.nan, self.whole.dtype)
                part.network.deltas(context, {parameter.name: own})
                terms = {worker: value for (name, worker), value in sums.items() if name == parameter.name}
                assert part.worker not in terms
                terms[part.worker] = own
                first, *others = (terms[worker] for worker in sorted(terms))
                target = found[parameter.name][_rows_of(parameter)]
                assert np.isnan(target).all(), "two workers push the same rows"
                target[...] = sum(others, start=first)
        return found

    def _whole_errors(self, contexts):
        """Add up the parts' error gradients of whole outputs, if all parts still have them."""
        here = [
            {part.network.layers[at].name: error for at, error in _errors(part.network, context).items()}
            for part, context in zip(self.parts, contexts, strict=True)
        ]
        found = {}
        for number, layer in enumerate(self.whole.layers):
            blocks = {worker: rows for worker, rows in enumerate(self.layout.computes[number]) if rows}
            if all(layer.name in here[worker] for worker in blocks):
                shape = (*layer.output_shape, contexts[0].images)
                total = found[number] = np.zeros(shape, self.whole.dtype)
                for worker, rows in blocks.items():
                    cut = (slice(rows.start, rows.stop),)
                    total[(slice(None), *cut) if total.ndim == 4 else cut] += here[worker][layer.name]
        return found


def _rows_of(parameter):
    return slice(parameter.first_row, parameter.first_row + parameter.shape[0])


def assert_close(found, expected, rtol=1e-9):
    """Assert that loss, gradients and error gradients are equal up to rounding."""
    assert found.loss == pytest.approx(expected.loss, rel=rtol)
    for name, value, right in _pairs(found, expected):
        limit = rtol * max(np.abs(right).max(initial=0), 1e-3)
        np.testing.assert_allclose(value, right, rtol=0, atol=limit, err_msg=name)


def assert_equal(found, expected):
    """Assert that loss, gradients and error gradients have the same bits."""
    assert found.loss == expected.loss
    for name, value, right in _pairs(found, expected):
        np.testing.assert_array_equal(value, right, err_msg=name)


def _pairs(found, expected):
    assert found.gradients.keys() == expected.gradients.keys()
    for name, right in expected.gradients.items():
        yield f"gradient of {name}", found.gradients[name], right
    for number in found.errors.keys() & expected.errors.keys():
        yield f"error gradient of layer {number}", found.errors[number], expected.errors[number]


WINDOWS = {
    "filters": st.integers(1, 3),
    "kernel": st.integers(1, 4),
    "stride": st.integers(1, 3),
    "padding": st.integers(0, 2),
    "frozen": st.sampled_from([False, False, False, True]),
}
SQUARES = {"kernel": st.integers(1, 3), "stride": st.integers(0, 3)}
ON_ANY = {
    "relu": {},
    "sigmoid": {},
    "tanh": {},
    "dropout": {"rate": st.sampled_from([0.2, 0.5])},
    "mirror": {},
}
ON_IMAGES = ON_ANY | {
    "conv2d": WINDOWS,
    "locally_connected": WINDOWS,
    "max_pool": SQUARES,
    "average_pool": SQUARES,
    "local_response_norm": {"size": st.integers(1, 4), "alpha": st.just(0.5)},
}
ON_FEATURES = ON_ANY | {
    "dense": {"outputs": st.integers(1, 9), "frozen": st.sampled_from([False, False, True])}
}
JOINS = ("add", "concatenate")


class _Growing:
    """A network that grows layer by layer, by layers that fit."""

    def __init__(self, draw, input_shape):
        self.draw = draw
        self.shapes = {"input": input_shape}
        self.layers, self.unread, self.last = [], [], "input"

    def add(self, kind, inputs, **options):
        spec = of(f"n{len(self.layers)}", kind, inputs=tuple(inputs), **options)
        try:
            layer = KINDS[kind](spec, tuple(self.shapes[source] for source in inputs))
        except SpecError:
            return
        self.shapes[spec.name] = layer.output_shape
        self.unread = [name for name in self.unread if name not in inputs] + [spec.name]
        self.layers.append(spec)
        self.last = spec.name

    def add_any(self, kinds, axes, *, chain):
        """Add a layer of one of these kinds, or a join; it reads outputs with this number of axes."""
        draw, shapes = self.draw, self.shapes
        known = [name for name, shape in shapes.items() if len(shape) == axes]
        source = self.last if chain else draw(st.sampled_from(known))
        kind = draw(st.sampled_from([*kinds] if chain else [*kinds, *JOINS]))
        if kind in JOINS:
            first = int(kind == "concatenate")
            alike = [name for name in known if shapes[name][first:] == shapes[source][first:]]
            self.add(kind, [source, *draw(st.lists(st.sampled_from(alike), min_size=1, max_size=2))])
        else:
            self.add(kind, [source], **{key: draw(values) for key, values in kinds[kind].items()})


@st.composite
def networks(draw):
    """Networks of any form, of layers of all kinds: first on images, then on features.

    Half of them are chains. In the others each layer reads any before it; a join reads unread outputs.
    """
    chain = draw(st.booleans())
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 11)), draw(st.integers(1, 4)))
    grown = _Growing(draw, shape)
    for _ in range(draw(st.integers(0, 7))):
        grown.add_any(ON_IMAGES, 3, chain=chain)
    for name in grown.unread or ["input"]:
        grown.add("flatten", [name])
    for _ in range(draw(st.integers(0, 4))):
        grown.add_any(ON_FEATURES, 1, chain=chain)
    if len(grown.unread) > 1:
        grown.add("concatenate", grown.unread)
    grown.add("dense", grown.unread, outputs=draw(st.integers(2, 9)))
    grown.add(draw(st.sampled_from(["softmax_cross_entropy", "mean_squared_error"])), grown.unread)
    return ModelSpec(name="any", input_shape=shape, layers=tuple(grown.layers))


EVERYTHING = ModelSpec(
    name="everything",
    input_shape=(2, 13, 9),
    layers=(
        of("conv", "conv2d", filters=4, kernel=3, padding=1),
        of("conv_relu", "relu"),
        of("norm", "local_response_norm", size=3, alpha=0.1),
        of("pool", "max_pool", kernel=3, stride=2),
        of("local", "locally_connected", filters=4, kernel=3, padding=1),
        of("bend", "tanh"),
        of("drop", "dropout", rate=0.25),
        of("sum", "add", inputs=("drop", "pool")),
        of("both", "concatenate", inputs=("sum", "pool")),
        of("fixed", "conv2d", filters=5, kernel=2, frozen=True),
        of("means", "average_pool", kernel=2, stride=1),
        of("turned", "mirror"),
        of("flat", "flatten"),
        of("hidden", "dense", outputs=20),
        of("squash", "sigmoid"),
        of("drop2", "dropout"),
        of("half", "dense", outputs=7, inputs=("squash",)),
        of("joined", "concatenate", inputs=("drop2", "half")),
        of("out", "dense", outputs=5),
        of("loss", "softmax_cross_entropy"),
    ),
)
"""Layers of every kind except the other loss; one of them cannot be cut."""
