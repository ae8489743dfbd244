"""Kernels layer by layer: microseconds per group of each layer's forward pass and of its backward pass.

The backward pass has the error gradient of the input, if it is needed, and the gradients of all tensors, in
the form for a parameter server. Sets of kernels are measured in turn, several times over; the median counts.
"""

import json
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from adam_async.model import Context, Network, named_model
from adam_async.model.keyed_random import Dice

ROUND_S = 0.02
"""Length of one measurement of one pass of one layer, in seconds."""
ROOT = Path(__file__).resolve().parents[1]


def microseconds(step: Callable[[], object]) -> float:
    """Time of one step, as the mean of a round."""
    step()
    count, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < ROUND_S:
        step()
        count += 1
    return 1e6 * spent / count


def passes(network: Network, context: Context, weights: dict[str, Any]) -> dict[str, Callable[[], None]]:
    """Each layer's forward pass and backward pass, by name."""
    network.forward(weights, context)
    network.backward(weights, context)
    gradients = {p.name: np.empty(p.shape, network.dtype) for p in network.parameters}

    def forward(number: int) -> None:
        network.forward_layers(weights, context, range(number, number + 1))

    def back(number: int) -> None:
        network.backward_layers(weights, context, range(number, number + 1))
        for parameter in network.layers[number].parameters:
            network.deltas(context, {parameter.name: gradients[parameter.name]})

    found: dict[str, Callable[[], None]] = {}
    for number, layer in enumerate(network.layers):
        found[f"{layer.name} forward"] = partial(forward, number)
        found[f"{layer.name} back"] = partial(back, number)
    return found


def measure(model: str, group: int, kernels: str, torch: str | None) -> dict[str, float]:
    """Microseconds of every pass, by name."""
    if kernels == "torch":
        assert torch is not None
        command = [torch, "-m", "benchmarks.kernels_torch", "--group", str(group), "--layers"]
        spec = json.dumps(named_model(model).to_dict()) + "\n\n"
        told = subprocess.run(
            command, input=spec, capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout
        found: dict[str, float] = json.loads(told.splitlines()[-1])
        return found
    network = Network(named_model(model), kernels=kernels)
    context = network.context(group)
    shape = (group, *network.spec.input_shape)
    context.load(
        Dice(1).normal("images", count=int(np.prod(shape))).reshape(shape),
        Dice(1).permutation("labels", group) % 10,
    )
    weights = network.initial_weights(Dice(1))
    return {name: microseconds(step) for name, step in passes(network, context, weights).items()}


def layer_rows(
    model: str,
    groups: list[int],
    kernels: list[str],
    torch: str | None,
    *,
    repeats: int,
    peer: dict[str, float],
) -> list[dict[str, Any]]:
    """Rows like those of whole networks, but lower is better; the ratio is the peer's time over ours."""
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        for group in groups:
            for chosen in kernels:
                for name, value in measure(model, group, chosen, torch).items():
                    case = f"{model}, {name}, group {group}, {chosen}"
                    found.setdefault(case, []).append(value)
    rows = []
    for case, values in found.items():
        ours, other = statistics.median(values), peer.get(case)
        rows.append(
            {
                "case": case,
                "ours": round(ours, 2),
                "peer": other,
                "ratio": round(other / ours, 3) if other else None,
                "unit": "us/group",
                "spread": [round(min(values), 2), round(max(values), 2)],
            }
        )
    return rows
