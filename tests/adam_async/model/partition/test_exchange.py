"""Departures and arrivals pass values and error gradients, and add up in the order of the workers."""

import gc
import itertools
import tracemalloc

import numpy as np
import pytest

from adam_async.model import LayerSpec, ModelSpec
from adam_async.model.gradcheck import lone_slots
from adam_async.model.partition.network import WIRES, Arrival, Departure, Landing, Wire
from adam_async.model.partition.plan import Layout
from adam_async.model.partition.planner import vertical_plan
from tests.adam_async.model.parts import Parts, group_of, network_of, weights_of

of = LayerSpec.of
ORDER_MATTERS = (1e16, 1.0, -1e16, 3.0)
"""Terms with the sum 3 from the left, and another sum in any other order."""


def departure(workers, worker, *, rows=range(2, 4), read=True):
    """Make a departure with rows that all other workers read."""
    wires = [Wire(peer, rows, 2 * peer, 2 * peer + 1) for peer in range(workers) if peer != worker]
    return Departure("it", (1, 9, 3), range(2, 6), worker=worker, wires=wires, read=read)


def sum_up(layer, parts, own, images=2):
    """Error gradient after backward; `parts` are the error gradients of all rows from the workers."""
    slots = lone_slots(layer, [np.zeros((1, 4, 3, images))])
    slots.error.fill(own)
    slots.views[WIRES] = {
        wire.back: np.full((1, len(wire.rows), 3, images), parts[wire.peer]) for wire in layer.wires
    }
    layer.backward({}, slots)
    return slots.error


@pytest.mark.parametrize(("workers", "worker"), [(3, 0), (3, 1), (3, 2), (4, 0), (4, 1), (4, 2), (4, 3)])
def test_error_gradients_are_added_up_in_the_order_of_the_workers_to_the_last_bit(workers, worker):
    sums = set()
    for parts in itertools.permutations(ORDER_MATTERS, workers):
        expected = 0.0
        for part in parts:
            expected += part
        found = sum_up(departure(workers, worker), parts, parts[worker])

        assert np.all(found[:, :2] == expected), parts
        assert np.all(found[:, 2:] == parts[worker])  # rows that no other worker reads
        sums.add(expected)
    assert len(sums) > 2


def test_an_output_without_a_local_reader_has_only_the_error_gradients_of_other_workers():
    found = sum_up(departure(3, 1, read=False), (4.0, np.nan, 0.5), own=np.nan)

    assert np.all(found[:, :2] == 4.5)
    assert np.all(found[:, 2:] == 0)


@pytest.mark.parametrize("workers", [3, 4])
def test_whole_parts_add_up_in_the_order_of_the_workers(workers):
    layers = (
        of("first", "dense", outputs=11),
        of("second", "dense", outputs=13),
        of("loss", "mean_squared_error"),
    )
    network = network_of(ModelSpec(name="it", input_shape=(5,), layers=layers))
    parts = Parts(network, vertical_plan(network, workers), weights_of(network))
    for part in parts.parts:
        for layer in part.network.layers:
            layer.hosts_at = None  # else the layer's own terms lie in the memory of the sum
    contexts, wires, checked = parts.contexts(4), parts.arrays(4), []
    images, targets = group_of(network, 4)
    parts.load(contexts, parts.cut(images), targets * 1e6)
    parts.run_segments(contexts, wires)

    for part, context in zip(parts.parts, contexts, strict=True):
        names = [layer.name for layer in part.network.layers]
        leaving = part.network.layers[names.index("first to others")]
        block = leaving.block
        own = context.slots(names.index("first from others")).error[block.start : block.stop]
        terms = {wire.peer: wires[wire.back] for wire in leaving.wires} | {part.worker: own}
        expected = np.zeros_like(own)
        for worker in sorted(terms):
            expected += terms[worker]

        np.testing.assert_array_equal(context.slots(names.index("first")).error, expected)
        checked.append(len(terms))
    assert checked == [workers] * workers


@pytest.mark.parametrize("workers", [3, 4])
def test_adding_up_makes_no_arrays(workers):
    layer = departure(workers, workers - 1)
    images = 20_000
    slots = lone_slots(layer, [np.zeros((1, 4, 3, images))])
    slots.error.fill(1.0)
    slots.views[WIRES] = {wire.back: np.ones((1, len(wire.rows), 3, images)) for wire in layer.wires}
    gc.collect()
    tracemalloc.start()
    try:
        layer.backward({}, slots)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * 1024 < slots.error.nbytes


def test_a_departure_copies_the_rows_that_others_read():
    layer = departure(3, 1, rows=range(3, 6))
    source = np.arange(24.0).reshape(1, 4, 3, 2)
    slots = lone_slots(layer, [source])
    wires = slots.views[WIRES] = {wire.forward: np.full((1, 3, 3, 2), np.nan) for wire in layer.wires}
    layer.forward({}, slots)

    assert wires.keys() == {0, 4}
    for value in wires.values():
        np.testing.assert_array_equal(value, source[:, 1:4])


@pytest.mark.parametrize(
    ("own", "rows"),
    [
        (range(2, 5), range(1, 7)),  # between two others
        (range(2, 5), range(3, 7)),  # only another worker reads its first row
        (range(5, 7), range(1, 3)),  # none of its own
        (range(2, 8), range(3, 5)),  # no rows received
    ],
)
def test_an_arrival_joins_rows_and_returns_their_error_gradients(own, rows):
    shape, images = (2, 9, 3), 2
    whole = np.random.default_rng(1).random((2, 9, 3, images))
    missing = [range(rows.start, min(own.start, rows.stop)), range(max(own.stop, rows.start), rows.stop)]
    wires = [Wire(n, part, 2 * n, 2 * n + 1) for n, part in enumerate(missing) if part]
    layer = Arrival("it", shape, rows, own=own, wires=wires)
    slots = lone_slots(layer, [whole[:, own.start : own.stop].copy()])
    slots.views[WIRES] = {wire.forward: whole[:, wire.rows.start : wire.rows.stop] for wire in wires}
    layer.forward({}, slots)

    np.testing.assert_array_equal(slots.output, whole[:, rows.start : rows.stop])

    slots.error[...] = whole[:, rows.start : rows.stop]
    back = slots.views[WIRES] = {wire.back: np.full((2, len(wire.rows), 3, images), np.nan) for wire in wires}
    layer.backward({}, slots)
    layer.send_errors(slots)
    for row in own:
        expected = whole[:, row] if row in rows else 0 * whole[:, row]
        np.testing.assert_array_equal(slots.input_errors[0][:, row - own.start], expected)
    for wire in wires:
        np.testing.assert_array_equal(back[wire.back], whole[:, wire.rows.start : wire.rows.stop])


def test_features_cross_like_rows():
    leaving = Departure("it", (9,), range(3, 7), worker=0, wires=[Wire(1, range(4, 6), 0, 1)], read=True)
    landing = Landing("it", (9,), range(4, 6), own=None, wires=[Wire(0, range(4, 6), 0, 1)])
    slots = lone_slots(leaving, [np.arange(8.0).reshape(4, 2)])
    slots.views[WIRES] = {0: np.empty((2, 2))}
    leaving.forward({}, slots)

    np.testing.assert_array_equal(slots.views[WIRES][0], [[2, 3], [4, 5]])
    assert (leaving.output_shape, landing.output_shape) == ((4,), (2,))


def test_no_error_gradients_are_sent_to_layers_with_nothing_to_train():
    layers = (
        of("fixed", "conv2d", filters=2, kernel=3, padding=1, frozen=True),
        of("conv", "conv2d", filters=2, kernel=3, padding=1),
        of("more", "conv2d", filters=2, kernel=3, padding=1),
        of("flat", "flatten"),
        of("out", "dense", outputs=3),
        of("loss", "softmax_cross_entropy"),
    )
    network = network_of(ModelSpec(name="it", input_shape=(1, 8, 4), layers=layers))
    layout = Layout(network.topology, (1, 8, 4), vertical_plan(network, 2, halo="exchange"))
    kinds = [(layers[c.layer].name, c.kind) for c in layout.crossings if c.layer < 2 and not c.tensors]

    assert kinds == [("fixed", "activation")] * 2 + [("conv", "activation")] * 2 + [("conv", "error")] * 2
