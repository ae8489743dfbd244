"""L-BFGS with workers and a coordinator in processes of their own, which are killed and frozen."""

import asyncio
import signal
from contextlib import ExitStack

import numpy as np
import pytest

from adam_async import LBFGS, ParameterStore
from adam_async.run.config import Waits
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


COORDINATOR = """
import asyncio, os, sys
from adam_async import LBFGS, ParameterStore
from tests.adam_async.lbfgs import problems

async def main():
    arrays, function, batches = problems.logistic()
    async with ParameterStore.open(sys.argv[1], arrays, name="lbfgs") as store:
        await LBFGS(store, function, batches).minimise(15, lose)

def lose(iteration):
    if iteration.number == 5:
        print("5", flush=True)
        os.kill(os.getpid(), SIGNAL)

asyncio.run(main())
"""


def keep(store, found):
    async def take(iteration):
        found.append((await store.pull())["w"].copy())

    return take


async def alone():
    """Return the points of an undisturbed minimisation."""
    arrays, function, batches = problems.logistic()
    points = []
    async with ParameterStore.open("local", arrays, name="alone") as store:
        await LBFGS(store, function, batches).minimise(15, keep(store, points))
    return points


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_or_frozen_worker_changes_no_bit_and_the_other_ends_with_the_coordinator(sent):
    arrays, function, batches = problems.logistic()
    expected, points = await alone(), []
    with ExitStack() as stack:
        where, start = started_by_hand(stack)
        start("ps", "--controller")
        start("ps", "--controller")
        workers = [stack.enter_context(program(WORKER, where)) for _ in range(2)]
        waits = Waits(clock_s=1.0)
        async with ParameterStore.open(where, arrays, name="lbfgs", waits=waits) as store:
            take = keep(store, points)

            async def lose(iteration):
                await take(iteration)
                if iteration.number == 5:
                    workers[0].send_signal(sent)

            optimizer = LBFGS(store, function, batches, workers=0)
            result = await optimizer.minimise(15, lose)
        assert workers[1].wait(20) == 0
        if sent == signal.SIGSTOP:  # it returns late, and finds the end
            workers[0].send_signal(signal.SIGCONT)
            assert workers[0].wait(20) == 0

    assert result.number == 15
    assert np.array_equal(points, expected)
    assert optimizer.computations >= result.evaluations * len(batches)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_or_frozen_coordinator_is_replaced_and_does_no_harm_when_it_returns(sent):
    arrays, function, batches = problems.logistic()
    expected, points = await alone(), []
    with ExitStack() as stack:
        where, start = started_by_hand(stack)
        start("ps", "--controller")
        start("ps", "--controller")
        first = stack.enter_context(program(COORDINATOR.replace("SIGNAL", str(int(sent))), where))
        assert first.stdout is not None
        assert first.stdout.readline() == "5\n"
        async with asyncio.timeout(40), ParameterStore.open(where, arrays, name="lbfgs") as store:
            optimizer, take = LBFGS(store, function, batches), keep(store, points)

            async def awake(iteration):
                await take(iteration)
                if len(points) == 1 and sent == signal.SIGSTOP:
                    first.send_signal(signal.SIGCONT)
                    assert await asyncio.to_thread(first.wait, 20) == 1

            now = await optimizer.minimise(1, awake)
            assert now.number == 5  # the move that is made twice
            assert (await optimizer.minimise(15 - now.number, take)).number == 15

    assert len(points) > 1
    assert np.array_equal(points, expected[-len(points) :])
