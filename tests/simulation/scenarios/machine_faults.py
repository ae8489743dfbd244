"""Faults of the machines of controllers and their clients: kills, stops, freezes, slow code, clocks; and the
targets of all faults of a controller group.

A fault without a target affects the controller that leads when the fault starts. A machine has one fault at a
time; further faults wait. After the time of faults no fault is undone: the scenario decides the repairs.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tests.simulation.faults import STEP_S, Strike, check_noticed, is_running
from tests.simulation.plan import Fault
from tests.simulation.scenario import Node, World
from tests.simulation.scenarios.controller_group import ControllerGroup

FIND_S = 3.0
"""Maximum wait in seconds of a fault for a leader without another fault; then the fault affects any
controller."""


class Targets:
    """The machines of a run.

    Args:
        over: Event that is set when the time of faults ends.
        patience_s: Longest extension of a fault without an effect, in seconds.

    Attributes:
        locks: Lock of each machine, held by the fault that affects the machine.
        dice: Random stream for choices that a plan leaves open.
    """

    def __init__(
        self, world: World, group: ControllerGroup, over: asyncio.Event, *, patience_s: float = math.inf
    ) -> None:
        self.world = world
        self.group = group
        self.over = over
        self.locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.dice = world.dice.fork("faults")
        self._patience_s = patience_s

    async def lasts(self, seconds: float) -> bool:
        """Wait for the duration of a fault.

        Returns whether to undo the fault: False after the time of faults.
        """
        try:
            async with asyncio.timeout(seconds):
                await self.over.wait()
        except TimeoutError:
            pass
        return not self.over.is_set()

    async def until(self, happened: Callable[[], bool]) -> bool:
        """Wait for a condition, at most for `patience_s` and until the end of the time of faults.

        Returns whether the condition was reached.
        """
        until = self.world.now + self._patience_s
        while not happened():
            if self.over.is_set() or self.world.now > until:
                return False
            await asyncio.sleep(STEP_S)
        return True

    @asynccontextmanager
    async def reserved(self, fault: Fault) -> AsyncIterator[Node]:
        """Reserve a machine with a running program for a fault.

        Raises:
            Missed: The machine runs no program.
        """
        node = await self.target(fault)
        async with self.locks[node.name]:
            check_noticed(is_running(node))
            yield node

    @asynccontextmanager
    async def settled(self, fault: Fault) -> AsyncIterator[Node]:
        """Reserve a controller to lose its disk once all others are in the group with their disks.

        Without the wait the group would lose more disks at once than it survives.

        Raises:
            Missed: The group did not settle within the time of faults.
        """
        node = self.world.nodes[fault.targets[0]]
        while True:
            check_noticed(await self.until(lambda: self.group.is_settled))
            async with self.locks[node.name]:
                if self.group.is_settled:
                    yield node
                    return

    async def target(self, fault: Fault) -> Node:
        """Return the machine that a fault strikes."""
        return self.world.nodes[fault.targets[0]] if fault.targets else await self._leader()

    def pair(self, fault: Fault) -> tuple[str, str] | None:
        """Return a fault's two machines; one is the leader if the fault has a single target.

        Returns None if the fault needs a leader and there is none.
        """
        one, other = (*fault.targets, self.group.leader)[:2]
        return (one, other) if other else None

    async def _leader(self) -> Node:
        until = self.world.now + FIND_S
        while not (name := self.group.leader) or self.locks[name].locked():
            if self.world.now > until or self.over.is_set():
                names = list(self.group.addresses)
                name = self.dice.choose([name for name in names if not self.locks[name].locked()] or names)
                break
            await asyncio.sleep(STEP_S)
        return self.world.nodes[name]


ENDS_S = 3.0
"""Time limit for the end of a stopped controller, in seconds."""

AGAIN_S = 1.0
"""Seconds of a wrong clock in the next incarnation, if another fault ended the previous incarnation."""


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
