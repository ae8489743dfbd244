"""The simulated loop: virtual time, the order of steps, deadlocks, and exact repetition."""

import asyncio
import gc
from collections import deque

import pytest

from tests.simulation.loop import Deadlock, Endless, SimulatedLoop, SimulationFailed
from tests.test_simulation.other_processes import printed_elsewhere


def run(scenario, seed=1, **options):
    """Run a coroutine function in a loop of its own; return its result and the loop."""
    loop = SimulatedLoop(seed, **options)
    try:
        return loop.run(scenario()), loop
    finally:
        loop.close()


async def note_turns(name, count, notes):
    for turn in range(count):
        notes.append((name, turn))
        await asyncio.sleep(0)


def test_hours_pass_at_once_and_timers_ring_in_their_order():
    notes = []

    async def wait(seconds):
        await asyncio.sleep(seconds)
        notes.append(asyncio.get_running_loop().time())

    async def scenario():
        async with asyncio.TaskGroup() as group:
            for seconds in (3000.0, 1.0, 2.5):
                group.create_task(wait(seconds))

    _, loop = run(scenario)

    assert notes == [1.0, 2.5, 3000.0]
    assert loop.now == 3000.0


def test_timeouts_queues_and_generators_of_asyncio_work():
    closed = []

    async def count():
        try:
            for number in range(9):
                yield number
                await asyncio.sleep(1.0)
        finally:
            await asyncio.sleep(1.0)
            closed.append(True)

    async def scenario():
        queue = asyncio.Queue(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await queue.get()
        async for number in count():
            if number == 2:
                break
        await asyncio.sleep(5.0)
        return asyncio.get_running_loop().time()

    assert run(scenario)[0] == 12.0
    assert closed == [True]


def test_an_asyncio_runner_can_run_it():
    with asyncio.Runner(loop_factory=lambda: SimulatedLoop(1)) as runner:
        assert runner.run(asyncio.sleep(60.0, "done")) == "done"
        assert runner.run(asyncio.sleep(60.0, "again")) == "again"


def test_steps_run_first_in_first_out_and_the_seed_does_not_matter():
    def order(seed):
        notes = []

        async def scenario():
            async with asyncio.TaskGroup() as group:
                for name in "abc":
                    group.create_task(note_turns(name, 3, notes))

        run(scenario, seed)
        return notes

    assert order(1) == order(2) == [(name, turn) for turn in range(3) for name in "abc"]


def test_a_shuffled_loop_finds_a_lost_update_that_order_hides():
    def total(seed, shuffled):
        async def scenario():
            value = 0

            async def add():
                nonlocal value
                before = value
                for _ in range(2):
                    await asyncio.sleep(0)
                value = max(value, before) if value != before else before + 1

            async def late():
                await asyncio.sleep(0)
                await add()

            async with asyncio.TaskGroup() as group:
                group.create_task(add())
                group.create_task(late())
            return value

        return run(scenario, seed, shuffled=shuffled)[0]

    assert {total(seed, False) for seed in range(30)} == {1}
    assert {total(seed, True) for seed in range(30)} == {1, 2}


def test_a_deadlock_names_the_waiting_tasks_and_where_they_wait():
    async def wait_for_ever():
        await asyncio.Event().wait()

    async def scenario():
        async with asyncio.TaskGroup() as group:
            group.create_task(wait_for_ever(), name="stuck")

    with pytest.raises(Deadlock, match=r"stuck at .*locks\.py.*in Event\.wait"):
        run(scenario)


def test_a_loop_that_lets_no_time_pass_is_found():
    async def scenario():
        await note_turns("endless", 10**9, deque(maxlen=1))

    with pytest.raises(Endless, match="steps at 0"):
        run(scenario)


def test_a_run_ends_at_its_limit():
    async def scenario():
        await asyncio.sleep(61.0)

    with pytest.raises(Endless, match="the run goes on after 60 s"):
        run(scenario, limit_s=60.0)


def test_a_failure_without_a_waiter_fails_the_run():
    async def scenario():
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(1.0)

    with pytest.raises(SimulationFailed, match="ZeroDivisionError"):
        run(scenario)


def test_threads_are_refused():
    async def scenario():
        with pytest.raises(RuntimeError, match="has none"):
            await asyncio.to_thread(print)

    run(scenario)


def test_two_runs_of_one_seed_have_one_replay_hash_and_other_seeds_have_others():
    def replay_hash(seed):
        async def scenario():
            async with asyncio.TaskGroup() as group:
                for name in "abcdef":
                    group.create_task(note_turns(name, 5, []), name=name)

        return run(scenario, seed, shuffled=True)[1].replay_hash

    hashes = [replay_hash(seed) for seed in range(5)]

    assert [replay_hash(seed) for seed in range(5)] == hashes
    assert len(set(hashes)) == 5


def test_remaining_tasks_are_unwound_at_the_end_despite_further_waits(recwarn):
    ended = []

    async def stubborn():
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(5):
                await asyncio.sleep(1.0)
            ended.append("never")

    async def waiter(condition):
        try:
            async with condition:
                await condition.wait()
        finally:
            ended.append("unwound")

    async def scenario():
        loop = asyncio.get_running_loop()
        condition = asyncio.Condition()
        tasks = [loop.create_task(stubborn()), loop.create_task(waiter(condition))]
        await asyncio.sleep(1.0)
        await condition.acquire()
        return tasks

    tasks, _ = run(scenario)
    del tasks
    gc.collect()

    assert ended == ["unwound"]
    assert recwarn.list == []


SCENARIO_IN_A_PROCESS = """
import asyncio
import gc
from tests.simulation.loop import SimulatedLoop

async def child(name):
    await asyncio.sleep(len(name))

async def scenario():
    words = {"one", "two", "three", "four", "five"}
    async with asyncio.TaskGroup() as group:
        tasks = {group.create_task(asyncio.Event().wait()) for _ in range(200)}
        for name in sorted(words):
            group.create_task(child(name), name=name)
        await asyncio.sleep(9.0)
        for task in tasks:
            task.cancel()

loop = SimulatedLoop(7, shuffled=True)
loop.run(scenario())
print(loop.replay_hash)
loop.close()
"""


def test_the_replay_hash_is_that_of_every_process():
    """On other loops, sets of tasks are ordered by address, which differs between processes."""
    assert len({printed_elsewhere(SCENARIO_IN_A_PROCESS, seed) for seed in ("0", "1", "4242")}) == 1
