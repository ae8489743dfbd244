"""The shipped clients of three controllers, while clients and controllers crash, freeze and are cut off.

Users read, set and watch the map by `MapClient`; members keep a membership by `Membership`, lose it and join
again. Some users have one address and must learn the others from answers; one also has addresses without a
listener. At the end of a run one order explains all answers, no watch has a gap, no member's map returned to
an earlier version, and no acknowledged write is lost (I6). After the faults every user gets answers, and
every member has its membership and the newest map (I15). Checkers follow the controllers as in `controllers`.
"""

import asyncio
from dataclasses import replace

import msgspec

from tests.simulation.faults import PATIENCE_S, STEP_S, strike_all
from tests.simulation.plan import Fault, Plan, Setting, draw_options, in_order
from tests.simulation.random_streams import RandomStream
from tests.simulation.scenario import Ledger, Scenario, World, settle
from tests.simulation.scenarios.controller_faults import draw_fault, strikes_of
from tests.simulation.scenarios.controller_group import MARKS, UNDER_WAY, ControllerRun, draw_settings
from tests.simulation.scenarios.map_user import WAITS, Member, User
from tests.simulation.scenarios.wire_faults import WIRE_KINDS

KINDS = ("crash", "kill", "freeze", *WIRE_KINDS, "restart-all", "crash-user", "stall")
"""Kinds of faults. A `stall` freezes the machine of a client."""

STRIKE_S = 10.0
"""Latest start of a fault, in seconds."""

ANSWERS = 3
"""Number of answers which show that a user has found the controllers again."""

SETTLED_S = 20.0
"""Time limit in seconds after the last fault until all members have joined with the same map."""

LEAST_OPERATIONS = 200
"""Minimum number of answers of a run; users continue until it is reached."""

CONTROLLERS = ("controller-1", "controller-2", "controller-3")
MEMBERS = ("member-0", "member-1")

WRONG_ADDRESSES = ("tcp://nobody:7000", "tcp://controller-1:7999")
"""Addresses of an unknown machine, and of a port without a listener."""


def draw_plan(dice: RandomStream) -> Plan:
    """Draw the clients' time limits, and a fault of each kind with some more."""
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
    long_s = round(dice.between(2.5, 3.5), 3)  # long enough for a new leader unknown to the old one
    faults = [
        msgspec.structs.replace(fault, targets=(), lasts_s=long_s) if fault.kind == "isolate" else fault
        for fault in faults
    ]
    options = draw_options(dice, settings, may_share=True)
    network = replace(options.network, ragged=False)  # `controllers` covers ragged wires
    return Plan(options=msgspec.structs.replace(options, network=network), faults=in_order(faults))


def _draw_fault(dice: RandomStream, kind: str, clients: list[str]) -> Fault:
    at_s = dice.between(0.5, STRIKE_S)
    if kind != "stall":
        return draw_fault(dice, kind, at_s=at_s, controllers=[*CONTROLLERS], users=clients)
    lasts_s = dice.choose([0.5, 2.0, 6.0])  # 6 s end a membership
    return Fault(at_s=round(at_s, 3), kind=kind, targets=(dice.choose(clients),), lasts_s=lasts_s)


class _Run(ControllerRun):
    """One run."""

    def __init__(self, world: World, plan: Plan, ledger: Ledger) -> None:
        super().__init__(world, plan, ledger)
        settings = self.settings
        waits = msgspec.structs.replace(
            WAITS, call_s=float(settings["call_s"]), patience_s=float(settings["patience_s"])
        )
        pause_s = float(settings["pause_s"])
        self.users = [
            User(
                name=f"user-{number}",
                group=self.group,
                ledger=ledger,
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
                name=name,
                group=self.group,
                ledger=ledger,
                controllers=self._addresses(how),
                waits=waits,
                pause_s=2 * pause_s,
                other=other,
            )
            for name, how, other in zip(MEMBERS, ("all", "one"), reversed(MEMBERS), strict=True)
        ]
        self.clients: list[User | Member] = [*self.users, *self.members]

    def _addresses(self, how: str) -> list[str]:
        addresses = self.addresses()
        if how == "with wrong ones":
            addresses += WRONG_ADDRESSES
            self.dice.shuffle(addresses)
        return addresses[:1] if how == "one" else addresses

    async def run(self) -> None:
        """Strike controllers, clients and links, heal, and check that users get answers and members join."""
        self.start({client.name: client.run for client in self.clients})
        strikes = strikes_of(self.world, self.group, asyncio.Event(), patience_s=PATIENCE_S)
        own = {**strikes, "stall": strikes["freeze"]}
        await strike_all(self.world, self.plan.faults, self.ledger, own=own)
        self.world.network.heal_all()
        await self.answer_all()
        await self.settle()
        self.group.check_end()

    async def answer_all(self) -> None:
        """Check that every user gets answers after the faults."""
        progress = self.group.progress
        progress.heal([user.name for user in self.users])
        before = {user.name: user.answered for user in self.users}
        while self.ledger.operations < LEAST_OPERATIONS or any(
            user.answered < before[user.name] + ANSWERS for user in self.users
        ):
            await asyncio.sleep(STEP_S)
            progress.check()

    async def settle(self) -> None:
        """Check that all members join, and that all maps are equal with all acknowledged writes."""
        for client in self.clients:
            client.working = False
        await settle(self.world, self.unsettled, within_s=SETTLED_S, invariant="I15")
        for member in self.members:
            for controller in self.group.running.values():
                member.check_kept(controller.map)

    def unsettled(self) -> str:
        """Return a final condition that does not hold yet; empty if all hold."""
        leader = self.group.leader
        if not leader:
            return "no controller leads"
        newest = self.group.running[leader].map
        problems = [self.group.check_equal(), *(member.check_joined(newest) for member in self.members)]
        return next(filter(None, problems), "")


CLIENTS = Scenario(
    name="clients",
    about="the clients of three controllers find each leader and get consistent answers",
    kinds=KINDS,
    least_operations=LEAST_OPERATIONS,
    least_leader_changes=1,
    limit_s=200.0,
    marks=(
        "unknown outcomes",
        "given up",
        "clients made anew",
        "memberships given up",
        "lost nodes",
        UNDER_WAY,
        *MARKS,
    ),
    plan=draw_plan,
    run=lambda world, plan, ledger: _Run(world, plan, ledger).run(),
)
