"""Clocks run at another rate for a while, and count only where a program ran by them to the end."""

import asyncio

from tests.simulation.faults import Missed
from tests.simulation.plan import Fault
from tests.simulation.scenario import World, simulate
from tests.simulation.scenarios.machine_faults import AGAIN_S, MachineFaults
from tests.test_simulation.scenarios.fault_targets import targets_in

NAME = "controller-1"
RATE = 1.25
LASTS_S = 4.0


async def lives_on(node) -> None:
    await asyncio.sleep(1e6)


def strike(*others, over_s: float = 1e6):
    """Let a clock be wrong, and do others to its machine, each at its time.

    Returns how fast the clock ran, every half second; whether that counts; and how it runs then.
    """

    async def scenario(world: World):
        targets = targets_in(world, patience_s=3.0)
        node = world.node(NAME)
        node.start(lives_on)
        rates, loop = [], asyncio.get_running_loop()
        loop.call_later(over_s, targets.over.set)
        for at_s, do in others:
            loop.call_later(at_s, do, node)

        async def watch() -> None:
            await asyncio.sleep(0.25)
            while True:
                rates.append(node.host.rate)
                await asyncio.sleep(0.5)

        watching = asyncio.create_task(watch())
        fault = Fault(at_s=0, kind="clock", targets=(NAME,), lasts_s=LASTS_S, amount=RATE)
        counts = True
        try:
            await MachineFaults(targets).strikes["clock"](world, fault)
        except Missed:
            counts = False
        watching.cancel()
        return rates, counts, node.host.rate

    return simulate(scenario, seed=0, limit_s=1000.0).result


def crash(node) -> None:
    node.crash()


def restart(node) -> None:
    node.restart()


def test_a_clock_is_wrong_for_its_time_and_is_right_again() -> None:
    rates, counts, rate = strike()

    assert counts
    assert rates == [RATE] * int(2 * LASTS_S)
    assert rate == 1.0


def test_a_clock_is_wrong_again_in_the_incarnation_after_an_ended_one() -> None:
    rates, counts, rate = strike((1.0, crash), (2.0, restart))

    assert counts
    assert rates[4:8] == [1.0] * 4
    assert rates[8:] == [RATE] * int(2 * AGAIN_S)
    assert rate == 1.0


def test_a_clock_of_a_machine_that_stays_down_does_not_count() -> None:
    _, counts, _ = strike((1.0, crash))

    assert not counts


def test_a_clock_that_is_wrong_when_the_time_of_faults_is_over_counts_and_stays_so() -> None:
    rates, counts, rate = strike(over_s=1.0)

    assert counts
    assert len(rates) == 2
    assert rate == RATE


def test_a_wrong_clock_of_an_incarnation_that_ended_early_does_not_count() -> None:
    _, counts, _ = strike((0.5, crash), (0.7, restart), over_s=1.0)

    assert not counts
