"""The compiled functions keep their error bounds, also for values that are not finite."""

import numpy as np
import pytest

pytest.importorskip("numba", reason="compiled kernels need numba")

from adam_async.model.fast.curves import exponential, logistic_of, tanh_of
from adam_async.model.fast.memory import exact

TINY = float(np.finfo(np.float32).tiny)


@exact
def _exponentials(values):
    for i in range(values.size):
        values[i] = exponential(values[i])


@exact
def _tanhs(values):
    for i in range(values.size):
        values[i] = tanh_of(values[i])


@exact
def _logistics(values):
    for i in range(values.size):
        values[i] = logistic_of(values[i])


def exact_logistic(x):
    return 1 / (1 + np.exp(-x))


CURVES = [(_exponentials, np.exp), (_tanhs, np.tanh), (_logistics, exact_logistic)]
"""Compiled functions, each with its reference in twice the precision."""


def applied(function, x):
    found = x.copy()
    function(found)
    return found


@pytest.mark.parametrize(("function", "truth"), CURVES)
def test_float32_is_right_to_two_ten_millionths(function, truth):
    near, far = np.linspace(-1, 1, 200_003), np.linspace(-87, 88.7, 200_003)
    x = np.concatenate((near, near * 1e-3, 9 * near, far, [1e-20, -1e-30])).astype(np.float32)
    expected = truth(x.astype(np.float64))
    normal = np.abs(expected) >= TINY
    found = applied(function, x)

    assert np.max(np.abs(found - expected)[normal] / np.abs(expected)[normal]) <= 2e-7
    assert np.all(np.abs(found - expected)[~normal] <= TINY)


@pytest.mark.parametrize(("function", "truth"), CURVES)
def test_float64_is_the_librarys(function, truth):
    x = np.linspace(-40, 40, 1001)

    np.testing.assert_allclose(applied(function, x), truth(x), rtol=1e-15)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_limits_are_reached_and_nan_stays(dtype):
    x = np.array([np.nan, np.inf, -np.inf, 1e6, -1e6, 0.0], dtype)

    np.testing.assert_array_equal(applied(_exponentials, x), [np.nan, np.inf, 0, np.inf, 0, 1])
    np.testing.assert_array_equal(applied(_tanhs, x), [np.nan, 1, -1, 1, -1, 0])
    np.testing.assert_array_equal(applied(_logistics, x), [np.nan, 1, 0, 1, 0, 0.5])


def test_tanh_is_odd_to_the_last_bit_and_keeps_the_sign_of_zero():
    x = np.linspace(0, 12, 4001, dtype=np.float32)

    np.testing.assert_array_equal(np.signbit(applied(_tanhs, -x)), np.ones(4001, bool))
    np.testing.assert_array_equal(applied(_tanhs, -x), -applied(_tanhs, x))
