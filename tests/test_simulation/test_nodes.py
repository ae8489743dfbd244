"""Simulated machines: their clocks, crashes, freezes, slow code and incarnations."""

import asyncio
from itertools import pairwise

import pytest

from tests.simulation.loop import SimulationFailed
from tests.simulation.scenario import simulate


def ticking(notes, every_s=1.0):
    async def program(node):
        while True:
            notes.append(asyncio.get_running_loop().time())
            await asyncio.sleep(every_s)

    return program


def test_a_crashed_machine_runs_no_code_not_even_the_cleanup_of_its_program():
    notes, ended = [], []

    async def program(node):
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(ticking(notes)(node), name="ticks")
                group.create_task(asyncio.Event().wait(), name="waits")
        finally:
            ended.append(asyncio.get_running_loop().time())
            await asyncio.sleep(1.0)

    async def scenario(world):
        node = world.node("a")
        node.start(program)
        await asyncio.sleep(2.5)
        node.crash()
        await asyncio.sleep(100.0)
        return len(notes), list(ended)

    assert simulate(scenario, seed=1).result == (3, [])


def test_a_restarted_machine_has_another_incarnation():
    lives = []

    async def program(node):
        lives.append((node.incarnation, node.entropy(4)))
        await asyncio.sleep(1000.0)

    async def scenario(world):
        node = world.node("a")
        for life in range(3):
            node.restart() if life else node.start(program)
            await asyncio.sleep(1.0)
            node.crash()
            await asyncio.sleep(1.0)

    simulate(scenario, seed=1)

    assert [life for life, _ in lives] == [1, 2, 3]
    assert len({drawn for _, drawn in lives}) == 3


def test_a_frozen_machine_stands_still_and_then_finds_its_timers_late():
    notes = []

    async def scenario(world):
        node = world.node("a")
        node.start(ticking(notes))
        await asyncio.sleep(1.5)
        node.freeze()
        await asyncio.sleep(10.0)
        assert notes == [0.0, 1.0]
        node.thaw()
        await asyncio.sleep(1.2)

    simulate(scenario, seed=1)

    assert notes == [0.0, 1.0, 11.5, 12.5]


def test_each_machine_has_its_own_clock():
    notes, fast = [], []

    async def scenario(world):
        world.node("a").start(ticking(notes), time=3600.0)
        world.node("b").start(ticking(fast), rate=1.1)
        await asyncio.sleep(10.5)

    simulate(scenario, seed=1)

    assert notes == [3600.0 + tick for tick in range(11)]
    assert len(fast) == 12
    assert all(later - earlier >= 1.0 for earlier, later in pairwise(fast))


def test_timers_follow_a_clock_that_changes_its_rate():
    notes = []

    async def scenario(world):
        node = world.node("a")

        async def program(node):
            await asyncio.sleep(10.0)
            notes.append((asyncio.get_running_loop().time(), world.now))

        node.start(program)
        await asyncio.sleep(5.0)
        node.set_clock(rate=0.5)
        await asyncio.sleep(20.0)

    simulate(scenario, seed=1)

    assert notes == [(10.0, 15.0)]


def test_a_slow_machine_is_late_and_keeps_its_order():
    notes = []

    async def turn(name, world):
        for step in range(3):
            notes.append((name, step, round(world.now, 6)))
            await asyncio.sleep(0)

    async def scenario(world):
        async def program(node):
            async with asyncio.TaskGroup() as group:
                group.create_task(turn("x", world), name="x")
                group.create_task(turn("y", world), name="y")

        world.node("a").start(program, step_s=0.1)
        await asyncio.sleep(5.0)

    simulate(scenario, seed=1)

    assert [note[:2] for note in notes] == [(name, step) for step in range(3) for name in "xy"]
    assert [note[2] for note in notes] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]


def test_a_program_that_raises_fails_the_run_unless_it_may():
    async def program(node):
        await asyncio.sleep(1.0)
        raise ValueError("broken")

    async def scenario(world, **how):
        world.node("a").start(program, **how)
        await asyncio.sleep(2.0)
        return world.now

    with pytest.raises(SimulationFailed, match="program of a raised"):
        simulate(scenario, seed=1)

    assert simulate(lambda world: scenario(world, may_fail=True), seed=1).result == 2.0


def test_a_failure_contains_the_arguments_of_its_run():
    async def scenario(world):
        await asyncio.sleep(2.0)
        raise AssertionError("so it is")

    with pytest.raises(AssertionError) as failure:
        simulate(scenario, seed="night/7", shuffled=True)

    (note,) = failure.value.__notes__
    assert "seed='night/7', shuffled=True" in note
    assert "at 2.0 s" in note


def test_a_machine_that_runs_cannot_be_started():
    async def scenario(world):
        world.node("a").start(ticking([]))
        with pytest.raises(RuntimeError, match="runs already"):
            world.node("a").restart()
        with pytest.raises(RuntimeError, match="never ran"):
            world.node("b").restart()

    simulate(scenario, seed=1)
