"""Gain of a second compute thread: the bare kernels, and training through the whole system.

    OPENBLAS_NUM_THREADS=1 python -m benchmarks.scaling --json scaling.json [--groups 64 16] [--rounds 5]

Rows: case, ours (images per second of two threads), peer (of one thread), ratio (median over rounds of two /
one), unit. The bare kernels train weights of their own in each thread. Two processes of one thread each are
the control. A rate that they cannot reach either is a limit of the machine, memory or clock rate, and not of
an interpreter's lock. Training is one epoch of the available data with every role in one process, whose event
loop needs a share of the same cores. All cases take turns, round by round.
"""

import os

# Before NumPy loads: threads are ours.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from adam_async.model import Sgd
from adam_async.runtime.kernel_cache import use_kernel_cache
from adam_async.runtime.machine import processor_name
from benchmarks.kernels import Case, measure
from benchmarks.training import train


def bare(model: str, group: int, momentum: float, kernels: str, threads: int, seconds: float) -> float:
    """Images per second of the bare kernels, all threads together."""
    rule = Sgd(momentum=momentum)
    case = Case(model=model, threads=threads, group=group, rule=rule, kernels=kernels)
    return measure(case, seconds, None)


def processes(model: str, group: int, momentum: float, kernels: str, seconds: float) -> float:
    """Images per second of two processes of one thread each, together."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.json" for number in range(2)]
        command = [sys.executable, "-m", "benchmarks.kernels", "--model", model, "--groups", str(group)]
        command += ["--threads", "1", "--momentum", str(momentum), "--kernels", kernels]
        # One rate each, of the middle one of three repeats, during which both certainly run.
        command += ["--repeats", "3", "--seconds", str(seconds)]
        running = [
            subprocess.Popen([*command, "--json", str(file)], stdout=subprocess.DEVNULL) for file in files
        ]
        for process in running:
            if process.wait(timeout=600):
                raise RuntimeError(f"{command} ended with {process.returncode}")
        return sum(float(json.loads(file.read_text())["rows"][0]["ours"]) for file in files)


def training(model: str, group: int, momentum: float, kernels: str, threads: int, pin: bool) -> float:
    """Images per second of a run of one epoch."""
    options = ["--model", model, "--images-per-group", str(group), "--momentum", str(momentum)]
    options += ["--kernels", kernels, "--threads", str(threads)]
    report = train([*options, "--pin-threads"] if pin else options)
    return float(report["totals"]["images_per_s"])


def cases(options: argparse.Namespace) -> dict[str, tuple[Callable[[], float], Callable[[], float]]]:
    """Functions by name that return the rate of two and of one."""
    found: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {}
    for group in options.groups:
        for momentum in options.momentum:
            run = (options.model, group, momentum, options.kernels)
            suffix = f", {options.model}, group {group}" + (f", momentum {momentum}" if momentum else "")
            suffix += f", {options.kernels}"
            one = partial(bare, *run, 1, options.seconds)
            found[f"bare kernels{suffix}: 2 threads / 1"] = (partial(bare, *run, 2, options.seconds), one)
            control = partial(processes, *run, options.seconds)
            found[f"bare kernels{suffix}: 2 processes / 1 thread"] = (control, one)
            for how, pin in (("training", False), ("training, pinned", True)):
                found[f"{how}{suffix}: 2 threads / 1"] = (
                    partial(training, *run, 2, pin),
                    partial(training, *run, 1, pin),
                )
    return found


def main() -> None:
    """Run the benchmark, print the rows, write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the rows, as JSON")
    parser.add_argument("--model", default="mnist-adam")
    parser.add_argument("--groups", type=int, nargs="+", default=[64])
    parser.add_argument("--momentum", type=float, nargs="+", default=[0.0])
    parser.add_argument("--kernels", choices=["numpy", "numba"])
    parser.add_argument("--only", default="", help="cases whose names begin with this text")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="seconds per case of bare kernels and round"
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    use_kernel_cache()
    options.kernels = options.kernels or ("numba" if find_spec("numba") else "numpy")
    chosen = {name: pair for name, pair in cases(options).items() if name.startswith(options.only)}
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen}
    for _ in range(options.rounds):
        for name, (two, one) in chosen.items():
            rates[name].append((two(), one()))
    rows = [
        {
            "case": name,
            "ours": round(statistics.median(two for two, _ in found)),
            "peer": round(statistics.median(one for _, one in found)),
            "ratio": round(statistics.median(two / one for two, one in found), 3),
            "unit": "images/s",
        }
        for name, found in rates.items()
    ]
    for row in rows:
        print(f"{row['case']:80s} {row['ours']:8d} {row['peer']:8d} {row['ratio']:7.3f}")
    if options.json:
        report = {
            "benchmark": "scaling",
            "machine": {"cpus": os.cpu_count(), "processor": processor_name()},
            "versions": {"python": platform.python_version(), "numpy": np.__version__},
            "rows": rows,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
