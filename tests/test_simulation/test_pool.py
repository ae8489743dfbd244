"""Jobs in virtual time: all run, in an order that the seed decides, at the pace of the pool."""

import asyncio

import pytest

from dataflow.errors import PoolClosed
from tests.simulation.loop import SimulationFailed
from tests.simulation.pool import SimulatedPool
from tests.simulation.scenario import simulate


def in_pool(use, *, seed=1, **options):
    async def scenario(world):
        async def program(node):
            async with SimulatedPool(**options) as pool:
                return await use(pool)

        world.node("a").start(program)
        return await world.nodes["a"].task

    return simulate(scenario, seed=seed)


def test_jobs_end_in_an_order_that_the_seed_decides():
    def order(seed):
        async def use(pool):
            ended = []
            async with asyncio.TaskGroup() as group:
                for number in range(6):
                    group.create_task(pool.run(ended.append, number))
            return tuple(ended)

        return in_pool(use, seed=seed, threads=3).result

    orders = {order(seed) for seed in range(10)}

    assert len(orders) > 5
    assert order(3) == order(3)
    assert all(sorted(one) == list(range(6)) for one in orders)


def test_a_pool_accepts_its_intake_runs_it_and_accepts_no_job_after_its_end():
    async def use(pool):
        ended = []
        accepted = [pool.submit(int, on_done=ended.append) for _ in range(4)]
        await pool.__aexit__(None, None, None)
        with pytest.raises(PoolClosed):
            await pool.run(int)
        return accepted, len(ended), pool.statistics().finished

    assert in_pool(use, threads=1, intake=3).result == ([True, True, True, False], 3, 3)


def test_a_pool_whose_jobs_take_too_long_ends_with_their_names():
    async def use(pool):
        pool.submit(int, cost="a long job", on_done=lambda job: None)

    with pytest.raises(SimulationFailed, match=r"WaitTimedOut.*closing pool .* runs 'a long job'"):
        in_pool(use, threads=1, pace=1e-6, close_timeout_s=1.0)


def test_contexts_errors_and_pace():
    async def use(pool):
        with pytest.raises(ZeroDivisionError):
            await pool.run(lambda: 1 / 0)
        for _ in range(200):
            await pool.run(list.append, 1, with_context=True)
        return len(await pool.run(lambda context: context, with_context=True))

    full, half = (in_pool(use, threads=1, contexts=list, pace=pace) for pace in (1.0, 0.5))

    assert full.result == half.result == 200
    assert half.now == pytest.approx(2 * full.now)
