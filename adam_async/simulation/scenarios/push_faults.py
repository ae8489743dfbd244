"""Faults of servers with copies, of their links, of the leading controller and of clients."""

import asyncio

from adam_async.simulation.faults import Strike, check_noticed, is_running
from adam_async.simulation.nodes import World
from adam_async.simulation.plan import Fault
from adam_async.simulation.scenario import Ledger
from adam_async.simulation.scenarios.push_clients import PUSHERS, PushClients
from adam_async.simulation.scenarios.push_cluster import SERVERS, PushCluster
from adam_async.simulation.scenarios.server_faults import LINK_KINDS, LOSS_KINDS, STALL_KINDS, ServerFaults

LEADER_KILL, PUSHER_KILL, POWER = "leader-kill", "pusher-kill", "power"

OWN_KINDS = (*LOSS_KINDS, *STALL_KINDS, *LINK_KINDS, LEADER_KILL, PUSHER_KILL)
"""Faults after which the store goes on; `POWER` ends the store."""


class PushFaults:
    """Carries out the faults of a plan.

    Attributes:
        strikes: Faults by kind, for `faults.strike_all`.
    """

    def __init__(self, world: World, cluster: PushCluster, clients: PushClients, ledger: Ledger) -> None:
        servers = ServerFaults(
            world,
            cluster.bundles,
            ledger,
            servers=SERVERS,
            peers=PUSHERS,
            is_over=lambda: not clients.are_going_on,
        )
        self.strikes: dict[str, Strike] = {
            **servers.strikes,
            LEADER_KILL: self._kill_leader,
            PUSHER_KILL: self._kill_pusher,
        }
        self._cluster = cluster

    async def _kill_leader(self, world: World, fault: Fault) -> None:
        """Kill the leading controller, and start it again; a single one then has an empty memory."""
        name = self._cluster.leader or min(self._cluster.addresses)
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
