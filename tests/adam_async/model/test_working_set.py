"""Working sets are the bytes of the arrays that a group touches."""

import pytest

from adam_async.model import BUILTIN_LAYERS, ModelError, Network, mlp, named_model
from adam_async.model.named import NAMED_MODELS
from adam_async.model.working_set import WorkingSet, working_sets


def made_up(total: int) -> WorkingSet:
    return WorkingSet(layers=("a",), weights=total, activations=0, gradients=0, scratch=0, push_buffers=0)


def test_a_dense_layer_is_counted_by_hand() -> None:
    network = Network(mlp((12, 5, 3), input_shape=(1, 3, 4)))
    first, second, whole = working_sets(network, 7)

    assert first.layers == ("flat", "fc1", "relu1")
    assert (first.weights, first.push_buffers) == (4 * 65, 4 * 65)
    # The rectifier works in its input's memory; images are flattened into a copy and have no error gradient.
    assert (first.activations, first.gradients) == (4 * 7 * (2 * 12 + 5), 4 * 7 * 5)
    assert second.layers == ("fc2", "loss")
    assert (second.activations, second.gradients) == (4 * 7 * (5 + 3 + 1), 4 * 7 * (5 + 3))
    assert whole.layers == first.layers + second.layers
    assert (whole.activations, whole.gradients) == (4 * 7 * (2 * 12 + 5 + 3 + 1), 4 * 7 * (5 + 3))


@pytest.mark.parametrize("name", NAMED_MODELS)
def test_the_whole_network_is_the_context_and_the_parameters_twice(name: str) -> None:
    network = Network(named_model(name))
    whole = working_sets(network, 4)[-1]

    assert whole.activations + whole.gradients + whole.scratch == network.context(4).nbytes
    assert whole.weights == whole.push_buffers == 4 * network.num_parameters
    assert whole.layers == tuple(layer.name for layer in network.layers)


@pytest.mark.parametrize("name", NAMED_MODELS)
def test_parts_cover_the_network_and_none_is_larger_than_the_whole(name: str) -> None:
    *parts, whole = working_sets(Network(named_model(name)), 2)

    assert tuple(layer for part in parts for layer in part.layers) == whole.layers
    assert sum(part.weights for part in parts) == whole.weights
    assert max(part.total for part in parts) < whole.total <= sum(part.total for part in parts)


def test_activations_grow_with_the_group_and_weights_do_not() -> None:
    network = Network(named_model("mnist-adam"))
    one, many = working_sets(network, 1)[-1], working_sets(network, 64)[-1]

    assert (many.activations, many.gradients) == (64 * one.activations, 64 * one.gradients)
    assert many.weights == one.weights


def test_float64_takes_twice_the_memory() -> None:
    single, double = (
        working_sets(Network(named_model("digits"), dtype, layers=BUILTIN_LAYERS), 3)[-1]
        for dtype in ("float32", "float64")
    )

    assert double.activations == 2 * single.activations
    assert double.weights == 2 * single.weights


@pytest.mark.parametrize(
    ("total", "l2_kb", "l3_kb", "level"),
    [
        (1024, 1, 2, "L2"),
        (1025, 1, 2, "L3"),
        (2049, 1, 2, "memory"),
        (1025, 1, None, None),
        (1025, None, 2, "L3"),
        (1024, 1, None, "L2"),
        (2049, None, 2, None),
    ],
)
def test_the_smallest_cache_that_holds_it_is_named(
    total: int, l2_kb: int | None, l3_kb: int | None, level: str | None
) -> None:
    assert made_up(total).fits(l2_kb=l2_kb, l3_kb=l3_kb) == level


def test_it_reads_as_a_line() -> None:
    assert str(made_up(1025)) == (
        "a: 2 KiB (weights 2, activations 0, gradients 0, scratch 0, push buffers 0)"
    )


def test_a_group_has_at_least_one_image() -> None:
    with pytest.raises(ModelError, match="at least 1 image"):
        working_sets(Network(named_model("digits")), 0)
