"""The rate of single-precision matrix products by the machine's BLAS, in operations per second.

A training rate alone depends on the machine as much as on the program. The operations per second of training,
divided by the rate of matrix products (sgemm) on as many threads, are the share of the machine that training
uses. The matrices have 512 rows and columns: they fit into the caches, at almost the best rate of a BLAS.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataflow import ComputePool

SIDE = 512
SECONDS = 0.3
"""Duration of the products on all threads, in seconds, after one uncounted product per thread."""

OPERATIONS = 2 * SIDE**3
"""Number of operations of one product: two for each multiply-add."""


class Factors:
    """One thread's matrices."""

    def __init__(self) -> None:
        self._a: NDArray[np.float32] = np.full((SIDE, SIDE), 0.5, np.float32)
        self._b, self._product = self._a.copy(), np.empty_like(self._a)
        self.multiply()

    def multiply(self) -> int:
        """Compute one product; returns the number of products."""
        np.matmul(self._a, self._b, out=self._product)
        return 1


async def measure_sgemm(threads: int, seconds: float = SECONDS) -> float:
    """Multiply on all threads at once; returns operations per second of all of them together.

    The BLAS must use one thread, as under the command line; more threads would change the measurement.

    Args:
        seconds: Duration; at least one product is computed.
    """
    contexts = [Factors() for _ in range(threads)]
    async with ComputePool(threads=threads, name="sgemm", contexts=contexts) as pool:
        done = await keep_busy(pool, Factors.multiply, seconds, cost="sgemm")
        return done * OPERATIONS * threads / pool.statistics().busy_s


async def keep_busy(
    pool: ComputePool, job: Callable[..., int], seconds: float, *arguments: Any, cost: str
) -> int:
    """Run a job on every thread of a pool for a time, with the thread's context; return the sum of the
    results."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds

    async def lane() -> int:
        """Run jobs one after the other until the end; return their sum."""
        total = 0
        while True:
            total += await pool.run(job, *arguments, cost=cost, with_context=True)
            if loop.time() >= end:
                return total

    # Two lanes per thread, so no thread waits for the loop between two jobs.
    async with asyncio.TaskGroup() as group:
        lanes = range(2 * pool.statistics().threads)
        tasks = [group.create_task(lane(), name=f"{cost}-{number}") for number in lanes]
    return sum(task.result() for task in tasks)
