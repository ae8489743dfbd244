"""The options of `drill`."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from adam_async.cli.options import ONLY_ON, options


@options
class DrillOptions:
    """Options of `drill`."""

    workload: Literal["counter", "train"] = "counter"
    """counter: clients push numbers, and an audit counts lost and doubled pushes; train: runs without and
    with faults."""
    data: str = "digits"
    """Data of the runs, as in `train --data`."""
    step: str | None = None
    """Train this step in place of a network, as in `train --step`; only for workload train."""
    step_args: str | None = None
    """Arguments of the factory of --step, as in `train --step-args`."""
    step_path: Annotated[tuple[Path, ...], ONLY_ON] = ()
    """Folder with the module of --step, as in `train --step-path`; repeatable."""
    servers: int = 3
    """Parameter servers."""
    copies: int = 3
    """Servers with each shard."""
    controllers: int = 3
    """Controllers: 1, 3 or 5."""
    replicas: int = 2
    """Model replicas of a run."""
    epochs: int = 0
    """Epochs of a run; 0 is the default of the data. All faults have to fit into the run."""
    faults: str = "kill,freeze"
    """Kinds of faults, with commas between them: kill, freeze, cut."""
    count: int | None = None
    """Number of faults; by default 4."""
    every: float | None = None
    """Minimum seconds between the starts of two faults; a fault also waits until all copies are in sync."""
    for_: Annotated[float | None, Parameter(name="--for")] = None
    """Planned seconds with faults, one every --every seconds; in the place of --count."""
    pairs: int = 1
    """Pairs of runs, without and with faults, seed by seed; 2 or more pairs test for equal accuracy."""
    margin: float = 0.5
    """Maximum difference of accuracies that count as equal, in percentage points."""
    seed: int = 0
    """Seed of the faults and the runs."""
    require: Annotated[bool, ONLY_ON] = False
    """End with code 3 if a kind of fault cannot be injected."""
    json: Path | None = None
    """Write all observations and claims to this file, as JSON."""
    verbose: Annotated[bool, ONLY_ON] = False
    """Log the events and the output of the processes."""
