"""Members of one controller crash, are killed, freeze and are cut off; the controller freezes.

Each worker but one writes increasing numbers to its own record during the faults. The controller's map must
have each acknowledged number, or a later one (I6). A member that is down for long is lost. After the faults
every machine is a member again, in its newest incarnation, with the newest map.

Meanwhile these workers train short runs (`short_runs.py`) from two or three data servers. The data servers
have faults, too, in some seeds all at once. After the faults epochs end again.
"""

import asyncio
from dataclasses import dataclass

from adam_async.controller.client import Membership
from adam_async.controller.consensus_node import ConsensusSetup
from adam_async.controller.role import RoleSettings
from adam_async.controller.service import Controller
from adam_async.errors import DeadlineExceeded, RoleDied, RunFailed
from tests.simulation.checkers.histories import check_kept
from tests.simulation.faults import STEP_S, strike_all
from tests.simulation.plan import Fault, Plan, Setting, draw_options, in_order
from tests.simulation.random_streams import RandomStream
from tests.simulation.scenario import Ledger, Node, Scenario, Violation, World, settle
from tests.simulation.scenarios.cluster import LINKS, network_of
from tests.simulation.scenarios.controller_group import permit_all
from tests.simulation.scenarios.map_user import INCARNATIONS, new_membership
from tests.simulation.scenarios.short_runs import ADDRESS, CONTROLLER, DRIVER, WAITS, ShortRuns
from transport import Identity

STRIKE_S = 14.0
"""Latest start of a fault, in seconds."""

WRITE_S = 0.6
"""Mean pause of a worker between two writes, in seconds."""

PACES_S = (0.05, 0.05, 0.2)
"""Durations in seconds of a group; each worker draws one, so some workers are slow."""

MISSED_S = LINKS.dead_after_s + LINKS.ping_every_s + WAITS.grace_s + 1.0
"""Longest time in seconds for which a machine that is down may count as live."""

SETTLED_S = 60.0
"""Time limit of the recovery after the last fault, in seconds."""


def draw_plan(dice: RandomStream) -> Plan:
    """Draw four to six workers and two or three data servers, a fault of each kind and some more."""
    workers = [f"worker-{number}" for number in range(4 + dice.below(3))]
    kinds = [*MEMBERS.kinds, *(dice.choose(MEMBERS.kinds) for _ in range(dice.below(4)))]
    faults = [_draw_fault(dice, kind, dice.choose(workers), CONTROLLER) for kind in kinds]
    data_servers = [f"data-{number}" for number in range(2 + dice.below(2))]
    for kind in (dice.choose(MEMBERS.kinds) for _ in range(3)):
        dice.shuffle(data_servers)
        faults.append(_draw_fault(dice, kind, data_servers[0], CONTROLLER))
    if dice.chance(0.3):
        at_s, lasts_s = round(dice.between(1.0, STRIKE_S), 3), round(dice.between(0.1, 7.0), 3)
        faults += [Fault(at_s=at_s, kind="kill", targets=(name,), lasts_s=lasts_s) for name in data_servers]
    settings: dict[str, Setting] = {"members": len(workers), "data_servers": len(data_servers)}
    return Plan(options=draw_options(dice, settings), faults=in_order(faults))


def _draw_fault(dice: RandomStream, kind: str, member: str, other: str) -> Fault:
    """Draw a fault of a machine, or of its link to another machine."""
    at_s, lasts_s, amount = dice.between(1.0, STRIKE_S), dice.between(0.1, 7.0), 0.0
    targets: tuple[str, ...] = (member,)
    match kind:
        case "freeze":
            targets = (dice.choose([member, other]),)
        case "cut":
            targets, amount = (member, other), float(dice.below(2))
        case "cut-one-way":
            ends = [member, other]
            dice.shuffle(ends)
            targets = (ends[0], ends[1])
        case "reset":
            targets, lasts_s = (member, other), 0.0
        case "slow":
            amount = dice.choose([0.001, 0.02])
    return Fault(at_s=round(at_s, 3), kind=kind, targets=targets, lasts_s=round(lasts_s, 3), amount=amount)


@dataclass(slots=True)
class _Member:
    """State of a worker as seen from outside, over all its incarnations."""

    membership: Membership | None = None
    incarnation: int = 0
    written: int = 0
    """Newest number that the worker began to write."""
    acknowledged: int = 0
    down_s: float = 0.0
    """Time for which the worker is down while the controller runs, in seconds."""
    pace_s: float = 0.0


class _Run:
    """One run."""

    def __init__(self, world: World, plan: Plan, ledger: Ledger) -> None:
        self.world = world
        self.ledger = ledger
        self.controller: Controller | None = None
        count = int(plan.options.settings["members"])
        self.members = {
            f"worker-{number}": _Member(pace_s=world.dice.choose(PACES_S)) for number in range(count)
        }
        self.runs = ShortRuns(world, ledger)
        self.silent = [*self.members][-1]
        """Name of the worker that never writes, so that it stays lost after a loss: a write sets the whole
        record, and would make a lost worker join again."""
        self.writing = True
        world.node(CONTROLLER).start(self._serve)
        world.node(DRIVER).start(self.runs.run_driver)
        for number in range(int(plan.options.settings["data_servers"])):
            world.node(f"data-{number}").start(self.runs.run_data_server)
        for name in self.members:
            world.node(name).start(self._supervise)

    async def _serve(self, node: Node) -> None:
        identity = Identity(role="controller", node=CONTROLLER, incarnation=node.incarnation)
        controller = Controller(
            RoleSettings(network=network_of(node), address=ADDRESS, identity=identity, waits=WAITS),
            ConsensusSetup(entropy=node.entropy),
            permits=permit_all,
        )
        async with controller:
            self.controller = controller
            await asyncio.Event().wait()

    async def _supervise(self, node: Node) -> None:
        """Run a member; after an error start it again, as a role's supervisor would."""
        network, member = network_of(node), self.members[node.name]
        for attempt in range(INCARNATIONS):
            member.incarnation = incarnation = node.incarnation * INCARNATIONS + attempt
            identity = Identity(role="worker", node=node.name, incarnation=incarnation)
            info = {"number": member.written}
            member.membership = membership = new_membership(network, ADDRESS, identity, WAITS, info=info)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(membership.run(), name="membership")
                    if node.name != self.silent:
                        group.create_task(self._write(member, membership), name="writer")
                        work = self.runs.train(node, membership, network, identity, pace_s=member.pace_s)
                        group.create_task(work, name="trainer")
                    else:
                        group.create_task(
                            self.runs.ask_wrongly(membership, network, identity), name="wrong questions"
                        )
            except* (RunFailed, RoleDied, DeadlineExceeded):
                self.ledger.counts["started again"] += 1
            await asyncio.sleep(0.5)

    # --- observations --------------------------------------------------------------------------

    async def _write(self, member: _Member, membership: Membership) -> None:
        await membership.wait_for(lambda _: membership.joined, "its membership", WAITS.patience_s)
        dice = self.world.dice.fork(f"{membership.node}/{member.incarnation}")
        while self.writing:
            member.written += 1
            number = member.written
            try:
                await membership.set_node(info={"number": number})
            except DeadlineExceeded:
                continue  # the outcome is unknown
            self.ledger.operations += 1
            member.acknowledged = max(member.acknowledged, number)
            self.check_written(membership.node)
            await asyncio.sleep(dice.around(WRITE_S))

    def check_written(self, name: str) -> None:
        """Check that the controller's map has the acknowledged writes of a member. Raises Violation."""
        assert self.controller is not None
        check_kept(self.controller.map, name, self.members[name].acknowledged, field="number")

    async def watch(self) -> None:
        """Check that maps never return to earlier versions, and that a member down for long is lost."""
        versions: dict[str, tuple[int, int]] = {}
        while True:
            await asyncio.sleep(STEP_S)
            controller = self.world.node(CONTROLLER)
            for name, member in self.members.items():
                self.check_written(name) if self.controller is not None else None
                membership = member.membership
                if membership is not None:
                    before = versions.get(name, (0, 0))
                    versions[name] = now = (member.incarnation, membership.map.version)
                    if now < before:
                        raise Violation("I7", f"the map of {name} went back from {before} to {now}")
                runs = self.world.node(name).host.up
                member.down_s = 0.0 if runs or controller.host.frozen else member.down_s + STEP_S
                if member.down_s > MISSED_S and name in self.live:
                    raise Violation("missed", f"{name} is down for {member.down_s:.1f} s and counts as live")

    @property
    def live(self) -> list[str]:
        """Live workers in the controller's map."""
        return self.controller.map.live("worker") if self.controller is not None else []

    @property
    def unsettled(self) -> str:
        """A final condition that does not hold yet; empty if all hold."""
        if self.controller is None:
            return "the controller has not begun"
        newest = self.controller.map
        if lost := self.runs.data_servers.keys() - set(newest.live("data")):
            return f"{min(lost)} is no member"
        for name, member in self.members.items():
            record, membership = newest.nodes.get(name), member.membership
            if record is None or not record.live:
                return f"{name} is no member"
            if record.incarnation != member.incarnation:
                return f"{name} is a member as {record.incarnation}, and runs as {member.incarnation}"
            if membership is None or membership.map.version != newest.version:
                return f"{name} lacks the newest map"
        return ""

    async def settle(self) -> None:
        """Wait until all conditions of the end hold."""
        await settle(self.world, lambda: self.unsettled, within_s=SETTLED_S, invariant="all return")

    async def end_an_epoch(self) -> None:
        """Wait until another epoch has ended."""
        by, before = self.world.now + SETTLED_S, len(self.runs.ended)
        while len(self.runs.ended) == before:
            if self.world.now > by:
                problem = self.unsettled  # a missing member may be the reason
                text = f"{SETTLED_S:g} s after the last fault {problem or 'no epoch has ended'}"
                raise Violation("all return" if problem else "epochs end", text)
            await asyncio.sleep(STEP_S)


async def run(world: World, plan: Plan, ledger: Ledger) -> None:
    """Carry out a plan."""
    current = _Run(world, plan, ledger)
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(current.watch(), name="watch")
        await strike_all(world, plan.faults, ledger)
        await asyncio.sleep(max(0.0, STRIKE_S - world.now))
        await current.end_an_epoch()
        current.writing = current.runs.going_on = False
        await current.settle()
        watch.cancel()
    for name in current.members:
        current.check_written(name)


MEMBERS = Scenario(
    name="members",
    about="members of one controller crash, freeze and are cut off, and return",
    kinds=("crash", "kill", "freeze", "cut", "cut-one-way", "reset", "slow"),
    least_operations=100,  # groups count only after their epoch, and writes are few
    limit_s=300.0,
    marks=("stops", "epochs cut short", "refused", "dealers lost", "epochs with returned leases"),
    plan=draw_plan,
    run=run,
)
