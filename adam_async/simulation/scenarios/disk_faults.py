"""What can happen to the disks of controllers: they are slow, fail, are full, are lost, and rot."""

import asyncio

from adam_async.simulation.disk import DiskConditions
from adam_async.simulation.disk_model import SECTOR_BYTES
from adam_async.simulation.faults import Strike, check_noticed
from adam_async.simulation.nodes import Node, World
from adam_async.simulation.plan import Fault
from adam_async.simulation.scenario import Violation
from adam_async.simulation.scenarios.controller_group import FILE
from adam_async.simulation.scenarios.fault_targets import STEP_S, Targets

ENDS_S = 3.0
"""So soon after its disk failed a controller ends, and after it began if what it has there is damaged."""

MOST_SECTORS = 3
"""So many rot at once."""


class DiskFaults:
    """Does them.

    Attributes:
        strikes: By kind, for `faults.strike_all`.
    """

    def __init__(self, targets: Targets) -> None:
        self.strikes: dict[str, Strike] = {
            "slow-disk": self._slow_disk,
            "disk-error": self._disk_error,
            "disk-full": self._disk_full,
            "wipe": self._wipe,
            "rot": self._rot,
        }
        self._targets = targets
        self._group = targets.group

    async def _slow_disk(self, _: World, fault: Fault) -> None:
        """Let a disk be slow, or stuck, until its controller had to write."""
        async with self._targets.reserved(fault) as node:
            writes = self._group.writes[node.name]
            node.disk_conditions.sync_s = fault.amount
            node.disk_conditions.stuck = fault.amount > 0.3
            if await self._targets.lasts(fault.lasts_s) and self._group.is_new(node.name):
                node.disk_conditions.stuck = False  # it could not read its file, and would never write
            noticed = await self._targets.until(lambda: self._group.writes[node.name] > writes)
            if not self._targets.over.is_set():
                mend_disk(node)
            check_noticed(noticed)

    async def _disk_error(self, _: World, fault: Fault) -> None:
        async with self._targets.reserved(fault) as node:
            node.disk_conditions.fail = 1.0
            await self._ends(node, fault)

    async def _disk_full(self, _: World, fault: Fault) -> None:
        async with self._targets.reserved(fault) as node:
            node.disk_model.capacity_bytes = node.disk_model.used_bytes
            await self._ends(node, fault)

    async def _ends(self, node: Node, fault: Fault) -> None:
        """A controller that has to write must end; its disk is mended, and it is started again."""
        assert node.task is not None
        written, asked_s = self._group.writes[node.name], self._targets.world.now
        while not node.task.done() and not self._targets.over.is_set():
            await asyncio.wait([node.task], timeout=STEP_S)
            if fault.kind == "disk-full" and node.disk_model.used_bytes < node.disk_model.capacity_bytes:
                # A new file took the place of the old one, and made room.
                node.disk_model.capacity_bytes = node.disk_model.used_bytes
                written = self._group.writes[node.name]
            if self._group.writes[node.name] == written:
                asked_s = self._targets.world.now
            elif self._targets.world.now > asked_s + ENDS_S:
                text = f"{node.name} goes on {ENDS_S:g} s after it had to write, and could not"
                raise Violation("I11", text)
        ended = node.task.done()
        node.kill()
        if await self._targets.lasts(fault.lasts_s):
            mend_disk(node)
            self._group.restart(node.name)
        check_noticed(ended)

    async def _wipe(self, _: World, fault: Fault) -> None:
        """Lose a disk."""
        async with self._targets.settled(fault) as node:
            node.crash()
            await self._lose(node, fault)

    async def _lose(self, node: Node, fault: Fault) -> None:
        """What a controller had on disk is gone: it comes back with an empty one, as another."""
        self._group.forget(node.name)
        await self._targets.lasts(fault.lasts_s)
        self._group.restart(node.name, empty_disk=True)

    async def _rot(self, _: World, fault: Fault) -> None:
        """Flip bits of what a controller has on disk. It must refuse to start with that, and lose its disk.

        With `amount` 1 they are flipped while it runs, and noticed when it has lost its power. What it has
        written anew meanwhile is whole again, and is damaged again.
        """
        group = self._group
        async with self._targets.settled(fault) as node:
            group.rotten.add(node.name)
            if fault.amount:
                self._damage(node)
                await self._targets.lasts(fault.lasts_s)
            while node.name not in group.refused:
                node.crash()
                mend_disk(node)
                must = node.name in group.damaged or self._damage(node)
                group.restart(node.name)
                assert node.task is not None
                await asyncio.wait([node.task], timeout=ENDS_S)
                if node.name in group.refused:
                    break
                if must:
                    raise Violation("I10", f"{node.name} takes part with a file that is damaged")
                if not await self._targets.until(lambda: self._can_damage(node)):
                    break
            group.rotten.discard(node.name)
            check_noticed(node.name in group.refused)
            group.refused.discard(node.name)
            node.kill()
            await self._lose(node, fault)

    def _can_damage(self, node: Node) -> bool:
        return self._group.proven[node.name] >= SECTOR_BYTES

    def _damage(self, node: Node) -> bool:
        """Flip a bit in some sectors behind which others were written. Returns whether there are any."""
        if not self._can_damage(node):
            return False
        sectors, dice = self._group.proven[node.name] // SECTOR_BYTES, self._targets.dice
        chosen = {dice.below(sectors) for _ in range(1 + dice.below(MOST_SECTORS))}
        node.disk_model.rot(lambda path, sector: path == FILE and sector in chosen)
        self._group.damaged.add(node.name)
        return True


def mend_disk(node: Node) -> None:
    """Let a disk work as it should."""
    node.disk_conditions.fail, node.disk_conditions.stuck = 0.0, False
    node.disk_conditions.sync_s = DiskConditions().sync_s
    node.disk_model.capacity_bytes = 1 << 30
