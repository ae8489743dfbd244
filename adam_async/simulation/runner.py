"""Runs of scenarios by their seeds: what a seed comes to, whether it counts, and one digest of many.

A seed gives a plan, and plan and seed give the run, step for step. So a plan that was written down, or made
smaller, is run under its seed again.
"""

import asyncio
import gc
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b

import msgspec

from adam_async.errors import first_cause
from adam_async.runtime.random_streams import Dice
from adam_async.simulation.loop import Deadlock, Endless, SimulationFailed
from adam_async.simulation.nodes import World, simulate
from adam_async.simulation.plan import Case
from adam_async.simulation.scenario import Ledger, Scenario, Span, Violation

NOT_DONE = "every planned fault is done"
"""What a run violates that ends before its plan does."""

MANY = 100
"""So many seeds must come across every mark of their scenario, and `LEAST_SHARE` of them count."""

LEAST_SHARE = 0.9


class SeedResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one run."""

    case: Case
    replay_hash: str
    """Of every step: equal when run again."""
    invariant: str = ""
    """What did not hold; empty if all did."""
    text: str = ""
    """What was seen instead."""
    too_little: tuple[str, ...] = ()
    """Why it does not count; empty if it does."""
    operations: int = 0
    leader_changes: int = 0
    faults: dict[str, int] = {}
    """Those that struck, by kind."""
    counts: dict[str, int] = {}
    """The scenario's own, and marks of `buggify`."""
    steps: int = 0
    ended_s: float = 0.0
    """Seconds of the simulation."""

    @property
    def ok(self) -> bool:
        """Whether everything held."""
        return not self.invariant

    @property
    def seed_counts(self) -> bool:
        """Whether everything held, and enough went on."""
        return self.ok and not self.too_little


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """A run with what a trace shows of it."""

    result: SeedResult
    nodes: dict[str, tuple[tuple[float, float | None], ...]]
    """By machine, when each of its lives began and ended; None for one that had not ended."""
    spans: tuple[Span, ...]


def draw_case(scenario: Scenario, seed: int) -> Case:
    """The run that a seed stands for, as the code is now."""
    plan = scenario.plan(Dice(f"{scenario.name}/{seed}/plan"))
    return Case(scenario=scenario.name, seed=seed, plan=plan)


def run_seed(scenario: Scenario, seed: int) -> SeedResult:
    """Draw the plan of a seed and run it."""
    return play(scenario, draw_case(scenario, seed)).result


def run_case(scenario: Scenario, case: Case) -> SeedResult:
    """Run a plan under its seed."""
    return play(scenario, case).result


def play(scenario: Scenario, case: Case) -> Played:
    """Run a plan under its seed, and say what came of it. What goes wrong in it is neither raised nor logged.

    Raises:
        RuntimeError: An event loop runs here, and the run needs one of its own.
    """
    with only_own_garbage():
        return _play(scenario, case)


def _play(scenario: Scenario, case: Case) -> Played:
    plan, options = case.plan, case.plan.options
    worlds: list[World] = []
    ledger = Ledger(lambda: worlds[0].now)

    async def main(world: World) -> None:
        worlds.append(world)
        await scenario.run(world, plan, ledger)
        absent = not_done(case, ledger)
        if absent:
            raise Violation(NOT_DONE, f"the run ended without {', '.join(absent)}")

    invariant = text = ""
    marks: dict[str, int] = {}
    with nothing_logged():
        try:
            outcome = simulate(
                main,
                seed=f"{scenario.name}/{case.seed}",
                shuffled=options.shuffled,
                conditions=options.network,
                limit_s=scenario.limit_s,
                unkind=options.unkind,
            )
            marks = outcome.marks
        except (Exception, asyncio.CancelledError) as error:
            if not worlds:
                raise
            invariant, text = what_broke(error)
    loop = worlds[0].loop
    result = SeedResult(
        case=case,
        replay_hash=loop.replay_hash,
        invariant=invariant,
        text=text,
        too_little=too_little(scenario, ledger),
        operations=ledger.operations,
        leader_changes=ledger.leader_changes,
        faults=dict(ledger.faults),
        counts={**ledger.counts, **marks},
        steps=loop.steps,
        ended_s=loop.now,
    )
    nodes = {name: tuple(node.lives) for name, node in worlds[0].nodes.items()}
    return Played(result=result, nodes=nodes, spans=tuple(ledger.spans))


def not_done(case: Case, ledger: Ledger) -> list[str]:
    """Kinds of planned faults that were done less often than planned, with how often."""
    kinds = [fault.kind for fault in case.plan.faults]
    done = ledger.faults + ledger.misses
    missing = {kind: kinds.count(kind) - done[kind] for kind in dict.fromkeys(kinds)}
    return [f"{count} x {kind}" for kind, count in missing.items() if count > 0]


def too_little(scenario: Scenario, ledger: Ledger) -> tuple[str, ...]:
    """Say why a run is too uneventful to count, if it is."""
    reasons = []
    if ledger.operations < scenario.least_operations:
        reasons.append(f"fewer than {scenario.least_operations} operations")
    if ledger.leader_changes < scenario.least_leader_changes:
        reasons.append(f"fewer than {scenario.least_leader_changes} changes of leader")
    reasons += [f"no {kind}" for kind in scenario.kinds if not (ledger.faults + ledger.misses)[kind]]
    reasons += [f"a {kind} that nobody noticed" for kind in ledger.misses]
    return tuple(reasons)


def reached(results: Iterable[SeedResult]) -> set[str]:
    """Marks and counts that any of these runs came across."""
    return {name for result in results for name, count in result.counts.items() if count}


def unreached(scenario: Scenario, seen: Collection[str]) -> list[str]:
    """Marks of a scenario that are not among those that its runs came across."""
    return [mark for mark in scenario.marks if mark not in seen]


def what_broke(error: BaseException) -> tuple[str, str]:
    """Name what an error of a run violates, and say what was seen."""
    cause = first_cause(error)
    while isinstance(cause, SimulationFailed) and cause.__cause__ is not None:
        cause = first_cause(cause.__cause__)
    match cause:
        case Violation():
            return cause.invariant, cause.text
        case Deadlock():
            return "no deadlock", str(cause)
        case Endless():
            return "the run ends", str(cause)
        case _:
            return type(cause).__name__, str(cause)


def digest(results: Iterable[SeedResult]) -> str:
    """One hash of the replay hashes of many seeds, whoever ran them."""
    lines = sorted((result.case.seed, result.replay_hash) for result in results)
    return blake2b(repr(lines).encode(), digest_size=8).hexdigest()


def summary(scenario: str, results: Sequence[SeedResult], took_s: float) -> str:
    """The one line that seeds of a scenario come to."""
    seeds = "1 seed" if len(results) == 1 else f"{len(results)} seeds"
    count = sum(result.seed_counts for result in results)
    failed = sum(not result.ok for result in results)
    return f"{scenario}: {seeds}, {count} count, {failed} failed, {took_s:.0f} s, hash {digest(results)}"


@contextmanager
def only_own_garbage() -> Iterator[None]:
    """Collect what a block leaves in circles when it ends, and look at nothing older for that.

    A run leaves much, which collections of the usual kind would find late and search slowly.
    """
    collecting = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()
        if collecting:
            gc.enable()


@contextmanager
def nothing_logged() -> Iterator[None]:
    """Silence the libraries within a block: a hundred simulated hours would fill a screen."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
