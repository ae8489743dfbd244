"""Pure: the JSON report of `adam-async plan`; docs/reference/plan.md explains its fields.

The records below are the schema. `plan.plan` is the plan itself, as `PartitionPlan.from_dict` reads it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from adam_async.cli.plan.choice import Candidate, kept_whole, recomputed
from adam_async.model.layer import extent
from adam_async.model.partition.plan import Crossing, Kind
from adam_async.model.partition.prediction import crossing_bytes, worker_seconds
from adam_async.model.working_set import Level
from adam_async.runtime.machine import Machine

SCHEMA = "adam-async/plan/1"
"""Name and version of the schema. The version grows when a field changes its meaning or goes."""


class PlannedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The network that is cut."""

    name: str
    input_shape: tuple[int, ...]
    parameters: int
    multiply_adds: int
    dtype: str
    kernels: str


class PlannedMachine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine of each worker, or of all."""

    processor: str
    cores: int
    l2_kb: int | None
    l3_kb: int | None
    own: bool


class LayerSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the layers."""

    images: int
    measured: bool
    seconds: dict[str, float]


class LinkReport(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of links."""

    bytes_per_s: float
    latency_s: float
    tensor_s: float


class BlockReport(msgspec.Struct, frozen=True, kw_only=True):
    """The block of a layer that one worker computes."""

    layer: str
    kind: str
    unit: str
    first: int
    stop: int
    of: int
    recomputed: bool


class ProtocolReport(msgspec.Struct, frozen=True, kw_only=True):
    """Form of the gradient of one tensor, or of its rows here, in messages to the servers."""

    tensor: str
    shape: tuple[int, ...]
    delta_bytes: int
    factor_bytes: int | None
    chosen: str


class PlannedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of the replica."""

    worker: int
    layers: list[BlockReport]
    held: int
    pushed: int
    working_set: int
    fits: Level | None
    compute_s: float
    pushed_bytes: int
    pulled_bytes: int
    protocols: list[ProtocolReport]


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors of one kind in a cut."""

    tensors: int
    bytes: int


class CutReport(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors from one worker to another, per group."""

    source: int
    target: int
    messages: int
    bytes: int
    activations: Traffic
    errors: Traffic
    gradients: Traffic


class BoundReport(msgspec.Struct, frozen=True, kw_only=True):
    """Time of one bound per group."""

    what: str
    workers: tuple[int, ...]
    seconds: float


class PredictionReport(msgspec.Struct, frozen=True, kw_only=True):
    """The rate of the replica."""

    images_per_s: float
    bound: BoundReport
    bounds: list[BoundReport]
    threads: int
    in_flight: int
    chain: int
    chain_s: float
    needed_in_flight: int


class CandidateReport(msgspec.Struct, frozen=True, kw_only=True):
    """One of the compared plans."""

    partitions: int
    plan: str
    images_per_group: int
    threads: int
    images_per_s: float
    bound: str
    slowest: BoundReport
    crossing_bytes: int
    chain: int
    needed_in_flight: int
    chosen: bool


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole report."""

    schema: str
    command: list[str]
    model: PlannedModel
    machine: PlannedMachine
    link: LinkReport
    times: LayerSeconds
    servers: int
    partitions: int
    images_per_group: int
    plan: dict[str, Any]
    workers: list[PlannedWorker]
    cuts: list[CutReport]
    prediction: PredictionReport
    whole: dict[str, str]
    recomputed: list[str]
    candidates: list[CandidateReport]
    recommendation: str


def build_plan_report(
    chosen: Candidate,
    *,
    compared: Sequence[Candidate],
    recommendation: str,
    machine: Machine,
    command: Sequence[str],
) -> PlanReport:
    """Build the report of a plan."""
    network, conditions = chosen.network, chosen.conditions
    return PlanReport(
        schema=SCHEMA,
        command=list(command),
        model=PlannedModel(
            name=network.spec.name,
            input_shape=network.input_shape,
            parameters=network.num_parameters,
            multiply_adds=network.multiply_adds,
            dtype=str(network.dtype),
            kernels=network.kernels,
        ),
        machine=PlannedMachine(
            processor=machine.processor,
            cores=conditions.cores,
            l2_kb=machine.l2_kb,
            l3_kb=machine.l3_kb,
            own=conditions.own_machines,
        ),
        link=LinkReport(**asdict(conditions.link)),
        times=LayerSeconds(
            images=chosen.images, measured=chosen.times.measured, seconds=dict(chosen.times.seconds)
        ),
        servers=conditions.servers,
        partitions=chosen.plan.workers,
        images_per_group=chosen.images,
        plan=chosen.plan.to_dict(),
        workers=list(_workers(chosen, machine)),
        cuts=list(_cuts(chosen)),
        prediction=_prediction(chosen),
        whole=dict(kept_whole(chosen.plan)),
        recomputed=list(recomputed(chosen)),
        candidates=[_candidate(each, chosen=each is chosen) for each in compared],
        recommendation=recommendation,
    )


def to_json(report: PlanReport) -> bytes:
    """Return the report as indented JSON with a newline at its end."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def _workers(chosen: Candidate, machine: Machine) -> Iterator[PlannedWorker]:
    seconds = worker_seconds(chosen.parts[0].layout, chosen.times)
    again = recomputed(chosen)
    for part, protocols, working_set in zip(chosen.parts, chosen.protocols, chosen.working_sets, strict=True):
        trained = part.network.trained
        shapes = {parameter.name: parameter.shape for parameter in trained}
        yield PlannedWorker(
            worker=part.worker,
            layers=list(_blocks(chosen, part.worker, again)),
            held=part.network.num_parameters,
            pushed=sum(parameter.size for parameter in trained if parameter.name in part.owned),
            working_set=working_set.total,
            fits=working_set.fits(l2_kb=machine.l2_kb, l3_kb=machine.l3_kb),
            compute_s=seconds[part.worker],
            pushed_bytes=chosen.pushed_bytes(part.worker),
            pulled_bytes=chosen.pulled_bytes(part.worker),
            protocols=[ProtocolReport(**asdict(row), shape=shapes[row.tensor]) for row in protocols],
        )


def _blocks(chosen: Candidate, worker: int, again: Sequence[str]) -> Iterator[BlockReport]:
    layout = chosen.parts[worker].layout
    for number, layer in enumerate(chosen.network.layers):
        rows = layout.computes[number][worker]
        if rows:
            yield BlockReport(
                layer=layer.name,
                kind=layer.spec.kind,
                unit=unit_of(layer.output_shape),
                first=rows.start,
                stop=rows.stop,
                of=extent(layer.output_shape),
                recomputed=layer.name in again,
            )


def unit_of(shape: Sequence[int]) -> str:
    """Return the unit of blocks of an output of this shape: rows of an image, features, or the loss."""
    return {3: "rows", 0: "loss"}.get(len(shape), "features")


def _cuts(chosen: Candidate) -> Iterator[CutReport]:
    crossings = chosen.parts[0].layout.crossings
    for source, target in sorted({(c.source, c.target) for c in crossings}):
        way = [c for c in crossings if (c.source, c.target) == (source, target)]
        numbers = {c.number for c in way}
        of_segments = sum(bool(numbers & set(s.sends)) for s in chosen.parts[source].segments)
        kinds = {kind: _traffic(chosen, way, kind) for kind in ("activation", "error", "gradient")}
        yield CutReport(
            source=source,
            target=target,
            messages=of_segments + kinds["gradient"].tensors,
            bytes=sum(each.bytes for each in kinds.values()),
            activations=kinds["activation"],
            errors=kinds["error"],
            gradients=kinds["gradient"],
        )


def _traffic(chosen: Candidate, way: Sequence[Crossing], kind: Kind) -> Traffic:
    item_bytes = chosen.network.dtype.itemsize
    sizes = [crossing_bytes(c, chosen.images, item_bytes) for c in way if c.kind == kind]
    return Traffic(tensors=len(sizes), bytes=sum(sizes))


def _prediction(chosen: Candidate) -> PredictionReport:
    found = chosen.prediction
    return PredictionReport(
        images_per_s=found.images_per_s,
        bound=BoundReport(**asdict(found.slowest)),
        bounds=[BoundReport(**asdict(bound)) for bound in found.bounds],
        threads=chosen.threads,
        in_flight=found.in_flight,
        chain=found.chain,
        chain_s=found.chain_s,
        needed_in_flight=found.needed_in_flight,
    )


def _candidate(each: Candidate, *, chosen: bool) -> CandidateReport:
    return CandidateReport(
        partitions=each.plan.workers,
        plan=each.plan.kind,
        images_per_group=each.images,
        threads=each.threads,
        images_per_s=each.prediction.images_per_s,
        bound=str(each.prediction.slowest),
        slowest=BoundReport(**asdict(each.prediction.slowest)),
        crossing_bytes=each.crossing_bytes,
        chain=each.prediction.chain,
        needed_in_flight=each.prediction.needed_in_flight,
        chosen=chosen,
    )
