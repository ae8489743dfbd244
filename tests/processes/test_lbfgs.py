"""L-BFGS with workers in processes of their own, one of which is killed."""

from contextlib import ExitStack

import numpy as np
import pytest

from adam_async import LBFGS, ParameterStore
from tests.adam_async.lbfgs import problems
from tests.processes.commands import started_by_hand
from tests.processes.test_stores import program

pytestmark = pytest.mark.processes

WORKER = """
import asyncio, sys
from adam_async import LBFGS, ParameterStore
from tests.adam_async.lbfgs import problems

async def main():
    arrays, function, batches = problems.logistic()
    async with ParameterStore.open(sys.argv[1], arrays, name="lbfgs") as store:
        await LBFGS.assist(store, function, batches)

asyncio.run(main())
"""


async def test_a_killed_worker_changes_no_bit_and_the_other_ends_with_the_coordinator():
    arrays, function, batches = problems.logistic()
    expected, points = [], []

    def keep(store, found):
        async def take(iteration):
            found.append((await store.pull())["w"].copy())

        return take

    async with ParameterStore.open("local", arrays, name="alone") as store:
        await LBFGS(store, function, batches).minimise(15, keep(store, expected))
    with ExitStack() as stack:
        where, start = started_by_hand(stack)
        start("ps", "--controller")
        start("ps", "--controller")
        workers = [stack.enter_context(program(WORKER, where)) for _ in range(2)]
        async with ParameterStore.open(where, arrays, name="lbfgs") as store:
            take = keep(store, points)

            async def kill(iteration):
                await take(iteration)
                if iteration.number == 5:
                    workers[0].kill()

            optimizer = LBFGS(store, function, batches, workers=0)
            result = await optimizer.minimise(15, kill)
        assert workers[1].wait(20) == 0

    assert result.number == 15
    assert np.array_equal(points, expected)
    assert optimizer.computations >= result.evaluations * len(batches)
