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

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import asyncio
import json
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

from adam_async.cluster.networks import cluster_network
from adam_async.controller.map_client import MapClient
from adam_async.messages import GetStatistics, pack, read_text_tensor
from adam_async.run.config import Waits
from adam_async.run.counts import ControllerCounts
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.machine import usable_cores
from adam_async.runtime.traffic import Traffic
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
    """Three controllers, each a process with a folder.

    Args:
        folder: Folder for the controllers' folders.
    """

    def __init__(self, folder: Path) -> None:
        with _free_ports(3) as ports:
            self.addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
        self._peers = ",".join(
            f"{number}={address}" for number, address in enumerate(self.addresses, start=1)
        )
        self._folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Controllers":
        for address in self.addresses:
            self.start(address)
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def start(self, address: str) -> None:
        """Start a controller, again after a kill."""
        number = str(self.addresses.index(address) + 1)
        words = ["--id", number, "--peers", self._peers, "--dir", str(self._folder / number)]
        self.processes[address] = subprocess.Popen(
            [sys.executable, "-m", "adam_async", "controller", *words], stdout=subprocess.DEVNULL
        )

    def kill(self, address: str) -> None:
        """Kill one controller with SIGKILL."""
        self.processes[address].send_signal(signal.SIGKILL)
        self.processes[address].wait()

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


@contextmanager
def _free_ports(count: int) -> Iterator[list[int]]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        yield [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


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


async def rate(controllers: Controllers, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compare-and-sets a second."""
    bare = bare_rate(folder, 2.0)
    setters = [
        Setter(controllers.client(f"client-{n}"), f"nodes/client-{n}") for n in range(arguments.clients)
    ]
    await asyncio.gather(*(setter.set() for setter in setters))
    tasks = [asyncio.create_task(setter.run()) for setter in setters]
    loop = asyncio.get_running_loop()
    begun, before = loop.time(), sum(setter.done for setter in setters)
    await asyncio.sleep(arguments.seconds)
    sets = sum(setter.done for setter in setters) - before
    took_s = loop.time() - begun
    await _end(tasks)
    for setter in setters:
        setter.client.close()
    return {
        "case": f"3 durable controllers, {arguments.clients} clients",
        "sets_per_s": round(sets / took_s, 1),
        "bare_fdatasyncs_per_s": round(bare, 1),
    }


async def gaps(controllers: Controllers, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds without an answer after kills of leaders."""
    setter = Setter(controllers.client("client"), "nodes/client")
    loop = asyncio.get_running_loop()
    found = []
    for _ in range(arguments.kills):
        await setter.set()
        victim = setter.client.leader.address
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


def _spin(count: int) -> "list[subprocess.Popen[bytes]]":
    return [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]


async def saturate(controllers: Controllers, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Changes of leader while no core is free."""
    setter = Setter(controllers.client("client"), "nodes/client")
    await setter.set()
    await asyncio.sleep(SETTLE_S)
    before, leader = await controllers.terms(), setter.client.leader.address
    spinners = _spin(arguments.spinners)
    changes = 0
    tasks = [asyncio.create_task(setter.run(CALM_S))]
    try:
        until = asyncio.get_running_loop().time() + arguments.saturate
        while asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.05)
            now = setter.client.leader.address
            changes += bool(now) and now != leader
            leader = now or leader
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
        await _end(tasks)
    after = await controllers.terms()
    setter.client.close()
    return {
        "case": f"{usable_cores()} cores saturated for {arguments.saturate:g} s",
        "changes_of_leader": changes,
        "terms": max(after) - max(before),
        "sets": setter.done,
        "met": changes == 0,
    }


async def _end(tasks: "list[asyncio.Task[None]]") -> None:
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if ended is not None and not isinstance(ended, asyncio.CancelledError):
            raise ended


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the rows, as JSON")
    parser.add_argument("--folder", type=Path, help="folder on the disk; by default that of temporary files")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--saturate", type=float, default=0.0)
    parser.add_argument("--spinners", type=int, default=usable_cores())
    arguments = parser.parse_args()
    measure = gaps if arguments.kills else saturate if arguments.saturate else rate
    folder = Path(tempfile.mkdtemp(prefix="adam-async-controllers-", dir=arguments.folder))
    try:
        with (
            Controllers(folder) as controllers,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            row = runner.run(measure(controllers, arguments, folder))
    finally:
        shutil.rmtree(folder)
    print(", ".join(f"{name} {value}" for name, value in row.items()))
    print(json.dumps(row), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([row], indent=1) + "\n")


if __name__ == "__main__":
    main()
