"""Sums of scaled vectors and exact dot products on the servers, beside plain NumPy over the same values.

    python -m benchmarks.vectors --json vectors.json [--mb 100] [--rounds 21]

`combine` is ``d = a x + b y``, of which each vector has `--mb` megabytes. NumPy's side is two products and a
sum into memory that is there, and ``np.dot``. Our side is a step of a store at ``local``: one client, one
server, one thread, with its messages, its check that all values are finite, and its exactly rounded sum. Both
sides count the processor time of this thread. The rows `servers` compare the wall time of steps of two server
processes with that of one.
"""

import asyncio
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async import Combine, ParameterStore, Sgd
from adam_async.model.fast.sums import CompiledVectors
from adam_async.parameter_server import served_store
from benchmarks.harness import Option, Row, compared, role, run, turns

STEP = Combine("d", ((0.5, "x"), (-0.25, "y")))

KERNELS_S = 3.0
"""Time in which a server reads its compiled kernels from disk, in seconds; until then it uses NumPy's."""

GOALS = {"combine numba": 1 / 0.75, "combine numpy": 1.0, "dot numba": 1 / 1.15}
"""Least ratio of NumPy's time to ours, by operation and kernels."""


class Plain:
    """The same work by NumPy."""

    def __init__(self, values: NDArray[Any]) -> None:
        self.x, self.y = values.copy(), values[::-1].copy()
        self.out, self.scratch = np.empty_like(values), np.empty_like(values)

    def combine(self) -> None:
        """Compute a sum of scaled vectors."""
        np.multiply(self.x, self.x.dtype.type(0.5), out=self.out)
        np.multiply(self.y, self.y.dtype.type(-0.25), out=self.scratch)
        np.add(self.out, self.scratch, out=self.out)

    def dot(self) -> None:
        """Compute a dot product."""
        np.dot(self.x, self.y)


def seconds(work: Callable[[], object]) -> float:
    """Return the time of a call."""
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


async def filled(store: ParameterStore, values: NDArray[Any]) -> None:
    """Give a store the vectors of the benchmark, and wait for compiled kernels."""
    for name in ("x", "y", "d"):
        await store.add_vector(name)
    await store.assign({"w": values}, vector="x")
    await store.assign({"w": values[::-1].copy()}, vector="y")
    await asyncio.sleep(KERNELS_S)
    for _ in range(3):
        await store.step([STEP], [("x", "y")])


async def took(store: ParameterStore, operation: str, clock: Callable[[], float]) -> float:
    """Return the time of a step, in seconds."""
    begin = clock()
    await (store.step([STEP]) if operation == "combine" else store.dot([("x", "y")]))
    return clock() - begin


async def on_one_server(options: Namespace, kernels: str, dtype: str) -> AsyncIterator[Row]:
    """Compare a store in this process with NumPy."""
    if kernels == "numba":
        CompiledVectors(np.dtype(dtype))  # so that the server only reads them
    vars(served_store).update(kernels_of=lambda store: kernels)
    values = np.random.default_rng(1).normal(size=options.mb * 1_000_000 // np.dtype(dtype).itemsize)
    values = values.astype(dtype)
    plain = Plain(values)
    async with ParameterStore.open("local", {"w": values}, rule=Sgd(rate=0.1)) as store:
        await filled(store, values)
        for operation in ("combine", "dot"):
            found: dict[str, list[float]] = {"ours": [], "numpy": []}
            for side in turns(found, options.rounds):
                work = plain.combine if operation == "combine" else plain.dot
                found[side].append(
                    await took(store, operation, time.thread_time) if side == "ours" else seconds(work)
                )
            case = f"{operation} {kernels}"
            yield compared(
                f"{case} {dtype} / NumPy",
                *(found["ours"], found["numpy"], "s"),
                less_is_better=True,
                goal=GOALS.get(case),
            )


async def on_processes(options: Namespace) -> AsyncIterator[Row]:
    """Compare two server processes with one."""
    CompiledVectors(np.dtype("float64"))
    values = np.random.default_rng(1).normal(size=options.mb * 125_000)
    with ExitStack() as roles:
        controller = roles.enter_context(role("controller"))
        for _ in range(2):
            roles.enter_context(role("ps", "--controller", controller.address))
        async with AsyncExitStack() as stores:
            opened = {}
            for servers in (1, 2):
                name, rule = f"of-{servers}", Sgd(rate=0.1)
                opening = ParameterStore.open(
                    controller.address, {"w": values}, name=name, rule=rule, servers=servers, copies=1
                )
                opened[servers] = await stores.enter_async_context(opening)
                await filled(opened[servers], values)
            for operation in ("combine", "dot"):
                found: dict[int, list[float]] = {1: [], 2: []}
                for servers in turns(found, options.rounds):
                    found[servers].append(await took(opened[servers], operation, time.perf_counter))
                case = f"servers: {operation}, two / one"
                yield compared(case, found[2], found[1], "s", less_is_better=True, goal=1.5)


async def measure(options: Namespace) -> AsyncIterator[Row]:
    """Yield the rows."""
    for kernels in options.kernels:
        for dtype in ("float64", "float32"):
            async for row in on_one_server(options, kernels, dtype):
                yield row
    if options.processes:
        async for row in on_processes(options):
            yield row


if __name__ == "__main__":
    run(
        __doc__,
        partial(measure),
        mb=Option(100, "megabytes of each vector"),
        rounds=Option(21, "rounds of each side"),
        kernels=Option(["numba", "numpy"], "kernels of the server"),
        processes=Option(True, "whether to compare two server processes with one"),
    )
