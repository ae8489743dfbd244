"""Rate of agreement of three durable controllers, length of a change of leader, and changes under load.

    python -m benchmarks.controllers [--seconds 10] [--clients 32] [--folder DIR] [--json FILE]
    python -m benchmarks.controllers --kills 60
    python -m benchmarks.controllers --saturate 60

Each controller is a process, `adam-async controller --dir ...`, all on this machine and loopback.

By default, clients set their own keys, each one request after the other. The row has compare-and-sets a
second, and the rate of a bare loop that appends to one file of the same folder and syncs it (`fdatasync`). A
set costs three syncs, one for each controller, but one sync serves several sets.

With `--kills`: the benchmark kills the leader (SIGKILL) this many times, and starts it again after the next
leader's first set. The row has the seconds from the kill to the first answer to a client: median, 90 % and
worst.

With `--saturate`: one process per core (or `--spinners`; 0 if another program keeps the cores busy)
multiplies matrices without a pause for this many seconds, under a light load of sets. The row has the number
of changes of leader, and the growth of terms; the goal is no change.
"""

import asyncio
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from subprocess import DEVNULL, Popen

from adam_async.cluster.networks import cluster_network
from adam_async.controller.map_client import MapClient
from adam_async.messages import GetStatistics, pack, read_text_tensor
from adam_async.run.config import Waits
from adam_async.run.counts import ControllerCounts
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.machine import usable_cores
from adam_async.runtime.traffic import Traffic
from benchmarks.harness import ADAM, Option, Row, program, run
from transport import BufferPool, Identity

WAITS = Waits(dial_s=60.0, call_s=60.0)
RECORD_BYTES = 200
"""Approximate size of a frame with one set, in bytes."""
SETTLE_S = 1.5
"""Wait from a restart to the next kill, in seconds, in which the controller becomes a voter with all
entries."""
CALM_S = 0.02
"""Pause between two sets of the light load, in seconds."""
SPIN = "import numpy as np; a = np.ones((400, 400), np.float32)\nwhile True: a @ a"


class Controllers:
    """Three controllers, each a process with a folder, until the block ends.

    Args:
        folder: Folder for the controllers' folders.
    """

    def __init__(self, folder: Path) -> None:
        with ExitStack() as stack:
            free = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
            self.addresses = [f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in free]
        self._peers = ",".join(f"{n}={address}" for n, address in enumerate(self.addresses, start=1))
        self._folder = folder
        self._stack = ExitStack()
        self._processes: dict[str, Popen[str]] = {}

    def __enter__(self) -> "Controllers":
        for address in self.addresses:
            self.start(address)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def start(self, address: str) -> None:
        """Start a controller, again after a kill."""
        number = str(self.addresses.index(address) + 1)
        words = ["--id", number, "--peers", self._peers, "--dir", str(self._folder / number)]
        process = program(*ADAM, "controller", *words, stdout=DEVNULL, stderr=None)
        self._processes[address] = self._stack.enter_context(process)

    def kill(self, address: str) -> None:
        """Kill one controller with SIGKILL."""
        self._processes[address].send_signal(signal.SIGKILL)
        self._processes[address].wait()

    def client(self, name: str) -> MapClient:
        """A client that asks the current leader."""
        return MapClient(
            network=cluster_network(None, entropy=system_entropy, buffers=BufferPool()),
            controllers=",".join(self.addresses),
            identity=Identity(role="worker", node=name, incarnation=1),
            waits=WAITS,
            traffic=Traffic(name),
        )

    async def terms(self) -> list[int]:
        """The term of each controller."""
        network = cluster_network(None, entropy=system_entropy, buffers=BufferPool())
        found = []
        for address in self.addresses:
            link = await network.dial(address, Identity(role="driver", node="benchmark", incarnation=1))
            try:
                answer = await link.call(pack(GetStatistics(run="")), timeout_s=WAITS.call_s)
                found.append(read_text_tensor(answer, ControllerCounts, 1 << 20).term)
            finally:
                link.abort()
        return found


class Setter:
    """A client that repeatedly sets its own key, and receives the changes of the map as members do."""

    def __init__(self, client: MapClient, key: str) -> None:
        self.client = client
        self._key = key
        self._at = 0
        self._seen, self._group = -1, ""
        self.done = 0

    async def set(self) -> None:
        """Set the key once."""
        # An address without a process, so the controllers miss none.
        record = {"role": "worker", "address": "", "incarnation": 1, "live": False, "info": {"n": self.done}}
        outcome = await self.client.compare_and_set(
            self._key, self._at, record, after=self._seen, group=self._group
        )
        assert outcome.done, outcome
        if outcome.updates:
            self._seen, self._group = outcome.updates[-1].version, outcome.updates[-1].group
        self._at = outcome.at
        self.done += 1

    async def run(self, pause_s: float = 0.0) -> None:
        """Set the key until cancelled."""
        while True:
            await self.set()
            if pause_s:
                await asyncio.sleep(pause_s)


def bare_rate(folder: Path, seconds: float) -> float:
    """Appends per second to one file, each synced."""
    data, count = bytes(RECORD_BYTES), 0
    with open(folder / "bare", "wb", buffering=0) as file:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            file.write(data)
            os.fdatasync(file.fileno())
            count += 1
    return count / seconds


@asynccontextmanager
async def running(setters: list[Setter], pause_s: float = 0.0) -> AsyncIterator[None]:
    """Let clients set their keys until the block ends."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(setter.run(pause_s), name="set") for setter in setters]
        yield
        for task in tasks:
            task.cancel()
    for setter in setters:
        setter.client.close()


async def rate(controllers: Controllers, arguments: Namespace, folder: Path) -> Row:
    """Compare-and-sets a second."""
    bare = bare_rate(folder, 2.0)
    names = [f"client-{number}" for number in range(arguments.clients)]
    setters = [Setter(controllers.client(name), f"nodes/{name}") for name in names]
    await asyncio.gather(*(setter.set() for setter in setters))
    async with running(setters):
        begun, before = time.monotonic(), sum(setter.done for setter in setters)
        await asyncio.sleep(arguments.seconds)
        sets, took_s = sum(setter.done for setter in setters) - before, time.monotonic() - begun
    return {
        "case": f"3 durable controllers, {arguments.clients} clients",
        "sets_per_s": round(sets / took_s, 1),
        "bare_fdatasyncs_per_s": round(bare, 1),
    }


async def gaps(controllers: Controllers, arguments: Namespace, folder: Path) -> Row:
    """Seconds without an answer after kills of leaders."""
    setter = Setter(controllers.client("client"), "nodes/client")
    loop = asyncio.get_running_loop()
    found = []
    for _ in range(arguments.kills):
        await setter.set()
        victim = setter.client.address
        begun = loop.time()
        controllers.kill(victim)
        await setter.set()
        found.append(loop.time() - begun)
        controllers.start(victim)
        await asyncio.sleep(SETTLE_S)
    setter.client.close()
    found.sort()
    return {
        "case": f"{arguments.kills} leaders killed",
        "median_s": round(statistics.median(found), 3),
        "p90_s": round(found[max(0, -(-len(found) * 9 // 10) - 1)], 3),
        "worst_s": round(found[-1], 3),
    }


async def saturate(controllers: Controllers, arguments: Namespace, folder: Path) -> Row:
    """Changes of leader while no core is free."""
    setter = Setter(controllers.client("client"), "nodes/client")
    await setter.set()
    await asyncio.sleep(SETTLE_S)
    before, leader = await controllers.terms(), setter.client.address
    changes = 0
    async with AsyncExitStack() as stack:
        for _ in range(arguments.spinners):
            stack.enter_context(program(sys.executable, "-c", SPIN, stdout=DEVNULL))
        await stack.enter_async_context(running([setter], CALM_S))
        until = time.monotonic() + arguments.saturate
        while time.monotonic() < until:
            await asyncio.sleep(0.05)
            now = setter.client.address
            changes += bool(now) and now != leader
            leader = now or leader
    after = await controllers.terms()
    return {
        "case": f"{usable_cores()} cores saturated for {arguments.saturate:g} s",
        "changes_of_leader": changes,
        "terms": max(after) - max(before),
        "sets": setter.done,
        "met": changes == 0,
    }


async def measure(arguments: Namespace) -> AsyncIterator[Row]:
    """Yield the row of the wanted measurement."""
    work = gaps if arguments.kills else saturate if arguments.saturate else rate
    with tempfile.TemporaryDirectory(prefix="adam-async-controllers-", dir=arguments.folder) as folder:
        with Controllers(Path(folder)) as controllers:
            yield await work(controllers, arguments, Path(folder))


if __name__ == "__main__":
    run(
        __doc__,
        measure,
        folder=Option(None, "folder on the disk; by default that of temporary files", type=Path),
        seconds=10.0,
        clients=32,
        kills=Option(0, "kills of leaders, in place of sets a second"),
        saturate=Option(0.0, "seconds with busy cores, in place of sets a second"),
        spinners=Option(usable_cores(), "processes that keep cores busy"),
    )
