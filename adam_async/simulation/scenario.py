"""A scenario: a simulated cluster, its faults, and the invariants that must hold.

    MEMBERS = Scenario(
        name="members",
        about="members of one controller crash, freeze and are cut off",
        kinds=("crash", "freeze", "cut"),
        least_operations=200,
        plan=draw_plan,      # from its dice alone: options and faults of one seed
        run=run,             # async (world, plan, ledger): raises Violation if an invariant does not hold
    )

The `Ledger` records the events of a run. A run fails if a fault of its plan was never done. A seed counts
only if all faults had an effect and enough operations completed, so an idle scenario is not a success.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec

from adam_async.runtime.random_streams import RandomStream
from adam_async.simulation.nodes import World
from adam_async.simulation.plan import Fault, Plan


class Violation(Exception):
    """An invariant did not hold.

    Args:
        invariant: Name of the invariant: ``I6``, or a name of the scenario.
    """

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant
        self.text = text


async def settle(
    world: World, problem: Callable[[], str], *, within_s: float, invariant: str, step_s: float = 0.05
) -> None:
    """Wait until `problem` returns an empty text, and check it at intervals of `step_s`.

    Raises:
        Violation: `problem` still returns a text after `within_s`.
    """
    by = world.now + within_s
    while text := problem():
        if world.now > by:
            raise Violation(invariant, f"{within_s:g} s after the last fault {text}")
        await asyncio.sleep(step_s)


class Span(msgspec.Struct, frozen=True):
    """An event at a node with a duration, or at one moment; times are seconds of the simulation."""

    node: str
    kind: str
    """Name of the lane: life, crash, cut, leader, ..."""
    text: str
    begun: float
    ended: float | None
    """End of the event, in seconds; None if the event is one moment."""


class Ledger:
    """Record of the events of one run.

    Args:
        clock: Time of the simulation, in seconds.

    Attributes:
        faults: Number of faults that struck, by kind.
        misses: Number of faults without a noticeable effect, by kind.
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
        """Record a fault that struck. Call the function once the effect of the fault is certain."""
        self.faults[fault.kind] += 1

    def missed(self, fault: Fault) -> None:
        """Record a fault that ended without a noticeable effect."""
        self.misses[fault.kind] += 1

    def note(self, kind: str, node: str, text: str) -> None:
        """Record an event of this moment."""
        self.spans.append(Span(node, kind, text, self._clock(), None))

    def span(self, kind: str, node: str, text: str, begun: float) -> None:
        """Record an event from `begun` until now."""
        self.spans.append(Span(node, kind, text, begun, self._clock()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One scenario.

    Attributes:
        kinds: Kinds of faults that must all strike for a seed to count.
        least_operations: Number of client operations that must complete for a seed to count.
        least_leader_changes: Number of changes of leader that a seed needs to count.
        events: Names of counts of the ledger. A seed must reach one of them to count; without names there is
            no such condition.
        limit_s: Time limit of a run, in seconds of the simulation.
        marks: Names of counts of the ledger, of marks and of fault points. If no seed of many reaches one of
            them, these seeds fail together.
        plan: Draws the plan of a run from its random stream only.
        run: Carries out the plan and checks the invariants; raises `Violation`.
    """

    name: str
    about: str
    kinds: tuple[str, ...]
    plan: Callable[[RandomStream], Plan]
    run: Callable[[World, Plan, Ledger], Coroutine[Any, Any, object]]
    least_operations: int = 0
    least_leader_changes: int = 0
    events: tuple[str, ...] = ()
    limit_s: float = 600.0
    marks: tuple[str, ...] = ()
