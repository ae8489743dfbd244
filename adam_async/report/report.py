"""A run's report, one JSON document; docs/reference/report.md explains its fields.

The structs below are the schema. The source is `RunResult`, with the counts of every node, so runs in one
process and in many processes have reports of the same form.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET

from adam_async.model.network import Network
from adam_async.model.working_set import Level, working_sets
from adam_async.report.baseline import Baseline
from adam_async.report.schema import SCHEMA
from adam_async.run.config import Config
from adam_async.run.counts import (
    ONCE,
    CacheCounts,
    ControllerCounts,
    Counts,
    DataCounts,
    ProtocolChoice,
    ServerCounts,
    WorkerCounts,
    of_kind,
)
from adam_async.run.learning_rate import default_rate
from adam_async.run.result import CheckpointResult, EpochResult, RunResult
from adam_async.run.run_copies import RunCopies
from adam_async.run.series import Sample, StalenessReport, add_up, add_up_by_name, waited_s
from adam_async.run.step_model import RunModel, StepModel
from adam_async.runtime.disk import Disk
from adam_async.runtime.machine import Machine
from adam_async.runtime.traffic import TrafficRow

_Counts = TypeVar("_Counts", bound=Counts)


class WorkingSetReport(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that some layers use, in bytes."""

    layers: tuple[str, ...]
    weights: int
    activations: int
    gradients: int
    scratch: int
    push_buffers: int
    total: int
    fits: Level | None


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """The network or step that the run trains."""

    name: str
    parameters: int
    multiply_adds: int
    dtype: str
    kernels: str
    working_sets: list[WorkingSetReport]
    spec: dict[str, Any]


class DataReport(msgspec.Struct, frozen=True, kw_only=True):
    """The images."""

    name: str
    source: str
    shape: tuple[int, ...]
    classes: int
    train_images: int
    test_images: int


class EpochReport(msgspec.Struct, frozen=True, kw_only=True):
    """One epoch of the run."""

    epoch: int
    images: int
    skipped: int
    train_loss: float | None
    test_accuracy: float
    validation_accuracy: float | None = None
    train_s: float
    images_per_s: float


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """All epochs together."""

    train_s: float
    images: int
    skipped: int = 0
    images_per_s: float
    test_accuracy: float
    peak_rss_mb: float
    checkpoint_age_epochs: int | None = None
    kept_epoch: int | None = None


class BaselineReport(msgspec.Struct, frozen=True, kw_only=True):
    """The bare kernel loop on the same number of threads, and matrix products of the machine's BLAS."""

    images_per_s: float
    efficiency: float
    threads: int
    before: float
    after: float
    sgemm: float
    """Operations per second of single-precision matrix products on all threads."""
    share: float
    """Operations per second of training, divided by `sgemm`."""


class EventReport(msgspec.Struct, frozen=True, kw_only=True):
    """One event of the run."""

    s: float
    event: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole report."""

    schema: str
    command: list[str]
    ended: str
    config: dict[str, Any]
    machine: Machine
    model: ModelReport
    data: DataReport
    epochs: list[EpochReport]
    totals: Totals
    baseline: BaselineReport | None
    traffic: list[TrafficRow]
    protocols: list[ProtocolChoice]
    staleness: StalenessReport
    series: list[Sample]
    events: list[EventReport]
    checkpoints: tuple[CheckpointResult, ...]
    copies: RunCopies | None = None
    controllers: list[ControllerCounts] = []
    servers: list[ServerCounts]
    caches: list[CacheCounts]
    workers: list[WorkerCounts]


def build_report(
    result: RunResult,
    *,
    config: Config,
    command: Sequence[str],
    machine: Machine,
    baseline: Baseline | None,
    ended: str = "finished",
) -> Report:
    """Build the report of a run.

    Args:
        config: The run's options; the report has them with the run's rate.
        baseline: The bare kernel loop; None if it was not measured.
    """
    totals, model = _totals(result), result.model
    roles = [counts for _, counts in sorted(result.statistics.items())]
    servers, workers = of_kind(ServerCounts, roles), of_kind(WorkerCounts, roles)
    return Report(
        schema=SCHEMA,
        command=list(command),
        ended=ended,
        config={
            **msgspec.to_builtins(config),
            "slow": list(config.slow),
            "memory": list(config.memory),
            "rate": default_rate(config),
        },
        machine=machine,
        model=ModelReport(
            name=model.spec.name,
            parameters=model.num_parameters,
            multiply_adds=model.multiply_adds,
            dtype=str(model.dtype),
            kernels=model.kernels,
            working_sets=_working_sets(model, config, machine),
            spec=model.spec.to_dict(),
        ),
        data=msgspec.convert(result.data, DataReport),
        epochs=[_epoch(epoch) for epoch in result.epochs],
        totals=totals,
        baseline=_baseline(baseline, totals.images_per_s, model)
        if baseline is not None and isinstance(model, Network)
        else None,
        series=list(result.series),
        events=msgspec.convert(result.events, list[EventReport]),
        copies=result.copies,
        checkpoints=result.checkpoints,
        traffic=[row for counts in roles for row in counts.sent],
        # All workers of a run have the same plan.
        protocols=next((each.protocols for each in workers if each.protocols is not UNSET), []),
        staleness=_staleness(servers),
        controllers=[_row(each) for each in of_kind(ControllerCounts, roles)],
        servers=[_row(each) for each in servers],
        caches=[each.cache for each in of_kind(DataCounts, roles) if each.cache is not None],
        workers=[_row(each) for each in workers],
    )


def _row(counts: _Counts) -> _Counts:
    """Return the counts of a role without the fields that a report has once for all roles."""
    once = ONCE.intersection(type(counts).__struct_fields__)
    return msgspec.structs.replace(counts, **dict.fromkeys(once, UNSET))


def to_json(report: Report) -> bytes:
    """Return the report as indented JSON with a newline at its end."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


async def write(report: Report, path: Path, disk: Disk) -> None:
    """Write the report as JSON, atomically. A cancellation leaves the old file or the new one.

    Raises:
        OSError: The file cannot be written.
    """
    await disk.write_atomic(path, [to_json(report)])


def _epoch(epoch: EpochResult) -> EpochReport:
    report = msgspec.convert(epoch, EpochReport, from_attributes=True)
    return report if isfinite(epoch.train_loss) else msgspec.structs.replace(report, train_loss=None)


def _staleness(servers: Sequence[ServerCounts]) -> StalenessReport:
    total = add_up(each.staleness for each in servers)
    clients = ({name: client.staleness for name, client in each.clients.items()} for each in servers)
    by_tensor = (each.staleness_by_tensor for each in servers)
    return StalenessReport(
        histogram=total.histogram,
        mean=total.mean,
        max=total.max,
        by_replica=add_up_by_name(clients),
        by_tensor=add_up_by_name(each for each in by_tensor if each is not UNSET),
    )


def _working_sets(model: RunModel, config: Config, machine: Machine) -> list[WorkingSetReport]:
    """Measure the working sets of a network; the working sets of a step are unknown."""
    if isinstance(model, StepModel):
        return []
    return [
        WorkingSetReport(
            **asdict(each), total=each.total, fits=each.fits(l2_kb=machine.l2_kb, l3_kb=machine.l3_kb)
        )
        for each in working_sets(model, config.images_per_group)
    ]


def _totals(result: RunResult) -> Totals:
    images = sum(epoch.images for epoch in result.epochs)
    train_s = sum(epoch.train_s for epoch in result.epochs)
    return Totals(
        train_s=train_s,
        images=images,
        skipped=sum(epoch.skipped for epoch in result.epochs),
        images_per_s=images / train_s if train_s else 0.0,
        test_accuracy=result.test_accuracy,
        peak_rss_mb=round(_memory_mb(result.statistics.values()), 1),
        checkpoint_age_epochs=_checkpoint_age(result),
        kept_epoch=result.kept_epoch or None,
    )


def _checkpoint_age(result: RunResult) -> int | None:
    """Return the number of epochs after the newest checkpoint; None without a checkpoint."""
    if not result.checkpoints or not result.epochs:
        return None
    return max(result.epochs[-1].epoch - result.checkpoints[-1].epoch, 0)


def _memory_mb(roles: Iterable[Counts]) -> float:
    """Return all processes' summed peak memory in MB; of one process, only the largest value counts."""
    peaks: dict[tuple[str, int], float] = {}
    for each in roles:
        key = each.host, each.pid
        peaks[key] = max(peaks.get(key, 0.0), each.peak_rss_mb)
    return sum(peaks.values())


def _baseline(baseline: Baseline, images_per_s: float, model: Network) -> BaselineReport:
    return BaselineReport(
        **msgspec.structs.asdict(baseline),
        images_per_s=baseline.images_per_s,
        efficiency=images_per_s / baseline.images_per_s,
        share=images_per_s * model.operations / baseline.sgemm,
    )


# --- reports side by side, as rows of text --------------------------------------------------------


def compare(reports: Sequence[Report]) -> list[tuple[str, ...]]:
    """Return one row for each quantity: its name, then its value in each report.

    The table leaves out a quantity for which no report has a value.
    """
    rows = [(name, *(text_of(report) for report in reports)) for name, text_of in _ROWS]
    return [row for row in rows if any(row[1:])]


def _mode(report: Report) -> str:
    lag = report.config["lag"]
    return f"{report.config['consistency']}{f', lag {lag}' if lag else ''}"


def _plan(report: Report) -> str:
    config = report.config
    if config["partitions"] == 1:
        return ""
    halo = f", halo {config['halo']}" if config["halo"] != "auto" else ""
    return f"{config['plan']}{halo}"


def _schedule(report: Report) -> str:
    config = report.config
    if config["rate"] is None:  # L-BFGS
        return ""
    words = [f"{config['rate']:.4g}"]
    if config["schedule"] != "constant":
        words.append(config["schedule"])
    if config["warm_up"]:
        words.append(f"warm-up {config['warm_up']:g}")
    return ", ".join(words)


def _cadence(report: Report) -> str:
    push, pull = report.config["push_every"], report.config["pull_every"]
    return f"{push} / {pull}" if (push, pull) != (1, 1) else ""


def _loss(report: Report) -> str:
    loss = report.epochs[-1].train_loss if report.epochs else None
    return "" if loss is None else f"{loss:.4f}"


def _sent(report: Report) -> str:
    return f"{sum(row.payload_bytes + row.frame_bytes for row in report.traffic) / 1e6:.1f}"


def _waited(what: int) -> Callable[[Report], str]:
    return lambda report: f"{waited_s(report.workers)[what]:.1f}" if report.workers else ""


_ROWS: tuple[tuple[str, Callable[[Report], str]], ...] = (
    ("ended", lambda report: report.ended if report.ended != "finished" else ""),
    ("model", lambda report: report.model.name),
    ("data", lambda report: report.data.name),
    ("consistency", _mode),
    ("replicas", lambda report: str(report.config["replicas"])),
    ("partitions", lambda report: str(report.config["partitions"])),
    ("plan", _plan),
    ("servers", lambda report: str(report.config["servers"])),
    ("weights", lambda report: str(report.config["weights"])),
    ("rule", lambda report: str(report.config["rule"])),
    ("rate", _schedule),
    ("push / pull every", _cadence),
    ("images per group", lambda report: str(report.config["images_per_group"])),
    ("epochs", lambda report: str(len(report.epochs))),
    ("test accuracy", lambda report: f"{report.totals.test_accuracy:.2%}"),
    ("train loss", _loss),
    ("images/s", lambda report: f"{report.totals.images_per_s:.0f}"),
    ("efficiency", lambda report: f"{report.baseline.efficiency:.2f}" if report.baseline else ""),
    ("training, s", lambda report: f"{report.totals.train_s:.1f}"),
    ("staleness, mean / max", lambda report: f"{report.staleness.mean:.2f} / {report.staleness.max}"),
    ("sent, MB", _sent),
    ("waited for servers, s", _waited(0)),
    ("waited for images, s", _waited(1)),
    ("waited for clocks, s", _waited(2)),
    ("memory, MB", lambda report: f"{report.totals.peak_rss_mb:.0f}"),
    ("events", lambda report: str(len(report.events)) if report.events else ""),
)
