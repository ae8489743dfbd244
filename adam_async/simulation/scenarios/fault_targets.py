"""Whom the faults of a group of controllers strike, and until when.

A fault without a target is for whoever leads when it strikes. One machine has one fault at a time; others
wait their turn. When the time of faults ends, none is undone any more: what is mended then, the scenario
decides.
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
"""So long a fault waits for a leader that it can strike; then any controller will do, a free one first."""

STEP_S = 0.05


class Targets:
    """The machines of a run.

    Args:
        world: Where they are.
        group: The controllers among them.
        over: Set when the time of faults has ended.
        patience_s: So much longer than its time a fault lasts, at most, that nobody has noticed.

    Attributes:
        locks: Of each machine, held by the fault that is at it.
        dice: For what a plan leaves open.
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
        """Wait until a fault is to be undone; False if it is not any more."""
        try:
            async with asyncio.timeout(seconds):
                await self.over.wait()
        except TimeoutError:
            pass
        return not self.over.is_set()

    async def until(self, happened: Callable[[], bool]) -> bool:
        """Wait for something, as long as there are faults. Returns whether it happened."""
        until = self.world.now + self._patience_s
        while not happened():
            if self.over.is_set() or self.world.now > until:
                return False
            await asyncio.sleep(STEP_S)
        return True

    @asynccontextmanager
    async def reserved(self, fault: Fault) -> AsyncIterator[Node]:
        """Have a machine for a fault alone, which must find a program there.

        Raises:
            Missed: None runs there any more.
        """
        node = await self.target(fault)
        async with self.locks[node.name]:
            check_noticed(is_running(node))
            yield node

    @asynccontextmanager
    async def settled(self, fault: Fault) -> AsyncIterator[Node]:
        """Have a controller for a fault that costs its disk: all others belong to the group with theirs.

        What it alone knows would be lost else: as many disks are damaged at once as a group survives.

        Raises:
            Missed: The group did not settle while there were faults.
        """
        node = self.world.nodes[fault.targets[0]]
        while True:
            check_noticed(await self.until(lambda: self.group.is_settled))
            async with self.locks[node.name]:
                if self.group.is_settled:
                    yield node
                    return

    async def target(self, fault: Fault) -> Node:
        """Whom a fault strikes."""
        return self.world.nodes[fault.targets[0]] if fault.targets else await self._leader()

    def pair(self, fault: Fault) -> tuple[str, str] | None:
        """Between whom a fault is; a client alone has it on the way to whoever leads, if anybody does."""
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
