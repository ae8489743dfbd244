"""Clients push to a store on disks, whose servers lose their power and come back with their disks.

There are three controllers, four servers with a folder each, and three clients. The clients open the store by
its name again whenever it fails. A seed draws when a push is acknowledged: with one copy in memory
(`single`), with several (`replicated`), or on disks (`durable`). All servers together lose their power or are
killed, once or several times, sometimes with the controllers; single servers end, too, and disks are full,
slow, fail or rot. A crash loses unsynced writes or tears them. Bits rot only on the disk of one server, while
other copies of its shards are whole. In half of the plans with copies one array is cold: clients seldom push
to it after the start, so servers that join again take its piece from their disks.

The invariants: the disks give back states that servers gave to them, none older than at the last start
(`checkers.saved_states`). The store comes back with each push once or never (`checkers.saved_pushes`). In
mode `durable` it has all acknowledged pushes; in the other modes it may lack those of at most the last two
intervals of writing, counted back from the loss, or from an earlier loss of a primary that no other server
has replaced. After the return each push is applied at most once. As in `pushes`, the copies of a bundle are
equal. In bsp the loss of a store also loses its step in progress.
"""

import asyncio
from functools import partial

from adam_async.runtime.random_streams import RandomStream
from adam_async.simulation.checkers.saved_pushes import Losses
from adam_async.simulation.faults import strike_all
from adam_async.simulation.nodes import World
from adam_async.simulation.plan import Fault, Plan, Setting, draw_options, in_order
from adam_async.simulation.scenario import Ledger, Scenario, settle
from adam_async.simulation.scenarios.bundle_watch import FAILOVERS, FROM_DISK
from adam_async.simulation.scenarios.power_clients import PowerClients
from adam_async.simulation.scenarios.power_cluster import (
    QUARANTINE,
    READ_BACK,
    REPLAYED,
    SEGMENT_BYTES,
    TORN,
    PowerCluster,
)
from adam_async.simulation.scenarios.power_faults import (
    ALL_KINDS,
    DISK_ERROR,
    DISK_KINDS,
    FULL_DISKS,
    ONE_KINDS,
    SLOW_DISKS,
    SPARING_KINDS,
    STRAND,
    PowerFaults,
)
from adam_async.simulation.scenarios.push_cluster import SERVERS

ACKS = ("single", "replicated", "durable")
"""Moments of acknowledgement to draw from."""

CONSISTENCIES = ("asp", "asp", "ssp:2", "bsp")
"""Consistencies to draw from."""

FLUSH_S = (0.2, 0.5, 1.0)
"""Times between two rounds of writing to draw from, in seconds."""

PACES_S = (0.08, 0.2, 0.4)
"""Mean pauses of a client between two steps to draw from, in seconds."""

COLD_SHARE = 0.5
"""Share of the plans with copies in which an array is cold."""

COLD_SERVER = SERVERS[0]
"""Server with the cold array, which is the largest shard."""

RETURNING_KINDS = ("kill", "crash")
"""Faults after which the server with the cold array joins again with its disk."""

BEGUN_S, STRIKE_S = 1.5, 9.0
"""Earliest and latest start of a fault, in seconds."""

WHOLE_S = 60.0
"""Time limit until all bundles have all copies in sync, after the last fault, in seconds."""

LEAST_PUSHES = 40
"""Minimum number of acknowledged pushes before the clients end."""

RECOVERED = "arrays recovered with pushes"
LOST = "acknowledged pushes lost"


def draw_plan(dice: RandomStream) -> Plan:
    """Draw losses of all servers, and further faults."""
    settings = _draw_store(dice)
    kinds = [dice.choose(ALL_KINDS) for _ in range(1 + dice.below(3))]
    kinds += [dice.choose(_further_kinds(settings)) for _ in range(dice.below(4))]
    options, faults = draw_options(dice, settings), [_draw_fault(dice, kind) for kind in kinds]
    if settings["cold"]:
        faults.append(_draw_fault(dice, dice.choose(RETURNING_KINDS), server=COLD_SERVER))
    return Plan(options=options, faults=in_order(faults))


def _draw_store(dice: RandomStream) -> dict[str, Setting]:
    ack, consistency = dice.choose(ACKS), dice.choose(CONSISTENCIES)
    copies = {"single": 1, "replicated": dice.choose([2, 3]), "durable": dice.choose([1, 2, 3])}[ack]
    return {
        "ack": ack,
        "copies": copies,
        "min_in_sync": 0 if copies == 1 else dice.choose([0, 0, 1]),
        "consistency": consistency,
        "momentum": dice.chance(0.2) and consistency != "bsp",
        "flush_s": dice.choose(FLUSH_S),
        "pace_s": dice.choose(PACES_S),
        "segment_bytes": dice.choose(SEGMENT_BYTES),
        "cold": copies != 1 and dice.fork("cold").chance(COLD_SHARE),
    }


def _further_kinds(settings: dict[str, Setting]) -> tuple[str, ...]:
    sparing = SPARING_KINDS if settings["copies"] != 1 else ()
    return (*ALL_KINDS, *ONE_KINDS, *DISK_KINDS, *sparing, *sparing)


def _draw_fault(dice: RandomStream, kind: str, *, server: str = "") -> Fault:
    targets: tuple[str, ...] = (server,) if server else ()
    if not server and kind in ONE_KINDS and dice.chance(0.5):
        targets = (dice.choose(SERVERS),)
    amount = 0.0
    if kind == SLOW_DISKS:
        amount = dice.choose([0.05, 0.2, 0.5])
    elif kind in (*ALL_KINDS, DISK_ERROR, "split"):
        amount = float(dice.below(2))
    least_s, most_s = {FULL_DISKS: (0.3, 4.0), STRAND: (0.05, 0.6)}.get(kind, (0.3, 2.0))
    lasts_s = dice.between(least_s, most_s)
    at_s = dice.between(BEGUN_S, STRIKE_S)
    return Fault(at_s=round(at_s, 3), kind=kind, targets=targets, lasts_s=round(lasts_s, 3), amount=amount)


async def run(world: World, plan: Plan, ledger: Ledger) -> None:
    """Carry out a plan."""
    settings = plan.options.settings
    is_durable = settings["ack"] == "durable"
    permitted_s = None if is_durable else 2 * float(settings["flush_s"])
    losses = Losses(permitted_s=permitted_s, now=lambda: world.now)
    cluster = PowerCluster(world, ledger, settings)
    clients = PowerClients(world, cluster, ledger, settings, losses)
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(cluster.watch(), name="watch")
        looks = group.create_task(cluster.watch_primaries(losses), name="primaries")
        faults = PowerFaults(world, cluster, clients, ledger, losses, settings)
        await strike_all(world, plan.faults, ledger, own=faults.strikes)
        await clients.pending.answered()
        await settle(world, cluster.bundles.lacking, within_s=WHOLE_S, invariant="all copies return")
        await settle(
            world, partial(_lacks_pushes, ledger, clients), within_s=WHOLE_S, invariant="pushes go on"
        )
        await clients.stop()
        reader = world.node("last-reader")
        reader.start(clients.read_all)
        assert reader.task is not None
        await reader.task
        watch.cancel()
        looks.cancel()
    cluster.bundles.compare()
    ledger.counts[RECOVERED], ledger.counts[LOST] = losses.recovered, losses.lost


def _lacks_pushes(ledger: Ledger, clients: PowerClients) -> str:
    lacks = clients.are_going_on and ledger.operations < LEAST_PUSHES
    return f"only {ledger.operations} pushes are acknowledged" if lacks else ""


POWER_CUTS = Scenario(
    name="power",
    about="servers with disks lose their power, all at once or one by one, and their store comes back",
    kinds=(),
    least_operations=LEAST_PUSHES,
    events=(RECOVERED,),
    limit_s=600.0,
    marks=(RECOVERED, LOST, TORN, QUARANTINE, REPLAYED, READ_BACK, FAILOVERS, FROM_DISK),
    plan=draw_plan,
    run=run,
)
