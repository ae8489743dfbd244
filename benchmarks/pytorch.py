"""Training `mnist-adam` in one process against PyTorch's modes, at several group sizes and momenta.

    ADAM_DATA_DIR=DIR python -m benchmarks.pytorch --torch 'PYTHON torch_mnist.py --data DIR' --json FILE
    ... --to-accuracy 0.99 --seeds 5 --rate 0.06 --torch-rate 0.05

The peer is a command that takes ``--mode --batch --momentum --images --lr --seed --to-accuracy`` and prints
JSON with ``images_per_second``, or ``seconds`` and ``reached``. Both sides use two compute threads, float32,
and the same network, rule and group size; they alternate for `--rounds` rounds, and medians are compared.
Rows: case, ours and peer, ratio (above 1 ours is better), unit; for accuracies all seconds of all seeds.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import asyncio
import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import uvloop

from adam_async import Config, Disk, LocalCluster, load_dataset
from adam_async.runtime.kernel_cache import use_kernel_cache

IMAGES = {1: 6000, 16: 48_000, 64: 60_000, 256: 60_000}
"""Number of images of one run of the peer, by group size, for runs of some seconds."""


async def ours_once(options: dict[str, Any]) -> dict[str, float]:
    """One run in this process: images per second, or seconds to the accuracy."""
    async with Disk() as disk:
        dataset = await load_dataset(os.environ["ADAM_DATA_DIR"], disk)
    async with LocalCluster(
        Config(model="mnist-adam", schedule="constant", kernels="numba", **options), dataset=dataset
    ) as cluster:
        result = await cluster.train()
    seconds = sum(epoch.train_s for epoch in result.epochs)
    images = sum(epoch.images for epoch in result.epochs)
    return {
        "images_per_second": images / seconds,
        "seconds": seconds,
        "reached": result.test_accuracy,
        "epochs": len(result.epochs),
    }


def ours(**options: Any) -> dict[str, float]:
    """The same run in a separate process, like the peer's."""
    command = [sys.executable, "-m", "benchmarks.pytorch", "--ours", json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def peer(command: str, **options: Any) -> dict[str, float]:
    """One run of the peer."""
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    done = subprocess.run([*shlex.split(command), *words], capture_output=True, text=True, timeout=900)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not rows:
        raise SystemExit(f"the peer printed no rows: {done.stderr[-500:]}")
    found: dict[str, float] = rows[-1]
    return found


def rates(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Images per second, for each group size, momentum and mode."""
    rows = []
    for group in arguments.groups:
        for momentum in arguments.momentum:
            mine: list[float] = []
            theirs: dict[str, list[float]] = {mode: [] for mode in arguments.modes}
            for _ in range(arguments.rounds):
                epochs = 1 if group == 1 else 3
                run = ours(
                    images_per_group=group, momentum=momentum, epochs=epochs, weights=arguments.weights
                )
                mine.append(run["images_per_second"])
                for mode, found in theirs.items():
                    options = {"batch": group, "momentum": momentum, "images": IMAGES.get(group, 24_000)}
                    found.append(peer(arguments.torch, mode=mode, **options)["images_per_second"])
            for mode, found in theirs.items():
                rate, other = statistics.median(mine), statistics.median(found)
                way = {"copy": "through the servers", "aliased": "in place"}[arguments.weights]
                case = f"{group} images per group, {way}, momentum {momentum:g}, beside PyTorch {mode}"
                rows.append(row(case, rate, other, rate / other, "images/s", accuracy=run["reached"]))
                print(json.dumps(rows[-1]), flush=True)
    return rows


def accuracies(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of training until the test accuracy is reached, for several seeds, 16 images per group."""
    mine, theirs = [], []
    for seed in range(arguments.seeds):
        run = ours(seed=seed, rate=arguments.rate, epochs=40, until_accuracy=arguments.to_accuracy)
        mine.append(run["seconds"])
        other = peer(
            arguments.torch,
            mode="hogwild",
            batch=16,
            momentum=0,
            lr=arguments.torch_rate,
            seed=seed,
            to_accuracy=arguments.to_accuracy,
        )
        theirs.append(other["seconds"])
        print(json.dumps({"seed": seed, "ours": run, "peer": other}), flush=True)
    our_s, their_s = statistics.median(mine), statistics.median(theirs)
    case = f"seconds to {arguments.to_accuracy:.1%}, 16 images per group, beside PyTorch hogwild"
    more = {"rate": arguments.rate, "peer_rate": arguments.torch_rate, "all_ours": mine, "all_peer": theirs}
    return [row(case, our_s, their_s, their_s / our_s, "s", **more)]


def row(case: str, ours: float, peer: float, ratio: float, unit: str, **more: Any) -> dict[str, Any]:
    """One row of the result."""
    digits = 0 if unit == "images/s" else 2
    return {
        "case": case,
        "ours": round(ours, digits),
        "peer": round(peer, digits),
        "ratio": round(ratio, 2),
        "unit": unit,
        **more,
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ours", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--torch", help="command of the peer")
    parser.add_argument("--json", type=Path, help="file for the rows, as JSON")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--momentum", type=float, nargs="+", default=[0.0, 0.9])
    parser.add_argument("--modes", nargs="+", default=["hogwild", "ddp", "single"])
    parser.add_argument(
        "--weights",
        choices=("aliased", "copy"),
        default="aliased",
        help="train in place, without a parameter server, or through the servers",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--to-accuracy", type=float, default=0.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=0.06)
    parser.add_argument("--torch-rate", type=float, default=0.05)
    arguments = parser.parse_args()
    use_kernel_cache()
    if arguments.ours is not None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            print(json.dumps(runner.run(ours_once(arguments.ours))))
        return
    rows = accuracies(arguments) if arguments.to_accuracy else rates(arguments)
    for each in rows:
        print(json.dumps(each))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
