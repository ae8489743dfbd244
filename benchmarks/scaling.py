"""Gain of a second compute thread: the bare kernels, and training through the whole system.

    python -m benchmarks.scaling --json scaling.json [--groups 64 16] [--rounds 5]

Rows: ours is the rate of two threads, peer that of one. The bare kernels train weights of their own in each
thread. Two processes of one thread each are the control: a rate that they cannot reach either is a limit of
the machine, memory or clock rate, and not of an interpreter's lock. Training is one epoch with every role in
one process, whose event loop needs a share of the same cores.
"""

import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from itertools import product
from multiprocessing.connection import Connection

from adam_async.model import Sgd
from benchmarks.harness import Option, Row, beside, compared, run, trained, turns
from benchmarks.kernels import Case, images_per_s

Sides = tuple[Callable[[], float], Callable[[], float]]
"""Functions that return the rate of two, and of one."""


def send_rate(channel: Connection, case: Case, seconds: float) -> None:
    """Send the middle one of three rates, during which both processes certainly run."""
    channel.send(statistics.median(images_per_s(case, seconds) for _ in range(3)))


def two_processes(case: Case, seconds: float) -> float:
    """Images per second of two processes of one thread each, together."""
    with ExitStack() as stack:
        channels = [stack.enter_context(beside(send_rate, case, seconds)) for _ in range(2)]
        return sum(float(channel.recv()) for channel in channels)


def training(case: Case, momentum: float, threads: int, *more: str) -> float:
    """Images per second of a run of one epoch."""
    words = ["--model", case.model, "--images-per-group", str(case.group), "--momentum", str(momentum)]
    words += ["--kernels", case.kernels, "--threads", str(threads), "--epochs", "1"]
    return float(trained(*words, *more)["totals"]["images_per_s"])


def cases(options: Namespace) -> Iterator[tuple[str, Sides]]:
    """Yield the name of each case, with both sides."""
    for group, momentum in product(options.groups, options.momentum):
        one, two = (
            Case(
                model=options.model,
                threads=threads,
                group=group,
                rule=Sgd(momentum=momentum),
                kernels=options.kernels,
            )
            for threads in (1, 2)
        )
        of = f", {options.model}, group {group}" + (f", momentum {momentum}" if momentum else "")
        of += f", {options.kernels}"
        alone = partial(images_per_s, one, options.seconds)
        yield f"bare kernels{of}: 2 threads / 1", (partial(images_per_s, two, options.seconds), alone)
        control = partial(two_processes, one, options.seconds)
        yield f"bare kernels{of}: 2 processes / 1 thread", (control, alone)
        for how, more in (("training", ()), ("training, pinned", ("--pin-threads",))):
            sides = tuple(partial(training, one, momentum, threads, *more) for threads in (2, 1))
            yield f"{how}{of}: 2 threads / 1", (sides[0], sides[1])


def measure(options: Namespace) -> Iterator[Row]:
    """Yield the row of each case."""
    chosen = {name: sides for name, sides in cases(options) if name.startswith(options.only)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen}
    for name in turns(chosen, options.rounds):
        two, one = chosen[name]
        found[name].append((two(), one()))
    for name, rates in found.items():
        yield compared(name, [two for two, _ in rates], [one for _, one in rates], "images/s")


if __name__ == "__main__":
    run(
        __doc__,
        measure,
        model="mnist-adam",
        groups=Option([64], "images per group"),
        momentum=[0.0],
        kernels=Option("numba" if find_spec("numba") else "numpy", choices=["numpy", "numba"]),
        only=Option("", "cases whose names begin with this text"),
        seconds=Option(2.0, "seconds per case of bare kernels and round"),
        rounds=5,
    )
