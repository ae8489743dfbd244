"""Clients and workers that share memory with a server join and leave, and leave nothing behind.

python -m tests.processes.joins [--links N] [--workers N]
"""

import argparse
import asyncio
import gc
import os
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adam_async import ParameterStore, Sgd
from adam_async.runtime.traffic import PEERS_KEPT
from tests.processes.commands import started_by_hand, until
from tests.processes.mapped_kills import Run, say
from tests.processes.shared_kills import regions_of
from tests.processes.single_steps import Tracer

WARM = PEERS_KEPT + 16
"""Number of joins after which a process has the memory that it keeps, such as the counts of earlier peers."""

VALUES = 1 << 16
"""Number of values of the array: 256 KiB, which travel in shared memory."""


class Kept(NamedTuple):
    """Numbers of the descriptors, regions and threads of a process."""

    descriptors: int
    regions: int
    threads: int

    @classmethod
    def of(cls, process: int) -> "Kept":
        """Look at a process."""
        folder = Path(f"/proc/{process}")
        return cls(len(os.listdir(folder / "fd")), regions_of(process), len(os.listdir(folder / "task")))


def memory_of(process: int) -> int:
    """Return the memory of a process that no other process shares with it, in bytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


async def _join(where: str, count: int) -> None:
    for _ in range(count):
        async with ParameterStore.open(where, name="joins", link="shared") as store:
            gradients = await store.buffers()
            gradients["w"][:] = 1
            await store.push(gradients)
            await store.pull()


async def links(count: int) -> dict[str, int]:
    """Open and close links in shared memory to one server; return the growth of both ends, in bytes."""
    with ExitStack() as stack:
        where, start = started_by_hand(stack)
        server, here = start("ps", "--controller").pid, os.getpid()
        arrays = {"w": np.zeros(VALUES, np.float32)}
        async with ParameterStore.open(where, arrays, name="joins", rule=Sgd(rate=1.0), link="tcp"):
            await _join(where, WARM)
            gc.collect()
            before, memory = [Kept.of(each) for each in (server, here)], [*map(memory_of, (server, here))]
            tasks = len(asyncio.all_tasks())
            await _join(where, count)
            assert len(asyncio.all_tasks()) == tasks
            gc.collect()
            for process, kept in zip((server, here), before, strict=True):
                until(lambda p=process, k=kept: Kept.of(p) == k, f"{before}, and not {Kept.of(process)}")
            after = [*map(memory_of, (server, here))]
    return {"server": after[0] - memory[0], "client": after[1] - memory[1]}


def workers(count: int) -> dict[str, int]:
    """Start and end workers of a run in place; return the growth of the server, in bytes."""
    with Tracer() as tracer, Run(tracer, replicas=1) as run:
        run.wait_for("epoch 1 ")
        server = run.child("ps-0")
        for number in range(count + 1):
            if number == 1:  # the first one has loaded what a join needs
                before, memory = Kept.of(server), memory_of(server)
            for workers in (2, 1):
                run.say(f"scale {workers}")
                run.wait_for(f"{workers} worker")
                run.wait_for("epoch ")
        until(lambda: Kept.of(server) == before, f"{before}, and not {Kept.of(server)}")
        after = memory_of(server)
        facts = run.stop()
        assert (facts["cut"], facts["in_place"]) == (0, facts["counted"][0]), facts
    return {"server": after - memory}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--links", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=50)
    options = parser.parse_args()
    if options.links:
        say(f"{options.links} links: {asyncio.run(links(options.links))} bytes more")
    if options.workers:
        say(f"{options.workers} workers: {workers(options.workers)} bytes more")
