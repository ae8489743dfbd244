"""Training `mnist-adam` in one process beside PyTorch's modes, at several group sizes and momenta.

    ADAM_DATA_DIR=DIR python -m benchmarks.pytorch --torch 'PYTHON torch_mnist.py --data DIR' --json FILE

The peer is a command that takes ``--mode --batch --momentum --images`` and prints JSON with
``images_per_second``. Both sides use two compute threads, float32, and the same network, rule and group size.
"""

from argparse import Namespace
from collections.abc import Iterator
from itertools import product
from typing import Any

from adam_async import Config, LocalCluster
from benchmarks.harness import Option, Row, apart, compared, printed, run, turns
from benchmarks.images import mnist

IMAGES = {1: 6000, 16: 48_000, 64: 60_000, 256: 60_000}
"""Number of images of one run of the peer, by group size, for runs of some seconds."""

WAYS = {"copy": "through the servers", "aliased": "in place"}


async def ours(options: dict[str, Any]) -> dict[str, float]:
    """Return the images per second of one run, and its accuracy."""
    config = Config(model="mnist-adam", schedule="constant", kernels="numba", **options)
    async with LocalCluster(config, dataset=await mnist()) as cluster:
        result = await cluster.train()
    seconds = sum(epoch.train_s for epoch in result.epochs)
    images = sum(epoch.images for epoch in result.epochs)
    return {"images_per_second": images / seconds, "reached": result.test_accuracy}


def peer(command: str, **options: Any) -> dict[str, Any]:
    """One run of the peer."""
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return printed(command, *words)[-1]


def measure(options: Namespace) -> Iterator[Row]:
    """Yield a row for each group size, momentum and mode."""
    for group, momentum in product(options.groups, options.momentum):
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in ("ours", *options.modes)}
        mine = {"images_per_group": group, "momentum": momentum, "weights": options.weights}
        mine["epochs"] = 1 if group == 1 else 3
        theirs = {"batch": group, "momentum": momentum, "images": IMAGES.get(group, 24_000)}
        for side in turns(found, options.rounds):
            found[side].append(
                apart(ours, mine) if side == "ours" else peer(options.torch, mode=side, **theirs)
            )
        values = {side: [run["images_per_second"] for run in runs] for side, runs in found.items()}
        for mode in options.modes:
            way, accuracy = WAYS[options.weights], found["ours"][-1]["reached"]
            case = f"{group} images per group, {way}, momentum {momentum:g}, beside PyTorch {mode}"
            yield compared(case, values["ours"], values[mode], "images/s", accuracy=accuracy)


if __name__ == "__main__":
    run(
        __doc__,
        measure,
        torch=Option("", "command of the peer"),
        groups=Option([1, 16, 64, 256], "images per group"),
        momentum=[0.0, 0.9],
        modes=["hogwild", "ddp", "single"],
        weights=Option("aliased", "in place, or through the servers", choices=list(WAYS)),
        rounds=3,
    )
