"""What a scenario is: a story that a simulated cluster goes through, and what must hold in it.

    MEMBERS = Scenario(
        name="members",
        about="members of one controller crash, freeze and are cut off",
        kinds=("crash", "freeze", "cut"),
        least_operations=200,
        plan=draw_plan,      # of its dice alone: options and faults of one seed
        run=run,             # async (world, plan, ledger): raises Violation where something does not hold
    )

The `Ledger` is told what happens in a run. A run fails if a fault of its plan was never done; a seed counts
only if all of them struck and enough happened, so that a scenario in which nothing goes on is not taken for a
success.
"""

from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec

from adam_async.runtime.random_streams import Dice
from adam_async.simulation.nodes import World
from adam_async.simulation.plan import Fault, Plan


class Violation(Exception):
    """Something that must always hold did not.

    Args:
        invariant: Which: ``I6``, or a word of the scenario's own.
        text: What was seen instead.
    """

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant
        self.text = text


class Span(msgspec.Struct, frozen=True):
    """Something that went on at a node for a while, or at one moment; seconds of the simulation."""

    node: str
    kind: str
    """What the lane is called: life, crash, cut, leader, ..."""
    text: str
    begun: float
    ended: float | None
    """None for a moment."""


class Ledger:
    """What happened in one run.

    Args:
        clock: Seconds of the simulation.

    Attributes:
        faults: Faults that struck, by kind.
        misses: Faults that were done and that nobody could notice, by kind.
        operations: Client operations that completed.
        leader_changes: How often another leader was seen.
        counts: Whatever else a scenario counts.
        spans: What a trace shows.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.faults: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.operations = 0
        self.leader_changes = 0
        self.counts: Counter[str] = Counter()
        self.spans: list[Span] = []

    def fired(self, fault: Fault) -> None:
        """A fault struck. Say it when it has certainly had its effect."""
        self.faults[fault.kind] += 1

    def missed(self, fault: Fault) -> None:
        """A fault is over, and had no effect that anybody could see."""
        self.misses[fault.kind] += 1

    def note(self, kind: str, node: str, text: str) -> None:
        """Something happened now."""
        self.spans.append(Span(node, kind, text, self._clock(), None))

    def span(self, kind: str, node: str, text: str, begun: float) -> None:
        """Something went on from `begun` until now."""
        self.spans.append(Span(node, kind, text, begun, self._clock()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A story.

    Attributes:
        name: What the command line calls it.
        about: One line for its list.
        kinds: Kinds of faults that must all strike for a seed to count.
        least_operations: So many client operations must complete for that.
        least_leader_changes: And so often the leader must change.
        limit_s: Time of the simulation after which a run is given up.
        marks: What seeds must come across, now and then: names of the ledger's counts, of marks of `buggify`
            and of its unkind places. Many seeds that never do fail together.
        plan: Draws the plan of a run. What it draws must follow from the dice alone.
        run: Goes through the plan and checks what must hold; raises `Violation`.
    """

    name: str
    about: str
    kinds: tuple[str, ...]
    plan: Callable[[Dice], Plan]
    run: Callable[[World, Plan, Ledger], Coroutine[Any, Any, object]]
    least_operations: int = 0
    least_leader_changes: int = 0
    limit_s: float = 600.0
    marks: tuple[str, ...] = ()
