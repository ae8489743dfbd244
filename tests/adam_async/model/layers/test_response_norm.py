"""Local response normalisation equals the naive loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.model import BUILTIN_LAYERS, LayerSpec, SpecError
from adam_async.model.gradcheck import lone_slots
from adam_async.model.keyed_random import Dice


def layer_of(shape=(4, 2, 2), **options):
    return BUILTIN_LAYERS["local_response_norm"](
        LayerSpec.of("it", "local_response_norm", **options), (shape,)
    )


@given(channels=st.integers(1, 9), size=st.integers(1, 12), images=st.integers(1, 3))
def test_normalisation_equals_the_naive_loops(channels, size, images):
    x = Dice(2).normal("x", count=channels * 6 * images, dtype=float).reshape(channels, 2, 3, images)
    layer = layer_of(x.shape[:3], size=size, alpha=0.7, beta=0.6, k=1.5)
    slots = lone_slots(layer, [x])
    layer.forward({}, slots)

    for channel in range(channels):
        window = x[max(channel - size // 2, 0) : channel + (size - 1) // 2 + 1]
        scale = 1.5 + 0.7 / size * (window**2).sum(axis=0)
        np.testing.assert_allclose(slots.output[channel], x[channel] / scale**0.6, rtol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "option 'size' must be a whole number of at least 1, not 0"),
        ({"alpha": -1}, "option 'alpha' must be a finite number of at least 0, not -1"),
        ({"beta": float("inf")}, "option 'beta' must be a finite number of at least 0, not inf"),
        ({"k": 0}, "option 'k' must be more than 0"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(options, message):
    with pytest.raises(SpecError, match=rf"layer 'it' \(local_response_norm\): {message}"):
        layer_of(**options)
