"""Child processes run simulations: they answer in turn, and none is left behind."""

import asyncio
import os
import signal

import pytest

from adam_async.errors import RoleDied
from tests.processes.commands import children_of
from tests.simulation.runner import draw_case, run_seed
from tests.simulation.scenarios import SCENARIOS
from tests.simulation.work import ProcessPool, Repeat, Seeds

MEMBERS = SCENARIOS["members"]


def simulating() -> list[int]:
    """Our children that simulate."""
    return [pid for pid, line in children_of(os.getpid()).items() if "simulate --supervised" in line]


@pytest.fixture(scope="module")
def replay_hash() -> str:
    return run_seed(MEMBERS, 2).replay_hash


@pytest.mark.slow
async def test_children_give_the_answers_of_this_process_and_end_with_the_block(replay_hash: str) -> None:
    async with ProcessPool(2) as process_pool:
        assert len(simulating()) == 2
        async with asyncio.TaskGroup() as group:
            seeds = group.create_task(process_pool.do(Seeds(scenario="members", seeds=(2,))))
            one = group.create_task(process_pool.do(Repeat(case=draw_case(MEMBERS, 2))))
        for answers in (await seeds, await one):
            assert [answer.result.replay_hash for answer in answers] == [replay_hash]

    assert simulating() == []


async def test_a_child_that_dies_is_named_and_the_others_end() -> None:
    with pytest.raises(RoleDied, match="a child process of simulate died: killed by signal 9"):
        async with ProcessPool(2) as process_pool:
            for pid in simulating():
                os.kill(pid, signal.SIGKILL)
            await process_pool.do(Seeds(scenario="members", seeds=(2,)))

    assert simulating() == []


async def test_a_pool_whose_block_is_cancelled_leaves_no_process() -> None:
    async def endless() -> None:
        async with ProcessPool(2) as process_pool:
            ready.set()
            await process_pool.do(Seeds(scenario="members", seeds=tuple(range(10_000))))

    ready = asyncio.Event()
    task = asyncio.get_running_loop().create_task(endless())
    await ready.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert simulating() == []
