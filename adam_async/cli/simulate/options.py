"""The options of the command `simulate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from adam_async.cli.options import LoopName
from adam_async.cli.values import strict

_OnlyOn = Parameter(negative="")


@strict
@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """What `simulate` can be told."""

    scenario: Annotated[tuple[str, ...], _OnlyOn] = ()
    """What the cluster goes through: a name of --list, or all; repeat for several. All if none is named."""
    seed: int | None = None
    """Run this seed alone; with --trace a file shows what happened in it."""
    seeds: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None
    """Run seeds A..B, from 0 on, both included; without this and --seed, 0..9, or with --soak all of them."""
    jobs: int = 0
    """Child processes; 0 is one per core."""
    trace: Path | None = None
    """Write what happened in the one run into this file, which Perfetto opens (ui.perfetto.dev)."""
    plan: Path | None = None
    """Run the plan in this file, as a failed run prints it, instead of one drawn from a seed."""
    soak: Path | None = None
    """Keep in this file which seeds are done, and go on behind them, until interrupted."""
    list: Annotated[bool, _OnlyOn] = False
    """List the scenarios."""
    supervised: Annotated[bool, Parameter(negative="", show=False)] = False
    """For child processes: take work on stdin."""
    loop: LoopName = "uvloop"
    """The event loop of the command; what is simulated has its own."""
