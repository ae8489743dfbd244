"""What all stories of controllers and their clients begin with."""

from collections.abc import Iterable
from typing import Protocol

from adam_async.simulation.nodes import Node, World
from adam_async.simulation.plan import Plan
from adam_async.simulation.scenario import Ledger
from adam_async.simulation.scenarios.controller_group import ControllerGroup

STEP_S = 0.05
"""Between two looks at how they stand."""


MARKS = (
    "a controller was sent a whole state",
    "a watcher was sent the whole map again",
    "controller.busy",
    "controller.history.short",
    "controller.log.late",
    "controller.message.twice",
    "controller.snapshot.early",
)
"""Of the code of controllers: what runs of theirs must come across."""

UNDER_WAY = "leadership was lost with a question under way"
"""The same, where leaders live long enough to hear of it."""


class Client(Protocol):
    """A program of one machine, over all its lives."""

    name: str

    async def run(self, node: Node) -> None:
        """Be one life."""


class ControllerRun:
    """One run: some controllers, and what the plan says of them.

    Args:
        world: Where it takes place.
        plan: Its settings are those of a `ControllerGroup`, and the story's own.
        ledger: Told of it.

    Attributes:
        dice: For what the story itself decides.
    """

    def __init__(self, world: World, plan: Plan, ledger: Ledger) -> None:
        self.world = world
        self.plan = plan
        self.ledger = ledger
        self.settings = plan.options.settings
        self.group = ControllerGroup(world, self.settings, ledger)
        self.dice = world.dice.fork("story")

    def start(self, clients: Iterable[Client]) -> None:
        """Start all machines."""
        self.group.start()
        for client in clients:
            self.world.node(client.name).start(client.run)
