"""Pure: the plans for a model and some machines, their predicted rates, and the recommended plan.

A *candidate* is a number of workers, a kind of plan and a number of images per group. The recommended
candidate is the fastest by `model/partition/planner.py`. If others are within `NEAR` of the fastest, the
recommended one has the fewest workers, then the fewest images per group, then the fewest bytes. The choice
ignores the effect of the group size on learning.

Workers on separate machines push every group's gradients to the servers and pull values, over links like
those between workers. On one machine a worker with the whole model trains in place, without messages.

docs/reference/plan.md explains the fields of the JSON report (`plan_report`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import msgspec

from adam_async.errors import ModelError
from adam_async.model.layer import extent
from adam_async.model.network import Network
from adam_async.model.partition.network import Partition
from adam_async.model.partition.plan import Crossing, PartitionPlan
from adam_async.model.partition.planner import (
    Halo,
    LayerTimes,
    LinkCost,
    Prediction,
    crossing_bytes,
    layers_plan,
    predict,
    vertical_plan,
    worker_seconds,
)
from adam_async.model.working_set import WorkingSet, working_sets
from adam_async.run.config import default_in_flight
from adam_async.run.counts import ProtocolChoice
from adam_async.run.ids import NodeId
from adam_async.run.partition import table_of
from adam_async.run.shard_table import assign_buckets, part_table
from adam_async.runtime.machine import Machine
from adam_async.worker.push_plan import choose_protocol, factorable_tensors

PlanKind = Literal["vertical", "layers"]

NEAR = 1.05
"""Maximum ratio of the fastest candidate's rate to the recommended candidate's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Machines and links of the plans."""

    link: LinkCost
    """Cost of links between workers, and between workers and servers."""
    cores: int
    own_machines: bool
    """Whether each worker has its own machine; otherwise all share one."""
    threads: int = 0
    """Compute threads per worker; 0 divides the cores of a machine among its workers."""
    in_flight: int = 0
    """Groups in flight per replica; 0 is twice its threads."""
    servers: int = 1
    halo: Halo = "auto"

    def threads_of(self, workers: int) -> int:
        """Return the compute threads of each worker in a replica."""
        return self.threads or max(1, self.cores // (1 if self.own_machines else workers))

    def in_flight_of(self, workers: int) -> int:
        """Return the groups in flight of a replica."""
        return self.in_flight or default_in_flight(self.threads_of(workers), workers)


class Candidate:
    """A plan under some conditions, with its prediction."""

    def __init__(
        self, network: Network, plan: PartitionPlan, times: LayerTimes, conditions: Conditions
    ) -> None:
        self.network = network
        self.plan = plan
        self.times = times
        self.conditions = conditions
        self.parts = tuple(Partition(network, plan, worker) for worker in range(plan.workers))
        self.protocols = tuple(self._protocols())
        """For each worker, the protocols of the tensors that it pushes."""
        self.prediction: Prediction = predict(
            self.parts,
            times,
            conditions.link,
            threads=min(self.threads, conditions.cores),
            in_flight=conditions.in_flight_of(plan.workers),
            pushed=[self.pushed_bytes(worker) for worker in range(plan.workers)],
            pulled=[self.pulled_bytes(worker) for worker in range(plan.workers)],
            servers=conditions.servers,
            shared_cores=None if conditions.own_machines else conditions.cores,
        )

    @property
    def images(self) -> int:
        """Images per group."""
        return self.times.images

    @property
    def threads(self) -> int:
        """Compute threads per worker."""
        return self.conditions.threads_of(self.plan.workers)

    @property
    def in_place(self) -> bool:
        """Whether a single worker on the machine of the servers trains in place on their memory."""
        return self.plan.workers == 1 and not self.conditions.own_machines

    def pushed_bytes(self, worker: int) -> int:
        """Return the size in bytes of one worker's gradients per group."""
        if self.in_place:
            return 0
        rows = self.protocols[worker]
        return sum(row.delta_bytes if row.chosen == "delta" else row.factor_bytes or 0 for row in rows)

    def pulled_bytes(self, worker: int) -> int:
        """Return the size in bytes of the values that one worker receives per group."""
        if self.in_place:
            return 0
        return sum(p.size for p in self.parts[worker].network.trained) * self.network.dtype.itemsize

    @cached_property
    def crossing_bytes(self) -> int:
        """Number of bytes that all workers send to each other per group."""
        item_bytes = self.network.dtype.itemsize
        return sum(crossing_bytes(c, self.images, item_bytes) for c in self.parts[0].layout.crossings)

    @cached_property
    def working_sets(self) -> tuple[WorkingSet, ...]:
        """Working set of one group at each worker. The first access allocates a context for each worker."""
        return tuple(working_sets(part.network, self.images)[-1] for part in self.parts)

    def fits_in(self, l3_kb: int | None) -> bool:
        """Return whether all threads' working sets fit the L3 cache; True if its size is unknown."""
        if l3_kb is None:
            return True
        at_once = [each.total * self.threads for each in self.working_sets]
        return (max(at_once) if self.conditions.own_machines else sum(at_once)) <= l3_kb << 10

    def _protocols(self) -> Iterator[tuple[ProtocolChoice, ...]]:
        network, count = self.network, self.conditions.servers
        table = table_of(network, plan=self.plan.to_dict())
        buckets = assign_buckets(table, [NodeId(f"ps-{number}") for number in range(count)])
        for part in self.parts:
            own, factorable = part_table(table, part.network.parameters), factorable_tensors(part.network)
            yield tuple(
                choose_protocol(
                    own, buckets, p.name, p.shape, images=self.images, rows=factorable.get(p.name, 0)
                )
                for p in part.network.trained
                if p.name in part.owned
            )


def make_plan(
    network: Network, kind: PlanKind, workers: int, times: LayerTimes, conditions: Conditions
) -> PartitionPlan:
    """Cut a network over some workers.

    Raises:
        ModelError: The network cannot be cut over this many workers.
    """
    if kind == "layers":
        return layers_plan(network, workers, times=times, link=conditions.link)
    return vertical_plan(network, workers, halo=conditions.halo, times=times, link=conditions.link)


def candidates(
    network: Network,
    times: Sequence[LayerTimes],
    conditions: Conditions,
    *,
    workers: Sequence[int],
    kinds: Sequence[PlanKind],
) -> list[Candidate]:
    """Make every possible plan: one for each number of workers, kind and group size.

    All kinds are equal for one worker, which gets only the first kind.

    Raises:
        ModelError: No plan is possible; the error has the reason for the last plan that was tried.
    """
    found: list[Candidate] = []
    refusal: ModelError | None = None
    for count in workers:
        for kind in kinds if count > 1 else kinds[:1]:
            for each in times:
                try:
                    plan = make_plan(network, kind, count, each, conditions)
                except ModelError as error:
                    refusal = error
                    break
                found.append(Candidate(network, plan, each, conditions))
    if not found and refusal is not None:
        raise refusal
    return found


def recommend(found: Sequence[Candidate]) -> Candidate:
    """Choose the fastest candidate, or a cheaper one within `NEAR` of it."""
    fastest = max(each.prediction.images_per_s for each in found)
    near = [each for each in found if each.prediction.images_per_s * NEAR >= fastest]
    return min(near, key=lambda each: (each.plan.workers, each.images, each.crossing_bytes))


def describe(candidate: Candidate) -> str:
    groups = f"{candidate.images} image{'s' * (candidate.images > 1)} per group"
    if candidate.plan.workers == 1:
        return f"one worker, {groups}"
    return f"plan {candidate.plan.kind} over {candidate.plan.workers} workers, {groups}"


def reason(best: Candidate, found: Sequence[Candidate]) -> str:
    """Return one or two sentences with the reason for a recommendation."""
    text = f"{describe(best)}: {_rate(best)}, bounded by {best.prediction.slowest}"
    cut = [each for each in found if each.plan.workers > 1]
    whole = [each for each in found if each.plan.workers == 1]
    if best.plan.workers == 1:
        if not cut:
            return f"{text}."
        other = max(cut, key=lambda each: each.prediction.images_per_s)
        return (
            f"Do not cut it: {text}; the best cut, {describe(other)}, makes {_rate(other)}, bounded by "
            f"{other.prediction.slowest}."
        )
    if not whole:
        return f"Take {text}."
    alone = max(whole, key=lambda each: each.prediction.images_per_s)
    times = best.prediction.images_per_s / alone.prediction.images_per_s
    text = (
        f"Take {text}; that is {times:.2f} times what one worker makes with the whole model ({_rate(alone)})"
    )
    if best.conditions.own_machines and times < best.plan.workers:
        text += (
            f", but less than {best.plan.workers} machines may make as replicas that have the whole model "
            "each, if it fits them"
        )
    return f"{text}."


def _rate(candidate: Candidate) -> str:
    return f"{candidate.prediction.images_per_s:,.0f} images/s"


def kept_whole(plan: PartitionPlan) -> dict[str, str]:
    """Return the layers that a plan of cut layers leaves whole, with the reasons."""
    return {} if plan.workers == 1 else {each.layer: each.whole for each in plan.layers if each.whole}


def recomputed(candidate: Candidate) -> tuple[str, ...]:
    """Return the layers whose whole inputs every worker computes, except layers that only move values."""
    if candidate.plan.workers == 1:
        return ()
    moves = {layer.name for layer in candidate.network.layers if layer.moves}
    return tuple(e.layer for e in candidate.plan.layers if e.recomputed and e.layer not in moves)


# --- the JSON report ------------------------------------------------------------------------------


SCHEMA = "adam-async/plan/1"
"""Name and version of the schema. The version grows when a field changes its meaning or is removed."""

UNITS = {3: "rows", 0: "loss"}
"""Unit of the blocks of a layer's output, by its number of axes; for other numbers it is features."""


def plan_report(
    chosen: Candidate,
    *,
    compared: Sequence[Candidate],
    recommendation: str,
    machine: Machine,
    command: Sequence[str],
) -> bytes:
    """Return the report of a plan and of the compared plans, as indented JSON."""
    network, conditions, times, found = chosen.network, chosen.conditions, chosen.times, chosen.prediction
    report = {
        "schema": SCHEMA,
        "command": command,
        "model": {
            "name": network.spec.name,
            "input_shape": network.input_shape,
            "parameters": network.num_parameters,
            "multiply_adds": network.multiply_adds,
            "dtype": str(network.dtype),
            "kernels": network.kernels,
        },
        "machine": {
            "processor": machine.processor,
            "cores": conditions.cores,
            "l2_kb": machine.l2_kb,
            "l3_kb": machine.l3_kb,
            "own": conditions.own_machines,
        },
        "link": conditions.link,
        "times": {"images": times.images, "measured": times.measured, "seconds": dict(times.seconds)},
        "servers": conditions.servers,
        "partitions": chosen.plan.workers,
        "images_per_group": chosen.images,
        "plan": chosen.plan.to_dict(),
        "workers": list(_workers(chosen, machine)),
        "cuts": list(_cuts(chosen)),
        "prediction": {
            "images_per_s": found.images_per_s,
            "bound": found.slowest,
            "bounds": found.bounds,
            "threads": chosen.threads,
            "in_flight": found.in_flight,
            "chain": found.chain,
            "chain_s": found.chain_s,
            "needed_in_flight": found.needed_in_flight,
        },
        "whole": kept_whole(chosen.plan),
        "recomputed": recomputed(chosen),
        "candidates": [{**_candidate(each), "chosen": each is chosen} for each in compared],
        "recommendation": recommendation,
    }
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def _workers(chosen: Candidate, machine: Machine) -> Iterator[dict[str, Any]]:
    seconds = worker_seconds(chosen.parts[0].layout, chosen.times)
    for part, protocols, working_set in zip(chosen.parts, chosen.protocols, chosen.working_sets, strict=True):
        trained = part.network.trained
        shapes = {parameter.name: parameter.shape for parameter in trained}
        yield {
            "worker": part.worker,
            "layers": list(_blocks(chosen, part.worker)),
            "held": part.network.num_parameters,
            "pushed": sum(parameter.size for parameter in trained if parameter.name in part.owned),
            "working_set": working_set.total,
            "fits": working_set.fits(l2_kb=machine.l2_kb, l3_kb=machine.l3_kb),
            "compute_s": seconds[part.worker],
            "pushed_bytes": chosen.pushed_bytes(part.worker),
            "pulled_bytes": chosen.pulled_bytes(part.worker),
            "protocols": [_protocol(row, shapes[row.tensor]) for row in protocols],
        }


def _protocol(row: ProtocolChoice, shape: Sequence[int]) -> dict[str, Any]:
    return {
        "tensor": row.tensor,
        "shape": shape,
        "delta_bytes": row.delta_bytes,
        "factor_bytes": row.factor_bytes,
        "chosen": row.chosen,
    }


def _blocks(chosen: Candidate, worker: int) -> Iterator[dict[str, Any]]:
    layout, again = chosen.parts[worker].layout, recomputed(chosen)
    for number, layer in enumerate(chosen.network.layers):
        rows = layout.computes[number][worker]
        if rows:
            yield {
                "layer": layer.name,
                "kind": layer.spec.kind,
                "unit": UNITS.get(len(layer.output_shape), "features"),
                "first": rows.start,
                "stop": rows.stop,
                "of": extent(layer.output_shape),
                "recomputed": layer.name in again,
            }


def _cuts(chosen: Candidate) -> Iterator[dict[str, Any]]:
    crossings = chosen.parts[0].layout.crossings
    for source, target in sorted({(c.source, c.target) for c in crossings}):
        way = [c for c in crossings if (c.source, c.target) == (source, target)]
        numbers = {c.number for c in way}
        of_segments = sum(bool(numbers & set(s.sends)) for s in chosen.parts[source].segments)
        activations, errors, gradients = (
            _traffic(chosen, [c for c in way if c.kind == kind])
            for kind in ("activation", "error", "gradient")
        )
        yield {
            "source": source,
            "target": target,
            "messages": of_segments + gradients["tensors"],
            "bytes": activations["bytes"] + errors["bytes"] + gradients["bytes"],
            "activations": activations,
            "errors": errors,
            "gradients": gradients,
        }


def _traffic(chosen: Candidate, crossings: Sequence[Crossing]) -> dict[str, int]:
    item_bytes = chosen.network.dtype.itemsize
    size = sum(crossing_bytes(crossing, chosen.images, item_bytes) for crossing in crossings)
    return {"tensors": len(crossings), "bytes": size}


def _candidate(each: Candidate) -> dict[str, Any]:
    return {
        "partitions": each.plan.workers,
        "plan": each.plan.kind,
        "images_per_group": each.images,
        "threads": each.threads,
        "images_per_s": each.prediction.images_per_s,
        "bound": str(each.prediction.slowest),
        "slowest": each.prediction.slowest,
        "crossing_bytes": each.crossing_bytes,
        "chain": each.prediction.chain,
        "needed_in_flight": each.prediction.needed_in_flight,
    }
