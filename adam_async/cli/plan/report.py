"""Pure: the JSON report of `adam-async plan`; docs/reference/plan.md explains its fields."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from adam_async.cli.plan.choice import Candidate, kept_whole, recomputed
from adam_async.model.layer import extent
from adam_async.model.partition.plan import Crossing
from adam_async.model.partition.planner import crossing_bytes, worker_seconds
from adam_async.run.counts import ProtocolChoice
from adam_async.runtime.machine import Machine

SCHEMA = "adam-async/plan/1"
"""Name and version of the schema. The version grows when a field changes its meaning or is removed."""

UNITS = {3: "rows", 0: "loss"}
"""Unit of the blocks of a layer's output, by the number of axes of the output; the unit is features for other
numbers of axes."""


def plan_report(
    chosen: Candidate,
    *,
    compared: Sequence[Candidate],
    recommendation: str,
    machine: Machine,
    command: Sequence[str],
) -> bytes:
    """Return the report of a plan, and of the compared plans, as indented JSON."""
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
