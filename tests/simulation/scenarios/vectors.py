"""A random program of vectors over links that fail, on servers that are lost or come back from their disks.

There are one controller, four servers with a folder each, and one client, whose program (`vector_programs`)
adds and deletes vectors, and pushes, assigns, steps and pulls, up to three calls at a time. Connections
between client and servers break after a drawn number of bytes, and in the midst of calls. In most of the
plans with three copies servers are lost one after the other. In the other plans all servers are lost
together, once or twice, and come back with their disks; a seed draws whether the store is durable.

The invariants: every pull and every dot product has the bits of NumPy. If all servers were lost, each shard
of a durable store has all answered calls; calls that were open are there whole or not at all, in order. Any
other shard is as it was after some call. No other fault ends the store.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from adam_async.errors import AdamError, first_cause
from adam_async.model.rules import Sgd
from adam_async.persistence.records import FlushSettings
from adam_async.store.arguments import OpenArguments
from adam_async.store.opening import ServerAccess, StoreLink
from adam_async.store.store import ParameterStore
from tests.simulation.checkers.saved_pushes import Losses
from tests.simulation.checkers.vector_programs import SHARD_BYTES, Program, first_values
from tests.simulation.faults import strike_all
from tests.simulation.plan import Fault, Plan, Setting, draw_options, in_order
from tests.simulation.random_streams import RandomStream
from tests.simulation.scenario import Ledger, Node, Scenario, Violation, World, settle
from tests.simulation.scenarios.cluster import SERVERS, Cluster, network_of
from tests.simulation.scenarios.disk_watch import READ_BACK, REPLAYED
from tests.simulation.scenarios.power import ONE_KINDS, SPARING_KINDS, STRAND, StoreFaults
from tests.simulation.scenarios.power_faults import KILL_ALL
from tests.simulation.scenarios.pushes import WHOLE_S
from tests.simulation.scenarios.server_faults import POWER
from tests.simulation.scenarios.store_clients import OPEN_AGAIN_S, WAITS, PendingPushes
from transport import TransportError

CLIENT = "program"

LOST_KINDS = (*ONE_KINDS, *SPARING_KINDS)
"""Faults of one server that a store with copies survives, and `STRAND`, which ends all servers."""

ALL_KINDS = (POWER, KILL_ALL)
"""Faults that end all servers at once."""

BREAK_BYTES = (8_000, 30_000)
"""Bytes after which each connection of the client breaks, to draw from, for each direction. A new link
repeats all open calls, which have some 4,500."""

TORN, TORN_S = 0.25, 0.02
"""Share of call rounds in which the client's links break, and by how many seconds after the begin."""

PACE_S = 0.05
"""Mean pause of the program between two calls, in seconds."""

BEGUN_S, STRIKE_S = 0.5, 2.5
"""Earliest and latest start of a fault, in seconds."""

LEAST_CALLS = 15
"""Minimum number of calls in a program, several of which may run at once."""

LASTS_S = 30.0
"""Time limit of the least calls after the last fault, in seconds."""

BROKEN, RETURNS = "broken connections", "returns from the disks"


def draw_plan(dice: RandomStream) -> Plan:
    """Draw a store, and how its servers are lost."""
    copies = dice.choose([1, 3, 3])
    kinds = [dice.choose(ALL_KINDS) for _ in range(1 + dice.below(2))]
    if copies == 3:
        kinds = [dice.choose(LOST_KINDS), *([dice.choose(ALL_KINDS)] if dice.chance(0.3) else ())]
    settings: dict[str, Setting] = {
        "copies": copies,
        "durable": dice.chance(0.5),
        "flush_s": dice.choose([0.2, 0.5]),
        "segment_bytes": dice.choose([4 << 10, 64 << 20]),
        "break_bytes": dice.choose(BREAK_BYTES),
    }
    faults = [
        Fault(
            at_s=round(dice.between(BEGUN_S, STRIKE_S), 3),
            kind=kind,
            lasts_s=round(dice.between(0.05, 0.6) if kind == STRAND else dice.between(0.3, 1.5), 3),
            amount=float(dice.below(2)),
        )
        for kind in kinds
    ]
    return Plan(options=draw_options(dice, settings), faults=in_order(faults))


class ProgramClient:
    """The client, which opens its store again whenever that was lost.

    Attributes:
        calls: Number of answered rounds of calls.
        is_over: Whether the program ends behind its present calls.
    """

    def __init__(
        self, world: World, cluster: Cluster, ledger: Ledger, losses: Losses, settings: Mapping[str, Setting]
    ) -> None:
        self.calls = 0
        self.is_over = False
        self._dice = world.dice.fork(CLIENT)
        self._world = world
        self._ledger = ledger
        self._losses = losses
        self._pending = PendingPushes(world, cluster.bundles)
        self._program = Program(world.dice.fork("calls"), keeps_all=bool(settings["durable"]))
        self._store = ""
        """Id of the newest store."""
        self._arguments = OpenArguments(
            where=",".join(cluster.addresses.values()),
            arrays=first_values(),
            name="model",
            rule=Sgd(rate=1.0),
            copies=int(settings["copies"]),
            shard_bytes=SHARD_BYTES,
            durable=bool(settings["durable"]),
            # The newest states may be on any disk, so all servers must be back before the store is.
            servers=len(SERVERS),
            waits=WAITS,
        )
        for server in SERVERS:
            for pair in ((CLIENT, server), (server, CLIENT)):
                wire = world.network.wire(*pair)
                wire.conditions = replace(wire.conditions, reset_after_bytes=int(settings["break_bytes"]))
        world.node(CLIENT).start(self._run)

    async def _run(self, node: Node) -> None:
        while True:
            try:
                await self._use(node)
                return
            except* (AdamError, TransportError) as errors:
                self._ledger.note("store", node.name, str(first_cause(errors)))
                if self._store and not self._losses.has_ended(self._store):
                    raise Violation("a store goes on", str(first_cause(errors))) from errors
            self._pending.forget(node.name)
            await asyncio.sleep(self._dice.around(OPEN_AGAIN_S))

    async def _use(self, node: Node) -> None:
        access = ServerAccess(
            network=network_of(node), controllers=self._arguments.where, entropy=node.entropy
        )
        async with asyncio.TaskGroup() as group:
            link = StoreLink("model", self._arguments, access, group)
            await link.start()
            self._ledger.counts[RETURNS] += bool(self._store) and self._store != link.store.id
            self._store = link.store.id
            store = ParameterStore(link)
            await self._program.opened(store)
            while not self.is_over:
                async with asyncio.TaskGroup() as call_group:
                    call_group.create_task(self._call(node, store), name="program/call")
                    if self._dice.chance(TORN):
                        call_group.create_task(self._tear(), name="program/tear")
                self.calls += 1
                await asyncio.sleep(self._dice.around(PACE_S))
            await self._program.check(store)
            await link.leave()
            for task in link.tasks:
                task.cancel()

    async def _call(self, node: Node, store: ParameterStore) -> None:
        with self._pending.noted(node.name):
            await self._program.call(store)

    async def _tear(self) -> None:
        """Reset links to servers, perhaps between calls and their answers."""
        await asyncio.sleep(self._dice.between(0.0, TORN_S))
        for server in SERVERS:
            self._ledger.counts[BROKEN] += self._world.network.reset(CLIENT, server)


async def run(world: World, plan: Plan, ledger: Ledger) -> None:
    """Carry out a plan."""
    settings = plan.options.settings
    flush = FlushSettings(flush_s=float(settings["flush_s"]), segment_bytes=int(settings["segment_bytes"]))
    losses = Losses(permitted_s=None, now=lambda: world.now)
    cluster = Cluster(world, ledger, single=True, flush=flush)
    client = ProgramClient(world, cluster, ledger, losses, settings)
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(cluster.watch(), name="watch")
        faults = StoreFaults(world, cluster, lambda: client.is_over, ledger, losses, settings)
        await strike_all(world, plan.faults, ledger, own=faults.strikes)
        await settle(world, cluster.bundles.lacking, within_s=WHOLE_S, invariant="all copies return")

        def lacks_calls() -> str:
            return f"the program has made {client.calls} calls" if client.calls < LEAST_CALLS else ""

        await settle(world, lacks_calls, within_s=LASTS_S, invariant="a store goes on")
        client.is_over = True
        task = world.node(CLIENT).task
        assert task is not None
        await task
        cluster.bundles.compare()
        watch.cancel()
    pairs = [pair for server in SERVERS for pair in ((CLIENT, server), (server, CLIENT))]
    ledger.counts[BROKEN] += sum(world.network.wire(*pair).broken for pair in pairs)
    ledger.operations = client.calls


VECTORS = Scenario(
    name="vectors",
    about="a random program of vectors equals NumPy while links fail and servers are lost or restart",
    kinds=(),
    least_operations=LEAST_CALLS,
    events=(BROKEN,),
    limit_s=400.0,
    marks=(BROKEN, RETURNS, REPLAYED, READ_BACK),
    plan=draw_plan,
    run=run,
)
