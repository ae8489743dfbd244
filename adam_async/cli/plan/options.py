"""The options of `plan`."""

from pathlib import Path
from typing import Annotated, Literal

from adam_async.cli.files import check_model_option
from adam_async.cli.options import checked_by, options, to_write
from adam_async.cli.plan.link_speed import parse_bandwidth, parse_latency


@options
class PlanOptions:
    """Options of `plan`."""

    model: Annotated[str | None, checked_by(check_model_option)] = None
    """Named model, FILE.toml with a spec, or auto (the one that fits the data); by default auto with --data,
    else mnist-adam."""
    data: str | None = None
    """Data that the model must fit, as in `train --data`."""
    partitions: int | None = None
    """Workers over which a replica is cut; by default the command tries 1 to 4."""
    plan: Literal["vertical", "layers"] | None = None
    """Cut of the model: vertical, each layer over all workers, or layers, consecutive layers to each worker;
    by default both."""
    halo: Literal["auto", "exchange", "recompute"] = "auto"
    """With plan vertical: send image rows needed by two workers (exchange), or compute them twice
    (recompute)."""
    images_per_group: int | None = None
    """Images per group; by default the command tries 1, 16 and 64."""
    bandwidth: Annotated[str | None, checked_by(parse_bandwidth)] = None
    """Bandwidth of links, each way, such as 1Gbit/s or 125MB/s; each worker then has a machine like this
    one."""
    latency: Annotated[str | None, checked_by(parse_latency)] = None
    """Latency of links, one way, such as 0.1ms; each worker then has a machine like this one."""
    threads: int = 0
    """Compute threads per worker; 0 divides the cores of a machine among its workers."""
    in_flight: int = 0
    """Groups in flight per replica; 0 is twice its threads."""
    servers: int = 1
    """Parameter servers."""
    json: Annotated[Path | None, to_write("--json")] = None
    """Write the report, with layers, workers and cuts, to this file, as JSON (docs/reference/plan.md)."""
    calibrate: bool = True
    """Measure the layers on this machine, about half a second per group size, instead of an estimate."""
