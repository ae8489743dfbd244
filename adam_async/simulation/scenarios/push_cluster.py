"""Simulated servers of stores whose shards have several copies, and observations of these servers.

The cluster has four parameter servers, and three controllers with a disk each or a single one without a disk;
`bundle_watch` observes their bundles.
"""

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext

from adam_async.controller.consensus_node import ConsensusSetup
from adam_async.controller.role import RoleSettings
from adam_async.controller.service import Controller
from adam_async.driver.training_rules import PROGRAM_KINDS
from adam_async.messages import table_among
from adam_async.parameter_server.server_disk import ServerDisk
from adam_async.parameter_server.server_links import CopiesPath
from adam_async.parameter_server.service import ParameterServer
from adam_async.run.config import Waits
from adam_async.simulation.nodes import Node, World, takes_at_once
from adam_async.simulation.scenario import Ledger
from adam_async.simulation.scenarios.bundle_watch import BundleWatch, numerics_of
from adam_async.simulation.scenarios.training_cluster import (
    CONTROLLERS,
    network_of,
    process_memory,
    run_controller,
)
from transport import BufferPool, Identity

SERVERS = ("ps-0", "ps-1", "ps-2", "ps-3")

WAITS = Waits(dial_s=20.0, call_s=5.0, answer_s=0.5, patience_s=60.0, clock_s=60.0, prepare_s=60.0)

APART = "paths of their own"
"""Name of the count of runs in which the servers have a second listener for each other, and separate links
for pieces."""

BEGUN_S = 1.8e9
"""Time of the wall clock at the beginning of a run, in seconds since 1970."""

CHECK_S = 0.1
"""Interval between two comparisons of all copies, in seconds."""


def copies_path_of(node: Node) -> CopiesPath:
    """Make the path of a server to the other servers, for one incarnation."""
    network = network_of(node, rules=table_among("ps"))
    return CopiesPath(address=f"tcp://{node.name}:2", network=network, pieces=network)


class PushCluster:
    """Controllers and servers of a run, over all their incarnations.

    Args:
        single: Whether one controller without a disk runs, in place of three.

    Attributes:
        addresses: Addresses of all controllers, by name.
        controllers: Running controllers, by name.
        bundles: Observations of servers and bundles.
    """

    def __init__(self, world: World, ledger: Ledger, *, single: bool = False) -> None:
        self.addresses = dict(list(CONTROLLERS.items())[:1]) if single else CONTROLLERS
        self.controllers: dict[str, Controller] = {}
        self.bundles = BundleWatch(world, ledger)
        self._ledger = ledger
        self._is_apart = world.loop.dice("paths").chance(0.5)
        ledger.counts[APART] += self._is_apart
        self._term = 0
        for name in self.addresses:
            world.node(name).start(self._run_controller)
        for name in SERVERS:
            world.node(name).start(self._run_server)

    # --- roles -------------------------------------------------------------------------------

    async def _run_controller(self, node: Node) -> None:
        settings = RoleSettings(
            network=network_of(node),
            address=CONTROLLERS[node.name],
            identity=Identity(role="controller", node=node.name, incarnation=node.incarnation),
            waits=WAITS,
        )
        if len(self.addresses) > 1:
            await run_controller(node, settings, self.bundles, self.controllers)
            return
        setup = ConsensusSetup(entropy=node.entropy, observe=self.bundles.saw_state)
        loop = asyncio.get_running_loop()
        async with Controller(
            settings, setup, kinds=PROGRAM_KINDS, wall=lambda: BEGUN_S + loop.time()
        ) as controller:
            self.controllers[node.name] = controller
            await asyncio.Event().wait()

    async def _run_server(self, node: Node) -> None:
        incarnation = int.from_bytes(node.entropy(7), "little")
        settings = RoleSettings(
            network=network_of(node),
            address=f"tcp://{node.name}:1",
            identity=Identity(role="ps", node=node.name, incarnation=incarnation),
            waits=WAITS,
            controller=",".join(self.addresses.values()),
            process_memory=process_memory,
        )
        self.bundles.ended(node.name)
        async with self._server_disk(node) as disk:
            server = ParameterServer(
                settings,
                buffers=BufferPool(),
                observe=self.bundles.applies,
                numerics=numerics_of(node.name),
                copies=copies_path_of(node) if self._is_apart else None,
                disk=disk,
                at_once=takes_at_once(incarnation),
            )
            self.bundles.started(server, (node.name, incarnation))
            async with server:
                await asyncio.Event().wait()

    def _server_disk(self, node: Node) -> AbstractAsyncContextManager[ServerDisk | None]:
        """Open the disk of a server's stores; None: they are in memory only."""
        return nullcontext()

    # --- observations ------------------------------------------------------------------------

    async def watch(self) -> None:
        """Compare the copies at intervals, and note the leaders of the controllers."""
        while True:
            await asyncio.sleep(CHECK_S)
            self._note_leader()
            self.bundles.compare()

    def _note_leader(self) -> None:
        name = self.leader
        term = self.controllers[name].group.term if name else 0
        if term > self._term:
            self._ledger.leader_changes += self._term > 0
            self._term = term

    @property
    def leader(self) -> str:
        """Running leader of the newest term; empty without one."""
        led = [(it.group.term, name) for name, it in self.controllers.items() if it.group.leads]
        return max(led, default=(0, ""))[1]
