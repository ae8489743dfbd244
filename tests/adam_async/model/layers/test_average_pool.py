"""Average pooling equals the naive loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.model import BUILTIN_LAYERS, LayerSpec, SpecError
from adam_async.model.gradcheck import lone_slots
from adam_async.model.keyed_random import Dice


@given(
    height=st.integers(3, 9),
    width=st.integers(3, 9),
    kernel=st.integers(1, 3),
    stride=st.integers(0, 4),
    images=st.integers(1, 3),
)
def test_average_pooling_equals_the_naive_loops(height, width, kernel, stride, images):
    x = Dice(2).normal("x", count=2 * height * width * images, dtype=float).reshape(2, height, width, images)
    spec = LayerSpec.of("it", "average_pool", kernel=kernel, stride=stride)
    layer = BUILTIN_LAYERS["average_pool"](spec, (x.shape[:3],))
    slots, step = lone_slots(layer, [x]), stride or kernel
    layer.forward({}, slots)

    rows, columns = (range(0, size - kernel + 1, step) for size in (height, width))
    expected = np.array(
        [
            [x[:, top : top + kernel, left : left + kernel].mean(axis=(1, 2)) for left in columns]
            for top in rows
        ]
    )
    np.testing.assert_allclose(slots.output, expected.transpose(2, 0, 1, 3), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": 0}, "option 'kernel' must be a whole number of at least 1, not 0"),
        ({"kernel": 2, "stride": -1}, "option 'stride' must be a whole number of at least 0, not -1"),
        ({}, "option 'kernel' is missing; known options: kernel, stride"),
        ({"kernel": 6}, "a kernel of 6 does not fit an input of 4x7"),
    ],
)
@pytest.mark.parametrize("kind", ["average_pool", "max_pool"])
def test_options_that_do_not_fit_are_refused_by_name(kind, options, message):
    with pytest.raises(SpecError, match=rf"layer 'it' \({kind}\): {message}"):
        BUILTIN_LAYERS[kind](LayerSpec.of("it", kind, **options), ((1, 4, 7),))
