"""A fleet of servers for tests of failover: servers that a test starts and ends, over local links or TCP."""

import asyncio
from contextlib import asynccontextmanager, suppress

import numpy as np

from adam_async.cluster.networks import LOOPBACK, cluster_network, copies_path
from adam_async.cluster.roles.controller import controller
from adam_async.cluster.roles.parameter_server import parameter_server
from adam_async.cluster.roles.place import Place
from adam_async.messages import role_table
from adam_async.model.rules import Sgd
from adam_async.run.config import Waits
from adam_async.run.user_rules import RuleSource
from adam_async.runtime.clock import system_entropy
from adam_async.store import opening
from adam_async.store.opening import ServerAccess
from adam_async.store.store import ParameterStore
from tests.adam_async.rules import Means, Picky
from tests.adam_async.runs import until
from transport import BufferPool, LocalNetwork

FLUSH_S = 0.02
"""Time between two rounds of a disk, in seconds."""

WAITS = Waits(answer_s=2.0, call_s=5.0, grace_s=0.2)


class Fleet:
    """Parameter servers and a controller in this loop.

    Args:
        copies_bind: Address of the servers for each other; empty: they have one listener.
        disks: Folder with one folder per server; None: they have no disks.

    Attributes:
        servers: The running servers by node.
    """

    def __init__(self, group, *, local, waits, copies_bind, disks):
        self._disks = disks
        self._copies_bind = copies_bind
        self._group = group
        self._waits = waits
        self._local = LocalNetwork(rules=role_table()) if local else None
        self._address = ""
        self._tasks = {}
        self.servers = {}
        self.rules = {}
        """Rules of users that each server allows, by node; others allow `Means` and `Picky`."""

    def _place(self, node):
        buffers = BufferPool()
        copies = None
        if self._copies_bind:
            copies = copies_path(None, self._copies_bind, entropy=system_entropy, buffers=buffers)
        return Place(
            node=node,
            bind="local://" if self._local else LOOPBACK,
            controller=self._address,
            network=self._local or cluster_network(None, entropy=system_entropy, buffers=buffers),
            buffers=buffers,
            waits=self._waits,
            entropy=system_entropy,
            copies=copies,
        )

    @asynccontextmanager
    async def led(self):
        """Run the controller."""
        async with controller(self._place("controller")) as leader:
            self.leader = leader
            self._address = leader.address
            try:
                yield self
            finally:
                for node in list(self._tasks):
                    await self.end(node)

    async def start(self, *nodes):
        for node in nodes:
            ready = asyncio.get_running_loop().create_future()
            self._tasks[node] = self._group.create_task(self._run(node, ready))
            await ready

    async def _run(self, node, ready):
        folder = self._disks / node if self._disks is not None else None
        rules = RuleSource(self.rules.get(node, (Means, Picky)))
        serving = parameter_server(self._place(node), folder=folder, flush_s=FLUSH_S, rules=rules)
        async with serving as server:
            await server.joined()
            self.servers[node] = server
            ready.set_result(None)
            await asyncio.Event().wait()

    async def end(self, node):
        """Cancel a server at once."""
        task = self._tasks.pop(node)
        self.servers.pop(node, None)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    @asynccontextmanager
    async def access(self):
        """Give a store of this fleet its network."""
        yield ServerAccess(network=self._place("client").network, controllers=self._address)

    def open(self, arrays, *, name="model", **options):
        """Open a store of the fleet."""
        options = {"waits": self._waits, **options}
        return ParameterStore.open("tcp://127.0.0.1:1", arrays, name=name, **options)

    def copies(self):
        """Return each copy of each bundle, by home and node."""
        return {
            (home, node): served
            for node, server in self.servers.items()
            for (_, home), served in server.served.items()
        }

    def primaries(self, home):
        return [node for (each, node), served in self.copies().items() if each == home and served.is_primary]

    def in_sync(self, home):
        """Return the members in sync that the controller's map has."""
        (record,) = [record for key, record in self.leader.map.bundles.items() if key.endswith(f"/{home}")]
        return [node for node, _ in record.in_sync]

    async def until(self, condition, what, *, within_s=20.0):
        """Wait until a condition holds."""
        try:
            async with asyncio.timeout(within_s):
                await until(condition)
        except TimeoutError:
            raise AssertionError(f"{what}, after {within_s} s: {self.copies()}") from None


@asynccontextmanager
async def fleet(monkeypatch, *nodes, network="tcp", waits=WAITS, copies_bind="", disks=None):
    """Run a fleet; `Fleet.open` opens its stores."""
    async with asyncio.TaskGroup() as group:
        fleet = Fleet(group, local=network == "local", waits=waits, copies_bind=copies_bind, disks=disks)
        monkeypatch.setattr(opening, "_access_to", lambda *_: fleet.access())
        async with fleet.led():
            await fleet.start(*nodes)
            yield fleet


@asynccontextmanager
async def copied(monkeypatch, arrays, *, network="tcp", **options):
    """Run three servers, and a store with three copies of each bundle, after a push of -1 for each value."""
    async with fleet(monkeypatch, "ps-0", "ps-1", "ps-2", network=network) as servers:
        async with servers.open(arrays, copies=3, rule=Sgd(rate=1.0), **options) as store:
            await store.push({name: -np.ones_like(array) for name, array in arrays.items()})
            yield servers, store
