"""Faults of the roles, links and store clients of a training cluster, and their targets.

In some seeds the parameter servers' state has one copy, and faults only delay them. A lost driver starts
again, and takes its run over or replaces it.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable

import msgspec

from tests.simulation.faults import (
    KINDS,
    Strike,
    check_noticed,
    crash,
    damage_between,
    freeze,
    is_running,
    kill,
    until,
    waits,
)
from tests.simulation.plan import Fault
from tests.simulation.scenario import Ledger, Violation, World
from tests.simulation.scenarios.cluster import CONTROLLERS
from tests.simulation.scenarios.server_faults import SHORT_STEP_S, ServerFaults
from tests.simulation.scenarios.training_cluster import CLIENTS, DATA_SERVERS, WORKERS, TrainingCluster

LINK_KINDS = ("cut", "cut-one-way", "reset", "damage")
"""Kinds of faults of a link that a worker is using."""

CONTROLLER_KINDS = ("controller-kill", "controller-crash", "controller-freeze")
"""Kinds of faults of a controller; half of them affect the leader."""

CLIENT_KINDS = ("client-kill", "client-crash", "client-freeze", "client-cut", "client-reset")
"""Kinds of faults of a stores' client, or of its links to servers and controllers."""

SERVER_KINDS = (
    "server-kill",
    "server-crash",
    "server-split",
    "server-successors",
    "server-freeze",
    "server-isolate",
    "server-cut",
    "server-cut-one-way",
)
"""Kinds of faults of a parameter server, if each shard has several copies."""

DRIVER_KINDS = ("driver-kill", "driver-crash")
"""Kinds of faults of the driver; with `amount` 1 its next incarnation begins a new run."""

TORN_KIND = "worker-torn"
"""Kind of fault in which a worker is lost while some bundles have a message of its step and others lack one.
With `amount` 1 the primary of a bundle that has it is lost, too, if each shard has several copies."""

TORN_S = 1.0
"""Time limit in seconds of the wait for such a moment: the worker is lost in any case."""

VICTIM_S = 60.0
"""Time limit of the wait for a target, in seconds."""

LEAST_S = 0.6
"""Minimum duration of a fault in seconds: longer than the interval between two pings, so peers notice it."""


class TrainingFaults:
    """Carries out faults of a training cluster.

    Attributes:
        strikes: Faults by kind, for `faults.strike_all`.
    """

    def __init__(self, world: World, cluster: TrainingCluster, ledger: Ledger) -> None:
        self.strikes: dict[str, Strike] = {
            **dict.fromkeys(CONTROLLER_KINDS, self._controller),
            **dict.fromkeys(LINK_KINDS, self._link),
            **dict.fromkeys(CLIENT_KINDS, self._client),
            **dict.fromkeys(SERVER_KINDS, self._server),
            **dict.fromkeys(DRIVER_KINDS, self._driver),
            "freeze": self._freeze,
            "kill-dealer": self._kill_dealer,
            TORN_KIND: self._tear,
        }
        self._servers = ServerFaults(
            world,
            cluster.bundles,
            ledger,
            servers=cluster.setup.servers,
            peers=(*WORKERS, *CLIENTS),
            is_over=lambda: cluster.is_over,
        )
        self._world = world
        self._cluster = cluster
        self._ledger = ledger
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Lock of each controller, held by the fault that affects the controller."""

    async def _controller(self, world: World, fault: Fault) -> None:
        """Kill, crash or freeze a controller: the fault's target or, without one, the next leader."""
        if not fault.targets:
            await _find_victim(
                world,
                fault,
                lambda: bool(self._cluster.leader) and not self._locks[self._cluster.leader].locked(),
                "no leader was without another fault",
            )
        name = fault.targets[0] if fault.targets else self._cluster.leader
        kind = fault.kind.removeprefix("controller-")
        async with self._locks[name]:
            if name == self._cluster.leader:
                self._ledger.counts["leaders struck"] += 1
            if kind != "freeze":
                self._cluster.controllers.pop(name, None)
            await KINDS[kind](world, msgspec.structs.replace(fault, kind=kind, targets=(name,)))

    async def _client(self, world: World, fault: Fault) -> None:
        """Apply a fault to a client of stores once the client runs, or reset its link to a server once the
        link exists."""
        kind, (client,) = fault.kind.removeprefix("client-"), fault.targets
        servers = [*self._cluster.setup.servers]
        world.dice.fork(str(fault)).shuffle(servers)
        if kind == "reset":
            missing = f"{client} had no connection to {' or '.join(servers)}"
            await _find_victim(
                world, fault, lambda: any(world.network.reset(client, server) for server in servers), missing
            )
            return
        await _find_victim(world, fault, lambda: is_running(world.nodes[client]), f"{client} did not run")
        if kind == "cut":
            ways = [(client, other) for other in (*servers, *CONTROLLERS)]
            await self._cut(fault, ways, both=True)
            return
        await KINDS[kind](world, msgspec.structs.replace(fault, kind=kind))

    async def _link(self, world: World, fault: Fault) -> None:
        """Cut, reset or damage one of a worker's present links."""
        (worker,), cluster = fault.targets, self._cluster
        await until(world, lambda: bool(cluster.leader) and cluster.takes_part(worker))
        dice, servers = world.dice.fork(str(fault)), cluster.setup.servers
        first = dice.choose([*servers, cluster.leader or "controller-1", cluster.map.dealing or "data-0"])
        rest = [name for name in (*servers, *CONTROLLERS, *DATA_SERVERS) if name != first]
        dice.shuffle(rest)
        others = [first, *rest]
        if fault.kind == "reset":
            await _find_victim(
                world,
                fault,
                lambda: any(world.network.reset(worker, other) for other in others),
                f"{worker} had no connection to any of {', '.join(others)}",
            )
            return
        if fault.kind == "damage":
            # Include the other worker, because this one may be down, or wait for the end of an epoch.
            ways = [(name, server) for name in WORKERS for server in servers]
            await damage_between(world, [*ways, *(pair[::-1] for pair in ways)], patience_s=VICTIM_S)
            return
        inwards = fault.kind == "cut-one-way" and dice.chance(0.5)
        ways = [(other, worker) if inwards else (worker, other) for other in others]
        await self._cut(fault, ways, both=fault.kind == "cut")

    async def _cut(self, fault: Fault, ways: list[tuple[str, str]], *, both: bool) -> None:
        """Cut the first of these directions, and further ones in turn until the cut has an effect."""
        network, pairs = self._world.network, list[tuple[str, str]]()
        noticed, lasts_s = False, fault.lasts_s
        for source, target in ways:
            pairs += [(source, target), (target, source)] if both else [(source, target)]
            network.cut(source, target, both=both)
            await asyncio.sleep(lasts_s)
            noticed, lasts_s = waits(self._world, pairs), LEAST_S
            if noticed:
                break
        for source, target in pairs:
            network.heal(source, target, both=False, reset=fault.amount > 0)
        check_noticed(noticed)

    async def _freeze(self, world: World, fault: Fault) -> None:
        """Freeze a machine as soon as it runs."""
        (name,) = fault.targets
        if name in self._cluster.setup.servers and self._cluster.setup.has_copies:
            await self._servers.strikes["freeze"](world, fault)  # a member loses its place by a longer freeze
            return
        await _find_victim(world, fault, lambda: is_running(world.nodes[name]), f"{name} did not run")
        await freeze(world, fault)

    async def _tear(self, world: World, fault: Fault) -> None:
        """Crash a worker within a step, and then a primary that has a message of this step."""
        (worker,), cluster = fault.targets, self._cluster
        await until(world, lambda: cluster.takes_part(worker))
        found: list[str] = []

        def is_torn() -> bool:
            found[:] = cluster.ahead_of_others(worker)
            return bool(found)

        self._ledger.counts["steps torn"] += await until(world, is_torn, TORN_S, SHORT_STEP_S)
        async with asyncio.TaskGroup() as group:
            lost = msgspec.structs.replace(fault, kind="crash", amount=0.0)
            group.create_task(crash(world, lost), name=f"tear-{worker}")
            if found and fault.amount and cluster.setup.has_copies:
                lost = msgspec.structs.replace(fault, kind="kill", targets=(found[0],), lasts_s=LEAST_S)
                await self._servers.strikes["kill"](world, lost)

    async def _server(self, world: World, fault: Fault) -> None:
        """Apply a fault to a server that its bundles can spare."""
        kind = fault.kind.removeprefix("server-")
        await self._servers.strikes[kind](world, msgspec.structs.replace(fault, kind=kind))

    async def _driver(self, world: World, fault: Fault) -> None:
        """Kill or crash the driver of a run that trains; a run in preparation fails without its driver."""
        cluster, ledger = self._cluster, self._ledger
        await _find_victim(
            world,
            fault,
            lambda: cluster.is_over or (is_running(cluster.driver) and trains(cluster)),
            "the driver had no run that trained",
        )
        check_noticed(not cluster.is_over)
        cluster.replaces = fault.amount > 0
        ledger.counts["drivers lost"] += 1
        kind = fault.kind.removeprefix("driver-")
        await KINDS[kind](world, msgspec.structs.replace(fault, kind=kind, amount=0.0))

    async def _kill_dealer(self, world: World, fault: Fault) -> None:
        """Kill the dealer, or with `amount` 1 all data servers; then restart them."""
        cluster = self._cluster
        await _find_victim(world, fault, lambda: bool(cluster.map.dealing), "no data server was the dealer")
        targets = DATA_SERVERS if fault.amount else (cluster.map.dealing,)
        self._ledger.counts["all data servers lost"] += fault.amount > 0
        async with asyncio.TaskGroup() as group:
            for name in targets:
                lost = msgspec.structs.replace(fault, kind="kill", targets=(name,), amount=0.0)
                group.create_task(kill(world, lost), name=f"kill-{name}")


def trains(cluster: TrainingCluster) -> bool:
    """Return whether the run has begun its first epoch, and is not over."""
    run = cluster.map.run
    return run is not None and run.phase in ("training", "between")


async def _find_victim(world: World, fault: Fault, found: Callable[[], bool], missing: str) -> None:
    """Wait until a fault has a target.

    Raises:
        Violation: The fault has no target for `VICTIM_S`; `missing` is the reason.
    """
    if not await until(world, found, VICTIM_S):
        raise Violation("faults find their victims", f"{fault}: for {VICTIM_S:g} s {missing}")
