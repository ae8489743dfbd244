"""Simulated controllers and parameter servers, and observations of them from outside.

A cluster has three controllers with a disk each, or a single one without a disk, and parameter servers, which
may have disks, too. `bundle_watch` observes the servers' bundles, and `disk_watch` their disks.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from adam_async.controller.consensus_node import ConsensusSetup
from adam_async.controller.log_file import LogFile
from adam_async.controller.role import RoleSettings
from adam_async.controller.service import Controller
from adam_async.errors import AdamError
from adam_async.messages import role_table, table_among
from adam_async.parameter_server.bundle_copy import BundleCopy
from adam_async.parameter_server.bundle_saver import DiskPorts
from adam_async.parameter_server.log_entries import Part
from adam_async.parameter_server.replication.local_copy import Entry
from adam_async.parameter_server.server_disk import ServerDisk
from adam_async.parameter_server.server_links import CopiesPath
from adam_async.parameter_server.service import ParameterServer
from adam_async.persistence.records import FlushSettings
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from adam_async.runtime.machine import ProcessMemory
from tests.simulation.pool import SimulatedPool
from tests.simulation.scenario import Ledger, Node, World, takes_at_once
from tests.simulation.scenarios.bundle_watch import BundleWatch, numerics_of
from tests.simulation.scenarios.disk_watch import DiskWatch
from tests.simulation.shared import UNIX_SOCKETS
from transport import Budget, BufferPool, Identity, LinkConfig, RoleTable, Secret, TcpNetwork

CONTROLLERS = {f"controller-{number}": f"tcp://controller-{number}:7000" for number in (1, 2, 3)}
"""Address of each controller; all roles get all addresses."""

SERVERS = ("ps-0", "ps-1", "ps-2", "ps-3")

TOKEN = b"a token of the simulated cluster"
FOLDER = Path("/controller")
SHARDS = Path("/shards")
"""Folders of a controller, and of a server."""

LINKS = LinkConfig(
    ping_every_s=0.5,
    dead_after_s=2.0,
    stalled_after_s=2.0,
    handshake_s=2.0,
    close_s=1.0,
    max_unauthenticated=32,
    link_budget_bytes=1 << 20,
)

PLACE_BYTES, LEND_BYTES, SHARED_BYTES = 256, 64, 256 << 10
"""In bytes: smallest payload that is copied into shared memory, smallest that is lent there, and maximum
memory of one side of a link."""

MEMORY_BYTES = 24 << 20
"""Maximum total bytes that one machine's links hold for their peers."""

WAITS = Waits(dial_s=20.0, call_s=5.0, answer_s=0.5, patience_s=60.0, clock_s=60.0, prepare_s=60.0)

APART = "paths of their own"
"""Name of a count: runs whose servers have a second listener for each other, and links for pieces."""

SINCE_1970_S = 1.8e9
"""Wall-clock time at the beginning of a run, in seconds since 1970."""

CHECK_S = 0.1
"""Interval between two checks, in seconds."""


def network_of(
    node: Node, *, token: Secret | None = TOKEN, rules: RoleTable | None = None, links: LinkConfig = LINKS
) -> TcpNetwork:
    """Make the network of one machine's incarnation; `token` may be one role's keys."""
    if node.is_beside_others:
        links = dataclasses.replace(
            links, link="auto", place_bytes=PLACE_BYTES, lend_bytes=LEND_BYTES, shared_bytes=SHARED_BYTES
        )
    return TcpNetwork(
        token=token,
        entropy=node.entropy,
        rules=rules or role_table(),
        config=links,
        pool=BufferPool(),
        budget=Budget(MEMORY_BYTES),
        unix=UNIX_SOCKETS,
    )


def process_memory() -> ProcessMemory:
    """Return the memory of a simulated process."""
    return ProcessMemory(host="", pid=1, peak_rss_mb=1.0)


def copies_path_of(node: Node) -> CopiesPath:
    """Make a server's path to the other servers, for one incarnation."""
    network = network_of(node, rules=table_among("ps"))
    return CopiesPath(address=f"tcp://{node.name}:2", network=network, pieces=network)


class Cluster:
    """Controllers and servers of a run, over all their incarnations.

    Args:
        servers: Names of the parameter servers.
        single: Whether one controller without a disk runs, instead of three.
        may_be_apart: Whether the seed draws `APART`.
        at_once: Whether all servers use the short way of pushes; otherwise the seed draws it.
        flush: How servers write to their disks; None: they have no disks.

    Attributes:
        addresses: Addresses of all controllers, by name.
        controllers: Running controllers, by name.
        bundles: Observations of servers and bundles.
        disks: Observations of the servers' disks.
        servers: Newest incarnation of each parameter server, by name.
        networks: By name, network of each machine's newest incarnation.
    """

    def __init__(
        self,
        world: World,
        ledger: Ledger,
        *,
        servers: Sequence[str] = SERVERS,
        waits: Waits = WAITS,
        single: bool = False,
        may_be_apart: bool = True,
        at_once: bool = False,
        flush: FlushSettings | None = None,
    ) -> None:
        self.addresses = dict(list(CONTROLLERS.items())[:1]) if single else CONTROLLERS
        self.controllers: dict[str, Controller] = {}
        self.bundles = BundleWatch(world, ledger)
        self.servers = self.bundles.servers
        self.disks = DiskWatch(ledger)
        self.networks: dict[str, TcpNetwork] = {}
        self._world = world
        self._ledger = ledger
        self._waits = waits
        self._flush = flush
        self._at_once = at_once
        self._is_apart = may_be_apart and world.loop.dice("paths").chance(0.5)
        ledger.counts[APART] += self._is_apart
        self._term = 0
        """Newest observed term with a leader."""
        for name in self.addresses:
            world.node(name).start(self._run_controller)
        for name in servers:
            world.node(name).start(self._run_server)

    # --- roles -------------------------------------------------------------------------------

    def _network(self, node: Node) -> TcpNetwork:
        network = self.networks[node.name] = network_of(node)
        return network

    def _place(self, role: str, node: Node) -> dict[str, Any]:
        """Return the place of a role in the cluster, for one incarnation of its machine."""
        incarnation = int.from_bytes(node.entropy(7), "little")
        return {
            "network": self._network(node),
            "controller": ",".join(self.addresses.values()),
            "identity": Identity(role=role, node=node.name, incarnation=incarnation),
            "process_memory": process_memory,
        }

    def _member(self, role: str, node: Node) -> RoleSettings:
        return RoleSettings(address=f"tcp://{node.name}:1", waits=self._waits, **self._place(role, node))

    async def _run_controller(self, node: Node) -> None:
        settings = RoleSettings(
            network=self._network(node),
            address=CONTROLLERS[node.name],
            identity=Identity(role="controller", node=node.name, incarnation=node.incarnation),
            waits=self._waits,
            process_memory=process_memory,
        )
        file = LogFile(node.open_disk(), FOLDER) if len(self.addresses) > 1 else None
        setup = ConsensusSetup(entropy=node.entropy, file=file, observe=self.bundles.saw_state)
        loop = asyncio.get_running_loop()
        async with Controller(
            settings,
            setup,
            peers=self.addresses if file is not None else {},
            learns=True,
            wall=lambda: SINCE_1970_S + loop.time(),
        ) as controller:
            self.controllers[node.name] = controller
            await asyncio.Event().wait()

    async def _run_server(self, node: Node) -> None:
        """Run a server, which may end if its disk fails."""
        try:
            await self._serve(node)
        except* (AdamError, OSError):
            if node.name not in self.disks.failing:
                raise

    async def _serve(self, node: Node) -> None:
        settings = self._member("ps", node)
        incarnation = settings.identity.incarnation
        self.bundles.ended(node.name)
        async with self._server_disk(node) as disk:
            server = ParameterServer(
                settings,
                buffers=BufferPool(),
                observe=self._applies,
                numerics=numerics_of(node.name),
                copies=copies_path_of(node) if self._is_apart else None,
                disk=disk,
                at_once=self._at_once or takes_at_once(incarnation),
                make_memory_pool=SimulatedPool,
            )
            self.bundles.started(server, (node.name, incarnation))
            async with server:
                await asyncio.Event().wait()

    def _applies(self, copy: BundleCopy, entry: Entry, parts: Sequence[Part]) -> None:
        """Check the next entry of a copy. Raises Violation."""
        self.bundles.applies(copy, entry, parts)
        if self._flush is not None:
            served = self.servers[copy.me[0]].served[copy.record.store, copy.home]
            self.disks.logged.applies(copy, served.store, entry, parts)

    @asynccontextmanager
    async def _server_disk(self, node: Node) -> AsyncIterator[ServerDisk | None]:
        """Open the disk of a server's stores; None: they are only in memory."""
        if self._flush is None:
            yield None
            return
        async with node.open_disk() as states, node.open_disk() as entries:
            ports = DiskPorts(
                states=states,
                entries=entries,
                clock=asyncio.get_running_loop().time,
                wall_clock=lambda: SINCE_1970_S + self._world.now,
                settings=self._flush,
                observe=self.disks.saved,
            )
            async with ServerDisk(SHARDS, ports).opened() as disk:
                await self._opened(node.name, disk)
                yield disk

    async def _opened(self, name: str, disk: ServerDisk) -> None:
        """Check a disk that was opened. Raises Violation."""
        await self.disks.opened(name, disk)

    # --- observations ------------------------------------------------------------------------

    @property
    def map(self) -> ClusterMap:
        """Newest cluster map of the running controllers."""
        maps = [controller.map for controller in self.controllers.values()]
        return max(maps, key=lambda each: each.version, default=ClusterMap())

    @property
    def leader(self) -> str:
        """Running leader of the newest term; empty without one."""
        led = [(it.group.term, name) for name, it in self.controllers.items() if it.group.leads]
        return max(led, default=(0, ""))[1]

    @property
    def group(self) -> str:
        """Name of the group of controllers."""
        return next(iter(self.controllers.values())).replicated_state.group

    def address(self, target: str) -> str:
        """Return the address of a role."""
        return CONTROLLERS.get(target) or self.map.nodes[target].address

    async def watch(self, every_s: float = CHECK_S) -> None:
        """Check the cluster at intervals."""
        while True:
            await asyncio.sleep(every_s)
            self.check()

    def check(self) -> None:
        """Compare the copies of all bundles, and note a new leader of the controllers. Raises Violation."""
        name = self.leader
        term = self.controllers[name].group.term if name else 0
        if term > self._term:
            self._ledger.leader_changes += self._term > 0
            self._ledger.note("leader", name, f"leads in term {term}")
            self._term = term
        self.bundles.compare()
