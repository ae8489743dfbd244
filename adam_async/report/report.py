"""The report of a run, one JSON document; docs/reference/report.md explains its fields.

The structs below are the schema. The source is `RunResult`, with the counts of every node, so runs in one
process and in many processes have reports of the same form.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from adam_async.model.network import Network
from adam_async.model.working_set import Level, WorkingSet, working_sets
from adam_async.report.baseline import Baseline
from adam_async.report.schema import SCHEMA
from adam_async.run.config import Config
from adam_async.run.learning_rate import default_rate
from adam_async.run.result import CheckpointResult, EpochResult, RunResult
from adam_async.run.run_copies import RunCopies
from adam_async.run.series import (
    DiskCounts,
    Sample,
    StalenessReport,
    WaitReport,
    add_up,
    add_up_by_name,
    waits_of,
)
from adam_async.run.step_model import RunModel, StepModel
from adam_async.runtime.disk import Disk
from adam_async.runtime.machine import Machine
from adam_async.runtime.traffic import TrafficRow
from dataflow import EngineStatistics, PoolStatistics
from transport import PoolStatistics as BufferPoolStatistics

MOST_LEFT_OUT = 400
"""Maximum length of the line about an omitted node, in characters."""


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


class ProtocolRow(msgspec.Struct, frozen=True, kw_only=True):
    """Form of the gradient of one tensor in messages."""

    tensor: str
    delta_bytes: int
    factor_bytes: int | None
    chosen: str


class EventReport(msgspec.Struct, frozen=True, kw_only=True):
    """One event of the run."""

    s: float
    event: str


class ServerReport(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one parameter server; zeros without shards."""

    node: str
    shards: int = 0
    versions: dict[str, int] = {}
    staleness: dict[str, int] = {}
    clocks: dict[str, dict[str, int]] = {}
    refused: int = 0
    duplicates: int = 0
    batches: int = 0
    batched_pushes: int = 0
    disk: DiskCounts | None = None
    peak_rss_mb: float


class ControllerReport(msgspec.Struct, frozen=True, kw_only=True):
    """State of one controller in its group at the end."""

    node: str
    role: str
    leader: str = ""
    term: int = 0


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """The images of one data server, from its start to the end of the run."""

    name: str
    budget_bytes: int
    resident_images: int
    resident_bytes: int
    block_bytes: int
    evicted_blocks: int
    hits: int = 0
    misses: int = 0
    decoded: int = 0
    decode_s: float = 0.0
    spilled: int = 0
    spilled_bytes: int = 0
    read_back: int = 0
    replaced: int = 0
    replaced_why: list[str] = []


class Lag(msgspec.Struct, frozen=True, kw_only=True):
    """Lateness of the timers of the event loop, in seconds."""

    p50: float
    p99: float
    max: float


class PushReport(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a worker's client of the parameter servers."""

    acknowledged: int
    duplicates: int
    refused: int
    resent: int
    reconnects: int
    admission_waits: int
    admission_wait_s: float


class FetchReport(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a worker's client of the data server."""

    groups: int
    blocked_fetches: int
    blocked_s: float


class KernelReport(msgspec.Struct, frozen=True, kw_only=True):
    """Kernels that trained a worker's groups."""

    set: str
    """Kernels at the end, ``"numpy"`` or ``"numba"``."""
    numpy_groups: int
    """Number of groups that NumPy's kernels trained while numba compiled."""


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one model worker."""

    node: str
    parameters: PushReport | None = None
    data: FetchReport | None = None
    pool: PoolStatistics | None = None
    engine: EngineStatistics | None = None
    cpus: tuple[int, ...] | None = None
    lag_s: Lag
    buffers: BufferPoolStatistics
    """Pool of receive buffers; roles of one process may share one."""
    push_buffers: int = 0
    peak_rss_mb: float
    kernels: KernelReport | None = None


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
    protocols: list[ProtocolRow]
    staleness: StalenessReport
    waits: list[WaitReport]
    series: list[Sample]
    events: list[EventReport]
    checkpoints: tuple[CheckpointResult, ...]
    copies: RunCopies | None = None
    controllers: list[ControllerReport] = []
    servers: list[ServerReport]
    caches: list[CacheReport]
    workers: list[WorkerReport]


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
        config: The run's options; the report has them with the rate of the run.
        baseline: The bare kernel loop; None if it was not measured.

    Raises:
        msgspec.ValidationError, KeyError, TypeError: The counts of a node are invalid; `without_invalid`
            leaves such nodes out.
    """
    totals = _totals(result)
    model, counts = result.model, _count_reports(result.statistics)
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
        **counts,
    )


def without_invalid(result: RunResult) -> tuple[RunResult, list[str]]:
    """Leave out the nodes whose counts are invalid.

    Returns:
        The result with the statistics of the other nodes, and a line for each omitted node.
    """
    kept: dict[str, dict[str, Any]] = {}
    left_out: list[str] = []
    for name, values in result.statistics.items():
        try:
            msgspec.json.encode([_count_reports({name: values}), _memory_mb({name: values})])
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            left_out.append(f"the report leaves out the counts of {name}: {error!r}"[:MOST_LEFT_OUT])
        else:
            kept[name] = values
    return replace(result, statistics=kept), left_out


def _count_reports(statistics: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Read the fields with the counts of nodes. Raises many kinds of errors for invalid counts."""
    workers = _of_role(statistics, "worker")
    return dict[str, Any](
        traffic=[
            msgspec.convert(row, TrafficRow)
            for _, values in sorted(statistics.items())
            for row in values["traffic"]
        ],
        protocols=msgspec.convert(_protocols(workers), list[ProtocolRow]),
        staleness=_staleness(statistics.values()),
        waits=[waits for name, values in workers.items() if (waits := waits_of(name, values)) is not None],
        controllers=[
            msgspec.convert({**values["controllers"], "node": name}, ControllerReport)
            for name, values in _of_role(statistics, "controller").items()
            if "controllers" in values
        ],
        servers=[
            msgspec.convert(_named(name, values), ServerReport)
            for name, values in _of_role(statistics, "ps").items()
        ],
        caches=[
            msgspec.convert({"name": name, **values["cache"]}, CacheReport)
            for name, values in _of_role(statistics, "data").items()
            if values.get("cache")
        ],
        workers=[msgspec.convert(_named(name, values), WorkerReport) for name, values in workers.items()],
    )


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


def _staleness(roles: Collection[Mapping[str, Any]]) -> StalenessReport:
    total = add_up(values.get("staleness", {}) for values in roles)
    return StalenessReport(
        histogram=total.histogram,
        mean=total.mean,
        max=total.max,
        by_replica=add_up_by_name(values.get("staleness_by_replica", {}) for values in roles),
        by_tensor=add_up_by_name(values.get("staleness_by_tensor", {}) for values in roles),
    )


def _working_sets(model: RunModel, config: Config, machine: Machine) -> list[WorkingSetReport]:
    """Measure the working sets of a network; the working sets of a step are unknown."""
    if isinstance(model, StepModel):
        return []
    return [_fitted(each, machine) for each in working_sets(model, config.images_per_group)]


def _fitted(each: WorkingSet, machine: Machine) -> WorkingSetReport:
    return WorkingSetReport(
        **asdict(each),
        total=each.total,
        fits=each.fits(l2_kb=machine.l2_kb, l3_kb=machine.l3_kb),
    )


def _totals(result: RunResult) -> Totals:
    images = sum(epoch.images for epoch in result.epochs)
    train_s = sum(epoch.train_s for epoch in result.epochs)
    return Totals(
        train_s=train_s,
        images=images,
        skipped=sum(epoch.skipped for epoch in result.epochs),
        images_per_s=images / train_s if train_s else 0.0,
        test_accuracy=result.test_accuracy,
        peak_rss_mb=round(_memory_mb(result.statistics), 1),
        checkpoint_age_epochs=_checkpoint_age(result),
        kept_epoch=result.kept_epoch or None,
    )


def _checkpoint_age(result: RunResult) -> int | None:
    """Return the number of epochs after the newest checkpoint; None without a checkpoint."""
    if not result.checkpoints or not result.epochs:
        return None
    return max(result.epochs[-1].epoch - result.checkpoints[-1].epoch, 0)


def _memory_mb(statistics: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the sum of all processes' peak memory, in MB; of one process, only the largest value counts."""
    peaks: dict[tuple[str, int], float] = {}
    for values in statistics.values():
        process = values["process"]
        key = (process["host"], process["pid"])
        peaks[key] = max(peaks.get(key, 0.0), process["peak_rss_mb"])
    return sum(peaks.values())


def _baseline(baseline: Baseline, images_per_s: float, model: Network) -> BaselineReport:
    return BaselineReport(
        images_per_s=baseline.images_per_s,
        efficiency=images_per_s / baseline.images_per_s,
        threads=baseline.threads,
        before=baseline.before,
        after=baseline.after,
        sgemm=baseline.sgemm,
        share=images_per_s * model.operations / baseline.sgemm,
    )


def _of_role(statistics: Mapping[str, Mapping[str, Any]], role: str) -> dict[str, Mapping[str, Any]]:
    return {node: statistics[node] for node in sorted(statistics) if statistics[node]["role"] == role}


def _protocols(workers: Mapping[str, Mapping[str, Any]]) -> Sequence[Any]:
    """Return the plan of the first worker that trained; all workers have the same plan."""
    return next((values["protocols"] for values in workers.values() if "protocols" in values), ())


def _named(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {**values, "node": name, "peak_rss_mb": values["process"]["peak_rss_mb"]}
