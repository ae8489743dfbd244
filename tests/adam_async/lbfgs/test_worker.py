"""A worker: what it does with a turn whose evaluation is over."""

import asyncio

from adam_async.lbfgs.minimiser import GRADIENT, stored_name
from adam_async.lbfgs.worker import GradientWorker
from adam_async.messages import Pieces
from adam_async.store.store import ParameterStore
from dataflow import ComputePool
from tests.adam_async.lbfgs import problems


async def test_a_worker_leaves_a_turn_that_another_one_had_too(monkeypatch):
    arrays, function, batches = problems.logistic()
    computed, pushing, moved, left = [asyncio.Event() for _ in range(4)]
    push, pushed = ParameterStore.push, []

    async def ask(asked):
        match asked.pushes, asked.evaluation, asked.batch:
            case True, 0, 0:
                await computed.wait()
                return Pieces(evaluation=1, first=0, stop=2)
            case True, _, _:
                left.set()
            case False, 0, 0:
                return Pieces(evaluation=1, first=0, stop=1)
            case False, 1, 0:
                return Pieces(evaluation=1, first=1, stop=2)
            case False, 1, 1:
                computed.set()
                await pushing.wait()
                return Pieces(evaluation=2, first=0, stop=1)
            case False, 2, 0:
                moved.set()
        return await asyncio.Event().wait()

    async def slow(store, gradients, **options):
        pushed.append(options["groups"])
        pushing.set()
        await moved.wait()
        return await push(store, gradients, **options)

    monkeypatch.setattr(ParameterStore, "push", slow)
    async with (
        asyncio.timeout(20),
        ParameterStore.open("local", arrays, name="turn") as store,
        ComputePool(threads=1, name="worker") as pool,
        asyncio.TaskGroup() as group,
    ):
        await store.add_vector(stored_name(GRADIENT))
        working = group.create_task(GradientWorker(store, function, batches, ask, pool).run())
        await left.wait()
        working.cancel()

    assert pushed == [(1, 0, 1)]
