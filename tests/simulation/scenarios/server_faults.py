"""Faults, one at a time, of servers with several copies of each shard, and of these servers' links.

A server's fault waits until each of its bundles has another member in sync that is well, so these faults
alone never take all copies. A killed server is down for a while, during which the next fault may strike. Two
kinds strike in the few milliseconds in which a bundle depends on the rules of its replication:

    split         a primary is lost while a member holds an entry that the next primary lacks
    successors    a primary is lost after an entry that the others do not know to be committed, and then its
                  successor before the others have the successor's entries
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec

from adam_async.parameter_server.replication.local_copy import Log
from tests.simulation.faults import KINDS, STEP_S, Missed, Strike, check_noticed, is_running, until
from tests.simulation.plan import Fault
from tests.simulation.scenario import Ledger, World, settle
from tests.simulation.scenarios.bundle_watch import BundleWatch
from tests.simulation.scenarios.wire_faults import both, widen

LOSS_KINDS = ("kill", "crash", "split", "successors")
"""Faults that cost the memory of a server."""

STALL_KINDS = ("freeze", "slow", "isolate", "clock")
"""Faults of a server that keeps its memory."""

LINK_KINDS = ("cut", "cut-one-way", "narrow", "reset")
"""Faults of a server's links to another machine."""

POWER = "power"
"""Fault that ends all servers, and so a store without disks."""

SPARE_S = 60.0
"""Time limit of the wait until a server may be lost, in seconds."""

MOMENT_S = 1.0
"""Time limit of the wait for a moment of the replication, in seconds: peers act on a cut somewhat later."""

FAILED_S = 15.0
"""Time limit in seconds until a store without copies has failed."""

BUSY_S = 10.0
"""Time limit of the wait for an answered push, in seconds: after an earlier fault all clients may be
waiting."""

FOLLOW_S = 5.0
"""Time limit of the wait for the successor of a lost primary, in seconds."""

SHORT_STEP_S = 0.001
"""Interval between two checks of a condition that lasts for milliseconds, in seconds."""


class ServerFaults:
    """Carries out faults of servers.

    Args:
        servers: Machines of the servers.
        peers: Machines at the other ends of links that faults strike.
        is_over: Returns whether the workload has ended; lost copies do not return after that.

    Attributes:
        strikes: Faults by kind, for `faults.strike_all`.
    """

    def __init__(
        self,
        world: World,
        bundles: BundleWatch,
        ledger: Ledger,
        *,
        servers: Sequence[str],
        peers: Sequence[str],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.strikes: dict[str, Strike] = {
            "kill": self._lose,
            "crash": self._lose,
            "split": self._split,
            "successors": self._lose_successors,
            "clock": self._clock,
            POWER: self._power,
            **dict.fromkeys(["freeze", "slow", "isolate"], self._stall),
            **dict.fromkeys(LINK_KINDS, self._link),
        }
        self._world = world
        self._bundles = bundles
        self._ledger = ledger
        self._servers = servers
        self._peers = peers
        self._is_over = is_over
        self._one = asyncio.Lock()
        """Lock held by the one fault of servers in progress."""
        self._dice = world.dice.fork("victims")

    @asynccontextmanager
    async def victim(self, fault: Fault, *, leads: bool = False) -> AsyncIterator[str]:
        """Reserve a server that may be lost: the target of the fault, or else the primary of most bundles.

        Args:
            leads: Whether the server must be the primary of a bundle with another member in sync.

        Raises:
            Missed: No server may be lost for `SPARE_S`, or the workload has ended.
        """
        until = self._world.now + SPARE_S
        async with self._one:
            while not (name := self._choose(fault, leads=leads)):
                if self._world.now > until or self._is_over():
                    raise Missed
                await asyncio.sleep(STEP_S)
            self._bundles.disturbed.add(name)
            try:
                yield name
            finally:
                self._bundles.disturbed.discard(name)

    def _choose(self, fault: Fault, *, leads: bool) -> str:
        bundles, led = self._bundles, self._bundles.led_by
        ranked = sorted(self._servers, key=lambda name: (name not in fault.targets, -len(led(name)), name))
        spared = [name for name in ranked if is_running(self._world.node(name)) and bundles.can_spare(name)]
        return next((name for name in spared if not leads or self._successor(self._main_bundle(name))), "")

    # --- losses ------------------------------------------------------------------------------

    async def _lose(self, world: World, fault: Fault) -> None:
        """Kill or crash a server, and start it again; the next fault may strike meanwhile."""
        async with self.victim(fault) as name:
            self._end(name, fault)
        await self._restart([name], fault)

    def _end(self, name: str, fault: Fault) -> None:
        """End a server: by a power cut, or by a kill, which closes its connections."""
        node = self._world.node(name)
        node.crash() if fault.kind == "crash" or fault.amount > 0 else node.kill()
        self._ledger.note(fault.kind, name, str(fault))

    async def _restart(self, names: Sequence[str], fault: Fault) -> None:
        await asyncio.sleep(fault.lasts_s)
        for name in names:
            self._world.node(name).restart()

    async def _split(self, world: World, fault: Fault) -> None:
        """Cut a primary off from its successor, and lose it while only another member has an entry."""
        async with self.victim(fault, leads=True) as name:
            answered = self._bundles.acknowledged
            await until(world, lambda: self._bundles.acknowledged > answered, BUSY_S)
            key = self._main_bundle(name)
            successor = self._successor(key)
            check_noticed(bool(successor))
            world.network.cut(name, successor, both=False)
            noticed = await until(world, lambda: self._is_split(key, name), MOMENT_S, SHORT_STEP_S)
            noticed = noticed and self._bundles.can_spare(name)
            if noticed:
                self._end(name, fault)
        await asyncio.sleep(fault.lasts_s)
        world.network.heal(name, successor, both=False, reset=fault.amount > 0)
        check_noticed(noticed)
        world.node(name).restart()

    async def _lose_successors(self, world: World, fault: Fault) -> None:
        """Lose a primary before the others know that its last entry is committed, and then the next primary.

        If the primary has nothing to send, these moments never come, and both losses are ordinary faults.
        """
        async with self.victim(fault, leads=True) as name:
            key = self._main_bundle(name)
            await until(world, lambda: self._is_held(key), MOMENT_S, SHORT_STEP_S)
            last = self._last(key)
            cut = [node for node in self._in_sync(key) if node != name]
            for other in cut:
                world.network.cut(name, other, both=False)
            await until(world, lambda: self._applied(key) >= last, MOMENT_S / 2, SHORT_STEP_S)
            names = [name] if self._bundles.can_spare(name) else []
            for each in names:
                self._end(each, fault)
            await until(world, lambda: self._primary(key) not in ("", name), FOLLOW_S, SHORT_STEP_S)
            await until(world, lambda: self._lags(key), MOMENT_S, SHORT_STEP_S)
            second = self._primary(key)
            if second not in ("", name) and self._bundles.can_spare(second):
                self._end(second, fault)
                names.append(second)
        await asyncio.sleep(fault.lasts_s)
        for other in cut:
            world.network.heal(name, other, both=False, reset=fault.amount > 0)
        for each in names:
            world.node(each).restart()
        check_noticed(bool(names))

    def _main_bundle(self, primary: str) -> str:
        """Returns the led bundle with most members in sync; empty if the server leads no bundle."""
        bundles = self._bundles.map.bundles
        return max(self._bundles.led_by(primary), key=lambda key: len(bundles[key].in_sync), default="")

    def _primary(self, key: str) -> str:
        """Return a bundle's primary; empty without one."""
        bundle = self._bundles.map.bundles.get(key)
        return bundle.primary[0] if bundle is not None and bundle.primary is not None else ""

    def _successor(self, key: str) -> str:
        """Return the first server in sync after a bundle's primary; empty without one."""
        return next(iter(self._in_sync(key)[1:]), "")

    def _in_sync(self, key: str) -> list[str]:
        """Return a bundle's members in sync, its primary first; none after the bundle left the map."""
        bundle = self._bundles.map.bundles.get(key)
        return [node for node, _ in bundle.in_sync] if bundle is not None else []

    def _logs(self, key: str) -> list[Log]:
        return self._bundles.logs(key) if self._primary(key) else [Log()]

    def _last(self, key: str) -> int:
        """Return the position of a primary's last entry."""
        return self._logs(key)[0].last

    def _applied(self, key: str) -> int:
        """Return the position of the last entry that a primary has applied."""
        return self._logs(key)[0].applied

    def _is_split(self, key: str, primary: str) -> bool:
        """Return whether the successor lacks an entry of a third member; False if the primary changed."""
        if self._primary(key) != primary:
            return False
        mine, *others = [log.last for log in self._logs(key)]
        return bool(others) and max(others[1:], default=mine) > others[0]

    def _is_held(self, key: str) -> bool:
        """Return whether all members in sync hold the last entry of a primary that has not committed it."""
        mine, *others = self._logs(key)
        return mine.committed < mine.last and all(log.last == mine.last for log in others)

    def _lags(self, key: str) -> bool:
        """Return whether a member in sync lacks an entry of its primary."""
        mine, *others = self._logs(key)
        return any(log.last < mine.last for log in others)

    async def _power(self, world: World, fault: Fault) -> None:
        """Crash all servers at once; the stores must fail, and the map must name the reasons."""
        async with self._one:
            check_noticed(not self._is_over())
            stores = {store.id for store in self._bundles.map.stores.values() if store.phase == "open"}
            crashed = [name for name in self._servers if is_running(world.node(name))]
            for name in crashed:
                world.node(name).crash()
        await self._restart(crashed, fault)
        check_noticed(bool(stores))

        def unfailed() -> str:
            left = sorted(store for store in stores if not self._bundles.failed.get(store))
            return f"store {left[0]} goes on, or has no reason" if left else ""

        await settle(world, unfailed, within_s=FAILED_S, invariant="a store without copies fails")

    # --- stalls and links --------------------------------------------------------------------

    async def _stall(self, world: World, fault: Fault) -> None:
        """Freeze a server, slow it down, or cut all its wires."""
        async with self.victim(fault) as name:
            await KINDS[fault.kind](world, msgspec.structs.replace(fault, targets=(name,)))

    async def _clock(self, world: World, fault: Fault) -> None:
        """Let the clock of a server run at the rate `amount`."""
        async with self.victim(fault) as name:
            node = world.node(name)
            node.set_clock(rate=fault.amount)
            await asyncio.sleep(fault.lasts_s)
            node.set_clock(rate=1.0)
            check_noticed(is_running(node))

    async def _link(self, world: World, fault: Fault) -> None:
        """Cut, narrow or reset the links of a server to another server or to another machine."""
        async with self.victim(fault) as name:
            other = self._dice.choose([other for other in (*self._servers, *self._peers) if other != name])
            if fault.kind == "narrow":
                await self._narrow(name, other, fault)
                return
            if fault.kind == "reset":
                world.network.reset(name, other)
                return
            one_way = (name, other) if self._dice.chance(0.5) else (other, name)
            pairs = both(name, other) if fault.kind == "cut" else [one_way]
            for source, target in pairs:
                world.network.cut(source, target, both=False)
            await asyncio.sleep(fault.lasts_s)
            for source, target in pairs:
                world.network.heal(source, target, both=False, reset=fault.amount > 0)

    async def _narrow(self, name: str, other: str, fault: Fault) -> None:
        """Limit the bandwidth between two machines to `amount` bytes per second."""
        network = self._world.network
        network.reset(name, other)
        for pair in both(name, other):
            wire = network.wire(*pair)
            wire.conditions = replace(network.conditions, bytes_per_s=fault.amount)
        await asyncio.sleep(fault.lasts_s)
        widen(network, name, other)
