"""Clients on one host read values where the server writes them, and keep some, while clients are lost.

A store with one copy of each shard is on two servers. Controller, servers and clients are processes of one
host with links in shared memory, so values are lent on sheets (`adam_async/parameter_server/shard.py`).
Pushers push and pull. Readers pull, and keep values for longer than several pushes, even after the end of the
store, which a client deletes. Clients are killed and freeze, and their links are reset, so that loans never
come back. The invariants: kept values do not change; each acknowledged push is applied once, each other one
once or never (I1, I2); a server has at most two sheets beside the lost ones, and allocates no others while
more than two lost ones are in use; after the end nothing is lent.
"""

import asyncio
from collections.abc import Iterator
from weakref import WeakSet

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.errors import AdamError, first_cause
from adam_async.parameter_server.shard import MOST_LOST, FamilyMemory
from adam_async.run.store_record import SHEETS
from adam_async.store.arguments import OpenArguments
from adam_async.store.opening import ServerAccess, StoreLink
from adam_async.store.store import ParameterStore
from tests.simulation.faults import check_noticed, strike_all, until
from tests.simulation.plan import Fault, Plan, Setting, draw_options, in_order
from tests.simulation.random_streams import RandomStream
from tests.simulation.scenario import Ledger, Node, Scenario, Violation, World, settle
from tests.simulation.scenarios.cluster import Cluster, network_of
from tests.simulation.scenarios.store_clients import (
    OPEN_AGAIN_S,
    PUSHED,
    WAITS,
    Array,
    StoreClients,
    Workload,
)
from transport import Region, TransportError

PUSHERS, READERS, PLACES = ("pusher-0", "pusher-1"), ("reader-0", "reader-1"), ("ps-0", "ps-1")

PAGES = Workload(
    store="pages",
    machines=PUSHERS,
    groups={
        **{f"array-{number}": {f"array-{number}": Array(rows=5)} for number in range(4)},
        "pair": {"left": Array(rows=3), "right": Array(rows=4)},
    },
    columns=64,
    shard_bytes=512,  # two rows
    pace_s=0.05,
    infinite=0.04,
    factors=0.2,
    pulls=0.5,
    vectors=0.1,
)
"""The store."""

DELETE = "delete"

KINDS = ("kill", "kill", "freeze", "reset", DELETE)

BEGUN_S, STRIKE_S = 1.0, 5.0
"""Earliest and latest start of a fault, in seconds."""

MOST_VALUES = 8
"""Maximum number of pulls whose values a reader keeps."""

KEEP_S = 0.1
"""Mean pause of a reader between two pulls, in seconds."""

LEAST_PUSHES = 60

LEAVES_S = 30.0
"""Time limit of the end, in seconds."""

LENT, ON_SHEETS, LOST, PRIVATE = "values lent", "kept values checked", "sheets lost", "values between sheets"


def draw_plan(dice: RandomStream) -> Plan:
    """Draw faults of clients and of their links."""
    settings: dict[str, Setting] = {
        "copies": 1,
        "min_in_sync": 0,
        "consistency": dice.choose(["asp", "asp", "ssp:2"]),
        "momentum": dice.chance(0.3),
    }
    kinds = ["kill", *(dice.choose(KINDS) for _ in range(2 + dice.below(4)))]
    faults = [_draw_fault(dice, kind) for kind in kinds]
    options = draw_options(dice, settings)
    return Plan(options=msgspec.structs.replace(options, together="all"), faults=in_order(faults))


def _draw_fault(dice: RandomStream, kind: str) -> Fault:
    client = dice.choose([*PUSHERS, *READERS, *READERS])
    lasts_s = dice.choose([1.0, 2.0, 3.0] if kind == "freeze" else [0.3, 1.0, 3.0])
    targets: tuple[str, ...] = (client,)
    if kind == DELETE:
        targets = ()
    at_s = dice.between(BEGUN_S, STRIKE_S)
    return Fault(at_s=round(at_s, 3), kind=kind, targets=targets, lasts_s=lasts_s)


class Readers:
    """Clients that pull values, keep them, and find them unchanged.

    Attributes:
        are_going_on: Whether they work.
    """

    def __init__(self, world: World, cluster: Cluster, ledger: Ledger) -> None:
        self._world = world
        self._cluster = cluster
        self._ledger = ledger
        self._dice = world.dice.fork("readers")
        self._lost: WeakSet[Region] = WeakSet()
        """Regions that were found lost."""
        self.are_going_on = True
        self.working: set[str] = set()
        for name in READERS:
            world.node(name).start(self._run)

    async def _run(self, node: Node) -> None:
        dice = self._dice.fork(f"{node.name}/{node.incarnation}")
        while self.are_going_on:
            self.working.add(node.name)
            try:
                await self._use(node, dice)
            except* (AdamError, TransportError) as errors:
                self._ledger.note("store", node.name, str(first_cause(errors)))
            await asyncio.sleep(dice.around(OPEN_AGAIN_S))
        self.working.discard(node.name)

    async def _use(self, node: Node, dice: RandomStream) -> None:
        where = ",".join(self._cluster.addresses.values())
        access = ServerAccess(network=network_of(node), controllers=where, entropy=node.entropy)
        arguments = OpenArguments(where=where, name=PAGES.store, create="never", reader=True, waits=WAITS)
        kept: list[list[tuple[NDArray[np.float32], NDArray[np.float32]]]] = []
        try:
            async with asyncio.TaskGroup() as group:
                link = StoreLink(PAGES.store, arguments, access, group)
                await link.start()
                while self.are_going_on:
                    names = dice.choose([[*each] for each in PAGES.groups.values()])
                    values = await ParameterStore(link).pull(names)
                    kept.append([(values[name], values[name].copy()) for name in names])
                    del values
                    self.look()
                    await asyncio.sleep(dice.around(KEEP_S))
                    self._check(node.name, kept)
                    while len(kept) > MOST_VALUES or (kept and dice.chance(0.2)):
                        kept.pop(dice.below(len(kept)))
                await link.leave()
                for task in link.tasks:
                    task.cancel()
        finally:
            self._check(node.name, kept)  # also after the end of store and link

    def _check(self, name: str, kept: list[list[tuple[NDArray[np.float32], NDArray[np.float32]]]]) -> None:
        for array, copy in (pair for pairs in kept for pair in pairs):
            if not np.array_equal(array, copy):
                raise Violation("kept values", f"values that {name} keeps have changed")
            self._ledger.counts[ON_SHEETS] += 1

    # --- servers -----------------------------------------------------------------------------

    def _memories(self) -> Iterator[FamilyMemory]:
        for server in self._cluster.servers.values():
            for served in server.served.values():
                shards = served.state.bundle.shards.values()
                yield from {id(m): m for shard in shards if (m := shard.memory) is not None}.values()

    def look(self) -> None:
        """Count what is lent, and check how many sheets the servers have. Raises Violation."""
        counts = self._ledger.counts
        for memory in self._memories():
            if len(memory.sheets) > SHEETS:
                raise Violation("bounded sheets", f"a server has {len(memory.sheets)} sheets")
            if len(memory._lost) > MOST_LOST + SHEETS:
                raise Violation("bounded sheets", f"a server has {len(memory._lost)} lost sheets")
            counts[PRIVATE] += bool(memory.sheets and memory.moves and memory.private.shards)
            for sheet in (*memory.sheets, *memory._left):
                assert sheet.region is not None
                counts[LENT] += bool(sheet.region.loans)
                if sheet.region.is_lost and sheet.region not in self._lost:
                    self._lost.add(sheet.region)
                    counts[LOST] += 1

    def lent(self) -> str:
        """Return a text about values that are still lent; empty if there are none."""
        loans = [
            sheet.region.loans
            for memory in self._memories()
            for sheet in memory.sheets
            if sheet.region is not None and sheet.region.loans and not sheet.region.is_lost
        ]
        return f"values are lent: {loans}" if loans else ""

    def left(self) -> str:
        """Return a text about readers that still work; empty if there are none."""
        return f"{', '.join(sorted(self.working))} went on" if self.working else ""


async def run(world: World, plan: Plan, ledger: Ledger) -> None:
    """Carry out a plan."""
    cluster = Cluster(world, ledger, servers=PLACES, single=True, may_be_apart=False, at_once=True)
    clients = StoreClients(world, cluster, ledger, plan.options.settings, PAGES)
    readers = Readers(world, cluster, ledger)

    async def look() -> None:
        while True:
            await asyncio.sleep(0.05)
            readers.look()

    async def delete(world: World, fault: Fault) -> None:
        """Let a client delete the store while others use it and keep its values."""
        clients.deletes_next = True
        check_noticed(await until(world, lambda: not clients.deletes_next))

    async def reset(world: World, fault: Fault) -> None:
        """Reset a client's links to the servers of the store, which may be one server."""
        (client,) = fault.targets
        check_noticed(await until(world, lambda: any(world.network.reset(client, place) for place in PLACES)))

    def lacks_pushes() -> str:
        lacks = ledger.counts[PUSHED] < LEAST_PUSHES
        return f"only {ledger.counts[PUSHED]} pushes are acknowledged" if lacks else ""

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work, name="watch") for work in (cluster.watch(), look())]
        await strike_all(world, plan.faults, ledger, own={DELETE: delete, "reset": reset})
        await clients.answered()
        await settle(world, lacks_pushes, within_s=LEAVES_S, invariant="pushes go on")
        readers.are_going_on = False
        await settle(world, readers.left, within_s=LEAVES_S, invariant="readers are answered")
        await clients.stop()
        await clients.read_all()
        await settle(world, readers.lent, within_s=LEAVES_S, invariant="all loans end")
        for task in tasks:
            task.cancel()
    ledger.operations = ledger.counts[PUSHED]


SHEETS_OF_STORES = Scenario(
    name="sheets",
    about="clients of one host keep values that they read in place, while clients are lost",
    kinds=(),
    least_operations=LEAST_PUSHES,
    events=(LENT,),
    limit_s=200.0,
    marks=(LENT, ON_SHEETS, LOST, PRIVATE, "stores deleted", "refused pushes", "vectors used"),
    plan=draw_plan,
    run=run,
)
