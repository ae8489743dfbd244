"""Dropout drops values by seed, group and layer, in training only."""

import numpy as np
import pytest

from adam_async.model import LayerSpec, ModelError, ModelSpec, Network, SpecError
from adam_async.model.keyed_random import Dice
from tests.adam_async.model.passes import output_of

of = LayerSpec.of
IMAGES = np.ones((6, 50))
LABELS = np.zeros(6, int)


def network_of(*dropouts, dtype=np.float64):
    layers = (of("out", "dense", outputs=50), of("loss", "softmax_cross_entropy"))
    return Network(ModelSpec(name="it", input_shape=(50,), layers=(*dropouts, *layers)), dtype)


def dropped(network, *, dice, keys=(1, 2), name="drop", context=None):
    context = context or network.context(6)
    context.load(IMAGES, LABELS, dice=dice, keys=keys)
    network.forward(network.initial_weights(Dice(1)), context)
    return output_of(network, context, name).copy()


def test_dropped_values_are_a_function_of_seed_group_and_layer():
    network = network_of(of("drop", "dropout"), of("other", "dropout"))
    first = dropped(network, dice=Dice(3))
    context = network.context(6)
    dropped(network, dice=Dice(3), keys=(1, 7), context=context)

    np.testing.assert_array_equal(dropped(network, dice=Dice(3), context=context), first)
    for different in (
        dropped(network, dice=Dice(4)),
        dropped(network, dice=Dice(3), keys=(2, 2)),
        dropped(network, dice=Dice(3), keys=(1, 3)),
        dropped(network_of(of("renamed", "dropout")), dice=Dice(3), name="renamed"),
    ):
        assert not np.array_equal(different, first)


def test_both_precisions_drop_the_same_values():
    wide, narrow = (
        dropped(network_of(of("drop", "dropout", rate=0.3), dtype=dtype), dice=Dice(3))
        for dtype in (np.float64, np.float32)
    )

    np.testing.assert_array_equal(wide == 0, narrow == 0)
    np.testing.assert_allclose(narrow, wide, rtol=1e-6)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_of_the_rate_is_dropped_and_the_mean_stays(rate):
    network = network_of(of("drop", "dropout", rate=rate))
    outputs = np.stack([dropped(network, dice=Dice(seed)) for seed in range(40)])

    assert set(np.unique(outputs)) == {0.0, 1.0 / (1.0 - rate)}
    assert abs((outputs == 0).mean() - rate) < 0.02
    assert abs(outputs.mean() - 1) < 0.06


def test_evaluation_drops_nothing_and_needs_no_dice():
    first = of("first", "dense", outputs=50)
    network, plain = network_of(first, of("drop", "dropout")), network_of(first)
    weights = network.initial_weights(Dice(1))

    np.testing.assert_array_equal(network.scores(weights, IMAGES), plain.scores(weights, IMAGES))


def test_loading_a_group_for_training_without_dice_is_refused():
    with pytest.raises(ModelError, match=r"'drop' \(dropout\) draws at random.*dice= and keys="):
        network_of(of("drop", "dropout")).context(6).load(IMAGES, LABELS)


@pytest.mark.parametrize("rate", [-0.1, 1, 1.5, float("nan"), "half", True, (0.5,)])
def test_rates_outside_0_to_1_are_refused(rate):
    with pytest.raises(SpecError, match=r"'drop' \(dropout\): option 'rate' must be.*less than 1, not"):
        network_of(of("drop", "dropout", rate=rate))
