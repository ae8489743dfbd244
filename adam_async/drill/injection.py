"""Faults of primaries: injected one after the other, each with its times.

The next fault waits until all copies are in sync again, because a store with two copies survives the loss of
only one server at a time.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from adam_async.drill.observations import FaultObservation
from adam_async.drill.plan import PlannedFault
from adam_async.drill.watch import MapWatch
from adam_async.errors import DeadlineExceeded
from adam_async.runtime.child_process import ChildProcess
from adam_async.runtime.network_namespaces import NamespaceNetwork

SETTLE_S = 0.5
"""Minimum time with all copies in sync before a planned fault, in seconds."""

PATIENCE_S = 60.0
"""Maximum duration of each wait after a fault, in seconds: for pushes to go on, and for all copies in
sync."""


class Target(Protocol):
    """The servers of a drill, and its workload."""

    def child(self, server: str) -> ChildProcess:
        """Return the process of a server."""

    async def resumed(self, lost: Mapping[str, int], fault_s: float) -> dict[str, float]:
        """Return the seconds from a fault until the workload of each bundle went on, by home.

        Args:
            lost: Generation of each bundle before the fault, by home.
            fault_s: Time of the fault on the clock of the loop, in seconds.
        """

    def restart(self, server: str) -> None:
        """Start a killed server again, unless the parent of its process does."""


class Injector:
    """Injects faults into the primaries of one store.

    Args:
        network: Hosts of the servers; None without cuts.
        on_fault: Called with a line for each fault.

    Attributes:
        begin_s: Time from which the times of faults count, on the clock of the loop, in seconds.
        faults: The injected faults in order; the last one may be incomplete.
    """

    def __init__(
        self,
        watch: MapWatch,
        target: Target,
        network: NamespaceNetwork | None,
        on_fault: Callable[[str], None],
    ) -> None:
        self.begin_s = asyncio.get_running_loop().time()
        self.faults: list[FaultObservation] = []
        self._watch = watch
        self._target = target
        self._network = network
        self._on_fault = on_fault

    async def run(self, plan: Sequence[PlannedFault], every_s: float) -> None:
        """Inject the faults of a plan; their starts are at least `every_s` apart.

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
        child = self._target.child(victim)
        watch.failovers.begin_fault(victim)
        await self._begin(fault.kind, victim, child)
        at_s = loop.time()
        seen = FaultObservation(
            number=fault.number, kind=fault.kind, server=victim, at_s=round(at_s - self.begin_s, 3)
        )
        self.faults.append(seen)
        try:
            async with asyncio.timeout(PATIENCE_S):
                seen.resumed_s = await self._target.resumed(lost, at_s)
        except TimeoutError:
            what = f"pushes to {', '.join(lost)} to go on after a {fault.kind} of {victim}"
            raise DeadlineExceeded(what, PATIENCE_S) from None
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
                self._target.restart(victim)
            case "freeze":
                child.wake()
            case _:
                assert self._network is not None
                await self._network.heal(victim)
