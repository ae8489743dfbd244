"""Layouts of plans: each value comes from one worker and crosses once; plans that do not fit."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adam_async.model import NAMED_MODELS, LayerSpec, ModelError, ModelSpec, named_model
from adam_async.model.layer import extent
from adam_async.model.partition.plan import Layout, PartitionPlan, common, hull, planned_cuts, row_values
from adam_async.model.partition.planner import layers_plan, vertical_plan
from tests.adam_async.model.parts import EVERYTHING, layout_of, network_of, networks, plans_of

of = LayerSpec.of
DIGITS = network_of(named_model("digits"))
PLAN = vertical_plan(DIGITS, 2)


def changed(name, **fields):
    """The plan with other values for one layer."""
    layers = [replace(each, **fields) if each.layer == name else each for each in PLAN.layers]
    return replace(PLAN, layers=tuple(layers))


def values_each_way(layout):
    """Values of one image that each worker sends each other worker, without weight gradients."""
    found = {}
    for crossing in layout.crossings:
        if crossing.kind != "gradient":
            way = (crossing.source, crossing.target)
            found[way] = found.get(way, 0) + crossing.values
    return found


def test_the_halo_of_mnist_costs_as_many_values_as_counted_by_hand():
    network = network_of(named_model("mnist-adam"))
    sent = values_each_way(layout_of(network, vertical_plan(network, 2, halo="exchange")))
    twice = values_each_way(layout_of(network, vertical_plan(network, 2, halo="recompute")))

    # Two of 12 rows of 10 channels, half of 20 x 4 x 4 pixels, half of 400 and of 400; half of 10 scores go
    # one way and their error gradients the other.
    features = 160 + 200 + 200
    assert sent == {(0, 1): 2 * (240 + features) + 5, (1, 0): 2 * (240 + features) + 5}
    assert set(sent.values()) == {1605}
    assert set(twice.values()) == {1125}


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("name", NAMED_MODELS)
def test_two_workers_send_each_other_equally_much(name, workers):
    network = network_of(named_model(name))
    for halo in ("exchange", "recompute"):
        sent = values_each_way(layout_of(network, vertical_plan(network, workers, halo=halo)))
        for source, target in sent:
            difference = abs(sent[source, target] - sent[target, source])
            assert difference <= 0.02 * sent[source, target] + 2


@settings(max_examples=50)
@given(spec=networks(), workers=st.integers(1, 4))
def test_every_value_that_is_read_is_there_once_and_crosses_once(spec, workers):
    network = network_of(spec)
    for plan in plans_of(network, workers).values():
        layout = layout_of(network, plan)
        assert [crossing.number for crossing in layout.crossings] == list(range(len(layout.crossings)))
        for number, layer in enumerate(network.layers):
            ways = [c for c in layout.crossings if c.layer == number and not c.tensors]
            forward = {(c.source, c.target): c.rows for c in ways if c.kind == "activation"}
            back = {(c.target, c.source): c.rows for c in ways if c.kind == "error"}
            assert len(forward) + len(back) == len(ways)
            assert back == (forward if network.topology.wants_error[number] else {})
            for worker in range(workers):
                here = set(layout.computes[number][worker])
                arrives = [row for way, rows in forward.items() if way[1] == worker for row in rows]
                assert len(set(arrives)) == len(arrives)
                assert here.isdisjoint(arrives)
                assert set(layout.needs[number][worker]) <= here | set(arrives)
                for (source, _), rows in forward.items():
                    assert set(rows) <= set(layout.computes[number][source])
            computed = [row for rows in layout.computes[number] for row in rows]
            assert set(computed) <= set(range(extent(layer.output_shape)))
            if not (plan.layers[number].recomputed or layer.moves):
                assert len(set(computed)) == len(computed)
                assert forward or workers == 1 or not needed_elsewhere(layout, number)


def needed_elsewhere(layout, number):
    """Whether a worker reads rows that it does not compute."""
    rows = zip(layout.needs[number], layout.computes[number], strict=True)
    return any(set(need) - set(here) for need, here in rows)


@settings(max_examples=40)
@given(spec=networks(), workers=st.integers(2, 4))
def test_recomputing_never_sends_more(spec, workers):
    network = network_of(spec)
    plans = plans_of(network, workers)
    if "exchange" in plans:
        sent = values_each_way(layout_of(network, plans["exchange"]))
        for halo in ("recompute", "auto"):
            for way, values in values_each_way(layout_of(network, plans[halo])).items():
                assert values <= sent[way]


@settings(max_examples=40)
@given(spec=networks(), workers=st.integers(1, 4))
def test_every_other_worker_with_a_partial_gradient_sends_it_to_the_owner(spec, workers):
    network = network_of(spec)
    for plan in plans_of(network, workers).values():
        layout = layout_of(network, plan)
        sums = [c for c in layout.crossings if c.kind == "gradient"]
        assert len({(c.source, c.target) for c in sums}) == len(sums)
        for number, layer in enumerate(network.layers):
            holders = {w for w in range(workers) if layout.computes[number][w]}
            for parameter in layer.parameters:
                senders = {c.source for c in sums if parameter.name in c.tensors}
                summed = not parameter.frozen and layer.cut_by != "outputs"
                assert senders == (holders - {layout.owner(number)} if summed else set())
        for crossing in sums:
            sizes = [network.parameter(name).size for name in crossing.tensors]
            assert crossing.values == sum(sizes)


@pytest.mark.parametrize("make", [vertical_plan, layers_plan])
@pytest.mark.parametrize("spec", [named_model("cifar-conv"), EVERYTHING], ids=lambda spec: spec.name)
def test_a_plan_survives_json(spec, make):
    plan = make(network_of(spec), 3)
    sent = msgspec.json.decode(msgspec.json.encode(plan.to_dict()))

    assert PartitionPlan.from_dict(sent) == plan
    assert PartitionPlan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("kind", "diagonal", r"not a partition plan: Invalid enum value 'diagonal' - at `\$\.kind`"),
        ("workers", "two", r"Expected `int`, got `str` - at `\$\.workers`"),
        ("layers", [{"layer": "conv1"}], r"missing required field `blocks` - at `\$\.layers\[0\]`"),
        ("layers", [{"layer": "a", "blocks": [[1, 2, 3]]}], r"at `\$\.layers\[0\]\.blocks\[0\]`"),
        ("owners", None, r"Expected `object`, got `null` - at `\$\.owners`"),
    ],
)
def test_an_invalid_plan_is_refused_with_the_position_of_the_error(key, value, message):
    with pytest.raises(ModelError, match=message):
        PartitionPlan.from_dict(PLAN.to_dict() | {key: value})
    with pytest.raises(ModelError, match=f"missing required field `{key}`"):
        PartitionPlan.from_dict({k: v for k, v in PLAN.to_dict().items() if k != key})


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(PLAN, workers=0), "over at least 1 worker, not 0"),
        (replace(PLAN, layers=PLAN.layers[1:]), r"plan is for layers \['relu1', .*\], not \['conv1', "),
        (changed("fc1", layer="fc9"), r"plan is for layers .* 'fc9', .*, not .*'fc1'"),
        (
            changed("fc1", blocks=((0, 64),)),
            r"'fc1': the plan is for 2 workers, but names blocks \[\(0, 64\)\]",
        ),
        (changed("fc1", blocks=((0, 30), (31, 64))), r"'fc1': .*31, 64.* do not hold each of 0 to 64 once"),
        (changed("fc1", blocks=((0, 33), (32, 64))), r"'fc1': .*32, 64.* do not hold each of 0 to 64 once"),
        (changed("fc1", blocks=((32, 64), (0, 32))), r"do not hold .* once, in the order of the workers"),
        (changed("conv1", blocks=((0, 4), (4, 7))), r"'conv1': .* do not hold each of 0 to 8 once"),
        (changed("fc1", blocks=((0, 32), (32, 65))), r"'fc1': blocks .* are not all within .* 0 to 64"),
        (changed("fc1", blocks=((0, 64), (64, 32))), r"'fc1': blocks .* are not all within"),
        (changed("fc1", recomputed=True), r"'fc1' \(dense\) may not be recomputed"),
        (changed("loss", recomputed=True), r"'loss' \(softmax_cross_entropy\) may not be recomputed"),
        (replace(PLAN, owners={"conv7": 1}), r"own the parameters of layer 'conv7'"),
        (replace(PLAN, owners={"conv1": 2}), r"has worker 2 own .* 'conv1': workers are 0 to 1"),
    ],
)
def test_the_refusal_of_a_plan_that_does_not_fit_names_the_reason(plan, message):
    with pytest.raises(ModelError, match=message):
        layout_of(DIGITS, plan)


def test_a_plan_that_cuts_an_uncuttable_layer_is_refused_by_name():
    network = network_of(EVERYTHING)
    plan = vertical_plan(network, 2)
    layers = [
        replace(each, blocks=((0, 2), (2, 3))) if each.layer == "turned" else each for each in plan.layers
    ]

    with pytest.raises(ModelError, match=r"'turned' \(mirror\) may not be cut, but its blocks are \[\(0, 2"):
        layout_of(network, replace(plan, layers=tuple(layers)))


def test_a_plan_for_larger_images_is_refused():
    larger = network_of(replace(named_model("digits"), input_shape=(1, 10, 8)))

    with pytest.raises(ModelError, match=r"layer 'fc1'|layer 'pool1'"):
        layout_of(larger, PLAN)
    with pytest.raises(ModelError, match="reads rows 0 to 5 of an image of 4"):
        Layout(DIGITS.topology, (1, 4, 8), PLAN)


def test_a_layer_with_readers_of_padding_only_is_computed_all_the_same():
    layers = (
        of("conv", "conv2d", filters=1, kernel=1),
        of("sparse", "conv2d", filters=1, kernel=1, padding=1, stride=3),
        of("flat", "flatten"),
        of("out", "dense", outputs=4),
        of("loss", "softmax_cross_entropy"),
    )
    network = network_of(ModelSpec(name="it", input_shape=(1, 2, 3), layers=layers))
    layout = layout_of(network, vertical_plan(network, 2))

    assert layout.needs[0] == [range(0), range(0)]
    assert sorted(row for rows in layout.computes[0] for row in rows) == [0, 1]


def test_tensors_are_cut_where_their_outputs_are():
    network = network_of(named_model("mnist-adam"))
    plan = vertical_plan(network, 3)

    assert plan.row_cuts(network.layers) == {
        "fc1.weight": (134, 267),
        "fc1.bias": (134, 267),
        "fc2.weight": (134, 267),
        "fc2.bias": (134, 267),
        "fc3.weight": (4, 7),
        "fc3.bias": (4, 7),
    }
    assert planned_cuts(plan.to_dict(), network.layers) == plan.row_cuts(network.layers)
    assert planned_cuts(layers_plan(network, 3).to_dict(), network.layers) == {}
    assert planned_cuts(None, network.layers) == {}


def test_ranges():
    assert hull([range(3, 5), range(0), range(1, 2)]) == range(1, 5)
    assert hull([range(0), range(7, 7)]) == range(0)
    assert common(range(1, 5), range(3, 9)) == range(3, 5)
    assert common(range(1, 3), range(3, 9)) == range(0)
    assert [row_values(shape) for shape in ((3, 7, 6), (9,), ())] == [18, 1, 1]
