"""The options of the command `plan`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cyclopts import Parameter

from adam_async.cli.options import LoopName
from adam_async.cli.values import strict


@strict
@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What `plan` can be told."""

    model: str | None = None
    """A named model, FILE.toml with a spec, or auto: what fits the data; by default auto with --data, else
    mnist-adam."""
    data: str | None = None
    """Data that the model must fit, as `train --data`."""
    partitions: int | None = None
    """Workers that a replica is cut over; without it, 1 to 4 are tried."""
    plan: Literal["vertical", "layers"] | None = None
    """Each layer over all workers, or consecutive layers to each; without it both are tried."""
    halo: Literal["auto", "exchange", "recompute"] = "auto"
    """With plan vertical: whether rows that two workers need are sent, or computed twice."""
    images_per_group: int | None = None
    """Images of a group; without it, 1, 16 and 64 are tried."""
    bandwidth: str | None = None
    """Of links, each way, such as 1Gbit/s or 125MB/s; workers then have a machine each, like this one."""
    latency: str | None = None
    """Of links, one way, such as 0.1ms; likewise."""
    threads: int = 0
    """Compute threads per worker; 0 shares the cores of a machine out."""
    in_flight: int = 0
    """Groups in flight; 0 is twice the threads of a replica."""
    servers: int = 1
    """Parameter servers that gradients are pushed to."""
    json: Path | None = None
    """Write what was found out to this file, as JSON (docs/plan.md)."""
    picture: Path | None = None
    """Draw the plan into this .svg file, or with the extra `plot` into a .png."""
    calibrate: bool = True
    """Measure what layers take here, about half a second for each size of group; else it is estimated."""
    loop: LoopName = "uvloop"
    """The event loop."""
