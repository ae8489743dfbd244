"""Faults of a plan strike at their times, have their effects, and are undone."""

import asyncio

import pytest

from tests.simulation.faults import KINDS, PATIENCE_S, damage_between, strike_all
from tests.simulation.plan import Fault
from tests.simulation.scenario import Ledger, Violation, World, simulate

NAMES = ("a", "b", "c")


async def stays(node):
    await asyncio.sleep(1e6)


async def ends(node):
    await asyncio.sleep(0.5)


async def talks(node, every_s=0.05):
    """Send data to the others at intervals."""
    loop = asyncio.get_running_loop()

    async def to(other):
        while True:
            await asyncio.sleep(every_s)
            try:
                transport, _ = await loop.create_connection(asyncio.Protocol, other, 7)
            except OSError:
                continue
            while not transport.is_closing():
                transport.write(b".")
                await asyncio.sleep(every_s)

    await loop.create_server(asyncio.Protocol, node.name, 7)
    async with asyncio.TaskGroup() as group:
        for other in NAMES:
            if other != node.name:
                group.create_task(to(other))


def seen_under(*faults: Fault, look=lambda world: None, own=None, program=talks):
    """Return the values of `look` every 0.1 s while faults strike, and the ledger."""

    async def scenario(world: World):
        for name in NAMES:
            world.node(name).start(program)
        ledger = Ledger(lambda: world.now)
        seen = []

        async def watch():
            while True:
                await asyncio.sleep(0.1)
                seen.append(look(world))

        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch())
            await strike_all(world, faults, ledger, own=own)
            await asyncio.sleep(0.5)
            watching.cancel()
        return seen, ledger

    return simulate(scenario, seed=0, limit_s=100.0).result


LOOKS = {
    "crash": (("a",), 0.0, lambda world: (world.node("a").host.up, world.node("a").incarnation)),
    "kill": (("a",), 0.0, lambda world: (world.node("a").host.up, world.node("a").incarnation)),
    "freeze": (("a",), 0.0, lambda world: world.node("a").host.frozen),
    "slow": (("a",), 0.01, lambda world: world.node("a").host.step_s),
    "cut": (
        ("a", "b"),
        0.0,
        lambda world: (world.network.wire("a", "b").cut, world.network.wire("b", "a").cut),
    ),
    "cut-one-way": (
        ("a", "b"),
        0.0,
        lambda world: (world.network.wire("a", "b").cut, world.network.wire("b", "a").cut),
    ),
    "isolate": (
        ("a",),
        0.0,
        lambda world: (world.network.wire("a", "b").cut, world.network.wire("c", "a").cut),
    ),
}
STATES = {
    "crash": [(True, 1), (False, 1), (True, 2)],
    "kill": [(True, 1), (False, 1), (True, 2)],
    "freeze": [False, True, False],
    "slow": [0.0, 0.01, 0.0],
    "cut": [(False, False), (True, True), (False, False)],
    "cut-one-way": [(False, False), (True, False), (False, False)],
    "isolate": [(False, False), (True, True), (False, False)],
}


@pytest.mark.parametrize("kind", LOOKS)
def test_a_fault_is_done_undone_and_recorded(kind: str) -> None:
    targets, amount, look = LOOKS[kind]
    fault = Fault(at_s=1.05, kind=kind, targets=targets, lasts_s=1.0, amount=amount)

    seen, ledger = seen_under(fault, look=look)

    before, during, after = STATES[kind]
    assert seen[:9] == [before] * 9
    assert seen[11:19] == [during] * 8
    assert seen[-3:] == [after] * 3
    assert ledger.faults == {kind: 1}
    assert [(span.node, span.kind, span.begun) for span in ledger.spans] == [
        (name, kind, 1.05) for name in targets
    ]


def test_every_kind_with_an_end_is_covered() -> None:
    assert {*LOOKS, "reset"} == set(KINDS)


QUIET = {
    "freeze": (stays, ("a",)),
    "cut": (stays, ("a", "b")),
    "cut-one-way": (stays, ("a", "b")),
    "isolate": (stays, ("a",)),
    "reset": (stays, ("a", "b")),
    "crash": (ends, ("a",)),
    "kill": (ends, ("a",)),
    "slow": (ends, ("a",)),
}


@pytest.mark.parametrize("kind", QUIET)
def test_a_fault_without_an_effect_has_missed_and_is_undone(kind: str) -> None:
    program, targets = QUIET[kind]
    fault = Fault(at_s=1.05, kind=kind, targets=targets, lasts_s=1.0)

    def look(world):
        host, wire = world.node("a").host, world.network.wire("a", "b")
        return host.up, host.frozen, host.step_s, host.rate, wire.cut

    seen, ledger = seen_under(fault, look=look, program=program)

    assert (ledger.faults, ledger.misses) == ({}, {kind: 1})
    assert ledger.spans == []
    assert seen[-1] == (True, False, 0.0, 1.0, False)


def test_a_cut_lasts_until_somebody_has_noticed_it() -> None:
    async def seldom(node):
        await talks(node, every_s=2.0)

    fault = Fault(at_s=4.5, kind="cut", targets=("a", "b"), lasts_s=0.1)

    seen, ledger = seen_under(fault, look=lambda world: world.network.wire("a", "b").cut, program=seldom)

    assert ledger.faults == {"cut": 1}
    assert 10 < sum(seen) < 20
    assert not seen[-1]


def test_a_reset_breaks_connections() -> None:
    class Kept(asyncio.Protocol):
        lost = None

        def connection_lost(self, error):
            self.lost = error

    async def scenario(world: World):
        async def listen(node):
            await asyncio.get_running_loop().create_server(Kept, "b", 7)
            await stays(node)

        async def connect(node):
            nonlocal kept
            await asyncio.sleep(0.5)
            _, kept = await asyncio.get_running_loop().create_connection(Kept, "b", 7)
            await stays(node)

        kept = None
        world.node("b").start(listen)
        world.node("a").start(connect)
        ledger = Ledger(lambda: 0.0)
        await strike_all(world, (Fault(at_s=1.0, kind="reset", targets=("a", "b")),), ledger)
        await asyncio.sleep(0.1)
        return kept.lost, ledger.faults

    lost, faults = simulate(scenario, seed=0).result
    assert isinstance(lost, ConnectionResetError)
    assert faults == {"reset": 1}


def test_damage_flips_one_bit_of_a_large_piece() -> None:
    small, large = bytes(256), bytes(257)

    class Heard(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            came.append(data)

    async def scenario(world: World):
        async def listen(node):
            await asyncio.get_running_loop().create_server(Heard, "b", 7)
            await stays(node)

        async def connect(node):
            transport, _ = await asyncio.get_running_loop().create_connection(Heard, "b", 7)
            for piece in (small, large, large):
                await asyncio.sleep(1.5)
                transport.write(piece)
            await stays(node)

        world.node("b").start(listen)
        world.node("a").start(connect)
        await asyncio.sleep(1.0)
        await damage_between(world, [("a", "b"), ("b", "a")], patience_s=PATIENCE_S)
        await asyncio.sleep(5.0)

    came: list[bytes] = []
    simulate(scenario, seed=0)
    assert [int.from_bytes(data).bit_count() for data in came] == [0, 1, 0]
    assert [len(data) for data in came] == [256, 257, 257]


def test_faults_at_the_same_machine_wait_for_one_another() -> None:
    faults = [Fault(at_s=1.0 + 0.1 * n, kind="crash", targets=("a",), lasts_s=1.0) for n in range(3)]

    _, ledger = seen_under(*faults)

    begun = [span.begun for span in ledger.spans]
    assert ledger.faults == {"crash": 3}
    assert begun == pytest.approx([1.0, 2.0, 3.0])


def test_a_scenario_may_have_kinds_of_its_own() -> None:
    async def rot(world, fault):
        await asyncio.sleep(fault.amount)

    _, ledger = seen_under(Fault(at_s=0.0, kind="rot", targets=("a",), amount=2.0), own={"rot": rot})

    assert ledger.faults == {"rot": 1}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault(at_s=0, kind="rot"), "'rot' is no kind of fault: known are crash, kill, "),
        (Fault(at_s=0, kind="crash", targets=("z",)), "there is no machine z"),
        (Fault(at_s=0, kind="cut", targets=("a",)), "this kind takes 2 machines, not 1"),
        (Fault(at_s=0, kind="crash", targets=("a", "b")), "this kind takes 1 machines, not 2"),
    ],
)
def test_a_fault_that_cannot_strike_violates_the_plan(fault: Fault, said: str) -> None:
    with pytest.raises((Violation, ExceptionGroup)) as raised:
        seen_under(fault)

    cause = raised.value
    while isinstance(cause, ExceptionGroup):
        cause = cause.exceptions[0]
    assert isinstance(cause, Violation)
    assert cause.invariant == "plan"
    assert said in cause.text
