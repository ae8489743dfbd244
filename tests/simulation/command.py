"""The command `simulate`, its options, and their checks.

This file imports only the modules that `--help` needs.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from adam_async.cli.options import ONLY_ON, checked_by, options, to_read, to_write
from adam_async.cli.running import run_in_loop
from adam_async.errors import ConfigError
from adam_async.option_types import check_bounds
from adam_async.runtime.machine import usable_cores
from adam_async.runtime.ordinary_files import read_ordinary

if TYPE_CHECKING:
    from tests.simulation.plan import Case

MOST_JOBS_PER_CORE = 4

RANGE = re.compile(r"([0-9]{1,18})\.\.([0-9]{1,18})")

ScenarioName = Literal[
    "members",
    "training",
    "controllers",
    "restarts",
    "clients",
    "strangers",
    "hostile",
    "pushes",
    "power",
    "vectors",
    "sheets",
    "cuts",
    "all",
]


def check_jobs(jobs: int) -> None:
    """Check a number of child processes. Raises ConfigError: the number is out of range."""
    check_bounds("--jobs", jobs, 0, usable_cores() * MOST_JOBS_PER_CORE)


@options
class SimulateOptions:
    """Options of `simulate`."""

    scenario: Annotated[tuple[ScenarioName, ...], ONLY_ON] = ()
    """Scenario to run, a name of --list; repeatable. By default all."""
    seed: int | None = None
    """Run this seed alone."""
    seeds: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None
    """Run seeds A..B, from 0, both included; by default 0..9."""
    jobs: Annotated[int, checked_by(check_jobs)] = 0
    """Child processes; 0 is one per core."""
    trace: Annotated[Path | None, to_write("--trace")] = None
    """Write a trace of the run to this file; ui.perfetto.dev opens it."""
    plan: Annotated[Path | None, to_read("--plan")] = None
    """Run the plan in this file, which a failed run printed, instead of a plan drawn from a seed."""
    list: Annotated[bool, ONLY_ON] = False
    """List the scenarios."""
    supervised: Annotated[bool, Parameter(negative="", show=False)] = False
    """For child processes: take work on stdin."""


def chosen_seeds(options: SimulateOptions) -> tuple[int, int] | None:
    """Return the first and the last seed that the options name; None without such an option.

    Raises:
        ConfigError: The text is not a range.
    """
    if options.seed is not None:
        return options.seed, options.seed
    if options.seeds is None:
        return None
    found = RANGE.fullmatch(options.seeds.strip())
    if found is None or int(found[1]) > int(found[2]):
        raise ConfigError(
            f"--seeds must be A..B, from 0 on and A at most B, such as 0..99, not {options.seeds!r}"
        )
    return int(found[1]), int(found[2])


def check_options(options: SimulateOptions) -> None:
    """Check the options before the modules of a simulation are imported.

    Raises:
        ConfigError: A value is wrong, or some contradict each other.
    """
    chosen_seeds(options)
    if options.seed is not None and options.seeds is not None:
        raise ConfigError("--seed and --seeds contradict each other: leave one out")
    if options.plan is not None:
        others = {"--seed": options.seed, "--seeds": options.seeds, "--scenario": options.scenario or None}
        given = [name for name, value in others.items() if value is not None]
        if given:
            raise ConfigError(f"--plan decides the run: leave out {', '.join(given)}")
    elif options.trace is not None and (options.seed is None or not _is_one(options.scenario)):
        raise ConfigError("--trace is of one run: name it with --seed and one --scenario, or with --plan")
    if options.plan is not None:
        read_plan(options.plan)


def read_plan(plan: Path) -> "Case":
    """Return the run in the file of ``--plan``. Blocks.

    Raises:
        ConfigError: The file is unreadable, or has no plan.
    """
    from tests.simulation.plan import read_case  # processes of roles need no module of a simulation

    try:
        data = read_ordinary(plan)
    except OSError as error:
        raise ConfigError(f"--plan {plan} cannot be read: {error.strerror or error}") from None
    return read_case(data, origin=f"--plan {plan}")


def _is_one(scenarios: Sequence[str]) -> bool:
    return len(set(scenarios)) == 1 and "all" not in scenarios


def is_one_run(options: SimulateOptions) -> bool:
    """Return whether the options name a single run."""
    return options.plan is not None or options.trace is not None


def simulate(options: SimulateOptions = SimulateOptions()) -> int:  # noqa: B008 - frozen
    """Run simulations, and return the exit code. `adam_async/cli/checkout.py` has the help."""
    check_options(options)
    from tests.simulation.simulate import run_simulation, serve

    if options.supervised:
        return serve()
    return run_in_loop(lambda terminal: run_simulation(options, terminal))
