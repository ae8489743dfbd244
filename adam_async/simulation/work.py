"""Work of the child processes of `simulate`: run seeds, repeat one run, or shrink one.

A simulated run needs an event loop of its own, outside of any other, and the command has a loop already. The
command therefore sends `Work` to children, one JSON line each. The children send an `Answer`, one line, for
each run.
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
    """Run seeds; each has an answer."""

    scenario: str
    seeds: tuple[int, ...]


class Repeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run a case; the answer contains its trace."""

    case: Case


class Shrink(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Shrink a failing case."""

    case: Case
    most_tries: int = MOST_TRIES


Work = Seeds | Repeat | Shrink


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one run."""

    result: SeedResult
    under_way: bool = False
    """Whether the answer is a progress report of a shrink, with the smallest failing run so far."""
    tries: int = 0
    """Number of runs that the shrink took."""
    trace: dict[str, Any] | None = None


def answers_to(work: Work) -> int:
    """Return the number of answers to work."""
    return len(work.seeds) if isinstance(work, Seeds) else 1


def ignore_progress(answer: Answer) -> None:
    """Ignore a progress report."""


def do(
    work: Work, scenarios: Mapping[str, Scenario], report: Callable[[Answer], None] = ignore_progress
) -> Iterator[Answer]:
    """Do work outside of any event loop; `report` is called after each run of a shrink."""
    match work:
        case Seeds():
            scenario = scenarios[work.scenario]
            for seed in work.seeds:
                yield Answer(result=run_case(scenario, draw_case(scenario, seed)))
        case Repeat():
            played = play(scenarios[work.case.scenario], work.case)
            yield Answer(result=played.result, trace=trace_file(played))
        case Shrink():
            yield shrink_case(scenarios[work.case.scenario], work.case, work.most_tries, report)


def shrink_case(
    scenario: Scenario,
    case: Case,
    most_tries: int = MOST_TRIES,
    report: Callable[[Answer], None] = ignore_progress,
) -> Answer:
    """Shrink a case while it violates the same invariant; return the result of the smallest case."""
    smallest = run_case(scenario, case)
    invariant, tries = smallest.invariant, 0

    def with_plan(plan: Plan) -> Case:
        return msgspec.structs.replace(case, plan=plan)

    def fails(plan: Plan) -> bool:
        """Run a smaller plan; return whether it violates the same invariant."""
        nonlocal smallest, tries
        result = run_case(scenario, with_plan(plan))
        still = result.invariant == invariant != ""
        smallest, tries = result if still else smallest, tries + 1
        report(Answer(result=smallest, tries=tries, under_way=True))
        return still

    shrunk = shrink(case.plan, fails, most_tries=most_tries)
    return Answer(result=run_case(scenario, with_plan(shrunk.plan)), tries=shrunk.tries)
