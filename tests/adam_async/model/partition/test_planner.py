"""Plans are balanced, cut every layer that can be cut, and name the others."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adam_async.model import NAMED_MODELS, LayerSpec, ModelError, ModelSpec, mlp, named_model
from adam_async.model.partition import planner
from adam_async.model.partition.planner import (
    BALANCE,
    LayerTimes,
    LinkCost,
    estimated_times,
    layers_plan,
    predicted_seconds,
    vertical_plan,
)
from tests.adam_async.model.parts import EVERYTHING, layout_of, network_of, networks

of = LayerSpec.of


def planned(plan, name):
    return next(each for each in plan.layers if each.layer == name)


def sizes(blocks):
    return [stop - start for start, stop in blocks]


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("name", NAMED_MODELS)
def test_in_named_models_only_the_loss_is_whole_and_every_worker_has_some_of_the_rest(name, workers):
    network = network_of(named_model(name))
    plan = vertical_plan(network, workers)

    assert {each.layer: each.whole for each in plan.layers if each.whole} == {
        "loss": "a loss reads every score"
    }
    for layer, each in zip(network.layers, plan.layers, strict=True):
        if layer.name != "loss" and not layer.moves:
            assert min(sizes(each.blocks)) > 0


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("name", NAMED_MODELS)
def test_blocks_of_the_last_image_and_of_features_differ_by_one_at_most(name, workers):
    network = network_of(named_model(name))
    plan = vertical_plan(network, workers)
    images = [layer.name for layer in network.layers if len(layer.output_shape) == 3]
    even = images[-1:] + [layer.name for layer in network.layers if layer.spec.kind in ("dense", "relu")]

    for layer in set(even) - set(images[:-1]):
        found = sizes(planned(plan, layer).blocks)
        assert max(found) - min(found) <= 1, layer


def test_mnist_is_cut_where_both_neighbours_read_equally_many_rows():
    network = network_of(named_model("mnist-adam"))
    plan = vertical_plan(network, 2, halo="exchange")

    assert planned(plan, "conv1").blocks == ((0, 12), (12, 24))
    assert planned(plan, "pool1").blocks == ((0, 6), (6, 12))
    assert planned(plan, "conv2").blocks == ((0, 4), (4, 8))
    assert planned(plan, "pool2").blocks == ((0, 2), (2, 4))
    assert planned(plan, "fc1").blocks == ((0, 200), (200, 400))
    assert plan.owners == {"conv1": 1, "conv2": 1}


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_recomputing_leaves_only_the_last_image_to_be_sent(workers):
    network = network_of(named_model("cifar-conv"))
    layout = layout_of(network, vertical_plan(network, workers, halo="recompute"))
    sent = {network.layers[c.layer].name for c in layout.crossings if not c.tensors}

    assert [each.layer for each in layout.plan.layers if each.recomputed] == [
        *("conv1", "relu1", "pool1", "conv2", "relu2", "pool2"),
        "flat",
    ]
    assert sent == {"pool3", "relu4", "fc2"}
    assert layout.input_rows[0].stop > 32 / workers + 4


def test_a_layer_that_cannot_be_cut_is_named_and_is_on_one_worker():
    plan = vertical_plan(network_of(EVERYTHING), 3)

    assert {each.layer: each.whole for each in plan.layers if each.whole} == {
        "turned": "a mirror cannot be cut",
        "loss": "a loss reads every score",
    }
    assert planned(plan, "turned").blocks == ((0, 4), (0, 0), (0, 0))


def test_an_output_of_one_row_is_named():
    layers = (
        of("conv", "conv2d", filters=2, kernel=3),
        of("tall", "conv2d", filters=2, kernel=6),
        of("flat", "flatten"),
        of("out", "dense", outputs=1),
        of("loss", "mean_squared_error"),
    )
    plan = vertical_plan(network_of(ModelSpec(name="it", input_shape=(1, 8, 8), layers=layers)), 2)

    assert [each.whole for each in plan.layers] == [
        *("", "it has 1 row", ""),
        "it has 1 row",
        "a loss reads every score",
    ]


@settings(max_examples=40)
@given(spec=networks(), workers=st.integers(2, 4), speed=st.sampled_from([1e6, 1e9]))
def test_auto_is_never_predicted_to_be_slower_than_sending(spec, workers, speed):
    network, link = network_of(spec), LinkCost(bytes_per_s=speed)
    times = estimated_times(network, 16)
    try:
        plans = [vertical_plan(network, workers, halo=halo, link=link) for halo in ("auto", "exchange")]
    except ModelError:
        return
    auto, sent = (predicted_seconds(layout_of(network, p), times, link, item_bytes=8) for p in plans)

    assert auto <= sent


def test_auto_recomputes_where_links_are_slow_and_sends_where_they_are_fast():
    network = network_of(named_model("cifar-conv"))
    slow, fast = (
        vertical_plan(network, 2, link=LinkCost(bytes_per_s=rate, tensor_s=0)) for rate in (1e5, 1e12)
    )

    assert slow == vertical_plan(network, 2, halo="recompute")
    assert fast == vertical_plan(network, 2, halo="exchange")


def all_cuts(network, workers):
    """All cuts into consecutive layers that begin with a layer with parameters."""
    starts = [n for n, layer in enumerate(network.layers) if layer.parameters][1:]
    for cuts in combinations(starts, workers - 1):
        yield list(pairwise((0, *cuts, len(network.layers))))


def parts_of(network, plan):
    """Layers of each worker."""
    layout = layout_of(network, plan)
    return [
        [
            layer.name
            for number, layer in enumerate(network.layers)
            if layout.computes[number][worker] and not layer.moves
        ]
        for worker in range(plan.workers)
    ]


@settings(max_examples=25)
@given(widths=st.lists(st.integers(1, 60), min_size=4, max_size=7), workers=st.integers(2, 3), data=st.data())
def test_consecutive_layers_are_balanced_as_well_as_any_cut_balances_them(widths, workers, data):
    network = network_of(mlp(widths, input_shape=(widths[0], 1, 1)))
    drawn = {layer.name: data.draw(st.floats(0, 1)) for layer in network.layers}
    times, link = LayerTimes(images=4, seconds=drawn), LinkCost(bytes_per_s=1e6)
    found = layers_plan(network, workers, times=times, link=link)
    seconds = []
    for ends in all_cuts(network, workers):
        layers = []
        for worker, (start, stop) in enumerate(ends):
            for number in range(start, stop):
                each = found.layers[number]
                rows = max(stop for _, stop in each.blocks)
                blocks = tuple((0, rows) if w == worker else (0, 0) for w in range(workers))
                layers.append(replace(each, blocks=blocks))
        plan = replace(found, layers=tuple(layers))
        seconds.append(predicted_seconds(layout_of(network, plan), times, link, item_bytes=8))

    predicted = predicted_seconds(layout_of(network, found), times, link, item_bytes=8)
    assert min(seconds) <= predicted <= min(seconds) * BALANCE


@pytest.mark.parametrize("slow", ["fc1", "fc2", "fc3", "fc4"])
def test_a_slow_layer_has_a_worker_to_itself(slow):
    network = network_of(mlp((8, 8, 8, 8, 8), input_shape=(8, 1, 1)))
    seconds = (
        {layer.name: 0.0 for layer in network.layers} | {f"fc{n}": 0.3 for n in range(1, 5)} | {slow: 1.0}
    )
    parts = parts_of(network, layers_plan(network, 3, times=LayerTimes(images=4, seconds=seconds)))
    own = next(part for part in parts if slow in part)

    assert [name for name in own if name.startswith("fc")] == [slow]


def test_a_limit_of_compared_cuts_leaves_cuts_at_evenly_spread_layers(monkeypatch):
    monkeypatch.setattr(planner, "MOST_CANDIDATES", 10)
    network = network_of(mlp((4,) * 10, input_shape=(4, 1, 1)))
    times = {layer.name: float(layer.name.startswith("fc")) for layer in network.layers}
    parts = parts_of(network, layers_plan(network, 6, times=LayerTimes(images=4, seconds=times)))

    assert max(sum(name.startswith("fc") for name in part) for part in parts) == 2


def test_few_of_many_equal_cuts_are_predicted(monkeypatch):
    predictions = []

    def predicted(*args, **rest):
        predictions.append(predicted_seconds(*args, **rest))
        return predictions[-1]

    monkeypatch.setattr(planner, "predicted_seconds", predicted)
    monkeypatch.setattr(planner, "MOST_PREDICTED", 5)
    layers_plan(network_of(mlp((4,) * 10, input_shape=(4, 1, 1))), 4)

    assert 0 < len(predictions) <= 5


def test_of_equally_fast_plans_the_one_that_sends_least_is_taken():
    network = network_of(mlp((8, 50, 2, 50, 8), input_shape=(8, 1, 1)))
    times = LayerTimes(images=4, seconds={layer.name: 0.0 for layer in network.layers} | {"fc1": 1.0})
    plan = layers_plan(network, 2, times=times)

    assert parts_of(network, plan)[0] == ["fc1", "relu1", "fc2", "relu2"]


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("name", NAMED_MODELS)
def test_parts_of_named_models_begin_with_parameters_while_there_are_enough(name, workers):
    network = network_of(named_model(name))
    parts = parts_of(network, layers_plan(network, workers))
    trained = {parameter.layer for parameter in network.parameters}

    assert [layer for part in parts for layer in part] == [la.name for la in network.layers if not la.moves]
    if workers <= len(trained):
        assert all(part[0] in trained for part in parts)


@pytest.mark.parametrize("make", [vertical_plan, layers_plan])
@pytest.mark.parametrize("workers", [0, -1])
def test_there_must_be_a_worker(make, workers):
    with pytest.raises(ModelError, match=f"cut over at least 1 worker, not {workers}"):
        make(network_of(named_model("digits")), workers)


def test_too_many_workers_are_refused():
    network = network_of(mlp((4, 3), input_shape=(4, 1, 1)))

    with pytest.raises(ModelError, match="worker 3 of 4 has nothing to compute: use fewer partitions"):
        vertical_plan(network, 4)
    with pytest.raises(ModelError, match="gives each of 4 workers a layer, and this model has 2: use fewer"):
        layers_plan(network, 4)


@pytest.mark.parametrize("make", [vertical_plan, layers_plan])
def test_times_of_another_model_are_refused(make):
    times = LayerTimes(images=4, seconds={"conv1": 1.0, "loss": 1.0})

    with pytest.raises(ModelError, match=r"times of the layers relu1, pool1, .* are missing"):
        make(network_of(named_model("digits")), 2, times=times)
