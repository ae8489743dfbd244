"""The rate of matrix products is that of real products, on all threads together."""

import time

import numpy as np
import pytest

from adam_async.report.baseline import OPERATIONS, SIDE, Factors, measure_sgemm


def plain_rate() -> float:
    a, begin, products = np.full((SIDE, SIDE), 0.5, np.float32), time.perf_counter(), 0
    while (spent_s := time.perf_counter() - begin) < 0.05:
        a @ a
        products += 1
    return products * OPERATIONS / spent_s


def test_a_product_is_computed() -> None:
    factors = Factors()

    assert np.all(factors._product == SIDE * 0.25)


@pytest.mark.parametrize("threads", [1, 2])
async def test_the_rate_is_near_that_of_plain_products(threads: int) -> None:
    """Within a factor of ten: it catches a wrong unit or a forgotten factor on a busy machine."""
    ratios: list[float] = []
    while len(ratios) < 5 and not any(0.1 < ratio < 10 for ratio in ratios):
        ratios.append(await measure_sgemm(threads, seconds=0.05) / plain_rate())
    assert 0.1 < ratios[-1] < 10
