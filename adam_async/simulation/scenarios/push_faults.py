"""Faults of servers with copies, one after the other, and of links, the leading controller and clients.

A fault of a server waits until every bundle has another member in sync that is well, so the faults of a run
never take all copies. A killed server is down for a while; meanwhile the next fault may strike.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec

from adam_async.simulation.faults import (
    KINDS,
    Missed,
    Strike,
    check_noticed,
    is_running,
)
from adam_async.simulation.nodes import World
from adam_async.simulation.plan import Fault
from adam_async.simulation.scenario import Ledger
from adam_async.simulation.scenarios.push_clients import PUSHERS
from adam_async.simulation.scenarios.push_cluster import SERVERS, PushCluster
from adam_async.simulation.scenarios.training_cluster import CONTROLLERS
from adam_async.simulation.scenarios.wire_faults import both, widen

LOSS_KINDS = ("kill", "crash")
"""Faults that cost the memory of a server."""

STALL_KINDS = ("freeze", "slow", "isolate")
"""Faults of a server that keeps its memory."""

LINK_KINDS = ("cut", "cut-one-way", "narrow", "reset")
"""Faults of the links of a server to another server or to a pusher."""

LEADER_KILL, PUSHER_KILL = "leader-kill", "pusher-kill"

OWN_KINDS = (*LOSS_KINDS, *STALL_KINDS, *LINK_KINDS, LEADER_KILL, PUSHER_KILL)

SPARE_S = 60.0
"""Time limit of the wait until a server may be lost, in seconds."""

STEP_S = 0.05
"""Interval between two checks of a condition, in seconds."""


class PushFaults:
    """Carries out the faults of a plan.

    Attributes:
        strikes: Faults by kind, for `faults.strike_all`.
    """

    def __init__(self, world: World, cluster: PushCluster, ledger: Ledger) -> None:
        self.strikes: dict[str, Strike] = {
            **dict.fromkeys(LOSS_KINDS, self._lose),
            **dict.fromkeys(STALL_KINDS, self._stall),
            **dict.fromkeys(LINK_KINDS, self._link),
            LEADER_KILL: self._kill_leader,
        }
        self.strikes[PUSHER_KILL] = self._kill_pusher
        self._world = world
        self._cluster = cluster
        self._ledger = ledger
        self._one = asyncio.Lock()
        """Held by the one fault of servers in progress."""
        self._dice = world.dice.fork("victims")

    @asynccontextmanager
    async def _victim(self, fault: Fault) -> AsyncIterator[str]:
        """Reserve a server that may be lost: the target, or one that is the primary of most bundles.

        Raises:
            Missed: None may be lost for `SPARE_S`.
        """
        until = self._world.now + SPARE_S
        async with self._one:
            while not (name := self._choose(fault)):
                if self._world.now > until:
                    raise Missed
                await asyncio.sleep(STEP_S)
            self._cluster.disturbed.add(name)
            try:
                yield name
            finally:
                self._cluster.disturbed.discard(name)

    def _choose(self, fault: Fault) -> str:
        cluster = self._cluster
        led = [bundle.primary[0] for bundle in cluster.map.bundles.values() if bundle.primary is not None]
        ranked = sorted(SERVERS, key=lambda name: (name not in fault.targets, -led.count(name), name))
        spared = [name for name in ranked if is_running(self._world.node(name)) and cluster.can_spare(name)]
        return spared[0] if spared else ""

    async def _lose(self, world: World, fault: Fault) -> None:
        """Kill or crash a server, and start it again; the next fault may strike meanwhile."""
        async with self._victim(fault) as name:
            node = world.node(name)
            node.kill() if fault.kind == "kill" else node.crash()
            self._ledger.note(fault.kind, name, str(fault))
        await asyncio.sleep(fault.lasts_s)
        node.restart()

    async def _stall(self, world: World, fault: Fault) -> None:
        """Freeze a server, slow it down, or cut all its wires."""
        async with self._victim(fault) as name:
            await KINDS[fault.kind](world, msgspec.structs.replace(fault, targets=(name,)))

    async def _link(self, world: World, fault: Fault) -> None:
        """Cut, narrow or reset the links of a server to another server or to a pusher."""
        async with self._victim(fault) as name:
            others = [other for other in (*SERVERS, *PUSHERS) if other != name]
            other = self._dice.choose(others)
            if fault.kind == "narrow":
                await self._narrow(name, other, fault)
                return
            if fault.kind == "reset":
                world.network.reset(name, other)
                return
            one_way = (name, other) if self._dice.chance(0.5) else (other, name)
            pairs = both(name, other) if fault.kind == "cut" else [one_way]
            for source, target in pairs:
                world.network.cut(source, target, both=False)
            await asyncio.sleep(fault.lasts_s)
            for source, target in pairs:
                world.network.heal(source, target, both=False, reset=fault.amount > 0)

    async def _narrow(self, name: str, other: str, fault: Fault) -> None:
        """Limit the bandwidth between two machines to `amount` bytes per second."""
        network = self._world.network
        network.reset(name, other)
        for pair in both(name, other):
            wire = network.wire(*pair)
            wire.conditions = replace(network.conditions, bytes_per_s=fault.amount)
        await asyncio.sleep(fault.lasts_s)
        widen(network, name, other)

    async def _kill_leader(self, world: World, fault: Fault) -> None:
        """Kill the leading controller, and start it again."""
        name = self._cluster.leader or min(CONTROLLERS)
        node = world.node(name)
        check_noticed(is_running(node))
        self._cluster.controllers.pop(name, None)
        node.kill()
        await asyncio.sleep(fault.lasts_s)
        node.restart()

    async def _kill_pusher(self, world: World, fault: Fault) -> None:
        """Kill a client; its pending pushes are applied once or not at all."""
        (name,) = fault.targets
        node = world.node(name)
        check_noticed(is_running(node))
        node.kill()
        await asyncio.sleep(fault.lasts_s)
        node.restart()
