"""Power losses of all servers at once, which keep their disks, and trouble with these disks."""

import asyncio
from collections.abc import Callable, Sequence

from tests.simulation.faults import check_noticed, is_running, until
from tests.simulation.plan import Fault
from tests.simulation.scenario import Node, World
from tests.simulation.scenarios.cluster import CONTROLLERS, SHARDS, Cluster
from tests.simulation.scenarios.disk_faults import mend_disk
from tests.simulation.scenarios.server_faults import SHORT_STEP_S

KILL_ALL, BLACKOUT = "kill-all", "blackout"
"""Loss of all servers by a kill in place of a power cut, and loss together with the controllers."""

SLOW_DISKS, FULL_DISKS = "slow-disks", "full-disks"

WRITING_S = 1.5
"""Time limit of the wait for a write, in seconds."""

ROOM_BYTES = 4096
"""Upper bound of the free space on a full disk, in bytes."""


class PowerFaults:
    """Carries out faults, one after the other.

    Args:
        servers: Machines of the servers.
        others: Machines that lose their power together with the servers.
    """

    def __init__(
        self, world: World, cluster: Cluster, servers: Sequence[str], others: Sequence[str] = ()
    ) -> None:
        self._world = world
        self._cluster = cluster
        self._servers = servers
        self._others = others
        self._dice = world.dice.fork("power")
        self._one = asyncio.Lock()
        """Lock held by the one fault in progress."""

    def _lost(self, fault: Fault) -> None:
        """Note that all servers are lost now."""

    def _without_power(self) -> None:
        """Change the disks of the servers while they have no power."""

    async def _end_all(self, fault: Fault, heal: Callable[[], None] = lambda: None) -> None:
        """End all servers at once, in a blackout also the controllers, and start them again with their disks.

        With an `amount` the fault first waits until a disk is being written, for `WRITING_S` at most. `heal`
        is called before the machines start again.
        """
        if fault.amount:
            node = self._world.node(self._dice.choose(list(self._servers)))
            await until(self._world, lambda: node.disk_model.has_unsynced(SHARDS), WRITING_S, SHORT_STEP_S)
        self._lost(fault)
        names = [*self._servers, *self._others, *(CONTROLLERS if fault.kind == BLACKOUT else ())]
        ended = [name for name in names if is_running(self._world.node(name))]
        for name in ended:
            self._cluster.controllers.pop(name, None)
            node = self._world.node(name)
            node.kill() if fault.kind == KILL_ALL else node.crash()
        self._without_power()
        await asyncio.sleep(fault.lasts_s)
        heal()
        for name in ended:
            mend_disk(self._world.node(name))
            self._world.node(name).restart()
        check_noticed(bool(ended))

    async def _trouble(self, fault: Fault, nodes: Sequence[Node]) -> bool:
        """Slow down or fill disks; in half of the cases the power then fails.

        Returns whether the servers have kept their power.
        """
        for node in nodes:
            if fault.kind == SLOW_DISKS:
                node.disk_conditions.sync_s = fault.amount
            else:
                room = self._dice.below(ROOM_BYTES)  # a part of an append fits
                node.disk_model.capacity_bytes = node.disk_model.used_bytes + room
        await asyncio.sleep(fault.lasts_s)
        fails = self._dice.chance(0.5)
        if fails:
            await self._end_all(fault)
        for node in nodes:
            mend_disk(node)
        return not fails
