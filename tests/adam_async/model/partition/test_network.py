"""Parts of a cut network have together the results of the whole, in any order of their segments."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adam_async.model import NAMED_MODELS, LayerSpec, ModelError, ModelSpec, named_model
from adam_async.model.keyed_random import Dice
from adam_async.model.partition.network import WIRES, Partition
from adam_async.model.partition.planner import layers_plan, vertical_plan
from tests.adam_async.model.parts import (
    EVERYTHING,
    Parts,
    assert_close,
    assert_equal,
    group_of,
    network_of,
    networks,
    plans_of,
    run_whole,
    weights_of,
)
from tests.adam_async.model.passes import peak_growth

pytestmark = pytest.mark.thorough

of = LayerSpec.of
KERNELS = ("numpy", "numba")


def may_round(network, name, workers):
    """Whether sums may have another order than in the uncut network.

    Error gradients of an output with several readers are: each worker adds up those of its own.
    """
    several = any(len(readers) > 1 for readers in network.topology.consumers)
    return workers > 1 and (name != "layers" or several)


def check_all_plans(network, workers, images, choose=min):
    """Compare all plans with the uncut network, in contexts with values of a larger group."""
    weights, group = weights_of(network), group_of(network, images)
    expected = run_whole(network, weights, *group)
    for name, plan in plans_of(network, workers).items():
        parts = Parts(network, plan, weights)
        contexts = parts.contexts(images + 2)
        parts.run(*group_of(network, images + 2, seed=2), contexts=contexts)

        found = parts.run(*group, choose, contexts)

        compare = assert_close if may_round(network, name, workers) else assert_equal
        compare(found, expected)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("name", NAMED_MODELS)
def test_parts_of_named_models_have_the_results_of_the_whole(name, workers, kernels):
    check_all_plans(network_of(named_model(name), kernels), workers, images=3)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("images", [1, 6])
def test_parts_of_a_network_of_all_layers_have_the_results_of_the_whole(images, workers, kernels):
    network = network_of(EVERYTHING, kernels)

    assert plans_of(network, workers).keys() == {"exchange", "recompute", "auto", "layers"}
    check_all_plans(network, workers, images)


def images_of(rows, *layers):
    """Make a small network of these layers, on images with this number of rows."""
    ends = (of("flat", "flatten"), of("out", "dense", outputs=3), of("loss", "softmax_cross_entropy"))
    return ModelSpec(name="odd", input_shape=(1, rows, 4), layers=(*layers, *ends))


def conv(name, kernel, **options):
    return of(name, "conv2d", filters=2, kernel=kernel, **options)


ODD = {
    "only padding is read": images_of(2, conv("a", 1), conv("b", 1, padding=1, stride=3)),
    "padding is read by some": images_of(3, conv("a", 1), conv("b", 2, padding=3)),
    "nobody reads what is recomputed": images_of(
        5, conv("a", 3, padding=1), conv("b", 1, padding=1, stride=3), conv("c", 1, padding=2, stride=2)
    ),
    "who recomputes nothing has nothing": images_of(
        6, of("a", "relu"), of("b", "max_pool", kernel=3), of("c", "local_response_norm")
    ),
    "the last row of what cannot be cut is not read": images_of(4, of("a", "mirror"), conv("b", 1, stride=2)),
    "the last rows are not read": images_of(
        11, conv("a", 2), of("b", "max_pool", kernel=3), conv("c", 1, stride=2)
    ),
    "more workers than rows": images_of(2, conv("a", 3, padding=1), conv("b", 2, padding=1)),
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("odd", ODD)
def test_parts_of_odd_networks_have_the_results_of_the_whole(odd, workers, kernels):
    check_all_plans(network_of(ODD[odd], kernels), workers, images=2)


@pytest.mark.parametrize("kernels", KERNELS)
@settings(max_examples=30, derandomize=True)  # a pool may find two equal values by accident
@given(
    spec=networks(),
    workers=st.integers(1, 4),
    images=st.integers(1, 3),
    order=st.randoms(use_true_random=False),
)
def test_parts_of_any_network_have_the_results_of_the_whole_in_any_order(
    kernels, spec, workers, images, order
):
    check_all_plans(network_of(spec, kernels), workers, images, order.choice)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kernels", KERNELS)
@settings(max_examples=1500, derandomize=True)
@given(spec=networks(), workers=st.integers(2, 4), images=st.integers(1, 3), seed=st.integers(0, 999))
def test_parts_of_a_great_many_networks_have_the_results_of_the_whole(kernels, spec, workers, images, seed):
    check_all_plans(network_of(spec, kernels), workers, images, random.Random(seed).choice)


def schedules(workers):
    """Ways to choose the next worker: the first or last as long as it can run, alternating, at random."""
    turns = iter(range(10_000))
    yield min
    yield max
    yield lambda ready: ready[next(turns) % len(ready)]
    for seed in range(3):
        yield random.Random(seed).choice


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("spec", [named_model("mnist-adam"), EVERYTHING], ids=lambda spec: spec.name)
def test_the_order_of_segments_changes_no_bit(spec, workers, kernels):
    network = network_of(spec, kernels)
    weights, group = weights_of(network), group_of(network, 2)
    for plan in plans_of(network, workers).values():
        parts = Parts(network, plan, weights)
        first, *others = (parts.run(*group, choose) for choose in schedules(workers))

        for found in others:
            assert_equal(found, first)


@settings(max_examples=20)
@given(spec=networks(), workers=st.integers(2, 4), order=st.randoms(use_true_random=False))
def test_the_order_of_segments_of_any_network_changes_no_bit(spec, workers, order):
    network = network_of(spec)
    weights, group = weights_of(network), group_of(network, 2)
    for plan in plans_of(network, workers).values():
        parts = Parts(network, plan, weights)

        assert_equal(parts.run(*group, order.choice), parts.run(*group))


@settings(max_examples=20)
@given(spec=networks(), workers=st.integers(1, 4), images=st.integers(1, 4))
def test_crossings_have_the_sizes_of_the_plan(spec, workers, images):
    network = network_of(spec)
    for plan in plans_of(network, workers).values():
        for part in Parts(network, plan, weights_of(network)).parts:
            for crossing in part.outgoing:
                values = np.prod(part.wire_shape(crossing, images), dtype=int)
                assert values == crossing.values * (1 if crossing.kind == "gradient" else images)
            for segment in part.segments:
                assert all(part.layout.crossings[number].target == part.worker for number in segment.receives)
                assert all(part.layout.crossings[number].source == part.worker for number in segment.sends)
            moved = [c.number for c in (*part.incoming, *part.outgoing) if c.kind != "gradient"]
            handled = [n for segment in part.segments for n in (*segment.receives, *segment.sends)]
            assert sorted(handled) == sorted(moved)


@settings(max_examples=20)
@given(spec=networks(), workers=st.integers(1, 4))
def test_every_row_of_every_tensor_is_pushed_by_one_worker(spec, workers):
    network = network_of(spec)
    for plan in plans_of(network, workers).values():
        owned = {parameter.name: [] for parameter in network.parameters}
        for worker in range(workers):
            part = Partition(network, plan, worker)
            for parameter in part.network.parameters:
                if parameter.name in part.owned:
                    owned[parameter.name] += range(
                        parameter.first_row, parameter.first_row + parameter.shape[0]
                    )
        for parameter in network.parameters:
            assert owned[parameter.name] == list(range(parameter.shape[0]))


def test_one_worker_runs_everything_at_once_and_sends_nothing():
    network = network_of(named_model("mnist-adam"))
    for plan in plans_of(network, 1).values():
        part = Partition(network, plan, 0)

        assert (len(part.segments), part.incoming, part.outgoing) == (1, (), ())
        assert part.network.layers == network.layers
        assert part.input_rows == range(28)


def test_a_part_of_mnist_runs_from_one_wait_to_the_next():
    network = network_of(named_model("mnist-adam"))
    upper = Partition(network, vertical_plan(network, 2, halo="exchange"), 0)
    names = [layer.name for layer in upper.network.layers]

    assert upper.input_rows == range(16)
    first = upper.segments[0]
    assert [names[number] for number in first.forward] == ["conv1", "relu1", "pool1", "pool1 to others"]
    assert (first.receives, len(first.sends)) == ((), 1)
    assert upper.has_loss
    assert upper.owned == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias", "fc3.weight", "fc3.bias"}
    assert repr(upper) == "<Partition 0 of 2, 10 segments>"


def test_a_part_without_images_loads_labels_only_and_other_parts_need_images():
    network = network_of(named_model("digits"))
    plan = layers_plan(network, 2)
    first, last = (Partition(network, plan, worker) for worker in (0, 1))
    labels = np.zeros(3, int)

    assert (first.input_rows, last.input_rows) == (range(8), range(0))
    assert (first.has_loss, last.has_loss) == (False, True)
    last.network.context(3).load(None, labels)
    with pytest.raises(ModelError, match=r"this network reads images of shape \[1, 8, 8\]"):
        first.network.context(3).load(None, labels)
    with pytest.raises(ModelError, match=r"images must have shape \[1, 5, 8\], not \[1, 8, 8\]"):
        upper = Partition(network, vertical_plan(network, 2), 0).network
        upper.context(3).load(np.zeros((3, 1, 8, 8)), labels)


def test_start_values_of_parts_are_those_of_the_whole():
    network = network_of(named_model("mnist-adam"))
    whole = network.initial_weights(Dice(1))
    for worker in range(3):
        part = Partition(network, vertical_plan(network, 3), worker).network
        for parameter in part.parameters:
            rows = slice(parameter.first_row, parameter.first_row + parameter.shape[0])
            np.testing.assert_array_equal(
                part.initial_values(Dice(1), parameter.name), whole[parameter.name][rows]
            )


def test_a_part_keeps_no_reference_to_its_wires():
    network = network_of(EVERYTHING)
    parts = Parts(network, vertical_plan(network, 3), weights_of(network))
    contexts = parts.contexts(2)
    parts.run(*group_of(network, 2), contexts=contexts)

    for part, context in zip(parts.parts, contexts, strict=True):
        for number in range(len(part.network.layers)):
            assert not context.slots(number).views.get(WIRES)


# The rest is NumPy's own buffers for strided operands and mixed dtypes: they do not grow with the group.
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("make", [vertical_plan, layers_plan])
def test_steady_state_allocates_no_tensors(make, kernels):
    network = network_of(EVERYTHING, kernels, np.float32)
    parts = Parts(network, make(network, 4), weights_of(network))
    contexts, wires = parts.contexts(512), {size: parts.arrays(size) for size in (512, 300)}
    images, labels = group_of(network, 512)
    cut = parts.cut(images)
    outs = [[np.empty(crossing.values, network.dtype) for crossing in part.partial] for part in parts.parts]

    def group(count):
        parts.load(contexts, [rows if rows is None else rows[:count] for rows in cut], labels[:count])
        parts.run_segments(contexts, wires[count])
        for part, context, out in zip(parts.parts, contexts, outs, strict=True):
            for crossing, values in zip(part.partial, out, strict=True):
                part.write_partial(context, crossing, values)

    group(512)
    group(300)
    assert peak_growth(group, (512, 512, 300)) < 160 * 1024
