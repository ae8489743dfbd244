"""Controllers and parameter servers of a drill, each a child process, without workers.

`ProcessCluster` gives a child up after a few restarts in a row, as a run must; a drill restarts servers as
often as it kills them.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from adam_async.cluster.local_launcher import free_addresses
from adam_async.cluster.networks import LOOPBACK, cluster_network
from adam_async.cluster.processes import orders_for
from adam_async.errors import DeadlineExceeded
from adam_async.run.addresses import controller_names
from adam_async.run.config import Waits
from adam_async.runtime.child_process import ChildProcess
from adam_async.runtime.disk import Disk
from adam_async.runtime.network_namespaces import NamespaceNetwork
from transport import BufferPool, Identity

logger = logging.getLogger(__name__)

FOLDER_PREFIX = "adam-async-drill-"
"""Prefix of the folder with the state of a drill's controllers."""


class DrillServers:
    """The child processes of one drill, in the task group of its block (`drill_servers`).

    Attributes:
        token: Token of the cluster.
        controllers: Addresses of the controllers, joined by commas.
    """

    def __init__(
        self,
        token: str,
        waits: Waits,
        environment: Mapping[str, str],
        group: asyncio.TaskGroup,
        network: NamespaceNetwork | None,
    ) -> None:
        self.token = token
        self.controllers = ""
        self.waits = waits
        self._orders = orders_for(token, waits, profile_events=0)
        self._environment = environment
        self._group = group
        self._network = network
        self._bind = LOOPBACK if network is None else f"tcp://{network.address}:0"
        self._children: dict[str, ChildProcess] = {}

    def child(self, server: str) -> ChildProcess:
        """Return the newest process of a server."""
        return self._children[server]

    def start_server(self, server: str) -> None:
        """Start a parameter server, also again after its end."""
        words = ("ps", server, "--controller", self.controllers, "--bind")
        if self._network is None:
            self._start(*words, LOOPBACK)
        else:
            bind = f"tcp://{self._network.address_of(server)}:0"
            self._start(*words, bind, within=self._network.within(server))

    async def start(
        self, controllers: int, servers: int, folder: Path, entropy: Callable[[int], bytes]
    ) -> None:
        """Start all processes, and wait for their addresses.

        Raises:
            RoleDied: A process could not start.
            DeadlineExceeded: A process did not report its address within `waits.prepare_s`.
        """
        names = controller_names(controllers)
        if controllers == 1:
            self._start("controller", *names, "--bind", self._bind)
            self.controllers = await self._address(names[0])
        else:
            network = cluster_network(self.token, entropy=entropy, buffers=BufferPool())
            drill = Identity(role="driver", node="drill", incarnation=1)
            addresses = await free_addresses(network, drill, self._bind, count=controllers)
            peers = ",".join(f"{number}={address}" for number, address in enumerate(addresses, 1))
            for name in names:
                self._start("controller", name, "--peers", peers, "--dir", str(folder / name))
            for name in names:
                await self._address(name)
            self.controllers = ",".join(addresses)
        for number in range(servers):
            self.start_server(f"ps-{number}")
        for number in range(servers):
            await self._address(f"ps-{number}")

    def end(self) -> None:
        """Kill all processes."""
        for child in self._children.values():
            child.kill()

    def _start(self, role: str, node: str, *words: str, within: Sequence[str] = ()) -> None:
        child = ChildProcess(
            node,
            (role, "--id", node, "--supervised", *words),
            orders=self._orders[role],
            environment=self._environment,
            on_line=logger.info,
            within=within,
        )
        self._children[node] = child
        self._group.create_task(child.run(), name=f"drill/{node}")

    async def _address(self, node: str) -> str:
        try:
            async with asyncio.timeout(self.waits.prepare_s):
                return await self._children[node].address
        except TimeoutError:
            raise DeadlineExceeded(f"{node} to report its address", self.waits.prepare_s) from None


@asynccontextmanager
async def drill_servers(
    controllers: int,
    servers: int,
    *,
    environment: Mapping[str, str],
    entropy: Callable[[int], bytes],
    waits: Waits,
    network: NamespaceNetwork | None,
) -> AsyncIterator[DrillServers]:
    """Run controllers and servers for the length of the block; the end of the block removes their folder.

    Args:
        network: Hosts of the servers; None for the loopback interface.
    """
    folder = Path(environment.get("TMPDIR") or "/tmp") / f"{FOLDER_PREFIX}{entropy(8).hex()}"
    async with Disk(name="drill", private=True) as disk:
        await disk.make_folder(folder)
        try:
            async with asyncio.TaskGroup() as group:
                running = DrillServers(entropy(32).hex(), waits, environment, group, network)
                try:
                    await running.start(controllers, servers, folder, entropy)
                    yield running
                finally:
                    running.end()
        finally:
            await disk.remove_folder(folder)
