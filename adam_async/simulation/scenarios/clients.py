"""The shipped clients of three controllers, while leaders and they crash, stand still and are cut off.

Askers read, set and watch the map by `MapClient`; members keep a seat by `Membership`, lose it and take it
again. Some are given one address and must find the others by what they are told, one has addresses at which
nobody listens beside the right ones. In the end all answers have one order, no watch had a gap, no seat's map
went back and nothing acknowledged is lost (I6); once all is well every asker is answered, and every member
has its seat and the newest map (I15). The controllers are watched as in `controllers`.
"""

import asyncio
from dataclasses import replace

import msgspec

from adam_async.run.config import Waits
from adam_async.runtime.random_streams import Dice
from adam_async.simulation.faults import PATIENCE_S, strike_all
from adam_async.simulation.nodes import World
from adam_async.simulation.plan import Fault, Plan, Setting, draw_options, in_order
from adam_async.simulation.scenario import Ledger, Scenario, Violation
from adam_async.simulation.scenarios.controller_faults import draw_fault, strikes_of
from adam_async.simulation.scenarios.controller_group import draw_settings
from adam_async.simulation.scenarios.controller_run import MARKS, STEP_S, UNDER_WAY, ControllerRun
from adam_async.simulation.scenarios.map_client_user import MapClientUser
from adam_async.simulation.scenarios.membership_holder import Member

KINDS = (
    "crash",
    "kill",
    "freeze",
    "cut",
    "cut-one-way",
    "isolate",
    "reset",
    "narrow",
    "break-off",
    "lose-answers",
    "restart-all",
    "crash-user",
    "stall",
)
"""`stall`: a client's machine stands still."""

STRIKE_S = 10.0
"""Faults begin within so many seconds, one at a machine after the other, and each is undone."""

ANSWERS = 3
"""So many answers to each asker show that the controllers are found again."""

SETTLED_S = 20.0
"""So soon after the last fault all have seats, and the same map."""

LEAST_OPERATIONS = 200
"""Who was kept waiting through most of the faults asks on until all have had so many answers."""

CONTROLLERS = ("controller-1", "controller-2", "controller-3")
MEMBERS = ("member-0", "member-1")

NOBODY = ("tcp://nobody:7000", "tcp://controller-1:7999")
"""No machine, and one that does not listen there."""


def draw_plan(dice: Dice) -> Plan:
    """Draw the clients' patience, and a fault of each kind with some more."""
    users = 2 + dice.below(2)
    settings: dict[str, Setting] = {
        **draw_settings(dice, sessions=users + len(MEMBERS)),
        "controllers": len(CONTROLLERS),
        "heartbeat_s": 0.3,
        "users": users,
        "pause_s": round(users / dice.between(24.0, 28.0), 3),
        "asks_s": dice.choose([2.0, 5.0, 12.0]),
        "patience_s": dice.choose([3.0, 30.0]),
        "call_s": dice.choose([1.0, 2.0, 5.0]),
    }
    clients = [*(f"user-{number}" for number in range(users)), *MEMBERS]
    kinds = [*KINDS, *(dice.choose(KINDS) for _ in range(dice.below(4)))]
    faults = [_draw_fault(dice, kind, clients) for kind in kinds]
    long_s = round(dice.between(2.5, 3.5), 3)  # so that another one leads, and the old one does not know it
    faults = [
        msgspec.structs.replace(fault, targets=(), lasts_s=long_s) if fault.kind == "isolate" else fault
        for fault in faults
    ]
    options = draw_options(dice, settings)
    network = replace(options.network, ragged=False)  # cuts of frames are for `controllers` to find
    return Plan(options=msgspec.structs.replace(options, network=network), faults=in_order(faults))


def _draw_fault(dice: Dice, kind: str, clients: list[str]) -> Fault:
    at_s = dice.between(0.5, STRIKE_S)
    if kind != "stall":
        return draw_fault(dice, kind, at_s=at_s, controllers=[*CONTROLLERS], users=clients)
    lasts_s = dice.choose([0.5, 2.0, 6.0])  # the last one costs the seat
    return Fault(at_s=round(at_s, 3), kind=kind, targets=(dice.choose(clients),), lasts_s=lasts_s)


class _Run(ControllerRun):
    """One run."""

    def __init__(self, world: World, plan: Plan, ledger: Ledger) -> None:
        super().__init__(world, plan, ledger)
        settings = self.settings
        waits = Waits(
            dial_s=10.0,
            call_s=float(settings["call_s"]),
            patience_s=float(settings["patience_s"]),
            grace_s=1.0,
        )
        pause_s = float(settings["pause_s"])
        self.users = [
            MapClientUser(
                f"user-{number}",
                self.group,
                ledger,
                controllers=self._addresses(("one", "with wrong ones", "all")[number]),
                waits=waits,
                patience_s=float(settings["asks_s"]),
                pause_s=pause_s,
                watches=number < 2,
            )
            for number in range(int(settings["users"]))
        ]
        self.members = [
            Member(
                name,
                self.group,
                ledger,
                controllers=self._addresses(how),
                waits=waits,
                pause_s=2 * pause_s,
                other=other,
            )
            for name, how, other in zip(MEMBERS, ("all", "one"), reversed(MEMBERS), strict=True)
        ]
        self.clients: list[MapClientUser | Member] = [*self.users, *self.members]

    def _addresses(self, how: str) -> list[str]:
        addresses = list(self.group.addresses.values())
        if how == "with wrong ones":
            addresses += NOBODY
        self.dice.shuffle(addresses)
        return addresses[:1] if how == "one" else addresses

    async def run(self) -> None:
        self.start(self.clients)
        strikes = strikes_of(self.world, self.group, asyncio.Event(), patience_s=PATIENCE_S)
        own = {**strikes, "stall": strikes["freeze"]}
        await strike_all(self.world, self.plan.faults, self.ledger, own=own)
        self.world.network.heal_all()
        await self.answer_all()
        await self.settle()
        self.group.check_end()

    async def answer_all(self) -> None:
        """All is well: see that every asker is answered."""
        progress = self.group.progress
        progress.heal([user.name for user in self.users])
        before = {user.name: user.answered for user in self.users}
        while self.ledger.operations < LEAST_OPERATIONS or any(
            user.answered < before[user.name] + ANSWERS for user in self.users
        ):
            await asyncio.sleep(STEP_S)
            progress.check()

    async def settle(self) -> None:
        """See that members are seated, and that all come to the same and have what was acknowledged."""
        for client in self.clients:
            client.working = False
        by = self.world.now + SETTLED_S
        while problem := self.unsettled():
            if self.world.now > by:
                raise Violation("I15", f"{SETTLED_S:g} s after the last fault: {problem}")
            await asyncio.sleep(STEP_S)
        for member in self.members:
            for controller in self.group.running.values():
                member.check_kept(controller.map)

    def unsettled(self) -> str:
        """What is not yet as it must be at the end; nothing if all is."""
        leader = self.group.leader
        if not leader:
            return "nobody leads"
        newest = self.group.running[leader].map
        problems = [self.group.check_equal(), *(member.check_joined(newest) for member in self.members)]
        return next(filter(None, problems), "")


async def run(world: World, plan: Plan, ledger: Ledger) -> None:
    """Go through a plan."""
    await _Run(world, plan, ledger).run()


CLIENTS = Scenario(
    name="clients",
    about="the clients of three controllers find whoever leads, and are told the truth",
    kinds=KINDS,
    least_operations=LEAST_OPERATIONS,
    least_leader_changes=1,
    limit_s=200.0,
    marks=(
        "unknown outcomes",
        "given up",
        "clients made anew",
        "seats given up",
        "lost nodes",
        UNDER_WAY,
        *MARKS,
    ),
    plan=draw_plan,
    run=run,
)
