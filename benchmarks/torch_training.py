"""PyTorch modules on MNIST: `RemoteOptimizer` beside PyTorch's Hogwild, DDP and a local optimizer.

    ADAM_DATA_DIR=DIR python -m benchmarks.torch_training --case resnet --json FILE
    ADAM_DATA_DIR=DIR python -m benchmarks.torch_training --case mlp --push-every 4
    ADAM_DATA_DIR=DIR python -m benchmarks.torch_training --case overhead
    ADAM_DATA_DIR=DIR python -m benchmarks.torch_training --case straggler --workers 4 --to-accuracy 0.98

All modes have the same module, batch size, images and type (float32), and one PyTorch thread per process:

- ``ours``: `--workers` processes with `RemoteOptimizer`, a controller and a parameter server as processes.
- ``hogwild``: `--workers` processes over parameters in shared memory, each with `torch.optim.SGD`.
- ``ddp``: `--workers` processes with DistributedDataParallel over gloo.
- ``local``: one process with `torch.optim.SGD`. ``store``: the same with `RemoteOptimizer` and the store
  ``local``, whose server is a thread of the process.

The modes run alternately for `--rounds` rounds. Processes of ``ours`` and ``hogwild`` take batches from one
shared counter; those of ``ddp`` need equal shares. In the case ``straggler`` the last process pauses after
each step for four times the step's duration, so it has a fifth of its speed. Seconds exclude evaluations.

Rows: images per second, or seconds to the accuracy; accuracies after the last step of each round; the values
of each round; rate and peer_rate. With `--to-accuracy` also the runs that reached it within `--images`:
seconds of the others are lower bounds.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Measured processes, which are children, keep freed memory. By default these limits of glibc follow the
# largest block that a process has freed, so the way of reading the images decides the page faults of a step.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 << 20))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 30))

import socket
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
import torch.multiprocessing
from torch import nn

from adam_async import Sgd, sync
from adam_async.data_server.sources.idx import gunzip, parse_idx
from benchmarks.harness import Option, Row, apart, compared, interleaved, role, run

BATCH = 64
WARM_UP = 5
"""Number of steps of each process before the measured ones."""
SLOW_BY = 5
"""Factor by which the straggler is slower."""


class Block(nn.Module):
    """A residual block: two convolutions of 3x3 with BatchNorm, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm_again = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""
        y = nn.functional.relu(self.norm(self.first(x)))
        return nn.functional.relu(self.norm_again(self.second(y)) + self.shortcut(x))


def resnet() -> nn.Module:
    """Make a ResNet of 8 layers for images of one channel, with 77,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 1, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Block(16, 16, 1),
        Block(16, 32, 2),
        Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def mlp() -> nn.Module:
    """Make a network of three dense layers, with 2.0 million parameters."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 1060), nn.ReLU(), nn.Linear(1060, 1060), nn.ReLU(), nn.Linear(1060, 10)
    )


MODULES: dict[str, Callable[[], nn.Module]] = {"resnet": resnet, "mlp": mlp}


def mnist(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (N, 1, 28, 28) from 0 to 1, and labels (N,)."""
    folder = Path(os.environ["ADAM_DATA_DIR"])
    found = []
    for kind, axes in (("images-idx3", 3), ("labels-idx1", 1)):
        name = f"{split}-{kind}-ubyte.gz"
        found.append(parse_idx(gunzip((folder / name).read_bytes(), name), name, axes=axes))
    images, labels = found
    return torch.from_numpy(images[:, None] / np.float32(255)), torch.from_numpy(labels.astype(np.int64))


@torch.no_grad()
def accuracy(module: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of right answers."""
    module.eval()
    found = torch.cat([module(part) for part in images.split(500)]).argmax(1)
    module.train()
    return float((found == labels).float().mean())


class Process:
    """One process of a run: its module, optimizer and batches.

    Args:
        rank: Number of the process.
        options: Options of the run.
        shared: Module in shared memory, for ``hogwild``.
        counter: Number of the next batch, for modes without equal shares.
        barrier: Barrier of all processes.
    """

    def __init__(self, rank: int, options: dict[str, Any], shared: Any, counter: Any, barrier: Any) -> None:
        torch.set_num_threads(1)
        self.rank, self.options, self.counter, self.barrier = rank, options, counter, barrier
        self.mode: str = options["mode"]
        self.images, self.labels = (each.to(options["device"]) for each in mnist("train"))
        random = np.random.default_rng(options["seed"])
        self.order = torch.from_numpy(random.permutation(len(self.images)))
        self.taken = 0
        torch.manual_seed(options["seed"])
        self.device = torch.device(options["device"])
        self.module = MODULES[options["module"]]().to(self.device) if shared is None else shared
        self.trained = self.module
        self.slow = rank == options["straggler"]
        self.store: sync.ParameterStore | None = None
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Make the optimizer of the mode."""
        options = self.options
        rate, momentum = options["rate"], options["momentum"]
        if self.mode in ("ours", "store"):
            from adam_async.torch import RemoteOptimizer, parameter_arrays

            self.store = sync.ParameterStore.open(
                options["where"],
                parameter_arrays(self.module),
                name="model",
                rule=Sgd(rate=rate, momentum=momentum),
            )
            return RemoteOptimizer(
                self.module,
                self.store,
                **{name: options[name] for name in ("push_every", "pull_every", "factors")},
                **(
                    {"max_staleness": options["max_staleness"]}
                    if options["max_staleness"] is not None
                    else {}
                ),
            )
        if self.mode == "ddp":
            self.trained = nn.parallel.DistributedDataParallel(self.module)
        return torch.optim.SGD(self.module.parameters(), lr=rate, momentum=momentum)

    def step(self, number: int) -> None:
        """Train one batch."""
        begin = time.perf_counter()
        start = number * BATCH % (len(self.order) - BATCH + 1)
        rows = self.order[start : start + BATCH].to(self.device)
        self.optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(self.trained(self.images[rows]), self.labels[rows]).backward()
        self.optimizer.step()
        if self.slow:
            time.sleep((SLOW_BY - 1) * (time.perf_counter() - begin))

    def steps(self, count: int) -> float:
        """Train this number of batches with all processes, and return the seconds."""
        workers = self.options["workers"]
        self.barrier.wait()
        if self.rank == 0:
            self.counter.value = self.taken
        self.barrier.wait()
        begin = time.perf_counter()
        if self.mode == "ddp":
            for number in range(count // workers):
                self.step(self.taken + number * workers + self.rank)
        else:
            while (number := self.next_batch()) < self.taken + count:
                self.step(number)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.barrier.wait()
        self.taken += count
        return time.perf_counter() - begin

    def next_batch(self) -> int:
        """Take a number from the shared counter."""
        with self.counter.get_lock():
            number: int = self.counter.value
            self.counter.value += 1
        return number

    def evaluated(self) -> float:
        """Return the accuracy on the test images, with the newest values of a store; 0 in all ranks but 0."""
        if self.rank:
            return 0.0
        if self.store is not None:
            from adam_async.torch import RemoteOptimizer

            assert isinstance(self.optimizer, RemoteOptimizer)
            self.optimizer.pull()
        found: float = accuracy(self.module, *(each.to(self.device) for each in mnist("t10k")))
        return found


def run_process(
    rank: int, options: dict[str, Any], shared: Any, counter: Any, verdict: Any, barrier: Any, results: Any
) -> None:
    """Train as one process of a run; rank 0 puts the result into the queue."""
    workers = options["workers"]
    if options["mode"] == "ddp":
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(options["port"]),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        torch.distributed.init_process_group("gloo", rank=rank, world_size=workers)
    process = Process(rank, options, shared, counter, barrier)
    for number in range(WARM_UP):
        process.step(rank * WARM_UP + number)
    result: dict[str, float]
    if options["to_accuracy"]:
        spent, images = 0.0, 0
        while verdict.value < options["to_accuracy"] and images < options["images"]:
            spent += process.steps(options["between"])
            images += options["between"] * BATCH
            found = process.evaluated()
            if rank == 0:
                verdict.value = found
            barrier.wait()
        result = {"seconds": spent, "accuracy": verdict.value, "images": images}
    else:
        seconds = process.steps(options["images"] // BATCH)
        result = {"rate": options["images"] // BATCH * BATCH / seconds, "accuracy": process.evaluated()}
    barrier.wait()
    if process.store is not None:
        process.store.close()
    if options["mode"] == "ddp":
        torch.distributed.destroy_process_group()
    if rank == 0:
        results.put(result)


def free_port() -> int:
    """Return a free TCP port of this host."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def measured(options: dict[str, Any]) -> dict[str, float]:
    """Run one mode, in this process and its children; returns the result of rank 0."""
    spawning, workers = torch.multiprocessing.get_context("spawn"), options["workers"]
    results, shared = spawning.SimpleQueue(), None
    common = (spawning.Value("q", 0), spawning.Value("d", 0.0), spawning.Barrier(workers), results)
    if options["mode"] == "hogwild":
        torch.manual_seed(options["seed"])
        shared = MODULES[options["module"]]()
        shared.share_memory()
    options = {**options, "port": free_port(), "where": "local"}
    with ExitStack() as stack:
        if options["mode"] == "ours":
            controller = stack.enter_context(role("controller", "--bind", "tcp://127.0.0.1:0"))
            for _ in range(options["servers"]):
                stack.enter_context(role("ps", "--controller", controller.address))
            options["where"] = controller.address
        if options["mode"] in ("local", "store"):
            run_process(0, options, None, *common)
        else:
            torch.multiprocessing.spawn(run_process, (options, shared, *common), nprocs=workers)
    found: dict[str, float] = results.get()
    return found


def rows_of(arguments: Namespace, modes: tuple[str, ...], straggler: int = -1) -> Iterator[Row]:
    """Run the modes in turn, and compare the first one with each other one."""
    names = (
        "servers",
        "images",
        "between",
        "momentum",
        "push_every",
        "max_staleness",
        "to_accuracy",
        "device",
        "factors",
    )
    base: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    base |= {
        "module": arguments.module or ("mlp" if arguments.case == "mlp" else "resnet"),
        "workers": 1 if "local" in modes else arguments.workers,
        "pull_every": arguments.push_every,
        "straggler": straggler,
    }
    rates = {"ddp": arguments.peer_rate or arguments.rate}
    seeds = dict.fromkeys(modes, 0)

    def once(mode: str) -> dict[str, float]:
        seeds[mode] += 1
        rate = rates.get(mode, arguments.rate)
        return apart(measured, {**base, "mode": mode, "seed": seeds[mode] - 1, "rate": rate})

    found = interleaved({mode: partial(once, mode) for mode in modes}, arguments.rounds)
    to_accuracy, ours = arguments.to_accuracy, found[modes[0]]
    what, unit = ("seconds", "s") if to_accuracy else ("rate", "images/s")
    for mode in modes[1:]:
        peer = found[mode]
        reached = {
            f"reached_{name}": sum(each["accuracy"] >= to_accuracy for each in side)
            for name, side in (("ours", ours), ("peer", peer))
        }
        yield compared(
            f"{arguments.case}, push and pull every {arguments.push_every}, {modes[0]} beside {mode}",
            [each[what] for each in ours],
            [each[what] for each in peer],
            unit,
            less_is_better=bool(to_accuracy),
            accuracy_ours=[each["accuracy"] for each in ours],
            accuracy_peer=[each["accuracy"] for each in peer],
            all_ours=[round(each[what], 2) for each in ours],
            all_peer=[round(each[what], 2) for each in peer],
            rate=arguments.rate,
            peer_rate=arguments.peer_rate or arguments.rate,
            **(reached if to_accuracy else {}),
        )


def measure(arguments: Namespace) -> Iterator[Row]:
    """Yield the rows of a case."""
    if arguments.case == "overhead":
        yield from rows_of(arguments, ("store", "local"))
    elif arguments.case == "straggler":
        yield from rows_of(arguments, ("ours", "ddp"), arguments.workers - 1)
    else:
        yield from rows_of(arguments, ("ours", "hogwild", "ddp"))


if __name__ == "__main__":
    run(
        __doc__,
        measure,
        case=Option("resnet", choices=["resnet", "mlp", "overhead", "straggler"]),
        module=Option("", "by default that of the case", choices=[*MODULES]),
        rounds=5,
        images=Option(24_000, "of a run; the maximum with --to-accuracy"),
        between=Option(96, "batches between two evaluations"),
        workers=2,
        servers=1,
        push_every=Option(1, "steps per push and pull"),
        max_staleness=Option(None, "maximum number of pushes in flight", type=int),
        factors=Option(False, "push the gradients of dense layers as factors"),
        rate=0.05,
        peer_rate=Option(0.0, "rate of DDP, if it differs"),
        momentum=0.0,
        to_accuracy=0.0,
        device=Option("cpu", "device of the case overhead: cpu, cuda or mps"),
    )
