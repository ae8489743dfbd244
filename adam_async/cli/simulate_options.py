"""The options of `simulate`."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from adam_async.cli.options import ONLY_ON, LoopName, options, to_read

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
    "all",
]


@options
class SimulateOptions:
    """Options of `simulate`."""

    scenario: Annotated[tuple[ScenarioName, ...], ONLY_ON] = ()
    """Scenario to run, a name of --list; repeatable. By default all."""
    seed: int | None = None
    """Run this seed alone."""
    seeds: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None
    """Run seeds A..B, from 0, both included; by default 0..9, or with --soak all."""
    jobs: int = 0
    """Child processes; 0 is one per core."""
    trace: Path | None = None
    """Write a trace of the run to this file; ui.perfetto.dev opens it."""
    plan: Annotated[Path | None, to_read("--plan")] = None
    """Run the plan in this file, which a failed run printed, instead of a plan drawn from a seed."""
    soak: Path | None = None
    """Keep the finished seeds in this file, and run further seeds, without --seeds until interrupted."""
    list: Annotated[bool, ONLY_ON] = False
    """List the scenarios."""
    supervised: Annotated[bool, Parameter(negative="", show=False)] = False
    """For child processes: take work on stdin."""
    loop: LoopName = "uvloop"
    """The event loop of the command; the simulation has its own."""
