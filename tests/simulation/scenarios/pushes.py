"""Clients push to a store with two or three copies of each shard while its servers are lost and return.

Controllers, four parameter servers and three pushers each have a separate machine. The faults of servers
strike one after the other: a server is killed, crashes, freezes, becomes slow, has a wrong clock or is cut
off, or a link is cut, narrow or reset. The leading controller or a client is killed, too. At least one member
in sync of each bundle stays well. In some seeds the only controller has no disk. The controller is killed and
started again with an empty memory, and learns the store from the servers. The invariants: each acknowledged
push is applied once, each other one once or never (I1, I2); the copies of a bundle have one log, one primary
in each generation and equal values (`checkers.bundles`); after the last fault all pending pushes end, all
bundles have all copies again, and these are equal. In a few seeds all servers lose their power at once: then
the store fails, the map has the reason, and the clients continue with a new store.
"""

import asyncio

import msgspec

from tests.simulation.faults import Strike, kill, strike_all
from tests.simulation.plan import Fault, Plan, Setting, draw_options, in_order
from tests.simulation.random_streams import RandomStream
from tests.simulation.scenario import Ledger, Scenario, World, settle
from tests.simulation.scenarios.bundle_watch import EVENTS, ROUND_OTHERWISE
from tests.simulation.scenarios.cluster import APART, SERVERS, Cluster
from tests.simulation.scenarios.server_faults import LINK_KINDS, LOSS_KINDS, POWER, STALL_KINDS, ServerFaults
from tests.simulation.scenarios.store_clients import PUSHED, Array, StoreClients, Workload

PUSHERS = ("pusher-0", "pusher-1", "pusher-2")

SLOTS = Workload(
    store="slots",
    machines=PUSHERS,
    groups={f"array-{number:02}": {f"array-{number:02}": Array(rows=5)} for number in range(16)},
    columns=64,
    shard_bytes=256,  # a row
    pace_s=0.08,
    infinite=0.04,
    factors=0.3,
    pulls=0.3,
    vectors=0.3,
)
"""The store, with one group for each array."""

CONSISTENCIES = ("asp", "asp", "asp", "ssp:2", "bsp")
"""Consistencies to draw from."""

LEADER_KILL, PUSHER_KILL = "leader-kill", "pusher-kill"

OWN_KINDS = (*LOSS_KINDS, *STALL_KINDS, *LINK_KINDS, LEADER_KILL, PUSHER_KILL)
"""Faults after which the store goes on; `POWER` ends the store."""

BEGUN_S, STRIKE_S = 1.5, 12.0
"""Earliest and latest start of a fault, in seconds."""

LEAST_S = 0.6
"""Minimum duration of a fault, in seconds."""

CLOCK_RATES = (0.3, 0.8, 1.25, 3.0)
"""Rates of a wrong clock, in seconds per second."""

WHOLE_S = 60.0
"""Time limit until all bundles have all copies in sync under load, after the last fault, in seconds."""

SINGLE_SHARE = 0.2
"""Share of the seeds with a single controller without a disk."""

POWER_SHARE = 0.05
"""Share of the seeds in which all servers lose their power at once."""


def draw_plan(dice: RandomStream) -> Plan:
    """Draw two losses of servers, and further faults."""
    kinds = ["kill", dice.choose(LOSS_KINDS), *(dice.choose(OWN_KINDS) for _ in range(2 + dice.below(5)))]
    consistency = dice.choose(CONSISTENCIES)
    settings: dict[str, Setting] = {
        "copies": dice.choose([2, 3, 3]),
        "min_in_sync": dice.choose([0, 0, 1]),
        "consistency": consistency,
        "momentum": consistency != "bsp" and dice.chance(0.2),
    }
    if dice.chance(SINGLE_SHARE):
        settings["controllers"] = 1
        kinds += [LEADER_KILL, LEADER_KILL]
    elif dice.chance(POWER_SHARE):
        kinds.append(POWER)  # with the last server goes what a controller with an empty memory could learn
    faults = [_draw_fault(dice, kind) for kind in kinds]
    return Plan(options=draw_options(dice, settings), faults=in_order(faults))


def _draw_fault(dice: RandomStream, kind: str) -> Fault:
    lasts_s, amount = dice.between(LEAST_S, 4.0), 0.0
    targets: tuple[str, ...] = ()
    if kind in (*LOSS_KINDS, *STALL_KINDS, *LINK_KINDS) and dice.chance(0.5):
        targets = (dice.choose(SERVERS),)
    match kind:
        case "slow":
            amount = dice.choose([0.001, 0.005, 0.02])
        case "narrow":
            amount = dice.choose([500.0, 5_000.0, 50_000.0])
        case "clock":
            amount = dice.choose(CLOCK_RATES)
        case "reset":
            lasts_s = 0.0
        case "cut" | "cut-one-way" | "isolate" | "split" | "successors":
            amount = float(dice.below(2))
        case _ if kind == PUSHER_KILL:
            targets = (dice.choose(PUSHERS),)
    at_s = dice.between(BEGUN_S, STRIKE_S)
    return Fault(at_s=round(at_s, 3), kind=kind, targets=targets, lasts_s=round(lasts_s, 3), amount=amount)


def _strikes(world: World, cluster: Cluster, clients: StoreClients, ledger: Ledger) -> dict[str, Strike]:
    """Return the faults of a plan by kind."""

    async def kill_leader(world: World, fault: Fault) -> None:
        """Kill the leading controller, and start it again; a single controller then has an empty memory."""
        name = cluster.leader or min(cluster.addresses)
        cluster.controllers.pop(name, None)
        await kill(world, msgspec.structs.replace(fault, targets=(name,)))

    servers = ServerFaults(
        world,
        cluster.bundles,
        ledger,
        servers=SERVERS,
        peers=PUSHERS,
        is_over=lambda: not clients.are_going_on,
    )
    # The pending pushes of a killed client are applied once or not at all.
    return {**servers.strikes, LEADER_KILL: kill_leader, PUSHER_KILL: kill}


async def run(world: World, plan: Plan, ledger: Ledger) -> None:
    """Carry out a plan."""
    settings = plan.options.settings
    cluster = Cluster(world, ledger, single=settings.get("controllers") == 1)
    clients = StoreClients(world, cluster, ledger, settings, SLOTS)
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(cluster.watch(), name="watch")
        strikes = _strikes(world, cluster, clients, ledger)
        await strike_all(world, plan.faults, ledger, own=strikes)
        await end(world, cluster, clients, ledger)
        watch.cancel()


async def end(
    world: World, cluster: Cluster, clients: StoreClients, ledger: Ledger, *, least_pushes: int = 0
) -> None:
    """Check that pushes are answered, all copies return, and pushes go on; then read the whole store."""
    counts = ledger.counts

    def lacks_pushes() -> str:
        lacks = clients.are_going_on and counts[PUSHED] < least_pushes
        return f"only {counts[PUSHED]} pushes are acknowledged" if lacks else ""

    await clients.answered()
    await settle(world, cluster.bundles.lacking, within_s=WHOLE_S, invariant="all copies return")
    await settle(world, lacks_pushes, within_s=WHOLE_S, invariant="pushes go on")
    await clients.stop()
    await clients.read_all()
    cluster.bundles.compare()
    ledger.operations = counts[PUSHED]


PUSHES = Scenario(
    name="pushes",
    about="clients push to a store with copies while its servers are lost, one after the other, and return",
    kinds=(),
    least_operations=20,
    events=EVENTS,
    limit_s=400.0,
    marks=(
        *(*EVENTS, ROUND_OTHERWISE, APART),
        *("copies compared", "entries applied", "bundles lost", "refused pushes"),
    ),
    plan=draw_plan,
    run=run,
)
