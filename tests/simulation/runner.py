"""Runs scenarios by seed: a seed's result, whether the seed counts, and one digest of many seeds.

A seed determines a plan, and plan and seed determine every step of the run. So a saved or shrunk plan runs
again under its seed.
"""

import asyncio
import gc
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b

import msgspec

from adam_async.errors import first_cause
from tests.simulation.loop import Deadlock, Endless, SimulationFailed
from tests.simulation.plan import Case
from tests.simulation.random_streams import RandomStream
from tests.simulation.scenario import Ledger, Scenario, Span, Violation, World, simulate

NOT_DONE = "every planned fault is done"
"""Name of the invariant that a run violates if it ends before all faults in its plan were done."""

MANY = 100
"""Number of seeds that together must reach every mark of their scenario."""

LEAST_SHARE = 0.9
"""Minimum share of the seeds that must count, if there are at least `MANY`."""


class SeedResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one run."""

    case: Case
    replay_hash: str
    """Digest of every step, equal in every repetition."""
    invariant: str = ""
    """The violated invariant; empty if all held."""
    text: str = ""
    """Observation that violates the invariant."""
    is_error: bool = False
    """Whether the run ended with an exception that no check raises; `invariant` is its type's name."""
    too_little: tuple[str, ...] = ()
    """Reasons why the seed does not count; empty if it counts."""
    operations: int = 0
    leader_changes: int = 0
    faults: dict[str, int] = {}
    """Number of faults that struck, by kind."""
    counts: dict[str, int] = {}
    """Counts of the scenario, of marks and of fault points."""
    steps: int = 0
    ended_s: float = 0.0
    """End of the run, in seconds of the simulation."""

    @property
    def ok(self) -> bool:
        """Whether every invariant held."""
        return not self.invariant

    @property
    def seed_counts(self) -> bool:
        """Whether every invariant held and the run was eventful enough."""
        return self.ok and not self.too_little


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """A run with the data of its trace."""

    result: SeedResult
    nodes: dict[str, tuple[tuple[float, float | None], ...]]
    """By machine, start and end of each incarnation; a running one's end is None."""
    spans: tuple[Span, ...]


def draw_case(scenario: Scenario, seed: int) -> Case:
    """Draw the run of a seed with the present code."""
    plan = scenario.plan(RandomStream(f"{scenario.name}/{seed}/plan"))
    return Case(scenario=scenario.name, seed=seed, plan=plan)


def run_seed(scenario: Scenario, seed: int) -> SeedResult:
    """Draw the plan of a seed and run it."""
    return play(scenario, draw_case(scenario, seed)).result


def run_case(scenario: Scenario, case: Case) -> SeedResult:
    """Run a plan under its seed."""
    return play(scenario, case).result


def play(scenario: Scenario, case: Case) -> Played:
    """Run a plan under its seed. Failures of the run are returned, not raised or logged.

    Raises:
        RuntimeError: An event loop runs in this thread already.
    """
    with only_own_garbage():
        return _play(scenario, case)


def _play(scenario: Scenario, case: Case) -> Played:
    plan, options = case.plan, case.plan.options
    worlds: list[World] = []
    ledger = Ledger(lambda: worlds[0].now)

    async def main(world: World) -> None:
        """Run the scenario, and check that it did all faults of the plan."""
        worlds.append(world)
        world.network.together = options.together
        await scenario.run(world, plan, ledger)
        absent = not_done(case, ledger)
        if absent:
            raise Violation(NOT_DONE, f"the run ended without {', '.join(absent)}")

    invariant = text = ""
    is_error = False
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
            invariant, text, is_error = what_broke(error)
    loop = worlds[0].loop
    result = SeedResult(
        case=case,
        replay_hash=loop.replay_hash,
        invariant=invariant,
        text=text,
        is_error=is_error,
        too_little=too_little(scenario, ledger),
        operations=ledger.operations,
        leader_changes=ledger.leader_changes,
        faults=dict(ledger.faults),
        counts={**ledger.counts, **marks},
        steps=loop.steps,
        ended_s=loop.now,
    )
    nodes = {name: tuple(node.uptimes) for name, node in worlds[0].nodes.items()}
    return Played(result=result, nodes=nodes, spans=tuple(ledger.spans))


def not_done(case: Case, ledger: Ledger) -> list[str]:
    """Return a plan's missing faults: the number of each kind."""
    kinds = [fault.kind for fault in case.plan.faults]
    done = ledger.faults + ledger.misses
    missing = {kind: kinds.count(kind) - done[kind] for kind in dict.fromkeys(kinds)}
    return [f"{count} x {kind}" for kind, count in missing.items() if count > 0]


def too_little(scenario: Scenario, ledger: Ledger) -> tuple[str, ...]:
    """Return the reasons for which a run has too few events to count."""
    reasons = []
    if ledger.operations < scenario.least_operations:
        reasons.append(f"fewer than {scenario.least_operations} operations")
    if ledger.leader_changes < scenario.least_leader_changes:
        reasons.append(f"fewer than {scenario.least_leader_changes} changes of leader")
    if scenario.events and not any(ledger.counts[name] for name in scenario.events):
        reasons.append(f"none of {', '.join(scenario.events)}")
    reasons += [f"no {kind}" for kind in scenario.kinds if not (ledger.faults + ledger.misses)[kind]]
    reasons += [f"a {kind} without an effect" for kind in ledger.misses]
    return tuple(reasons)


def unreached(scenario: Scenario, results: Iterable[SeedResult]) -> list[str]:
    """Return a scenario's marks that none of its runs reached."""
    seen = {name for result in results for name, count in result.counts.items() if count}
    return [mark for mark in scenario.marks if mark not in seen]


def what_broke(error: BaseException) -> tuple[str, str, bool]:
    """Return the invariant that an error violates, the observation, and whether no check raised the error."""
    cause = first_cause(error)
    while isinstance(cause, SimulationFailed) and cause.__cause__ is not None:
        cause = first_cause(cause.__cause__)
    match cause:
        case Violation():
            return cause.invariant, cause.text, False
        case Deadlock():
            return "no deadlock", str(cause), False
        case Endless():
            return "the run ends", str(cause), False
        case _:
            return type(cause).__name__, str(cause), True


def digest(results: Iterable[SeedResult]) -> str:
    """Return one hash of many seeds' replay hashes, in any order."""
    lines = sorted((result.case.seed, result.replay_hash) for result in results)
    return blake2b(repr(lines).encode(), digest_size=8).hexdigest()


def summary(scenario: str, results: Sequence[SeedResult], took_s: float) -> str:
    """Return the line that summarises seeds of a scenario."""
    seeds = "1 seed" if len(results) == 1 else f"{len(results)} seeds"
    count = sum(result.seed_counts for result in results)
    failed = sum(not result.ok for result in results)
    return f"{scenario}: {seeds}, {count} count, {failed} failed, {took_s:.0f} s, hash {digest(results)}"


@contextmanager
def only_own_garbage() -> Iterator[None]:
    """Collect a block's cyclic garbage at its end, without searching older objects.

    A run leaves much garbage, which ordinary collections would find late and search slowly.
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
    """Disable logging within a block: simulated hours would fill the screen."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
