"""Class weights multiply losses and gradients; wrong ones are refused."""

import numpy as np
import pytest

from adam_async.model import BUILTIN_LAYERS, LayerSpec, SpecError
from adam_async.model.gradcheck import lone_slots
from adam_async.model.keyed_random import Dice


def run(labels, **options):
    """Losses and error gradients, batch first."""
    layer = BUILTIN_LAYERS["softmax_cross_entropy"](
        LayerSpec.of("it", "softmax_cross_entropy", **options), ((4,),)
    )
    scores = Dice(1).normal("x", count=4 * len(labels), dtype=float).reshape(4, len(labels))
    slots = lone_slots(layer, [scores])
    layer.load_targets(slots, np.array(labels))
    layer.forward({}, slots)
    layer.backward({}, slots)
    return slots.output.copy(), slots.input_errors[0].T.copy()


def test_the_weight_of_its_class_multiplies_loss_and_gradient_of_each_image():
    labels, weights = [3, 0, 1, 3, 2], (1.0, 2.0, 0.0, 0.5)
    losses, errors = run(labels)
    weighted_losses, weighted_errors = run(labels, class_weights=weights)

    factors = np.array(weights)[labels]
    np.testing.assert_allclose(weighted_losses, factors * losses, rtol=1e-12)
    np.testing.assert_allclose(weighted_errors, factors[:, None] * errors, rtol=1e-12)


def test_weights_of_one_change_nothing():
    for plain, weighted in zip(run([0, 1, 3]), run([0, 1, 3], class_weights=(1, 1, 1, 1)), strict=True):
        np.testing.assert_array_equal(plain, weighted)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1.0, 2.0), r"must be a list of 4 numbers, one per class, not \(1\.0, 2\.0\)"),
        (3, "must be a list of 4 numbers, one per class, not 3"),
        ((1, 1, -1, 1), "must hold finite numbers of at least 0, not all 0, not"),
        ((1, 1, float("inf"), 1), "must hold finite numbers of at least 0, not all 0, not"),
        ((1, 1, float("nan"), 1), "must hold finite numbers of at least 0, not all 0, not"),
        ((0, 0, 0, 0), "must hold finite numbers of at least 0, not all 0, not"),
    ],
)
def test_class_weights_that_do_not_fit_are_refused(weights, message):
    with pytest.raises(SpecError, match=rf"'it' \(softmax_cross_entropy\): option 'class_weights' {message}"):
        run([0], class_weights=weights)
