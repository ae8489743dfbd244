"""PyTorch's side of `benchmarks.networks`: Hogwild, as in its own example. The script needs only torch.

The script reads a model as JSON. Processes of one thread each train one network in shared memory, without
locks, by plain SGD; the script prints the sum of their images per second. Variants: `channels_last` stores
images and convolution weights with the channels innermost; `compile` makes the kernels by torch.compile.
"""

import argparse
import json
import sys
import time
from typing import Any

import torch
import torch.multiprocessing

from benchmarks.kernels_torch import POOL_IMAGES, RATE, build

WARM_UP_GROUPS = 5


def train(
    network: torch.nn.Module,
    shape: list[int],
    group: int,
    seconds: float,
    variant: str,
    line: Any,
    told: Any,
) -> None:
    """One process: warm up, wait for the others, train for the given time, report images per second."""
    torch.set_num_threads(1)
    rule = torch.optim.SGD(network.parameters(), lr=RATE)
    images = torch.rand(POOL_IMAGES, *shape)
    labels = torch.randint(0, 10, (POOL_IMAGES,))
    run = network
    if variant == "channels_last":
        images = images.to(memory_format=torch.channels_last)
    if variant == "compile":
        run = torch.compile(network)

    def step(number: int) -> None:
        start = number * group % (POOL_IMAGES - group + 1)
        loss = torch.nn.functional.cross_entropy(
            run(images[start : start + group]), labels[start : start + group]
        )
        rule.zero_grad(set_to_none=True)
        loss.backward()
        rule.step()

    for number in range(WARM_UP_GROUPS):
        step(number)
    line.wait(timeout=300.0)
    done, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        step(done)
        done += 1
    told.put(done * group / spent)


def main() -> None:
    """Start the processes and print the sum as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--variant", choices=["plain", "channels_last", "compile"], default="plain")
    options = parser.parse_args()
    spec = json.load(sys.stdin)
    _, modules = build(spec)
    network = torch.nn.Sequential(*modules)
    if options.variant == "channels_last":
        network = network.to(memory_format=torch.channels_last)
    network.share_memory()
    spawning = torch.multiprocessing.get_context("spawn")
    line, told = spawning.Barrier(options.processes), spawning.Queue()
    arguments = (network, spec["input"], options.group, options.seconds, options.variant, line, told)
    processes = [spawning.Process(target=train, args=arguments) for _ in range(options.processes)]
    for process in processes:
        process.start()
    total = sum(told.get() for _ in processes)
    for process in processes:
        process.join()
    print(json.dumps({"images_per_s": total}))


if __name__ == "__main__":
    main()
