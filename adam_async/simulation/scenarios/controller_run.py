"""Base of the runs of controllers and their clients."""

from collections.abc import Mapping

from adam_async.simulation.nodes import Program, World
from adam_async.simulation.plan import Plan
from adam_async.simulation.scenario import Ledger
from adam_async.simulation.scenarios.controller_group import ControllerGroup

STEP_S = 0.05
"""Interval between two checks of a condition, in seconds."""


MARKS = (
    "a controller was sent a whole state",
    "a watcher was sent the whole map again",
    "controller.busy",
    "controller.history.short",
    "controller.log.late",
    "controller.message.twice",
    "controller.snapshot.early",
)
"""Marks in the code of controllers that their scenarios must reach."""

UNDER_WAY = "leadership was lost with a question under way"
"""Mark of the scenarios whose leaders run long enough to reach it."""


class ControllerRun:
    """One run with a group of controllers.

    Args:
        plan: Plan with the settings of a `ControllerGroup` and of the scenario.

    Attributes:
        dice: Random stream for choices of the scenario.
    """

    def __init__(self, world: World, plan: Plan, ledger: Ledger) -> None:
        self.world = world
        self.plan = plan
        self.ledger = ledger
        self.settings = plan.options.settings
        self.group = ControllerGroup(world, self.settings, ledger)
        self.dice = world.dice.fork("story")

    def start(self, programs: Mapping[str, Program]) -> None:
        """Start all controllers, and the programs of clients by machine."""
        self.group.start()
        for name, program in programs.items():
            self.world.node(name).start(program)
