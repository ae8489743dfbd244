"""The workload `counter`: one client per bundle pushes numbers, and an audit compares them with the values.

Each client has one array on one bundle, and pushes again `PAUSE_S` after each acknowledgement. A slot of the
array has two values: push n subtracts 1 from the first and n from the second (`gradient_of`). So the values
show a lost push, a doubled push, and a push in place of another one. After a drill without a failure, the
audit kills primaries until each copy was a primary and was read, because only primaries serve. The number of
kills is bounded.

Controllers and parameter servers are child processes, without workers. `ProcessCluster` gives a child up
after a few restarts in a row, as a run must; a drill restarts servers as often as it kills them.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import reduce

import numpy as np

from adam_async.cluster.launcher import LocalLauncher, RoleSpec
from adam_async.cluster.networks import cluster_network
from adam_async.cluster.processes import orders_for
from adam_async.controller.client import Membership
from adam_async.errors import AdamError, RunFailed, first_cause
from adam_async.model.rules import Sgd
from adam_async.run.addresses import controller_names
from adam_async.run.cluster_map import NodeRecord
from adam_async.run.config import Waits
from adam_async.run.shard_table import shard_table
from adam_async.run.store_record import StoreRecord
from adam_async.runtime.child_process import ChildProcess
from adam_async.runtime.clock import Within
from adam_async.runtime.traffic import Traffic
from adam_async.store.arrays import records_of
from adam_async.store.layout import StoreLayout
from adam_async.store.store import ParameterStore
from tests.drill.hosts import launcher_of
from tests.drill.injection import PATIENCE_S, Injector, MapWatch
from tests.drill.judging import SLOTS, Audit, CopyCheck, Observations, audit_of, count_push, gradient_of
from tests.drill.network_namespaces import NamespaceNetwork
from tests.drill.plan import PlannedFault
from transport import BufferPool, Identity

logger = logging.getLogger(__name__)


class DrillServers:
    """The child processes of one drill, in its block's task group (`drill_servers`).

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
        launcher: LocalLauncher,
    ) -> None:
        self.token = token
        self.controllers = ""
        self.waits = waits
        self._orders = orders_for(token, waits, profile_events=0)
        self._environment = environment
        self._group = group
        self._launcher = launcher
        self._children: dict[str, ChildProcess] = {}

    def child(self, server: str) -> ChildProcess:
        """Return the newest process of a server."""
        return self._children[server]

    def start_server(self, server: str) -> None:
        """Start a parameter server, also again after its end."""
        self._start("ps", server, "--controller", self.controllers)

    async def start(
        self, controllers: int, servers: int, folder: str, entropy: Callable[[int], bytes]
    ) -> None:
        """Start all processes, and wait for their addresses.

        Raises:
            RoleDied: A process could not start.
            DeadlineExceeded: A process did not report its address within `waits.prepare_s`.
        """
        names = controller_names(controllers)
        network = cluster_network(self.token, entropy=entropy, buffers=BufferPool())
        drill = Identity(role="driver", node="drill", incarnation=1)
        binds = await self._launcher.controller_addresses(names, network, drill)
        peers = ",".join(f"{number}={bind}" for number, bind in enumerate(binds, 1))
        for name, bind in zip(names, binds, strict=True):
            words = ("--peers", peers, "--dir", f"{folder}/{name}") if controllers > 1 else ()
            self._start("controller", name, *words, bind=bind)
        self.controllers = ",".join([await self._address(name) for name in names])
        for number in range(servers):
            self.start_server(f"ps-{number}")
        for number in range(servers):
            await self._address(f"ps-{number}")

    def end(self) -> None:
        """Kill all processes."""
        for child in self._children.values():
            child.kill()

    def _start(self, role: str, node: str, *words: str, bind: str = "") -> None:
        orders, environment = self._orders[role], self._environment
        spec = RoleSpec(
            role=role, node=node, arguments=words, orders=orders, environment=environment, bind=bind
        )
        self._children[node] = self._launcher.start(spec, self._group, logger.info)

    async def _address(self, node: str) -> str:
        async with Within(self.waits.prepare_s, f"{node} to report its address"):
            return await self._children[node].address


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
    """Run controllers and servers for the duration of the block; its end removes their folder.

    Args:
        network: Hosts of the servers; None for the loopback interface.
    """
    launcher = launcher_of(environment, network)
    async with launcher.state_folder(entropy(8).hex()) as folder, asyncio.TaskGroup() as group:
        running = DrillServers(entropy(32).hex(), waits, environment, group, launcher)
        try:
            await running.start(controllers, servers, folder, entropy)
            yield running
        finally:
            running.end()


STORE = "counters"
"""Name of the store."""

PAUSE_S = 0.002
"""Pause of a client between two pushes, in seconds, so that clients leave the cores to the servers."""

CHECKS_PER_COPY = 2
"""Maximum number of pulls per copy, each followed by at most one kill, when copies are compared."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CounterDrill:
    """Settings of a drill with counters.

    Attributes:
        every_s: Minimum time between the starts of two faults, in seconds.
        environment: Environment of the processes.
        on_fault: Called with a line for each fault.
        network: Hosts of the servers, if the plan has cuts.
    """

    servers: int
    copies: int
    controllers: int
    plan: Sequence[PlannedFault]
    every_s: float
    environment: Mapping[str, str]
    entropy: Callable[[int], bytes]
    on_fault: Callable[[str], None]
    waits: Waits
    network: NamespaceNetwork | None

    async def run(self) -> Observations:
        """Start the servers, inject the faults, audit, and return the observations.

        Raises:
            ExceptionGroup: An `AdamError` before the workload, such as `RoleDied` for a process that could
                not start.
            ConfigError: The logs of the controllers cannot be kept in the folder of TMPDIR.
        """
        seen = Observations(planned=len(self.plan))
        async with drill_servers(
            self.controllers,
            self.servers,
            environment=self.environment,
            entropy=self.entropy,
            waits=self.waits,
            network=self.network,
        ) as servers:
            watch = MapWatch(lambda cluster: cluster.stores.get(STORE))
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(_watched(servers, watch, self.entropy))
                stores = await self._open_stores(stack, servers)
                try:
                    await self._drill(servers, watch, stores, seen)
                except AdamError as error:
                    seen.failure = seen.failure or str(error)
                seen.failovers = watch.failovers.caused
                seen.false_failovers = list(watch.failovers.false)
        return seen

    async def _open_stores(self, stack: AsyncExitStack, servers: DrillServers) -> list[ParameterStore]:
        return [
            await stack.enter_async_context(
                ParameterStore.open(
                    servers.controllers,
                    _arrays(self.servers),
                    name=STORE,
                    rule=Sgd(rate=1.0),
                    servers=self.servers,
                    copies=self.copies,
                    token=servers.token,
                    waits=self.waits,
                )
            )
            for _ in range(self.servers)
        ]

    async def _drill(
        self, servers: DrillServers, watch: MapWatch, stores: Sequence[ParameterStore], seen: Observations
    ) -> None:
        """Run the clients under the faults, then audit and compare the copies."""
        await watch.until(lambda: watch.is_whole, "all copies in sync", PATIENCE_S)
        homes = homes_of(watch.map.stores[STORE], self.servers)
        clients: list[Client] = []

        async def resumed(lost: Mapping[str, int], fault_s: float) -> dict[str, float]:
            """Return the seconds from a fault to each bundle's next acknowledged push, if clients push."""
            waits = {each.home: each.next_after(fault_s) for each in clients if each.home in lost}
            return {home: await wait for home, wait in waits.items()}

        def new_injector() -> Injector:
            restart = servers.start_server
            return Injector(watch, servers.child, resumed, self.network, self.on_fault, restart=restart)

        injector = new_injector()
        seen.faults = injector.faults

        def count(now_s: float) -> None:
            count_push(seen.pushes, now_s - injector.begin_s)

        clients += [
            Client(store, array, homes[array], count) for store, array in zip(stores, homes, strict=True)
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for client in clients:
                    group.create_task(client.run(), name=f"drill/{client.array}")
                try:
                    await injector.run(self.plan, self.every_s)
                finally:
                    for client in clients:
                        client.end()
        except ExceptionGroup as errors:
            cause = first_cause(errors)
            if not isinstance(cause, AdamError):
                raise
            seen.failure = str(cause)  # the audit follows: a failed drill may have lost pushes, too
        values = await stores[0].pull()
        audits = [client.audit(np.asarray(values[client.array])) for client in clients]
        seen.audit = reduce(Audit.plus, audits)
        if seen.failure:
            return
        clients.clear()
        seen.copies = await self._compare_copies(new_injector(), watch, stores[0], homes)

    async def _compare_copies(
        self, injector: Injector, watch: MapWatch, store: ParameterStore, homes: Mapping[str, str]
    ) -> CopyCheck:
        """Kill primaries until each server with a copy was the primary of its bundles, and compare values."""
        first: dict[str, bytes] = {}
        read: set[tuple[str, str]] = set()
        different: list[str] = []
        wanted = {(home, each[0]) for home, bundle in watch.bundles.items() for each in bundle.in_sync}
        for attempt in range(CHECKS_PER_COPY * self.servers * self.copies):
            primaries = _primaries(watch)
            values = await store.pull()
            if _primaries(watch) != primaries:  # a handover: the values have an unknown source
                continue
            for array, home in homes.items():
                bits = np.asarray(values[array]).tobytes()
                copy = home, primaries[home]
                if first.setdefault(array, bits) != bits and copy not in read:
                    different.append(f"{home} on {primaries[home]}")
                read.add(copy)
            left = wanted - read
            if not left or self.copies == 1:
                break
            open_homes = {home for home, _ in left}
            victims = sorted(server for home, server in primaries.items() if home in open_homes)
            fault = PlannedFault(number=attempt + 1, kind="kill", choice=0.0)
            await injector.inject(fault, victims[attempt % len(victims)])
        return CopyCheck(copies=len(wanted), compared=len(wanted & read), different=tuple(different))


class Client:
    """A client that pushes to one array.

    Args:
        home: Home of the bundle with the array.
        on_push: Called with the time of each acknowledgement on the clock of the loop, in seconds.
    """

    def __init__(
        self, store: ParameterStore, array: str, home: str, on_push: Callable[[float], None]
    ) -> None:
        self.array = array
        self.home = home
        self._store = store
        self._on_push = on_push
        self._acknowledged = 0
        self._unanswered = False
        self._ending = False
        self._waiting: list[tuple[float, asyncio.Future[float]]] = []

    async def run(self) -> None:
        """Push until `end`.

        Raises:
            AdamError: A push failed.
        """
        loop = asyncio.get_running_loop()
        while not self._ending:
            begun_s = loop.time()
            self._unanswered = True
            await self._store.push({self.array: gradient_of(self._acknowledged + 1)})
            self._unanswered = False
            self._acknowledged += 1
            now_s = loop.time()
            self._on_push(now_s)
            for fault_s, future in self._waiting:
                if begun_s > fault_s and not future.done():
                    future.set_result(now_s - fault_s)
            self._waiting = [each for each in self._waiting if not each[1].done()]
            await asyncio.sleep(PAUSE_S)

    def next_after(self, fault_s: float) -> "asyncio.Future[float]":
        """Return a future of the seconds from a fault to the acknowledgement of the first push after the
        fault."""
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((fault_s, future))
        return future

    def end(self) -> None:
        """End `run` after the push in progress."""
        self._ending = True

    def audit(self, values: "np.ndarray[tuple[int, int], np.dtype[np.float64]]") -> Audit:
        """Compare the values (2, SLOTS) of the array with the acknowledged pushes."""
        return audit_of(values, self._acknowledged, unanswered=self._unanswered)


def _primaries(watch: MapWatch) -> dict[str, str]:
    """Return, by home, the server that is each bundle's primary."""
    return {home: bundle.primary[0] for home, bundle in watch.bundles.items() if bundle.primary}


def homes_of(store: StoreRecord, servers: int) -> dict[str, str]:
    """Return the home of each counter's array.

    Raises:
        RunFailed: A bundle has no array.
    """
    records, _ = records_of(_arrays(servers), Sgd(rate=1.0))
    layout = StoreLayout(records, shard_table(records, shard_bytes=store.shard_bytes), store.buckets)
    homes = {record.name: layout.plan((record.name,)).messages[0].server for record in records}
    if len(set(homes.values())) < servers:
        raise RunFailed(f"the controllers placed {servers} counters on {len(set(homes.values()))} servers")
    return homes


def _arrays(count: int) -> dict[str, np.ndarray[tuple[int, int], np.dtype[np.float64]]]:
    return {f"counter-{number}": np.zeros((2, SLOTS)) for number in range(count)}


@asynccontextmanager
async def _watched(
    servers: DrillServers, watch: MapWatch, entropy: Callable[[int], bytes]
) -> AsyncIterator[None]:
    """Follow the cluster map as a reader for the length of the block."""
    incarnation = int.from_bytes(entropy(7), "little")
    identity = Identity(role="reader", node=f"reader-{incarnation:014x}", incarnation=incarnation)
    membership = Membership(
        network=cluster_network(servers.token, entropy=entropy, buffers=BufferPool()),
        controller=servers.controllers,
        identity=identity,
        record=NodeRecord(role="reader", address="", incarnation=incarnation),
        waits=servers.waits,
        traffic=Traffic(identity.node),
        seen=watch.see,
    )
    async with asyncio.TaskGroup() as group:
        running = group.create_task(membership.run(), name="drill/membership")
        what = "the controllers to accept the drill"
        await membership.wait_for(lambda _: membership.joined, what, servers.waits.start_s)
        try:
            yield
        finally:
            await membership.leave()
            running.cancel()
