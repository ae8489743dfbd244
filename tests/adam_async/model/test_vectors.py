"""Sums of scaled vectors round in one order; dot products are exactly rounded; kernels have equal bits."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.model.fast.sums import LANES, CompiledVectors
from adam_async.model.vectors import BLOCK, GROUP, NumpyVectors, exact_parts, exact_sum, rounded_sum

SIZES = (0, 1, 7, 8 * LANES - 1, 8 * LANES + 3, GROUP + 1, BLOCK + 5)
DTYPES = ("float32", "float64")
BOTH = ("numpy", "numba")


def kernels_of(name, dtype):
    return NumpyVectors(dtype) if name == "numpy" else CompiledVectors(np.dtype(dtype))


def drawn(size, dtype, seed, *, spread=6):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=size) * 10.0 ** rng.integers(-spread, spread, size=size)).astype(dtype)


def fsum_of(x, y):
    return math.fsum((x.astype(np.float64) * y.astype(np.float64)).tolist())


def dot_of(kernels, x, y):
    """The dot product of kernels, or in its place the sum in whole numbers."""
    found = kernels.dot(x, y)
    return [*exact_sum(x, y)][-1] if found is None else found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("size", SIZES)
def test_a_sum_rounds_coefficients_then_products_then_sums_in_order(name, dtype, size):
    vectors = [drawn(size, dtype, seed) for seed in range(4)]
    coefficients = [0.1, 1.0, -3.7, 1e-3]
    for terms in range(5):
        want = np.zeros(size, dtype)
        for at in range(terms):
            product = vectors[at] * np.dtype(dtype).type(coefficients[at])
            want = product if at == 0 else want + product
        out = np.full(size, 7, dtype)
        finite = kernels_of(name, dtype).combine(out, [*zip(coefficients, vectors, strict=True)][:terms])
        assert finite
        assert out.tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("terms", [1, 2, 3])
def test_a_sum_says_whether_all_values_are_finite(name, dtype, bad, terms):
    for place in (0, 2048, BLOCK + 4):
        vector = np.ones(BLOCK + 5, dtype)
        vector[place] = bad
        others = [(1.0, np.ones(len(vector), dtype))] * (terms - 1)
        assert not kernels_of(name, dtype).combine(np.empty_like(vector), [*others, (1.0, vector)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("size", SIZES)
def test_a_dot_product_is_the_rounded_sum_of_its_products(name, dtype, size):
    kernels = kernels_of(name, dtype)
    for seed in range(5):
        x, y = drawn(size, dtype, seed), drawn(size, dtype, seed + 100)
        assert dot_of(kernels, x, y) == fsum_of(x, y)
        assert dot_of(kernels, x, x) == fsum_of(x, x)


@pytest.mark.parametrize("name", BOTH)
def test_most_dot_products_need_no_whole_numbers(name):
    kernels = kernels_of(name, "float64")
    pairs = [
        (drawn(5000, "float64", seed, spread=1), drawn(5000, "float64", -seed - 1 + 99)) for seed in range(40)
    ]
    assert sum(kernels.dot(x, y) is None for x, y in pairs) == 0


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    "products",
    [
        [1.0, 2.0**-53, 2.0**-106],  # above a tie
        [1.0, 2.0**-53],  # a tie, to even
        [1.0 + 2.0**-52, 2.0**-53],  # a tie, to even, upwards
        [1.0, 2.0**-53, -(2.0**-110)],
        [1e300, 1.0, -1e300],
        [1e300, 3.0, -1e300, 1e-300],
        [5e-324] * 3,
        [1e-200, 1e-210],
        [2.0**1000, 2.0**947, -(2.0**1000)],
        [0.0, -0.0],
    ],
)
def test_a_sum_that_cancels_or_is_near_a_tie_is_exact(name, products):
    for pad in (0, 3 * 8 * LANES):
        x = np.array([*products, *[0.0] * pad])
        np.random.default_rng(pad).shuffle(x)
        y = np.ones(len(x))
        want = fsum_of(x, y)
        assert dot_of(kernels_of(name, "float64"), x, y) == want
        assert math.copysign(1, dot_of(kernels_of(name, "float64"), x, y)) == math.copysign(1, want)
        assert [*exact_sum(x, y)][-1] == want


@given(st.lists(st.floats(-1e150, 1e150), min_size=1, max_size=60), st.randoms())
def test_any_dot_product_equals_fsum(values, dice):
    x = np.array(values + [-each for each in values[: len(values) // 2]])
    y = np.array([dice.choice((1.0, -1.0, 3.0, 1e-8)) for _ in x])
    for name in BOTH:
        assert dot_of(kernels_of(name, "float64"), x, y) == fsum_of(x, y)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("scale", [1e70, 1e75, 1e76, 1e77])
def test_a_dot_product_whose_squares_nearly_overflow_is_exact(name, scale):
    kernels = kernels_of(name, "float64")
    for seed in range(5):
        x, y = (scale * drawn(GROUP + 1, "float64", each, spread=1) for each in (seed, seed + 100))
        assert dot_of(kernels, x, y) == fsum_of(x, y)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("values", [[1e200], [1e308, 1e308], [np.inf, 1.0], [np.nan]])
def test_an_overflow_is_nan(name, values):
    x = np.array(values)
    assert math.isnan(dot_of(kernels_of(name, "float64"), x, np.maximum(x, 1.0)))


@given(st.lists(st.lists(st.floats(-1e300, 1e300), max_size=9), max_size=5))
def test_parts_of_several_servers_add_up_exactly(bundles):
    parts = [exact_parts(values) or (0.0,) for values in bundles]
    whole = [value for values in bundles for value in values]
    assert [sum(map(Fraction, each)) for each in parts] == [sum(map(Fraction, each)) for each in bundles]
    assert rounded_sum(parts) == math.fsum(whole)
    assert max(map(len, parts), default=0) <= 48


def test_a_bundle_without_a_finite_sum_makes_the_sum_nan():
    assert exact_parts([1e308, 1e308]) == ()
    assert exact_parts([math.nan, 1.0]) == ()
    assert math.isnan(rounded_sum([(1.0,), ()]))
    assert math.isnan(rounded_sum([(1.7e308,), (1.7e308,)]))
    assert rounded_sum([]) == 0.0
