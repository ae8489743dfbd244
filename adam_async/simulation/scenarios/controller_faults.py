"""What can happen to a group of controllers and its clients, and is left as it is when all of it is over.

A fault without a target is for whoever leads when it strikes. One machine has one fault at a time; others
wait their turn. When the time of faults ends, none is undone any more: what is mended then, the scenario
decides.
"""

import asyncio
from collections import defaultdict

from adam_async.simulation.dice import Dice
from adam_async.simulation.disk import DiskConditions
from adam_async.simulation.faults import Strike
from adam_async.simulation.nodes import Node, World
from adam_async.simulation.plan import Fault
from adam_async.simulation.scenario import Violation
from adam_async.simulation.scenarios.controller_group import ControllerGroup

FIND_S = 3.0
"""So long a fault waits for a leader that it can strike; then any controller will do."""

STEP_S = 0.05

ENDS_S = 3.0
"""So soon after its disk failed a controller ends."""

KINDS = (
    "crash",
    "wipe",
    "kill",
    "stop",
    "freeze",
    "slow",
    "clock",
    "cut",
    "cut-one-way",
    "isolate",
    "reset",
    "lose-answers",
    "slow-disk",
    "disk-error",
    "disk-full",
    "restart-all",
    "crash-user",
)


def draw_fault(dice: Dice, kind: str, *, at_s: float, controllers: list[str], users: list[str]) -> Fault:
    """Draw a fault of one kind, half of them for who leads."""
    targets: tuple[str, ...] = () if dice.chance(0.5) else (dice.choose(controllers),)
    lasts_s, amount = dice.between(0.2, 2.0), 0.0
    match kind:
        case "crash" | "kill" | "stop" | "restart-all":
            lasts_s = dice.between(0.05, 1.5)
            targets = () if kind == "restart-all" else targets
        case "wipe":
            targets = (dice.choose(controllers),)
        case "freeze":
            lasts_s = dice.between(0.3, 3.0)
        case "slow":
            amount = dice.choose([0.0002, 0.002, 0.005])
        case "clock":
            lasts_s, amount = dice.between(1.0, 8.0), dice.between(0.8, 1.25)
        case "cut" | "cut-one-way" | "reset":
            ends = [dice.choose(controllers)]
            ends.append(dice.choose([name for name in [*controllers, *users] if name not in ends]))
            dice.shuffle(ends)
            targets, amount = tuple(ends), float(dice.below(2))
            lasts_s = 0.0 if kind == "reset" else dice.between(0.2, 3.0)
        case "isolate":
            lasts_s, amount = dice.between(0.5, 3.0), float(dice.below(3))
        case "lose-answers":
            targets, lasts_s = (dice.choose(users),), dice.between(0.1, 0.8)
        case "slow-disk":
            amount = dice.choose([0.02, 0.1, 0.5])
        case "disk-error" | "disk-full":
            lasts_s = dice.between(0.05, 0.5)
        case "crash-user":
            targets, lasts_s = (dice.choose(users),), dice.choose([0.2, 1.0, 5.0])
    return Fault(at_s=round(at_s, 3), kind=kind, targets=targets, lasts_s=round(lasts_s, 3), amount=amount)


class Faults:
    """Does them.

    Attributes:
        over: Set when the time of faults has ended.
        strikes: By kind, for `faults.strike_all`.
    """

    def __init__(self, world: World, group: ControllerGroup, over: asyncio.Event) -> None:
        self.over = over
        self.strikes: dict[str, Strike] = {
            "crash": self._crash,
            "wipe": self._wipe,
            "kill": self._kill,
            "stop": self._stop,
            "freeze": self._freeze,
            "slow": self._slow,
            "clock": self._clock,
            "cut": self._cut,
            "cut-one-way": self._cut,
            "isolate": self._isolate,
            "reset": self._reset,
            "lose-answers": self._lose_answers,
            "slow-disk": self._slow_disk,
            "disk-error": self._disk_error,
            "disk-full": self._disk_full,
            "restart-all": self._restart_all,
            "crash-user": self._crash_user,
        }
        self._world = world
        self._group = group
        self._dice = world.dice.fork("faults")
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def _lasts(self, seconds: float) -> bool:
        """Wait until a fault is to be undone; False if it is not any more."""
        try:
            async with asyncio.timeout(seconds):
                await self.over.wait()
        except TimeoutError:
            pass
        return not self.over.is_set()

    async def _target(self, fault: Fault) -> Node:
        """Whom a fault strikes."""
        if fault.targets:
            return self._world.nodes[fault.targets[0]]
        until = self._world.now + FIND_S
        while not (name := self._group.leader) or self._locks[name].locked():
            if self._world.now > until or self.over.is_set():
                name = self._dice.choose(list(self._group.addresses))
                break
            await asyncio.sleep(STEP_S)
        return self._world.nodes[name]

    # --- machines ----------------------------------------------------------------------------

    async def _crash(self, _: World, fault: Fault) -> None:
        node = await self._target(fault)
        async with self._locks[node.name]:
            node.crash()
            if await self._lasts(fault.lasts_s):
                self._group.restart(node.name)

    async def _wipe(self, _: World, fault: Fault) -> None:
        """Lose a disk, while all others belong to the group with theirs: else what it knows would be lost."""
        node = self._world.nodes[fault.targets[0]]
        async with self._locks[node.name]:
            while not self._group.is_settled:
                if self.over.is_set():
                    raise Violation("I15", f"{fault}: the group never settled, so no disk could be lost")
                await asyncio.sleep(STEP_S)
            node.crash()
            self._group.forget(node.name)
            await self._lasts(fault.lasts_s)
            self._group.restart(node.name, empty_disk=True)

    async def _kill(self, _: World, fault: Fault) -> None:
        node = await self._target(fault)
        async with self._locks[node.name]:
            node.kill()
            if await self._lasts(fault.lasts_s):
                self._group.restart(node.name)

    async def _stop(self, _: World, fault: Fault) -> None:
        """End a controller in good order: it hands over, if it leads."""
        node = await self._target(fault)
        async with self._locks[node.name]:
            if node.task is not None and node.host.up:
                node.task.cancel()
                await asyncio.wait([node.task], timeout=ENDS_S)
            node.kill()
            if await self._lasts(fault.lasts_s):
                self._group.restart(node.name)

    async def _freeze(self, _: World, fault: Fault) -> None:
        node = await self._target(fault)
        async with self._locks[node.name]:
            node.freeze()
            if await self._lasts(fault.lasts_s):
                node.thaw()

    async def _slow(self, _: World, fault: Fault) -> None:
        node = await self._target(fault)
        async with self._locks[node.name]:
            node.slow(fault.amount)
            if await self._lasts(fault.lasts_s):
                node.slow(0.0)

    async def _clock(self, _: World, fault: Fault) -> None:
        node = await self._target(fault)
        node.set_clock(rate=fault.amount)  # beside all other faults
        if await self._lasts(fault.lasts_s):
            node.set_clock(rate=1.0)

    async def _restart_all(self, _: World, fault: Fault) -> None:
        """Take the power of all controllers at once; they come back one after the other."""
        names = sorted(self._group.addresses)
        for name in names:
            await self._locks[name].acquire()
        for name in names:
            self._world.nodes[name].crash()
        for name in names:
            if await self._lasts(fault.lasts_s * self._dice.random()):
                self._group.restart(name)
        for name in names:
            self._locks[name].release()

    async def _crash_user(self, _: World, fault: Fault) -> None:
        node = self._world.nodes[fault.targets[0]]
        async with self._locks[node.name]:
            node.crash()
            if await self._lasts(fault.lasts_s):
                node.restart()

    # --- the network -------------------------------------------------------------------------

    async def _cut(self, world: World, fault: Fault) -> None:
        source, target = fault.targets
        both = fault.kind == "cut"
        world.network.cut(source, target, both=both)
        if await self._lasts(fault.lasts_s):
            world.network.heal(source, target, both=both, reset=fault.amount > 0)

    async def _isolate(self, world: World, fault: Fault) -> None:
        """Cut a controller off from everybody; with `amount` 2, from the other controllers."""
        node = await self._target(fault)
        others = self._group.addresses if fault.amount == 2 else world.nodes
        for other in others:
            if other != node.name:
                world.network.cut(node.name, other)
        if await self._lasts(fault.lasts_s):
            for other in others:
                if other != node.name:
                    world.network.heal(node.name, other, reset=fault.amount == 1)

    async def _reset(self, world: World, fault: Fault) -> None:
        source, target = fault.targets
        world.network.reset(source, target)

    async def _lose_answers(self, world: World, fault: Fault) -> None:
        """What a client asks is done, and the answer is lost."""
        (user,) = fault.targets
        for name in self._group.addresses:
            world.network.cut(name, user, both=False)
        if await self._lasts(fault.lasts_s):
            for name in self._group.addresses:
                world.network.heal(name, user, both=False, reset=True)

    # --- disks -------------------------------------------------------------------------------

    async def _slow_disk(self, _: World, fault: Fault) -> None:
        node = await self._target(fault)
        async with self._locks[node.name]:
            node.disk_conditions.sync_s = fault.amount
            node.disk_conditions.stuck = fault.amount > 0.3
            if await self._lasts(fault.lasts_s):
                mend_disk(node)

    async def _disk_error(self, _: World, fault: Fault) -> None:
        node = await self._target(fault)
        async with self._locks[node.name]:
            node.disk_conditions.fail = 1.0
            await self._ends(node, fault)

    async def _disk_full(self, _: World, fault: Fault) -> None:
        node = await self._target(fault)
        async with self._locks[node.name]:
            node.drive.capacity_bytes = node.drive.used_bytes
            await self._ends(node, fault)

    async def _ends(self, node: Node, fault: Fault) -> None:
        """A controller that has to write must end; its disk is mended, and it is started again."""
        written, asked_s = self._group.writes[node.name], self._world.now
        while node.host.up and node.task is not None and not node.task.done() and not self.over.is_set():
            await asyncio.wait([node.task], timeout=STEP_S)
            if fault.kind == "disk-full" and node.drive.used_bytes < node.drive.capacity_bytes:
                # A new file took the place of the old one, and made room.
                node.drive.capacity_bytes = node.drive.used_bytes
                written = self._group.writes[node.name]
            if self._group.writes[node.name] == written:
                asked_s = self._world.now
            elif self._world.now > asked_s + ENDS_S:
                text = f"{node.name} goes on {ENDS_S:g} s after it had to write, and could not"
                raise Violation("I11", text)
        node.kill()
        if await self._lasts(fault.lasts_s):
            mend_disk(node)
            self._group.restart(node.name)


def mend_disk(node: Node) -> None:
    """Let a disk work as it should."""
    node.disk_conditions.fail, node.disk_conditions.stuck = 0.0, False
    node.disk_conditions.sync_s = DiskConditions().sync_s
    node.drive.capacity_bytes = 1 << 30
