"""The bare kernel loop: forward, backward, all gradients and the rule, on weights of its own.

    OPENBLAS_NUM_THREADS=1 python -m benchmarks.kernels --json kernels.json [--peer torch.json]

Rows: case, ours (images per second, all threads together), peer, ratio, unit. A peer is the same row of an
earlier run's file, or of any file with such rows; without one, peer and ratio are null. Cases are run in
turn, several times over, and the median is kept, because shared machines drift.

Every thread trains its own copy of the weights, as worker replicas without a server would.
"""

import os

# Before NumPy loads: threads are ours, and a BLAS with two of its own is slower than with one.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import json
import platform
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adam_async.dice import Dice
from adam_async.model import Network, Rule, Sgd, StepBuffers, named_model, new_rule_state, train_step

RATE = 0.01
POOL_IMAGES = 1024
"""Distinct images that a thread goes round in: enough not to stay in the cache, as in training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the result."""

    model: str
    threads: int
    group: int
    rule: Rule

    @property
    def name(self) -> str:
        momentum = (
            f", momentum {self.rule.momentum}" if isinstance(self.rule, Sgd) and self.rule.momentum else ""
        )
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{self.model}, {threads}, group {self.group}, {self.rule.name}{momentum}"


class Loop(threading.Thread):
    """One thread that trains until its time is over."""

    def __init__(self, case: Case, number: int, start_line: threading.Barrier, seconds: float) -> None:
        super().__init__(name=f"kernels-{number}")
        self._case, self._start_line, self._seconds = case, start_line, seconds
        self._network = Network(named_model(case.model))
        dice = Dice(number)
        self._weights = self._network.initial_weights(dice)
        self._state = new_rule_state(self._network, case.rule)
        self._context = self._network.context(case.group)
        self._buffers = StepBuffers.of(self._network)
        shape = (POOL_IMAGES, *self._network.spec.input_shape)
        drawn = dice.bits("images", count=int(np.prod(shape)))
        self._images = (drawn >> np.uint64(56)).astype(np.uint8).reshape(shape)
        self._labels = dice.permutation("labels", POOL_IMAGES) % 10
        self.images_per_s = 0.0

    def _train(self, groups: int) -> None:
        for number in range(groups):
            start = number * self._case.group % (POOL_IMAGES - self._case.group + 1)
            stop = start + self._case.group
            self._context.load(self._images[start:stop], self._labels[start:stop])
            train_step(
                self._network,
                self._weights,
                self._state,
                self._context,
                self._buffers,
                self._case.rule,
                rate=RATE,
            )

    def run(self) -> None:
        """Warm up, wait for the others, train for the given time."""
        self._train(10)
        self._start_line.wait(timeout=60.0)
        groups, began = 0, time.perf_counter()
        while (spent := time.perf_counter() - began) < self._seconds:
            self._train(10)
            groups += 10
        self.images_per_s = groups * self._case.group / spent


def measure(case: Case, seconds: float) -> float:
    """Images per second of one run of a case, all threads together."""
    start_line = threading.Barrier(case.threads)
    loops = [Loop(case, number, start_line, seconds) for number in range(case.threads)]
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join()
    return sum(loop.images_per_s for loop in loops)


def rows(cases: list[Case], *, repeats: int, seconds: float, peer: dict[str, float]) -> list[dict[str, Any]]:
    """Run all cases `repeats` times over and keep each one's median."""
    found: dict[str, list[float]] = {case.name: [] for case in cases}
    for _ in range(repeats):
        for case in cases:
            found[case.name].append(measure(case, seconds))
    result = []
    for name, values in found.items():
        ours, other = statistics.median(values), peer.get(name)
        result.append(
            {
                "case": name,
                "ours": round(ours, 1),
                "peer": other,
                "ratio": round(ours / other, 3) if other else None,
                "unit": "images/s",
                "spread": [round(min(values), 1), round(max(values), 1)],
            }
        )
    return result


def main() -> None:
    """Run the benchmark, print the rows, write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--peer", type=Path, help="a file with rows to compare with")
    parser.add_argument("--model", default="mnist-adam")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--momentum", type=float, nargs="+", default=[0.0, 0.9])
    parser.add_argument("--seconds", type=float, default=1.0, help="per case and repeat")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    cases = [
        Case(model=options.model, threads=threads, group=group, rule=Sgd(momentum=momentum))
        for momentum in options.momentum
        for group in options.groups
        for threads in options.threads
    ]
    peer = {}
    if options.peer:
        peer = {row["case"]: row["ours"] for row in json.loads(options.peer.read_text())["rows"]}
    found = rows(cases, repeats=options.repeats, seconds=options.seconds, peer=peer)
    for row in found:
        print(f"{row['case']:50s} {row['ours']:10.0f} {row['unit']}  {row['ratio'] or ''}")
    if options.json:
        report = {
            "benchmark": "kernels",
            "machine": {
                "cpus": os.cpu_count(),
                "platform": platform.platform(),
                "processor": platform.processor(),
            },
            "versions": {"python": platform.python_version(), "numpy": np.__version__},
            "blas_threads": os.environ["OPENBLAS_NUM_THREADS"],
            "rows": found,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
