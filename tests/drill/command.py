"""The command `drill` and its options. This file imports only the modules that `--help` needs."""

import os
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from msgspec import Meta

from adam_async.cli.options import ONLY_ON, ImportOptions, RunPart, with_options
from adam_async.cli.running import run_in_loop


@with_options(data="digits", servers=3, copies=3, controllers=3, replicas=2, epochs=0, seed=0)
class DrillOptions(RunPart, ImportOptions):
    """Options of `drill`. The seed is that of the faults and the runs. All faults have to fit into a run."""

    workload: Literal["counter", "train"] = "counter"
    """counter: clients push numbers, and an audit counts lost and doubled pushes; train: runs without and
    with faults."""
    step: str | None = None
    """Train this step in place of a network, as in `train --step`; only for workload train."""
    step_args: str | None = None
    """Arguments of the factory of --step, as in `train --step-args`."""
    faults: str = "kill,freeze"
    """Kinds of faults, with commas between them: kill, freeze, cut."""
    count: int | None = None
    """Number of faults; by default 4."""
    every: Annotated[float | None, Meta(gt=0.0, lt=1e9)] = None
    """Minimum seconds between the starts of two faults; a fault also waits until all copies are in sync."""
    for_: Annotated[float | None, Meta(gt=0.0, lt=1e9), Parameter(name="--for")] = None
    """Planned seconds with faults, one every --every seconds; in the place of --count."""
    pairs: int = 1
    """Pairs of runs, without and with faults, seed by seed; 2 or more pairs test for equal accuracy."""
    margin: Annotated[float, Meta(gt=0.0, lt=1e9)] = 0.5
    """Maximum difference of accuracies that count as equal, in percentage points."""
    require: Annotated[bool, ONLY_ON] = False
    """End with code 3 if a kind of fault cannot be injected."""
    json: Path | None = None
    """Write all observations and claims to this file, as JSON."""
    verbose: Annotated[bool, ONLY_ON] = False
    """Log the events and the output of the processes."""


def drill(options: DrillOptions = DrillOptions()) -> int:  # noqa: B008 - frozen
    """Run a drill, and return its exit code. `adam_async/cli/checkout.py` has the help."""
    from tests.drill.drill import run_drill

    return run_in_loop(lambda terminal: run_drill(options, os.environ, terminal), verbose=options.verbose)
