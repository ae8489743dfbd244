"""Members of one controller crash, are killed, freeze and are cut off; the controller freezes.

Each member but one writes numbers into its own record, one after the other, while faults strike. A number
whose write was acknowledged must be in the controller's map, that one or a later one (I6). Who is down for
long is missed; and when all faults are over everybody is a member again, in its newest life, with the newest
map.
"""

import asyncio
from dataclasses import dataclass

from adam_async.cluster_map import NodeRecord
from adam_async.config import Waits
from adam_async.controller.client import Membership
from adam_async.controller.service import Controller
from adam_async.errors import DeadlineExceeded, RoleDied, RunFailed
from adam_async.messages import role_table
from adam_async.simulation.dice import Dice
from adam_async.simulation.faults import strike_all
from adam_async.simulation.nodes import Node, World
from adam_async.simulation.plan import Fault, Plan, draw_options, in_order
from adam_async.simulation.scenario import Ledger, Scenario, Violation
from adam_async.traffic import Traffic
from transport import BufferPool, Identity, LinkConfig, TcpNetwork

CONTROLLER = "controller"
ADDRESS = f"tcp://{CONTROLLER}:7000"
TOKEN = b"a token of the simulated cluster"

WAITS = Waits(dial_s=5.0, call_s=5.0, patience_s=120.0, grace_s=2.0)
LINKS = LinkConfig(ping_every_s=0.5, dead_after_s=2.0, stalled_after_s=2.0, handshake_s=2.0, close_s=1.0)

STRIKE_S = 30.0
"""Faults strike within so many seconds."""

WRITE_S = 0.15
"""Mean pause of a member between two writes."""

MISSED_S = LINKS.dead_after_s + LINKS.ping_every_s + WAITS.grace_s + 1.0
"""Who is down for longer is no member any more."""

SETTLED_S = 60.0
"""So long after the last fault all is well at the latest."""

LIVES = 1000
"""A program that starts itself again takes the next incarnation; a machine's lives are so far apart."""


def draw_plan(dice: Dice) -> Plan:
    """Draw four to six members, a fault of each kind and some more."""
    members = [f"worker-{number}" for number in range(4 + dice.below(3))]
    kinds = [*MEMBERS.kinds, *(dice.choose(MEMBERS.kinds) for _ in range(dice.below(4)))]
    faults = [_draw_fault(dice, kind, dice.choose(members)) for kind in kinds]
    return Plan(options=draw_options(dice, {"members": len(members)}), faults=in_order(faults))


def _draw_fault(dice: Dice, kind: str, member: str) -> Fault:
    at_s, lasts_s, amount = dice.between(2.0, STRIKE_S), dice.between(0.1, 9.0), 0.0
    targets: tuple[str, ...] = (member,)
    match kind:
        case "freeze":
            targets = (dice.choose([member, CONTROLLER]),)
        case "cut":
            targets, amount = (member, CONTROLLER), float(dice.below(2))
        case "cut-one-way":
            ends = [member, CONTROLLER]
            dice.shuffle(ends)
            targets = (ends[0], ends[1])
        case "reset":
            targets, lasts_s = (member, CONTROLLER), 0.0
        case "slow":
            amount = dice.choose([0.001, 0.02])
    return Fault(at_s=round(at_s, 3), kind=kind, targets=targets, lasts_s=round(lasts_s, 3), amount=amount)


@dataclass(slots=True)
class _Member:
    """What the world knows of a member, over all its lives."""

    seat: Membership | None = None
    incarnation: int = 0
    written: int = 0
    """The newest number that it began to write."""
    acknowledged: int = 0
    down_s: float = 0.0
    """Since when it is down while the controller runs."""


class _Story:
    """One run."""

    def __init__(self, world: World, plan: Plan, ledger: Ledger) -> None:
        self.world = world
        self.ledger = ledger
        self.controller: Controller | None = None
        count = int(plan.options.settings["members"])
        self.members = {f"worker-{number}": _Member() for number in range(count)}
        self.silent = [*self.members][-1]
        """It never writes: a write sets the whole record, and so gives back a seat that was lost."""
        self.writing = True
        world.node(CONTROLLER).start(self._serve)
        for name in self.members:
            world.node(name).start(self._stay)

    def _network(self, node: Node) -> TcpNetwork:
        return TcpNetwork(
            token=TOKEN, entropy=node.entropy, rules=role_table(), config=LINKS, pool=BufferPool()
        )

    async def _serve(self, node: Node) -> None:
        identity = Identity(role="controller", node=CONTROLLER, incarnation=node.life)
        controller = Controller(
            network=self._network(node),
            address=ADDRESS,
            identity=identity,
            waits=WAITS,
            entropy=node.entropy,
        )
        async with controller:
            self.controller = controller
            await asyncio.Event().wait()

    async def _stay(self, node: Node) -> None:
        """Be a member. What ends by an error starts again, as a role's supervisor would do it."""
        network, member = self._network(node), self.members[node.name]
        for attempt in range(LIVES):
            member.incarnation = incarnation = node.life * LIVES + attempt
            identity = Identity(role="worker", node=node.name, incarnation=incarnation)
            record = NodeRecord(
                role="worker",
                address=f"tcp://{node.name}:1",
                incarnation=incarnation,
                info={"number": member.written},
            )
            member.seat = seat = Membership(
                network=network,
                controller=ADDRESS,
                identity=identity,
                record=record,
                waits=WAITS,
                traffic=Traffic(node.name),
            )
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(seat.run(), name="seat")
                    if node.name != self.silent:
                        group.create_task(self._write(member, seat), name="writer")
            except* (RunFailed, RoleDied, DeadlineExceeded):
                self.ledger.counts["started again"] += 1
            await asyncio.sleep(0.5)

    async def _write(self, member: _Member, seat: Membership) -> None:
        await seat.wait_for(lambda _: seat.seated, "a seat", WAITS.patience_s)
        dice = self.world.dice.fork(f"{seat.node}/{member.incarnation}")
        while self.writing:
            member.written += 1
            number = member.written
            try:
                await seat.set_node(info={"number": number})
            except DeadlineExceeded:
                continue  # whether it was written is unknown
            self.ledger.operations += 1
            member.acknowledged = max(member.acknowledged, number)
            self.check_written(seat.node)
            await asyncio.sleep(dice.around(WRITE_S))

    def check_written(self, name: str) -> None:
        """What was acknowledged to a member is in the controller's map."""
        assert self.controller is not None
        record, acknowledged = self.controller.map.nodes.get(name), self.members[name].acknowledged
        held = record.info["number"] if record is not None else 0
        if held < acknowledged:
            raise Violation("I6", f"{name} was told that {acknowledged} is written; the map holds {held}")

    async def watch(self) -> None:
        """See that maps never go back, and that who is down for long is missed."""
        versions: dict[str, tuple[int, int]] = {}
        while True:
            await asyncio.sleep(STEP_S)
            controller = self.world.node(CONTROLLER)
            for name, member in self.members.items():
                self.check_written(name) if self.controller is not None else None
                seat = member.seat
                if seat is not None:
                    before = versions.get(name, (0, 0))
                    versions[name] = now = (member.incarnation, seat.map.version)
                    if now < before:
                        raise Violation("I7", f"the map of {name} went back from {before} to {now}")
                runs = self.world.node(name).host.up
                member.down_s = 0.0 if runs or controller.host.frozen else member.down_s + STEP_S
                if member.down_s > MISSED_S and name in self.live:
                    raise Violation("missed", f"{name} is down for {member.down_s:.1f} s and counts as live")

    @property
    def live(self) -> list[str]:
        """Who is a member."""
        return self.controller.map.live("worker") if self.controller is not None else []

    @property
    def unsettled(self) -> str:
        """What is not yet as it must be when all faults are over; nothing if all is."""
        if self.controller is None:
            return "the controller has not begun"
        newest = self.controller.map
        for name, member in self.members.items():
            record, seat = newest.nodes.get(name), member.seat
            if record is None or not record.live:
                return f"{name} is no member"
            if record.incarnation != member.incarnation:
                return f"{name} is a member as {record.incarnation}, and lives as {member.incarnation}"
            if seat is None or seat.map.version != newest.version:
                return f"{name} has not the newest map"
        return ""

    async def settle(self) -> None:
        """Wait until all is as it must be."""
        by = self.world.now + SETTLED_S
        while self.unsettled:
            if self.world.now > by:
                raise Violation("all return", f"{SETTLED_S:g} s after the last fault {self.unsettled}")
            await asyncio.sleep(STEP_S)


STEP_S = 0.05
"""How often the world looks."""


async def run(world: World, plan: Plan, ledger: Ledger) -> None:
    """Go through a plan."""
    story = _Story(world, plan, ledger)
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(story.watch(), name="watch")
        await strike_all(world, plan.faults, ledger)
        await asyncio.sleep(max(0.0, STRIKE_S - world.now))
        story.writing = False
        await story.settle()
        watch.cancel()
    for name in story.members:
        story.check_written(name)


MEMBERS = Scenario(
    name="members",
    about="members of one controller crash, freeze and are cut off, and return",
    kinds=("crash", "kill", "freeze", "cut", "cut-one-way", "reset", "slow"),
    least_operations=200,
    limit_s=300.0,
    plan=draw_plan,
    run=run,
)
