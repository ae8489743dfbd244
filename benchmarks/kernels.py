"""The bare kernel loop: forward, backward, all gradients and the rule, on its own weights.

    OPENBLAS_NUM_THREADS=1 python -m benchmarks.kernels --json kernels.json [--peer earlier.json]
    ... --kernels numpy numba --torch PYTHON     both sets, and PyTorch of that interpreter, in turn
    ... --busy                                   together with a thread as busy as an event loop
    ... --layers                                 layer by layer instead: microseconds per group

Rows: case, ours (images per second, all threads together), peer, ratio, unit, share. A peer is the same row
of an earlier run's file, or of any file with such rows; without a peer, its column and the ratio are null.
Cases run in turn, several times over, and the median counts, because the speed of shared machines changes.
`share` compares the operations of training with those of the BLAS in products of 512 x 512, on as many
threads in the same turn.

    ADAM_VECTORS=avx2 OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 ...
                                                 on a machine with AVX-512, as if it had none

Every thread trains its own copy of the weights, like worker replicas without a server. PyTorch gets a process
per thread instead, each with one thread, as in its Hogwild example.
"""

import os

# Before NumPy loads, because the benchmark has its own threads, and a BLAS with two threads is slower than
# with one.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import asyncio
import json
import platform
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adam_async.model import InPlaceStep, Network, Rule, Sgd, named_model, new_rule_state
from adam_async.model.keyed_random import Dice
from adam_async.report.baseline import measure_sgemm
from adam_async.runtime.kernel_cache import use_kernel_cache
from benchmarks.kernels_layers import layer_rows

RATE = 0.01
POOL_IMAGES = 1024
"""Number of distinct images in a thread's cycle: too many for the cache, as in training."""
BURST_S = 100e-6
"""Seconds for which the busy thread holds the interpreter's lock, and for which it then sleeps."""
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the result."""

    model: str
    threads: int
    group: int
    rule: Rule
    kernels: str = "numpy"
    busy: bool = False

    @property
    def name(self) -> str:
        momentum = (
            f", momentum {self.rule.momentum}" if isinstance(self.rule, Sgd) and self.rule.momentum else ""
        )
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        kernels = "" if self.kernels == "numpy" else f", {self.kernels}"
        busy = ", beside a busy loop" if self.busy else ""
        return f"{self.model}, {threads}, group {self.group}, {self.rule.name}{momentum}{kernels}{busy}"


class Loop(threading.Thread):
    """One thread that trains until its time is over."""

    def __init__(self, case: Case, number: int, start_line: threading.Barrier, seconds: float) -> None:
        super().__init__(name=f"kernels-{number}")
        self._case, self._start_line, self._seconds = case, start_line, seconds
        self._network = Network(named_model(case.model), kernels=case.kernels)
        dice = Dice(number)
        self._weights = self._network.initial_weights(dice)
        self._state = new_rule_state(self._network, case.rule)
        self._context = self._network.context(case.group)
        self._step = InPlaceStep(self._network, case.rule)
        self._scratch = self._step.new_scratch()
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
            self._step.train(self._weights, self._state, self._context, self._scratch, rate=RATE)

    def run(self) -> None:
        """Warm up, wait for the others, train for the given time."""
        self._train(10)
        self._start_line.wait(timeout=60.0)
        groups, began = 0, time.perf_counter()
        while (spent := time.perf_counter() - began) < self._seconds:
            self._train(10)
            groups += 10
        self.images_per_s = groups * self._case.group / spent


class Busy(threading.Thread):
    """Holds the interpreter's lock in bursts, like an event loop with many short callbacks."""

    def __init__(self) -> None:
        super().__init__(name="busy")
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(BURST_S):
            end = time.perf_counter() + BURST_S
            while time.perf_counter() < end:
                pass

    def close(self) -> None:
        self._ended.set()
        self.join()


def measure(case: Case, seconds: float, torch: str | None) -> float:
    """Images per second of one run of a case, all threads together."""
    if case.kernels == "torch":
        return measure_torch(case, seconds, torch)
    start_line = threading.Barrier(case.threads)
    loops = [Loop(case, number, start_line, seconds) for number in range(case.threads)]
    busy = Busy() if case.busy else None
    if busy:
        busy.start()
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join()
    if busy:
        busy.close()
    return sum(loop.images_per_s for loop in loops)


def measure_torch(case: Case, seconds: float, torch: str | None) -> float:
    """Images per second of PyTorch, one process per thread."""
    assert torch is not None
    assert isinstance(case.rule, Sgd)
    spec = json.dumps(named_model(case.model).to_dict())
    command = [torch, "-m", "benchmarks.kernels_torch", "--group", str(case.group), "--seconds", str(seconds)]
    command += ["--momentum", str(case.rule.momentum)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for _ in range(case.threads)
    ]
    for process in processes:  # each reports ready, then all begin
        assert process.stdin is not None
        process.stdin.write(spec + "\n")
        process.stdin.flush()
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    found = [process.communicate("\n")[0] for process in processes]
    return sum(float(json.loads(text)["images_per_s"]) for text in found)


def rows(
    cases: list[Case], *, repeats: int, seconds: float, peer: dict[str, float], torch: str | None
) -> list[dict[str, Any]]:
    """Run all cases `repeats` times over and return each one's median."""
    found: dict[str, list[float]] = {case.name: [] for case in cases}
    shares: dict[str, list[float]] = {case.name: [] for case in cases}
    for _ in range(repeats):
        sgemm = {threads: asyncio.run(measure_sgemm(threads)) for threads in {case.threads for case in cases}}
        for case in cases:
            found[case.name].append(measure(case, seconds, torch))
            operations = Network(named_model(case.model)).operations * found[case.name][-1]
            shares[case.name].append(operations / sgemm[case.threads])
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
                "share": round(statistics.median(shares[name]), 3),
                "spread": [round(min(values), 1), round(max(values), 1)],
            }
        )
    return result


def main() -> None:
    """Run the benchmark, print the rows, write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="file for the rows, as JSON")
    parser.add_argument("--peer", type=Path, help="a file with rows to compare with")
    parser.add_argument("--model", default="mnist-adam")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--momentum", type=float, nargs="+", default=[0.0, 0.9])
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds per case and repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kernels", nargs="+", default=["numpy"], choices=["numpy", "numba"])
    parser.add_argument("--torch", help="a Python interpreter that has PyTorch")
    parser.add_argument("--busy", action="store_true", help="together with a thread as busy as an event loop")
    parser.add_argument("--layers", action="store_true", help="measure layer by layer")
    options = parser.parse_args()
    use_kernel_cache()
    kernels = options.kernels + (["torch"] if options.torch else [])
    cases = [
        Case(
            model=options.model,
            threads=threads,
            group=group,
            rule=Sgd(momentum=momentum),
            kernels=chosen,
            busy=options.busy and chosen != "torch",
        )
        for momentum in options.momentum
        for group in options.groups
        for threads in options.threads
        for chosen in kernels
    ]
    peer = {}
    if options.peer:
        peer = {row["case"]: row["ours"] for row in json.loads(options.peer.read_text())["rows"]}
    if options.layers:
        found = layer_rows(
            options.model, options.groups, kernels, options.torch, repeats=options.repeats, peer=peer
        )
    else:
        found = rows(cases, repeats=options.repeats, seconds=options.seconds, peer=peer, torch=options.torch)
    for row in found:
        share = f"{row['share']:.2f} of sgemm" if "share" in row else ""
        print(f"{row['case']:60s} {row['ours']:10.1f} {row['unit']}  {row['ratio'] or ''}  {share}")
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
