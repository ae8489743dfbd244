"""The supervisor of a cluster's processes: it restarts a lost role if the run still has its state.

The parent of the server processes learns that one has ended before the controllers do. So `ServerLosses`
notes the ended incarnations, and leaves them out when it reads the newest map.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from weakref import WeakSet

from adam_async.cluster.launcher import Launcher, RestartPolicy, RoleSpec
from adam_async.driver.driver import Driver
from adam_async.driver.readiness import LONGER
from adam_async.errors import LOST_SHARDS, RoleDied, RoleFailed, listed, lost_copies_text
from adam_async.run.addresses import controller_names
from adam_async.run.cluster_map import ClusterMap, failure_of
from adam_async.run.config import Config
from adam_async.run.memory_sizes import read_memory
from adam_async.run.option_sources import role_words
from adam_async.run.store_record import BundleRecord, Member
from adam_async.run.stragglers import texts_for
from adam_async.runtime.clock import Within
from adam_async.runtime.role_handle import RoleHandle


class ServerLosses:
    """The ended servers of a cluster of processes. The methods get the newest map of the cluster's driver."""

    def __init__(self) -> None:
        self._ended: set[Member] = set()

    def note(self, cluster: ClusterMap, node: str) -> None:
        """Note that the process of a server has ended."""
        if node in cluster.nodes:
            self._ended.add((node, cluster.nodes[node].incarnation))

    def loss(self, cluster: ClusterMap) -> str:
        """Return a text about the run's shards that have no copy left; empty if there are none."""
        homes = [home for home, bundle in _bundles_of(cluster) if not self._left(bundle)]
        store = cluster.run_store
        return lost_copies_text(homes, store.id, is_of_run=True) if homes and store is not None else ""

    def suffice(self, cluster: ClusterMap) -> bool:
        """Return whether all pushes of the run can go on with the servers that are left."""
        store, bundles = cluster.run_store, tuple(_bundles_of(cluster))
        if store is None or not bundles:
            return False
        return all(len(self._left(bundle)) >= store.min_in_sync_in_force for _, bundle in bundles)

    def outlive(self, cluster: ClusterMap, without: Collection[str]) -> bool:
        """Return whether all bundles of the run, and of clients' stores, have copies on other servers."""
        bundles = [bundle for _, bundle in _bundles_of(cluster)]
        for store in cluster.stores.values():
            if not store.program and store.phase == "open":
                found = (cluster.bundle(store.id, home) for home in set(store.buckets))
                bundles += [bundle for bundle in found if bundle is not None]
        return all(set(self._left(bundle)).difference(without) for bundle in bundles)

    def successors(self, cluster: ClusterMap, node: str) -> tuple[str, ...]:
        """Return the servers that take over the shards of which an ended server was the primary."""
        found: dict[str, None] = {}
        for _, bundle in _bundles_of(cluster):
            if bundle.primary is not None and bundle.primary[0] == node:
                found.update(dict.fromkeys(self._left(bundle)))
        return tuple(found)

    def _left(self, bundle: BundleRecord) -> list[str]:
        return [member[0] for member in bundle.in_sync if member not in self._ended]


def successors_text(servers: tuple[str, ...]) -> str:
    """Return a text about the servers that go on with the shards of a lost server; empty without servers."""
    return f"; its shards go on with {listed(servers)}" if servers else ""


def _bundles_of(cluster: ClusterMap) -> Iterator[tuple[str, BundleRecord]]:
    """Yield home and record of each bundle of the current run, once its store was opened."""
    store = cluster.run_store
    if store is None or not cluster.in_progress or store.phase not in ("open", "failed"):
        return
    for home in sorted(set(store.buckets)):
        bundle = cluster.bundle(store.id, home)
        if bundle is not None:
            yield home, bundle


class Supervisor:
    """Keeps the roles of a cluster running, in tasks of one group.

    Args:
        config: The run.
        launcher: Starts the processes.
        environment: Variables of the processes.
        on_line: Called with each event, and with each line of a process's stderr.
        restarts: Limits on restarts of each role.

    Attributes:
        processes: The newest process of each role, by node id.
        driver: Driver of the cluster, once it runs; deaths are also its events.
    """

    def __init__(
        self,
        config: Config,
        launcher: Launcher,
        *,
        environment: Mapping[str, str],
        on_line: Callable[[str], None],
        restarts: RestartPolicy = RestartPolicy(),
    ) -> None:
        self.processes: dict[str, RoleHandle] = {}
        self.driver: Driver | None = None
        self._config = config
        self._memory = read_memory(config.memory)
        self._launcher = launcher
        self._environment = environment
        self._restarts = restarts
        self._on_line = on_line
        self._controllers = controller_names(config.controllers)
        self._given_up: WeakSet[RoleHandle] = WeakSet()
        self._asked: WeakSet[RoleHandle] = WeakSet()
        """Processes that an operator has killed."""
        self._losses = ServerLosses()
        self._stopping = asyncio.Event()

    def begin(self, group: asyncio.TaskGroup, orders: Mapping[str, bytes]) -> None:
        """Set the group of the tasks, and the first stdin line for the processes of each role."""
        self._group = group
        self._orders = orders
        self._death: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def death(self) -> BaseException | None:
        """The death that ends the run; None if there was none."""
        return self._death.exception() if self._death.done() else None

    async def needed_one_died(self) -> None:
        """Wait for a death that ends the run.

        Raises:
            RoleDied: The role and the cause.
        """
        # Shielded, because the end of this wait must not cancel the future, which the next run awaits.
        await asyncio.shield(self._death)

    def start(
        self,
        role: str,
        node: str,
        *arguments: str,
        bind: str = "",
        threads: int = 0,
        config: Config | None = None,
    ) -> RoleHandle:
        """Start a role, and restart it after each death. See `RoleSpec` for the arguments.

        Args:
            config: Options of the role; None: those of the run.
        """
        config = config or self._config
        slow = (word for text in texts_for(config.slow, node) for word in ("--slow", text))
        held = role_words(config, role, without=("threads",))
        spec = RoleSpec(
            role=role,
            node=node,
            arguments=(*held, *arguments, *slow),
            orders=self._orders[role],
            environment=self._environment,
            bind=bind,
            threads=threads,
            memory_bytes=self._memory.get(role, 0),
            restart=self._restarts,
        )
        first = self._process(spec)
        self._group.create_task(self._supervise(spec, first), name=f"processes/{node}")
        return first

    async def address_of(self, process: RoleHandle) -> str:
        """Wait for the address of a process.

        Raises:
            RoleDied: The process could not start.
            DeadlineExceeded: The process did not report its address within `prepare_s`.
        """
        what = f"{process.node} to report its address{LONGER}"
        async with Within(self._config.waits.prepare_s, what):
            return await process.address

    async def serves(self, node: str) -> None:
        """Wait until a role listens, after restarts if necessary.

        Raises:
            RoleDied: The role could not start, or no restart could listen.
            DeadlineExceeded: See `address_of`.
        """
        while True:
            process = self.processes[node]
            try:
                await self.address_of(process)
                return
            except RoleDied:
                if self.processes[node] is process:  # `_supervise` has not restarted the role
                    raise

    async def give_up(self, nodes: Sequence[str]) -> None:
        """Kill the processes of some roles, without a restart, and wait for their ends."""
        given_up = [self.processes[node] for node in nodes]
        self._given_up.update(given_up)
        for process in given_up:
            process.kill()
            await process.ended.wait()

    async def release(self, node: str) -> None:
        """End a role's process in order, without a restart; kill it after `drain_s`."""
        process = self.processes.pop(node)
        self._given_up.add(process)
        process.end()
        try:
            async with asyncio.timeout(self._config.waits.drain_s):
                await process.ended.wait()
        except TimeoutError:
            self._note(f"{node} did not end in time and is killed")
        finally:
            process.kill()
        if self.driver is not None:
            await self.driver.report_death(node)  # a role that left has no live record

    async def stop(self) -> None:
        """End all processes in order within `drain_s`, then kill the rest."""
        self._stopping.set()
        controllers = [process for node, process in self.processes.items() if node in self._controllers]
        members = [process for node, process in self.processes.items() if node not in self._controllers]
        for process in members:
            process.end()
        try:
            async with asyncio.timeout(self._config.waits.drain_s):
                for process in members:
                    await process.ended.wait()
                # Controllers end last, so no member loses them.
                for process in controllers:
                    process.end()
                for process in controllers:
                    await process.ended.wait()
        except TimeoutError:
            asked = members if any(not process.ended.is_set() for process in members) else controllers
            late = ", ".join(process.node for process in asked if not process.ended.is_set())
            drain_s = self._config.waits.drain_s
            self._on_line(f"not ended within drain_s={drain_s:g} s, and killed: {late}")
        finally:
            for process in self.processes.values():
                process.kill()

    def _process(self, spec: RoleSpec) -> RoleHandle:
        process = self._launcher.start(spec, self._group, self._on_line)
        self.processes[spec.node] = process
        return process

    async def _supervise(self, spec: RoleSpec, process: RoleHandle) -> None:
        """Wait for the end of a process, and restart its role; repeat until it is not restarted."""
        role, node = spec.role, spec.node
        left, served = spec.restart.most, False
        while True:
            await process.ended.wait()
            if self._stopping.is_set() or process in self._given_up:
                return
            how = process.how
            if role == "ps":
                self._losses.note(self._map, node)
            refusal = self._refusal_of(node)
            served = served or process.served_s > 0
            if process.served_s >= spec.restart.sound_s or process in self._asked:
                left = spec.restart.most
            # A process that ended before it served cannot start; `address_of` raises its error. A killed
            # controller can start, and the other controllers need it to form their group.
            could_start = served or (process.code < 0 and role == "controller")
            restart = could_start and left > 0 and not refusal and self._may_restart(role, node)
            successors = successors_text(self._losses.successors(self._map, node)) if role == "ps" else ""
            self._note(f"{node} died: {how}{successors}{'; starting it again' if restart else ''}")
            if served and left == 0 and self._others_suffice(node):
                self._note(
                    f"{node} was started again {spec.restart.most} times and is left: the others go on"
                )
                if self.driver is not None:
                    await self.driver.report_death(node)
                return
            if not restart:
                if served and not self._death.done():
                    self._death.set_exception(self._last_death(spec, how, refusal, exhausted=left == 0))
                    self._death.exception()  # mark the error retrieved: without a `train`, no wait does
                return
            left -= 1
            if self.driver is not None:
                await self.driver.report_death(node)
                if self._stopping.is_set() or process in self._given_up:
                    return
            process = self._process(spec)

    def kill(self, node: str) -> None:
        """Kill a role with SIGKILL; it counts as ended at once, and its restart count begins anew."""
        self._losses.note(self._map, node)
        self._asked.add(self.processes[node])
        self.processes[node].kill()

    def survives(self, node: str, *, frozen: Collection[str]) -> bool:
        """Return whether the run and all stores go on if the process of a role ends.

        Args:
            frozen: Roles that do not answer meanwhile.
        """
        role = node.rpartition("-")[0] or node
        if role == "ps":
            return self._config.copies_in_force > 1 and self._losses.outlive(self._map, {node, *frozen})
        return self._may_restart(role, node)

    def spares(self, node: str, *, frozen: Collection[str]) -> bool:
        """Return whether the run and all stores continue while a role does not answer and is not started
        again.

        Args:
            frozen: Roles that do not answer meanwhile.
        """
        role = node.rpartition("-")[0] or node
        if role == "ps":
            return self.survives(node, frozen=frozen)
        of_role = {each for each in self.processes if (each.rpartition("-")[0] or each) == role}
        left = len(of_role - {node, *frozen})
        if role == "controller":
            return left > len(of_role) // 2
        return left >= (self._config.partitions if role == "worker" else 1)

    def _last_death(self, spec: RoleSpec, how: str, refusal: str, *, exhausted: bool) -> RoleDied:
        """Return the error of a role that is not restarted but that the run needs."""
        if refusal:
            return RoleFailed(spec.node, f"cannot train the run: {refusal}")
        if exhausted:
            how = f"{how}, after it had been started again {spec.restart.most} times within a short time"
        if spec.role == "ps":
            loss = self._losses.loss(self._map) if self._config.copies_in_force > 1 else ""
            how = f"{how}; {loss or LOST_SHARDS}"
        elif spec.role == "controller" and self._config.controllers == 1:
            how = f"{how}; with --controllers 3 the others go on"
        return RoleDied(spec.node, how)

    def _refusal_of(self, node: str) -> str:
        """Return why a worker ended, as it reported, such as an error in the run's step.

        A restart would not remove the error.
        """
        cluster = self._map
        if cluster.run is None or node not in cluster.nodes or cluster.nodes[node].role != "worker":
            return ""
        return failure_of(cluster.nodes[node], cluster.run.id)

    def _may_restart(self, role: str, node: str) -> bool:
        """Return whether the run keeps its state without a role, so that the cluster can start it again."""
        if role == "ps" and self._config.copies_in_force > 1:
            return not self._losses.loss(self._map)
        # With several controllers, each one's state is in its folder, even if all of them die.
        return role in ("worker", "data") or (role == "controller" and len(self._controllers) > 1)

    def _others_suffice(self, node: str) -> bool:
        """Return whether the run continues without a controller or server that is not started again."""
        if node.startswith("ps-"):
            return self._config.copies_in_force > 1 and self._losses.suffice(self._map)
        serving = [
            name
            for name in self._controllers
            if name != node and name in self.processes and self.processes[name].serves
        ]
        return node in self._controllers and 2 * len(serving) > len(self._controllers)

    @property
    def _map(self) -> ClusterMap:
        """The newest map of the driver; empty before the cluster has a driver."""
        return self.driver.map if self.driver is not None else ClusterMap()

    def _note(self, what: str) -> None:
        if self.driver is not None:
            self.driver.note(what)  # an event, with which the stream calls `self._on_line`
        else:
            self._on_line(what)

    def __repr__(self) -> str:
        return f"<Supervisor {', '.join(self.processes) or 'of no process'}>"
