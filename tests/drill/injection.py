"""Faults of primaries, injected one after the other, each with its times.

The next fault waits until all copies are in sync again, because a store with two copies survives the loss of
only one server at a time.

`MapWatch` has the newest cluster map, waits for its changes, and notes the failovers that the maps show.

A failover replaces a primary that leaves the members in sync. A handover keeps the old primary in sync, so it
is no failover.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from adam_async.run.cluster_map import ClusterMap
from adam_async.run.store_record import BundleRecord, StoreRecord
from adam_async.runtime.child_process import ChildProcess
from adam_async.runtime.clock import Within
from tests.drill.judging import FaultObservation
from tests.drill.network_namespaces import NamespaceNetwork
from tests.drill.plan import PlannedFault


class FailoverCount:
    """Counts failovers. The caller feeds maps in their order, and names the servers that have a fault."""

    def __init__(self) -> None:
        self.caused = 0
        """Number of failovers from a server with a fault."""
        self.false: list[str] = []
        """Description of each failover from a server without a fault."""
        self._bundles: Mapping[str, BundleRecord] = {}
        self._faulty: set[str] = set()

    def begin_fault(self, server: str) -> None:
        """Note that a server has a fault from now on."""
        self._faulty.add(server)

    def end_fault(self, server: str) -> None:
        """Note that a server is back, with all copies in sync."""
        self._faulty.discard(server)

    def observe(self, bundles: Mapping[str, BundleRecord]) -> None:
        """Compare the bundles of a newer map with those of the last one."""
        for key, now in bundles.items():
            was = self._bundles.get(key)
            if was is None or was.store != now.store or was.primary is None:
                continue
            if was.primary == now.primary or was.primary in now.in_sync:
                continue
            server = was.primary[0]
            if server in self._faulty:
                self.caused += 1
            else:
                successor = now.primary[0] if now.primary else "no server"
                self.false.append(f"{key} from {server} to {successor}, generation {now.generation}")
        self._bundles = dict(bundles)


StoreOf = Callable[[ClusterMap], StoreRecord | None]
"""Function that returns the store of a drill in a map, or None before the store exists."""


class MapWatch:
    """Receives cluster maps in their order.

    Args:
        store_of: Finds the store of the drill.
    """

    def __init__(self, store_of: StoreOf) -> None:
        self.map = ClusterMap()
        self.failovers = FailoverCount()
        self._store_of = store_of
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def copies(self) -> int:
        """Number of copies of each shard; 0 before the store exists."""
        store = self._store_of(self.map)
        return store.copies if store is not None else 0

    @property
    def bundles(self) -> Mapping[str, BundleRecord]:
        """The placed bundles of the store, by home."""
        store = self._store_of(self.map)
        if store is None:
            return {}
        found = {home: self.map.bundle(store.id, home) for home in sorted(set(store.buckets))}
        return {home: bundle for home, bundle in found.items() if bundle is not None}

    @property
    def is_whole(self) -> bool:
        """Whether the store is open, and each of its bundles has all copies in sync."""
        store, bundles = self._store_of(self.map), self.bundles
        if store is None or store.phase != "open" or not bundles:
            return False
        return all(len(bundle.in_sync) >= store.copies for bundle in bundles.values())

    def see(self, cluster: ClusterMap) -> None:
        """Take a newer map."""
        self.map = cluster
        self.failovers.observe(self.bundles)
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def until(self, reached: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Wait until the newest map satisfies a condition.

        Raises:
            DeadlineExceeded: No map satisfied the condition in time; the error contains `what`.
        """
        async with Within(timeout_s, what):
            while not reached():
                changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._waiting.append(changed)
                await changed


SETTLE_S = 0.5
"""Minimum time with all copies in sync before a planned fault, in seconds."""

PATIENCE_S = 60.0
"""Maximum duration of each wait after a fault, in seconds: for pushes to go on, and for all copies in
sync."""


Resumed = Callable[[Mapping[str, int], float], Awaitable[dict[str, float]]]
"""Function that returns the seconds from a fault until the workload of each bundle went on, by home. The
function gets each bundle's generation before the fault, by home, and the fault's time on the loop's clock, in
seconds."""


class Injector:
    """Injects faults into the primaries of one store.

    Args:
        child: Returns the newest process of a server.
        resumed: Waits for the workload.
        network: Hosts of the servers; None without cuts.
        on_fault: Called with a line for each fault.
        restart: Starts a killed server again, unless the parent of its process does.

    Attributes:
        begin_s: Time from which the times of faults count, on the clock of the loop, in seconds.
        faults: The injected faults in order; the last one may be incomplete.
    """

    def __init__(
        self,
        watch: MapWatch,
        child: Callable[[str], ChildProcess],
        resumed: Resumed,
        network: NamespaceNetwork | None,
        on_fault: Callable[[str], None],
        *,
        restart: Callable[[str], None] = lambda server: None,
    ) -> None:
        self.begin_s = asyncio.get_running_loop().time()
        self.faults: list[FaultObservation] = []
        self._watch = watch
        self._child = child
        self._resumed = resumed
        self._restart = restart
        self._network = network
        self._on_fault = on_fault

    async def run(self, plan: Sequence[PlannedFault], every_s: float) -> None:
        """Inject a plan's faults; their starts are at least `every_s` apart.

        Raises:
            DeadlineExceeded: Pushes did not go on, or copies were missing, for `PATIENCE_S`.
        """
        loop = asyncio.get_running_loop()
        await self._watch.until(lambda: self._watch.is_whole, "all copies in sync", PATIENCE_S)
        first_s = loop.time()
        for index, fault in enumerate(plan):
            due_s = first_s + (index + 1) * every_s - loop.time()
            await asyncio.sleep(max(due_s, SETTLE_S))
            primaries = {bundle.primary[0] for bundle in self._watch.bundles.values() if bundle.primary}
            await self.inject(fault, fault.victim(primaries))
            seen = self.faults[-1]
            times = ", ".join(f"{home} {seconds:.3f} s" for home, seconds in seen.resumed_s.items())
            self._on_fault(
                f"{fault.number}/{len(plan)} {fault.kind} {seen.server}: {times}; "
                f"all copies in sync after {seen.whole_s or 0:.2f} s"
            )

    async def inject(self, fault: PlannedFault, victim: str) -> None:
        """Inject one fault, measure, bring the server back, and wait until all copies are in sync.

        Raises:
            DeadlineExceeded: Pushes did not go on, or copies were missing, for `PATIENCE_S`.
        """
        watch, loop = self._watch, asyncio.get_running_loop()
        lost = {
            home: bundle.generation
            for home, bundle in watch.bundles.items()
            if bundle.primary is not None and bundle.primary[0] == victim
        }
        incarnation = watch.map.nodes[victim].incarnation
        child = self._child(victim)
        watch.failovers.begin_fault(victim)
        await self._begin(fault.kind, victim, child)
        at_s = loop.time()
        seen = FaultObservation(
            number=fault.number, kind=fault.kind, server=victim, at_s=round(at_s - self.begin_s, 3)
        )
        self.faults.append(seen)
        what = f"pushes to {', '.join(lost)} to go on after a {fault.kind} of {victim}"
        async with Within(PATIENCE_S, what):
            seen.resumed_s = await self._resumed(lost, at_s)
        await self._end(fault.kind, victim, child)

        def is_back() -> bool:
            node, bundles = watch.map.nodes.get(victim), watch.bundles
            came = fault.kind != "kill" or (node is not None and node.incarnation != incarnation)
            moved = all(home in bundles and bundles[home].generation > lost[home] for home in lost)
            return came and moved and node is not None and node.live and watch.is_whole

        what = f"all copies in sync after a {fault.kind} of {victim}"
        await watch.until(is_back, what, PATIENCE_S)
        seen.whole_s = loop.time() - at_s
        watch.failovers.end_fault(victim)

    async def _begin(self, kind: str, victim: str, child: ChildProcess) -> None:
        match kind:
            case "kill":
                child.kill()
            case "freeze":
                child.freeze()
            case _:
                assert self._network is not None, "a plan with cuts needs a network"
                await self._network.cut(victim)

    async def _end(self, kind: str, victim: str, child: ChildProcess) -> None:
        match kind:
            case "kill":
                self._restart(victim)
            case "freeze":
                child.wake()
            case _:
                assert self._network is not None
                await self._network.heal(victim)
