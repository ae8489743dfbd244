"""Networks against PyTorch's Hogwild, variants of PyTorch, and specs of other shapes against `mnist-adam`.

    OPENBLAS_NUM_THREADS=1 python -m benchmarks.networks --json networks.json --torch PYTHON

Three questions, with compiled kernels, plain SGD and two threads:

    networks   images per second of `cifar-conv` and of an MLP 784-2048-2048-10, all threads sharing one set
               of weights; the peer is PyTorch's Hogwild: processes of one thread each with shared weights
    variants   the same of `mnist-adam`, with PyTorch plain, channels_last and torch.compile
    shapes     multiply-adds per second (forward, of all trained images) of the MNIST network under another
               name, from TOML, and with 12 and 24 maps, each thread with its own weights; the peer is
               `mnist-adam` itself

Rows: case, ours, peer, ratio, unit, spread. Both sides of a row run in turn, several times over; ours and
peer are medians, and the ratio is the median of the rounds' ratios, because the speed of shared machines
changes.
"""

import os

# Before NumPy loads, because the benchmark has its own threads, and a BLAS with two threads is slower than
# with one.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import dataclasses
import json
import platform
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from adam_async.model import (
    InPlaceStep,
    ModelSpec,
    Network,
    RuleState,
    Sgd,
    mlp,
    named_model,
    new_rule_state,
)
from adam_async.model.keyed_random import Dice
from adam_async.runtime.kernel_cache import use_kernel_cache

ROOT = Path(__file__).resolve().parents[1]
RATE = 0.01
POOL_IMAGES = 1024
"""Number of distinct images in a thread's cycle: too many for the cache, as in training."""
WARM_UP_GROUPS = 5
RULE = Sgd()

MAPS_TOML = """
name = "{name}"
input = [1, 28, 28]
layers = [
    {{ kind = "conv2d", name = "first", filters = {first}, kernel = 5 }},
    {{ kind = "relu", name = "r1" }},
    {{ kind = "max_pool", name = "p1", kernel = 2 }},
    {{ kind = "conv2d", name = "second", filters = {second}, kernel = 5 }},
    {{ kind = "relu", name = "r2" }},
    {{ kind = "max_pool", name = "p2", kernel = 2 }},
    {{ kind = "flatten", name = "row" }},
    {{ kind = "dense", name = "d1", outputs = 400 }},
    {{ kind = "relu", name = "r3" }},
    {{ kind = "dense", name = "d2", outputs = 400 }},
    {{ kind = "relu", name = "r4" }},
    {{ kind = "dense", name = "d3", outputs = 10, init = "lecun" }},
    {{ kind = "softmax_cross_entropy", name = "loss" }},
]
"""


def with_maps(name: str, first: int, second: int) -> ModelSpec:
    """The MNIST network with other numbers of maps, read from TOML like a user's."""
    return ModelSpec.from_toml(MAPS_TOML.format(name=name, first=first, second=second))


class Weights:
    """Values and rule state of one network, for one or several threads."""

    def __init__(self, network: Network, seed: int) -> None:
        self.values = network.initial_weights(Dice(seed))
        self.state: Mapping[str, RuleState] = new_rule_state(network, RULE)


class Trainer(threading.Thread):
    """Trains until its time is over."""

    def __init__(
        self, network: Network, weights: Weights, group: int, start_line: threading.Barrier, seconds: float
    ) -> None:
        super().__init__(name="trainer")
        self._weights, self._group, self._start_line, self._seconds = weights, group, start_line, seconds
        self._context = network.context(group)
        self._step = InPlaceStep(network, RULE)
        self._scratch = self._step.new_scratch()
        shape = (POOL_IMAGES, *network.spec.input_shape)
        drawn = Dice(1).bits("images", count=int(np.prod(shape)))
        self._images = (drawn >> np.uint64(56)).astype(np.uint8).reshape(shape)
        self._labels = Dice(1).permutation("labels", POOL_IMAGES) % 10
        self.images_per_s = 0.0

    def _train(self, number: int) -> None:
        start = number * self._group % (POOL_IMAGES - self._group + 1)
        stop = start + self._group
        self._context.load(self._images[start:stop], self._labels[start:stop])
        self._step.train(self._weights.values, self._weights.state, self._context, self._scratch, rate=RATE)

    def run(self) -> None:
        """Warm up, wait for the others, train for the given time."""
        for number in range(WARM_UP_GROUPS):
            self._train(number)
        self._start_line.wait(timeout=60.0)
        groups, began = 0, time.perf_counter()
        while (spent := time.perf_counter() - began) < self._seconds:
            self._train(groups)
            groups += 1
        self.images_per_s = groups * self._group / spent


def ours(spec: ModelSpec, group: int, *, threads: int, seconds: float, shared: bool) -> float:
    """Images per second of all threads together."""
    network = Network(spec, kernels="numba")
    network.warm_up()
    start_line = threading.Barrier(threads)
    common = Weights(network, 1) if shared else None
    trainers = [
        Trainer(network, common or Weights(network, number), group, start_line, seconds)
        for number in range(threads)
    ]
    for trainer in trainers:
        trainer.start()
    for trainer in trainers:
        trainer.join()
    return sum(trainer.images_per_s for trainer in trainers)


def torchs(
    spec: ModelSpec, group: int, *, python: str, processes: int, seconds: float, variant: str = "plain"
) -> float:
    """Images per second of PyTorch's Hogwild, all processes together."""
    command = [python, "-m", "benchmarks.networks_torch", "--group", str(group)]
    command += ["--processes", str(processes), "--seconds", str(seconds), "--variant", variant]
    text = json.dumps(spec.to_dict())
    found = subprocess.run(command, input=text, cwd=ROOT, capture_output=True, text=True, check=True)
    return float(json.loads(found.stdout)["images_per_s"])


def row(
    case: str, unit: str, sides: tuple[Callable[[], float], Callable[[], float] | None], repeats: int
) -> dict[str, Any]:
    """Run both sides in turn; without a peer, its columns are null."""
    mine, other = sides
    turns = [(mine(), other() if other else None) for _ in range(repeats)]
    values = [value for value, _ in turns]
    peers = [peer for _, peer in turns if peer is not None]
    ratios = [value / peer for value, peer in turns if peer is not None]
    found = {
        "case": case,
        "ours": round(statistics.median(values), 1),
        "peer": round(statistics.median(peers), 1) if peers else None,
        "ratio": round(statistics.median(ratios), 3) if ratios else None,
        "unit": unit,
        "spread": [round(min(values), 1), round(max(values), 1)],
    }
    print(f"{found['case']:58s} {found['ours']:12.1f} {found['unit']}  {found['ratio'] or ''}", flush=True)
    return found


def network_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Both networks at each group size, with PyTorch if available."""
    specs = (named_model("cifar-conv"), mlp((784, 2048, 2048, 10), name="mlp 784-2048-2048-10"))
    found = []
    for spec in specs:
        for group in options.groups:

            def mine(spec: ModelSpec = spec, group: int = group) -> float:
                return ours(spec, group, threads=options.threads, seconds=options.seconds, shared=True)

            def peer(spec: ModelSpec = spec, group: int = group) -> float:
                return torchs(
                    spec, group, python=options.torch, processes=options.threads, seconds=options.seconds
                )

            case = f"{spec.name}, {options.threads} threads, group {group}, weights shared"
            found.append(row(case, "images/s", (mine, peer if options.torch else None), options.repeats))
    return found


def variant_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """`mnist-adam` against each of PyTorch's variants."""
    spec, found = named_model("mnist-adam"), []
    for group in options.groups:
        for variant in ("plain", "channels_last", "compile"):

            def mine(group: int = group) -> float:
                return ours(spec, group, threads=options.threads, seconds=options.seconds, shared=True)

            def peer(group: int = group, variant: str = variant) -> float:
                return torchs(
                    spec,
                    group,
                    python=options.torch,
                    processes=options.threads,
                    seconds=options.seconds,
                    variant=variant,
                )

            case = f"{spec.name}, {options.threads} threads, group {group}, beside PyTorch {variant}"
            found.append(row(case, "images/s", (mine, peer), options.repeats))
    return found


def shape_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Specs like the MNIST network, against it."""
    specs = (with_maps("of-my-own", 10, 20), with_maps("more-maps", 12, 24))
    found = []
    for spec in specs:
        for group in options.groups:

            def rate(spec: ModelSpec, group: int = group) -> float:
                images = ours(spec, group, threads=options.threads, seconds=options.seconds, shared=False)
                return images * sum(layer.multiply_adds for layer in Network(spec).layers) / 1e6

            def mine(spec: ModelSpec = spec, rate: Callable[[ModelSpec], float] = rate) -> float:
                return rate(spec)

            def peer(rate: Callable[[ModelSpec], float] = rate) -> float:
                return rate(named_model("mnist-adam"))

            case = f"{spec.name}, {options.threads} threads, group {group}, beside mnist-adam"
            found.append(row(case, "M multiply-adds/s", (mine, peer), options.repeats))
    return found


def main() -> None:
    """Run the benchmark, print the rows, write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="file for the rows, as JSON")
    parser.add_argument("--torch", help="a Python interpreter that has PyTorch")
    parser.add_argument("--groups", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.5, help="seconds per side and turn")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    use_kernel_cache()
    found = network_rows(options) + shape_rows(options)
    if options.torch:
        found += variant_rows(options)
    if options.json:
        report = {
            "benchmark": "networks",
            "machine": {
                "cpus": os.cpu_count(),
                "platform": platform.platform(),
                "processor": platform.processor(),
            },
            "versions": {"python": platform.python_version(), "numpy": np.__version__},
            "blas_threads": os.environ["OPENBLAS_NUM_THREADS"],
            "settings": dataclasses.asdict(RULE) | {"repeats": options.repeats, "seconds": options.seconds},
            "rows": found,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
