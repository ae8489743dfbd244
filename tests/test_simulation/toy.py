"""Small scenarios for tests of the runner: three machines tick, and one must not restart."""

import asyncio

from tests.simulation.faults import strike_all
from tests.simulation.plan import Fault, Options, Plan, draw_options, in_order
from tests.simulation.scenario import Ledger, Node, Scenario, Violation, World

NAMES = ("a", "b", "c")


def draw_plan(dice):
    faults = [
        Fault(
            at_s=dice.between(0.0, 10.0),
            kind=dice.choose(["freeze", "crash"]),
            targets=(dice.choose(["a", "c"]),),
            lasts_s=dice.between(0.1, 2.0),
        )
        for _ in range(6)
    ]
    faults.append(Fault(at_s=dice.between(0.0, 10.0), kind="kill", targets=("b",), lasts_s=1.0))
    faults.append(Fault(at_s=5.0, kind="slow", targets=("c",), lasts_s=1.0, amount=0.001))
    return Plan(options=draw_options(dice, {"ticks_s": 0.1}), faults=in_order(faults))


def ticking(*, breaks: bool):
    async def run(world: World, plan: Plan, ledger: Ledger) -> None:
        async def tick(node: Node) -> None:
            if breaks and node.name == "b" and node.incarnation > 1:
                raise Violation("I0", f"b came back as {node.incarnation}")
            while True:
                await asyncio.sleep(plan.options.settings["ticks_s"])
                ledger.operations += 1
                node.entropy(1)

        for name in NAMES:
            world.node(name).start(tick)
        await strike_all(world, plan.faults, ledger)
        await asyncio.sleep(15.0 - min(15.0, world.now))

    return run


def toy(**changes) -> Scenario:
    """Make a passing scenario, with changes."""
    settled = {
        "name": "toy",
        "about": "machines tick",
        "kinds": ("kill", "slow"),
        "least_operations": 200,
        "limit_s": 100.0,
        "plan": draw_plan,
        "run": ticking(breaks=False),
    }
    return Scenario(**{**settled, **changes})


BROKEN = toy(name="broken", run=ticking(breaks=True))


def plan_of(*faults: Fault, **options) -> Plan:
    """A plan of these faults."""
    return Plan(options=Options(settings={"ticks_s": 0.1}, **options), faults=tuple(faults))
