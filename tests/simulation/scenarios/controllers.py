"""Three or five controllers under all kinds of faults, and their clients.

Clients read, set and watch keys of the map while faults strike the controllers. Checkers follow every event
of every controller: the controllers agree (I7), accept no old message (I4), and have one table and one ledger
leader (I3). At the end one order explains all answers, and no watch has a gap (I6). After the time of faults
the scenario chooses a *core*: a majority of the controllers, and a client. The scenario repairs all parts
that the core needs; the other parts stay broken. The client must get answers, and the leader must stay (I15).
Then all parts are repaired, and all controllers must reach the same state.
"""

import asyncio
from dataclasses import replace

import msgspec

from tests.simulation.faults import STEP_S, strike_all
from tests.simulation.plan import Fault, Options, Plan, Setting, draw_options, in_order
from tests.simulation.random_streams import RandomStream
from tests.simulation.scenario import Ledger, Scenario, World, settle
from tests.simulation.scenarios.controller_faults import COSTS_A_DISK, KINDS, draw_fault, strikes_of
from tests.simulation.scenarios.controller_group import MARKS, UNDER_WAY, ControllerRun, draw_settings
from tests.simulation.scenarios.disk_faults import mend_disk
from tests.simulation.scenarios.map_user import PATIENT_S, User
from tests.simulation.scenarios.wire_faults import widen

STRIKE_S = 44.0
"""Latest start of a fault, in seconds."""

CHAOS_S = 51.0
"""End of the time of faults, in seconds."""

CALM_S = 5.0
"""Minimum time in seconds for which a core must keep its leader and answer. Without an answer in this time
the check goes on until the next answer."""

CORE_ANSWERS = 5
"""Number of answers which show that a core works."""

SETTLED_S = 20.0
"""Time limit until all controllers are equal after the repair, in seconds."""

OUTSIDE = ("as it is", "silent", "deaf", "mute", "frozen", "down")
"""States of a controller outside the core: deaf receives nothing from it, mute sends nothing to it; silent
and "as it is" do neither. With "as it is" the other clients are cut off, too."""


def draw_plan(dice: RandomStream) -> Plan:
    """Draw a group, its clients, and a fault of each kind with some more."""
    users = 3 + dice.below(2)
    settings: dict[str, Setting] = {
        **draw_settings(dice, sessions=users),
        "users": users,
        "runs": dice.chance(0.4),
        "watchers": 1 + dice.chance(0.3),
        "pause_s": round(users / dice.between(5.8, 6.8), 3),
        "patience_s": dice.choose([2.0, 5.0, 20.0]),
        "outside": dice.choose(OUTSIDE),
    }
    controllers = [f"controller-{number + 1}" for number in range(int(settings["controllers"]))]
    names = [f"user-{number}" for number in range(users)]
    kinds = [*KINDS, *(dice.choose(KINDS) for _ in range(dice.below(8)))]
    early = 0.1 if dice.chance(0.3) else 3.0  # 0.1: faults during the founding of the group
    faults: list[Fault] = []
    for kind in kinds:
        at_s = dice.between(early, STRIKE_S * (0.7 if kind in COSTS_A_DISK else 1.0))
        faults.append(draw_fault(dice, kind, at_s=at_s, controllers=controllers, users=names))
    return Plan(options=_cheaper(draw_options(dice, settings), dice), faults=in_order(faults))


def _cheaper(options: Options, dice: RandomStream) -> Options:
    """Make fewer networks ragged, because such runs take three times as long as others."""
    network = replace(options.network, ragged=options.network.ragged and dice.chance(0.2))
    return msgspec.structs.replace(options, network=network)


class _Run(ControllerRun):
    """One run."""

    def __init__(self, world: World, plan: Plan, ledger: Ledger) -> None:
        super().__init__(world, plan, ledger)
        settings = self.settings
        self.users = {
            name: User(
                name=name,
                group=self.group,
                ledger=ledger,
                controllers=self.addresses(),
                role=("ps", "data", "worker", "worker")[number],
                watches=number < int(settings["watchers"]),
                submits=bool(settings["runs"]),
                pause_s=float(settings["pause_s"]),
                patience_s=float(settings["patience_s"]),
            )
            for number in range(int(settings["users"]))
            if (name := f"user-{number}")
        }

    async def run(self) -> None:
        """Strike the group, and check that its members agree after the faults."""
        self.start({name: user.run for name, user in self.users.items()})
        await self.strike()
        await self.run_core()
        await self.settle()
        self.group.check_end()

    async def strike(self) -> None:
        """Do all faults of the plan."""
        over = asyncio.Event()
        strikes = strikes_of(self.world, self.group, over)

        async def end() -> None:
            await asyncio.sleep(CHAOS_S)
            over.set()

        async with asyncio.TaskGroup() as group:
            group.create_task(end(), name="end of faults")
            await strike_all(self.world, self.plan.faults, self.ledger, own=strikes)

    # --- a core ------------------------------------------------------------------------------

    async def run_core(self) -> None:
        """Repair the parts that a core needs, and check that it works."""
        core = self.group.majority(self.dice)
        user = self.users[self.dice.choose(list(self.users))]
        outside = [name for name in [*self.group.addresses, *self.users] if name not in (*core, user.name)]
        for name in [*core, user.name]:
            self.mend(name)
        self._cut_off(core, outside, user.name)
        user.patience_s = PATIENT_S
        progress = self.group.progress
        progress.heal([user.name])
        self.ledger.note("core", user.name, f"{user.name} and {', '.join(core)} are well")
        while progress.answered < CORE_ANSWERS:
            await asyncio.sleep(STEP_S)
            progress.check()
        calm = self.world.now + CALM_S
        answered = progress.answered
        while self.world.now < calm or progress.answered == answered:
            progress.leads((self.group.leader, max(self.group.terms.leaders)))
            await asyncio.sleep(STEP_S)
            progress.check()

    def mend(self, name: str) -> None:
        """Repair a machine."""
        node = self.world.nodes[name]
        mend_disk(node)
        if node.host.up and node.task is not None and node.task.done():
            node.kill()
        if not node.host.up:
            self.group.restart(name) if name in self.group.addresses else node.restart()
            return
        node.thaw()
        node.slow(0.0)
        node.set_clock(rate=1.0)

    def _cut_off(self, core: list[str], outside: list[str], user: str) -> None:
        """Heal the wires within the core; cut off, freeze or crash the controllers outside of the core for
        good."""
        network, inside = self.world.network, [*core, user]
        for number, one in enumerate(inside):
            for other in inside[:number]:
                network.heal(one, other)
                widen(network, one, other)
        how = str(self.settings["outside"])
        for name in outside:
            node, is_controller = self.world.nodes[name], name in self.group.addresses
            if is_controller and how == "frozen":
                node.freeze()
            elif is_controller and how == "down":
                node.crash()
            elif is_controller or how == "as it is":
                # A controller that only a part of the core reaches may lead, so cut it off from the whole
                # core.
                for one in inside:
                    if how != "mute":
                        network.cut(one, name, both=False)
                    if how != "deaf":
                        network.cut(name, one, both=False)

    # --- the end -----------------------------------------------------------------------------

    async def settle(self) -> None:
        """Repair all faults; check that all controllers reach the same state with all acknowledged writes."""
        network, names = self.world.network, list(self.world.nodes)
        network.heal_all()
        for number, one in enumerate(names):
            for other in names[:number]:
                widen(network, one, other)
        for name in names:
            if name != "outside":
                self.mend(name)
        for user in self.users.values():
            user.working = False
        await settle(self.world, self.group.check_equal, within_s=SETTLED_S, invariant="I15")
        for user in self.users.values():
            for controller in self.group.running.values():
                user.check_kept(controller.map)


CONTROLLERS = Scenario(
    name="controllers",
    about="three controllers and their clients, and all that may happen to them",
    kinds=KINDS,
    least_operations=200,
    least_leader_changes=1,
    limit_s=200.0,
    marks=("unknown outcomes", "clients made anew", "runs", "lost nodes", UNDER_WAY, *MARKS),
    plan=draw_plan,
    run=lambda world, plan, ledger: _Run(world, plan, ledger).run(),
)
