"""What a child process of `simulate` is asked to do, and does: seeds, or one run to repeat or make smaller.

A simulated run has an event loop of its own, which no other one may run around. So the command never runs one
itself: it sends `Work` to children, one JSON line each, and they send `Answer`s, one line for each run.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from adam_async.simulation.plan import Case, Plan
from adam_async.simulation.runner import SeedResult, draw_case, play, run_case
from adam_async.simulation.scenario import Scenario
from adam_async.simulation.shrinking import MOST_TRIES, shrink
from adam_async.simulation.trace import trace_file


class Seeds(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run these seeds; each is answered."""

    scenario: str
    seeds: tuple[int, ...]


class Repeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run a case; the answer has its trace."""

    case: Case


class Shrink(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make a case that fails smaller."""

    case: Case
    most_tries: int = MOST_TRIES


Work = Seeds | Repeat | Shrink


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one run."""

    result: SeedResult
    under_way: bool = False
    """Whether this only says how far making a case smaller has come, with its smallest so far."""
    tries: int = 0
    """Runs that making it smaller took."""
    trace: dict[str, Any] | None = None


def answers_to(work: Work) -> int:
    """How many answers work has."""
    return len(work.seeds) if isinstance(work, Seeds) else 1


def tell_nobody(answer: Answer) -> None:
    """Nobody wants to know how far it has come."""


def do(
    work: Work, scenarios: Mapping[str, Scenario], tell: Callable[[Answer], None] = tell_nobody
) -> Iterator[Answer]:
    """Do it, in no event loop; `tell` is told how far making a case smaller has come, after each run."""
    match work:
        case Seeds():
            scenario = scenarios[work.scenario]
            for seed in work.seeds:
                yield Answer(result=run_case(scenario, draw_case(scenario, seed)))
        case Repeat():
            played = play(scenarios[work.case.scenario], work.case)
            yield Answer(result=played.result, trace=trace_file(played))
        case Shrink():
            yield shrink_case(scenarios[work.case.scenario], work.case, work.most_tries, tell)


def shrink_case(
    scenario: Scenario,
    case: Case,
    most_tries: int = MOST_TRIES,
    tell: Callable[[Answer], None] = tell_nobody,
) -> Answer:
    """Make a case smaller for as long as it violates the same, and say what the smallest comes to."""
    smallest = run_case(scenario, case)
    invariant, tries = smallest.invariant, 0

    def with_plan(plan: Plan) -> Case:
        return msgspec.structs.replace(case, plan=plan)

    def fails(plan: Plan) -> bool:
        nonlocal smallest, tries
        result = run_case(scenario, with_plan(plan))
        still = result.invariant == invariant != ""
        smallest, tries = result if still else smallest, tries + 1
        tell(Answer(result=smallest, tries=tries, under_way=True))
        return still

    shrunk = shrink(case.plan, fails, most_tries=most_tries)
    return Answer(result=run_case(scenario, with_plan(shrunk.plan)), tries=shrunk.tries)
