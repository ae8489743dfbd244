"""Targets and duration of the faults of a group of controllers.

A fault without a target affects the controller that leads when the fault starts. A machine has one fault at a
time; further faults wait. After the time of faults no fault is undone: the scenario decides the repairs.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from adam_async.simulation.faults import check_noticed, is_running
from adam_async.simulation.nodes import Node, World
from adam_async.simulation.plan import Fault
from adam_async.simulation.scenarios.controller_group import ControllerGroup

FIND_S = 3.0
"""Maximum wait of a fault for a leader without another fault, in seconds; then the fault affects any
controller."""

STEP_S = 0.05
"""Interval between two checks of a condition, in seconds."""


class Targets:
    """The machines of a run.

    Args:
        over: Event that is set at the end of the time of faults.
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
        """Reserve a controller for the loss of its disk once all others are in the group with their disks.

        Without this wait the group would lose more disks at once than it survives.

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
        """Return the two machines of a fault, one of them the leader if the fault has a single target.

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
