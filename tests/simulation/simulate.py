"""The run of the command `simulate`: seeds of scenarios in child processes, and their results.

The command prints one line per scenario. The command shrinks the plan of a failed seed, and then prints the
plan with the options that repeat the run.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import msgspec

from adam_async.cli.files import check_target, write_file
from adam_async.cli.terminal import Terminal
from adam_async.cluster.parent_pipe import die_with_parent
from adam_async.errors import ConfigError
from adam_async.runtime.disk import Disk
from adam_async.runtime.machine import usable_cores
from tests.simulation.command import SimulateOptions, chosen_seeds, is_one_run, read_plan
from tests.simulation.plan import MOST_TRIES, Case
from tests.simulation.runner import LEAST_SHARE, MANY, SeedResult, draw_case, summary, unreached
from tests.simulation.scenarios import SCENARIOS
from tests.simulation.work import Answer, ProcessPool, Repeat, Seeds, Shrink, Work, do

FAILED = 8
"""Exit code of a violated invariant; see docs/reference/exit-codes.md."""

FIRST_SEEDS = (0, 9)

SLICE = 10
"""Maximum number of seeds that a child gets at once."""

SHOWN = 3
"""Maximum number of failed seeds of a scenario that are shrunk and described; the command only names further
ones."""

SHRINK_NOTICE_S = 5.0
"""Minimum time between two notices about the shrinking of a plan, in seconds."""


async def run_simulation(options: SimulateOptions, terminal: Terminal) -> int:
    """Run seeds of scenarios, and print their results.

    Raises:
        ConfigError: A scenario is unknown, or a file cannot be read or written.
        RoleDied: A child process died.
    """
    names = chosen_scenarios(options.scenario)
    if options.list:
        for name in names:
            terminal.print(f"{name}: {SCENARIOS[name].about}")
        return 0
    seeds = chosen_seeds(options)
    async with (
        Disk() as disk,
        ProcessPool(1 if is_one_run(options) else options.jobs or usable_cores()) as process_pool,
    ):
        if is_one_run(options):
            case = await chosen_case(options, names[0], disk)
            failed = await run_one(case, options.trace, process_pool, disk, terminal)
        else:
            first, last = seeds or FIRST_SEEDS
            every = [await run_seeds(name, range(first, last + 1), process_pool, terminal) for name in names]
            failed = any(every)
    return FAILED if failed else 0


def serve(source: TextIO = sys.stdin, target: TextIO = sys.stdout) -> int:
    """Do the work on each line of the input, as a child process, until the end of the input."""
    die_with_parent()

    def send(answer: Answer) -> None:
        target.write(msgspec.json.encode(answer).decode() + "\n")
        target.flush()

    for line in source:
        work: Work = msgspec.json.decode(line, type=Work)
        for answer in do(work, SCENARIOS, report=send):
            send(answer)
    return 0


# --- options -------------------------------------------------------------------------------------


def chosen_scenarios(words: Sequence[str]) -> list[str]:
    """Return the named scenarios, in the order of the list. Raises ConfigError: a name is unknown."""
    unknown = [word for word in words if word != "all" and word not in SCENARIOS]
    if unknown:
        raise ConfigError(f"unknown scenario {unknown[0]!r}: known are {', '.join(SCENARIOS)}, and all")
    return [name for name in SCENARIOS if not words or "all" in words or name in words]


async def chosen_case(options: SimulateOptions, name: str, disk: Disk) -> Case:
    """Return the single run that the options name.

    Raises:
        ConfigError: The plan's file cannot be read, or has no plan.
    """
    if options.plan is None:
        assert options.seed is not None
        return draw_case(SCENARIOS[name], options.seed)
    case = await disk.run(read_plan, options.plan)
    chosen_scenarios([case.scenario])
    return case


# --- running -------------------------------------------------------------------------------------


async def run_one(
    case: Case, trace: Path | None, process_pool: ProcessPool, disk: Disk, terminal: Terminal
) -> bool:
    """Run one case, print its result, and write its trace. Returns whether the run failed."""
    if trace is not None:
        await check_target(trace, "--trace", disk)
    begun = asyncio.get_running_loop().time()
    (answer,) = await process_pool.do(Repeat(case=case))
    if trace is not None:
        await write_file(trace, "--trace", [msgspec.json.encode(answer.trace)], disk)
    took_s = asyncio.get_running_loop().time() - begun
    await report_results(case.scenario, [answer.result], took_s, process_pool, terminal)
    return not answer.result.ok


async def run_seeds(name: str, seeds: Sequence[int], process_pool: ProcessPool, terminal: Terminal) -> bool:
    """Run seeds of a scenario in slices, and print their results.

    Returns whether a seed failed, or many seeds together missed a required mark.
    """
    begun = asyncio.get_running_loop().time()
    size = max(1, min(SLICE, -(-len(seeds) // (4 * process_pool.jobs))))
    results: list[SeedResult] = []

    async def run_slice(part: Sequence[int]) -> None:
        """Run some seeds in the pool, and keep their results."""
        answers = await process_pool.do(Seeds(scenario=name, seeds=tuple(part)))
        results.extend(answer.result for answer in answers)

    async with asyncio.TaskGroup() as group:
        for start in range(0, len(seeds), size):
            group.create_task(run_slice(seeds[start : start + size]), name=f"seeds from {seeds[start]}")
    results.sort(key=lambda result: result.case.seed)
    await report_results(name, results, asyncio.get_running_loop().time() - begun, process_pool, terminal)
    failed = not all(result.ok for result in results)
    return report_unreached(name, results, terminal) or failed


# --- output --------------------------------------------------------------------------------------


async def report_results(
    name: str, results: Sequence[SeedResult], took_s: float, process_pool: ProcessPool, terminal: Terminal
) -> None:
    """Print failed seeds, a summary in one line, and the reasons of seeds that do not count."""
    failed = [result for result in results if not result.ok]
    for result in failed[:SHOWN]:
        for line in await describe(result, process_pool, terminal):
            terminal.print(line)
    for result in failed[SHOWN:]:
        terminal.print(f"{name}: seed {result.case.seed} violates {result.invariant}")
    terminal.print(summary(name, results, took_s))
    reasons = Counter(reason for result in results for reason in result.too_little if result.ok)
    if reasons:
        text = ", ".join(f"{count} with {reason}" for reason, count in reasons.most_common())
        terminal.notice(f"{name}: of those that do not count {text}")


def report_unreached(name: str, results: Sequence[SeedResult], terminal: Terminal) -> bool:
    """Print the marks that no seed reached, and whether too few seeds count; return whether either is so.

    Fewer than `MANY` seeds need not reach the marks: the function prints nothing, and returns False.
    """
    if len(results) < MANY:
        return False
    missing, counted = unreached(SCENARIOS[name], results), sum(result.seed_counts for result in results)
    few = counted < LEAST_SHARE * len(results)
    if missing:
        terminal.print(f"{name}: no seed reached: {', '.join(missing)}")
    if few:
        terminal.print(f"{name}: only {counted} of {len(results)} seeds count; {LEAST_SHARE:.0%} have to")
    return few or bool(missing)


async def describe(result: SeedResult, process_pool: ProcessPool, terminal: Terminal) -> list[str]:
    """Return the lines about a failed run: its options, and the smallest failing plan.

    The search for that plan may take long.
    """
    case = result.case
    loop = asyncio.get_running_loop()
    noticed_at = loop.time()
    terminal.notice(f"{case.scenario}: seed {case.seed} violates {result.invariant}; shrinking its plan")

    def under_way(so_far: Answer) -> None:
        """Print the size of the plan so far, every few seconds."""
        nonlocal noticed_at
        if loop.time() - noticed_at >= SHRINK_NOTICE_S:
            noticed_at = loop.time()
            terminal.notice(
                f"{case.scenario}: seed {case.seed} is down to {len(so_far.result.case.plan.faults)} of "
                f"{len(case.plan.faults)} faults after {so_far.tries} runs, of at most {MOST_TRIES}"
            )

    (answer,) = await process_pool.do(Shrink(case=case), under_way)
    smallest = answer.result.case
    faults = smallest.plan.faults
    return [
        f"{case.scenario}: seed {case.seed} violates {result.invariant}: {result.text}",
        f"  options: {case.plan.options}",
        f"  shrunk to {len(faults)} of {len(case.plan.faults)} faults in {answer.tries} runs:",
        *(f"    {fault}" for fault in faults),
        f"  with options: {smallest.plan.options}",
        "  again: adam-async simulate --plan FILE, with this in the file:",
        f"  {msgspec.json.encode(smallest).decode()}",
    ]
