"""Faults of wires between controllers and clients have an effect and are undone."""

import asyncio

import pytest

from tests.simulation.faults import Missed
from tests.simulation.plan import Fault
from tests.simulation.scenario import World, simulate
from tests.simulation.scenarios.wire_faults import WireFaults
from tests.simulation.wire import Conditions
from tests.test_simulation.scenarios.fault_targets import targets_in

ADDRESSES = ("controller-1", "controller-2", "controller-3")
USER = "user-0"


async def listens(node) -> None:
    await asyncio.get_running_loop().create_server(asyncio.Protocol, node.name, 7)
    await asyncio.sleep(1e6)


async def asks(node) -> None:
    """Send data to the second controller, and connect again after an error."""
    while True:
        await asyncio.sleep(0.1)
        try:
            transport, _ = await asyncio.get_running_loop().create_connection(
                asyncio.Protocol, ADDRESSES[1], 7
            )
        except OSError:
            continue
        while not transport.is_closing():
            transport.write(bytes(100))
            await asyncio.sleep(0.1)


async def is_silent(node) -> None:
    await asyncio.sleep(1e6)


def strike(fault: Fault, *, program=asks, over_s: float = 1e6):
    """Return the state of the client's wire every 0.1 s, whether the fault struck, and the state after it."""

    async def scenario(world: World):
        targets = targets_in(world, patience_s=3.0)
        for name in ADDRESSES:
            world.node(name).start(listens)
        world.node(USER).start(program)
        wire, seen = world.network.wire(USER, ADDRESSES[1]), []

        async def watch() -> None:
            while True:
                await asyncio.sleep(0.1)
                seen.append((wire.conditions, wire.cut))

        await asyncio.sleep(1.0)
        asyncio.get_running_loop().call_later(over_s, targets.over.set)
        watching = asyncio.create_task(watch())
        struck = True
        try:
            await WireFaults(targets).strikes[fault.kind](world, fault)
        except Missed:
            struck = False
        watching.cancel()
        return seen, struck, wire.conditions, wire.cut

    return simulate(scenario, seed=0, limit_s=1000.0).result


LIMITS = {
    "narrow": Fault(at_s=0, kind="narrow", targets=(USER,), lasts_s=1.0, amount=2000.0),
    "break-off": Fault(at_s=0, kind="break-off", targets=(USER,), lasts_s=1.0, amount=300.0),
}
LIMITED = {"narrow": Conditions(bytes_per_s=2000.0), "break-off": Conditions(reset_after_bytes=300)}


@pytest.mark.parametrize("kind", LIMITS)
def test_a_way_has_its_limit_for_a_while_and_is_as_before(kind: str) -> None:
    seen, struck, conditions, _ = strike(LIMITS[kind])

    assert struck
    assert {limited for limited, _ in seen[:9]} == {LIMITED[kind]}
    assert len(seen) < 15
    assert conditions == Conditions()


@pytest.mark.parametrize("kind", LIMITS)
def test_a_limit_without_an_effect_has_missed(kind: str) -> None:
    _, struck, conditions, _ = strike(LIMITS[kind], program=is_silent)

    assert not struck
    assert conditions == Conditions()


@pytest.mark.parametrize("kind", LIMITS)
def test_a_limit_stays_when_the_time_of_faults_is_over(kind: str) -> None:
    _, struck, conditions, _ = strike(LIMITS[kind], over_s=0.5)

    assert struck
    assert conditions == LIMITED[kind]


CUTS = [
    Fault(at_s=0, kind="cut", targets=(USER, ADDRESSES[1]), lasts_s=1.0),
    Fault(at_s=0, kind="cut-one-way", targets=(USER, ADDRESSES[1]), lasts_s=1.0),
    Fault(at_s=0, kind="isolate", targets=(ADDRESSES[1],), lasts_s=1.0),
]


@pytest.mark.parametrize("fault", CUTS, ids=lambda fault: fault.kind)
def test_a_cut_in_the_direction_of_data_has_an_effect(fault: Fault) -> None:
    seen, struck, _, cut = strike(fault)

    assert struck
    assert {was_cut for _, was_cut in seen[:9]} == {True}
    assert not cut

    _, struck, _, cut = strike(fault, program=is_silent)

    assert not struck
    assert not cut
