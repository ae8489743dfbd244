"""Faults of the machines of controllers and their clients: kills, stops, freezes, slow code, clocks."""

import asyncio
from collections import defaultdict

from adam_async.simulation.faults import Strike, check_noticed, is_running
from adam_async.simulation.nodes import World
from adam_async.simulation.plan import Fault
from adam_async.simulation.scenarios.fault_targets import Targets

ENDS_S = 3.0
"""Time limit for the end of a stopped controller, in seconds."""

AGAIN_S = 1.0
"""Duration of a wrong clock in the next incarnation, in seconds, if another fault ended the one before."""


class MachineFaults:
    """Carries out faults of machines.

    Attributes:
        strikes: Faults by kind, for `faults.strike_all`.
    """

    def __init__(self, targets: Targets) -> None:
        self.strikes: dict[str, Strike] = {
            "crash": self._crash_or_kill,
            "kill": self._crash_or_kill,
            "stop": self._stop,
            "freeze": self._freeze,
            "slow": self._slow,
            "clock": self._clock,
            "restart-all": self._restart_all,
            "crash-user": self._crash_user,
        }
        self._targets = targets
        self._group = targets.group
        self._clocks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def _crash_or_kill(self, _: World, fault: Fault) -> None:
        async with self._targets.reserved(fault) as node:
            node.crash() if fault.kind == "crash" else node.kill()
            if await self._targets.lasts(fault.lasts_s):
                self._group.restart(node.name)

    async def _stop(self, _: World, fault: Fault) -> None:
        """End a controller in order: a leader hands over first."""
        async with self._targets.reserved(fault) as node:
            assert node.task is not None
            node.task.cancel()
            await asyncio.wait([node.task], timeout=ENDS_S)
            ended = node.task.done()
            node.kill()
            if await self._targets.lasts(fault.lasts_s):
                self._group.restart(node.name)
            check_noticed(ended)

    async def _freeze(self, _: World, fault: Fault) -> None:
        async with self._targets.reserved(fault) as node:
            node.freeze()
            await self._targets.lasts(fault.lasts_s)
            noticed = await self._targets.until(lambda: bool(node.host.waiting))
            if not self._targets.over.is_set():
                node.thaw()
            check_noticed(noticed)

    async def _slow(self, _: World, fault: Fault) -> None:
        async with self._targets.reserved(fault) as node:
            host = node.host
            node.slow(fault.amount)
            if await self._targets.lasts(fault.lasts_s):
                node.slow(0.0)
            check_noticed(is_running(node) and node.host is host)

    async def _clock(self, _: World, fault: Fault) -> None:
        """Change the rate of a clock, again in the next incarnation if another fault ends the present one."""
        node, over = await self._targets.target(fault), self._targets.over
        lasts_s, ran = fault.lasts_s, False
        async with self._clocks[node.name]:
            while not ran:
                running = await self._targets.until(lambda: is_running(node))
                check_noticed(running and not over.is_set())
                host = node.host
                node.set_clock(rate=fault.amount)
                await self._targets.lasts(lasts_s)
                ran, lasts_s = is_running(node) and node.host is host, AGAIN_S
            if not over.is_set():
                node.set_clock(rate=1.0)

    async def _restart_all(self, _: World, fault: Fault) -> None:
        """Crash all controllers at once; they restart one after the other."""
        names, nodes = sorted(self._group.addresses), self._targets.world.nodes
        for name in names:
            await self._targets.locks[name].acquire()
        ran = sum(is_running(nodes[name]) for name in names)
        for name in names:
            nodes[name].crash()
        for name in names:
            if await self._targets.lasts(fault.lasts_s * self._targets.dice.random()):
                self._group.restart(name)
        for name in names:
            self._targets.locks[name].release()
        check_noticed(2 * ran > len(names))

    async def _crash_user(self, _: World, fault: Fault) -> None:
        async with self._targets.reserved(fault) as node:
            node.crash()
            if await self._targets.lasts(fault.lasts_s):
                node.restart()
