"""Infinite values and NaN are found; large ones are not mistaken for them."""

import numpy as np
import pytest

from adam_async.model.context import is_finite


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_value_anywhere_is_found(dtype, bad):
    for position in range(7):
        values = np.ones((7, 1), dtype)
        values[position] = bad

        assert not is_finite(values)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_whose_squares_overflow_are_finite(dtype):
    assert is_finite(np.full((3, 4), np.finfo(dtype).max, dtype))
    assert is_finite(np.zeros(0, dtype))
