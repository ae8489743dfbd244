"""All controllers crash at once, repeatedly, and must continue with all acknowledged writes.

A restart of all controllers is the hardest case for votes and terms that are not on disk: a node that lost
its vote votes again. In each round the machines crash in the middle of their work, and unsynced writes are
lost or torn; in some rounds all crash again during the restart, and the controllers restart one after the
other. Then a client must get answers (I15), and the map must have all acknowledged writes (I6). Checkers
follow every event, as in `controllers`.
"""

import asyncio

from tests.simulation.faults import STEP_S, strike_all
from tests.simulation.plan import Fault, Plan, Setting, draw_options
from tests.simulation.random_streams import RandomStream
from tests.simulation.scenario import Ledger, Scenario, Violation, World
from tests.simulation.scenarios.controller_group import ANSWER_S, MARKS, ControllerRun, draw_settings
from tests.simulation.scenarios.map_user import PATIENT_S, User

ROUNDS = 8
"""Number of times in one run that all controllers restart."""

ROUND_S = 3.5
"""Mean interval between two planned restarts, in seconds."""

LEAST_OPERATIONS = 200
"""Minimum number of answered questions of a run."""

ANSWERS = 3
"""Number of answers, to all clients together, after which a group counts as working."""


def draw_plan(dice: RandomStream) -> Plan:
    """Draw a group, its clients and its restarts; further crashes interrupt some restarts."""
    users = 2 + dice.below(2)
    settings: dict[str, Setting] = {
        **draw_settings(dice, sessions=users),
        "controllers": dice.choose([1, 3, 3, 3, 3, 5]),
        "users": users,
        "pause_s": dice.choose([0.01, 0.03]),
    }
    faults = [
        Fault(
            at_s=round(2.0 + number * ROUND_S + dice.between(0.0, 2.0), 3),
            kind="restart-all",
            lasts_s=round(dice.choose([0.0, 0.05, 0.5]) + dice.between(0.0, 0.5), 3),
            amount=float(dice.below(3)),
        )
        for number in range(ROUNDS)
    ]
    return Plan(options=draw_options(dice, settings), faults=tuple(faults))


class _Run(ControllerRun):
    """One run."""

    def __init__(self, world: World, plan: Plan, ledger: Ledger) -> None:
        super().__init__(world, plan, ledger)
        settings = self.settings
        self.users = [
            User(
                name=f"user-{number}",
                group=self.group,
                ledger=ledger,
                controllers=self.addresses(),
                watches=number == 0,
                pause_s=float(settings["pause_s"]),
                patience_s=PATIENT_S,
            )
            for number in range(int(settings["users"]))
        ]

    async def run(self) -> None:
        """Restart whole groups, and check that they go on with their state."""
        self.start({user.name: user.run for user in self.users})
        await strike_all(self.world, self.plan.faults, self.ledger, own={"restart-all": self.restart_all})
        while self.ledger.operations < LEAST_OPERATIONS:
            await asyncio.sleep(STEP_S)
            self.group.progress.check()
        self.group.check_end()

    async def restart_all(self, world: World, fault: Fault) -> None:
        """Crash all controllers, `amount` times again during their restart, and check that they continue."""
        names = list(self.group.addresses)
        for attempt in range(int(fault.amount) + 1):
            if attempt:
                await asyncio.sleep(self.dice.between(0.0, 1.5))
            for name in names:
                self.world.node(name).crash()
            self.ledger.counts["restarts"] += 1
            self.dice.shuffle(names)
            for name in names:
                await asyncio.sleep(fault.lasts_s * self.dice.random() / len(names))
                self.group.restart(name)
        await self.goes_on()

    async def goes_on(self) -> None:
        """Wait for answers, and check that the newest map has all acknowledged writes."""
        kept = {user.name: user.acknowledged for user in self.users}
        progress = self.group.progress
        progress.heal(kept)
        while progress.answered < ANSWERS:
            await asyncio.sleep(STEP_S)
            progress.check()
            if self.world.now > progress.healed + 2 * ANSWER_S:
                raise Violation(
                    "I15", f"{progress.answered} answers in {2 * ANSWER_S} s after a restart of all"
                )
        newest = max(self.group.running.values(), key=lambda controller: controller.map.version).map
        for user in self.users:
            user.check_kept(newest)


RESTARTS = Scenario(
    name="restarts",
    about="all controllers crash at once, repeatedly",
    kinds=("restart-all",),
    least_operations=LEAST_OPERATIONS,
    least_leader_changes=ROUNDS,
    limit_s=600.0,
    marks=MARKS,
    plan=draw_plan,
    run=lambda world, plan, ledger: _Run(world, plan, ledger).run(),
)
