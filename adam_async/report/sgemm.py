"""The rate of single-precision matrix products by the machine's BLAS, in operations per second.

A training rate alone depends on the machine as much as on the program. Divided by the rate of matrix products
(sgemm) on as many threads at the same time, it is the used share of the machine. Products of 512 by 512 fit
into the caches, and are large enough for a BLAS to be near its best rate.
"""

import asyncio

import numpy as np
from numpy.typing import NDArray

from dataflow import ComputePool

SIDE = 512
SECONDS = 0.3
"""Seconds for which all threads multiply, after one uncounted product on each."""

OPERATIONS = 2 * SIDE**3
"""Operations of one product: a multiplication and an addition per multiply-add."""


class Factors:
    """One thread's matrices."""

    def __init__(self) -> None:
        self._a: NDArray[np.float32] = np.full((SIDE, SIDE), 0.5, np.float32)
        self._b, self._product = self._a.copy(), np.empty_like(self._a)
        self.multiply()

    def multiply(self) -> None:
        """Compute one product."""
        np.matmul(self._a, self._b, out=self._product)


async def measure_sgemm(threads: int, seconds: float = SECONDS) -> float:
    """Multiply on all threads at once; returns operations per second of all of them together.

    The BLAS has to use one thread, as under the command line; more threads would change the measure.

    Args:
        threads: Number of threads, each with matrices of its own.
        seconds: Duration; at least one product is computed.
    """
    loop, contexts = asyncio.get_running_loop(), [Factors() for _ in range(threads)]
    async with ComputePool(threads=threads, name="sgemm", contexts=contexts) as pool:
        end = loop.time() + seconds

        async def lane() -> int:
            products = 0
            while products == 0 or loop.time() < end:
                await pool.run(Factors.multiply, cost="sgemm", with_context=True)
                products += 1
            return products

        # Two lanes per thread, so that none waits for the loop between two products.
        async with asyncio.TaskGroup() as group:
            lanes = [group.create_task(lane(), name=f"sgemm-{number}") for number in range(2 * threads)]
        done = sum(task.result() for task in lanes)
        return done * OPERATIONS * threads / pool.statistics().busy_s
