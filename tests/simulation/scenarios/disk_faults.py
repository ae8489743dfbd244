"""Faults of controllers' disks: slow, failing, full, lost and damaged disks."""

import asyncio

from tests.simulation.disk import DiskConditions
from tests.simulation.disk_model import SECTOR_BYTES
from tests.simulation.faults import STEP_S, Strike, check_noticed
from tests.simulation.plan import Fault
from tests.simulation.scenario import Node, Violation, World
from tests.simulation.scenarios.controller_group import FILE
from tests.simulation.scenarios.machine_faults import Targets

ENDS_S = 3.0
"""Time limit in seconds for a controller's end after its disk failed, or after a start on a damaged file."""

MOST_SECTORS = 3
"""Largest number of sectors damaged at once."""


class DiskFaults:
    """Carries out faults of disks.

    Attributes:
        strikes: Faults by kind, for `faults.strike_all`.
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
        """Make a disk slow or stuck until its controller tries to write."""
        async with self._targets.reserved(fault) as node:
            writes = self._group.writes[node.name]
            node.disk_conditions.sync_s = fault.amount
            node.disk_conditions.stuck = fault.amount > 0.3
            if await self._targets.lasts(fault.lasts_s) and self._group.is_new(node.name):
                node.disk_conditions.stuck = False  # a controller that cannot read its log never writes
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
        """Wait until a controller ends at its next write; then repair its disk and restart it."""
        assert node.task is not None
        written, asked_s = self._group.writes[node.name], self._targets.world.now
        while not node.task.done() and not self._targets.over.is_set():
            await asyncio.wait([node.task], timeout=STEP_S)
            if fault.kind == "disk-full" and node.disk_model.used_bytes < node.disk_model.capacity_bytes:
                # A new, smaller file has replaced the old one and freed space: fill the disk again.
                node.disk_model.capacity_bytes = node.disk_model.used_bytes
                written = self._group.writes[node.name]
            if self._group.writes[node.name] == written:
                asked_s = self._targets.world.now
            elif self._targets.world.now > asked_s + ENDS_S:
                text = f"{node.name} goes on {ENDS_S:g} s after a write that must have failed"
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
        """Restart a controller with an empty disk, under a new identity."""
        self._group.forget(node.name)
        await self._targets.lasts(fault.lasts_s)
        self._group.restart(node.name, empty_disk=True)

    async def _rot(self, _: World, fault: Fault) -> None:
        """Flip bits on a controller's disk.

        The controller must refuse to start with the flipped bits; then it loses its disk.

        With `amount` 1 the bits flip while the controller runs, and it notices them after a crash. If the
        controller has replaced the file in that time, the file is damaged again.
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
                    raise Violation("I10", f"{node.name} runs with a damaged file")
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
        """Flip a bit in some sectors before the last durable record. Returns whether any exist."""
        if not self._can_damage(node):
            return False
        sectors, dice = self._group.proven[node.name] // SECTOR_BYTES, self._targets.dice
        chosen = {dice.below(sectors) for _ in range(1 + dice.below(MOST_SECTORS))}
        node.disk_model.rot(lambda path, sector: path == FILE and sector in chosen)
        self._group.damaged.add(node.name)
        return True


def mend_disk(node: Node) -> None:
    """Repair a disk."""
    conditions = node.disk_conditions
    conditions.fail, conditions.fail_syncs, conditions.stuck = 0.0, 0.0, False
    node.disk_conditions.sync_s = DiskConditions().sync_s
    node.disk_model.capacity_bytes = 1 << 30
