"""Time from the fault of a server to the next acknowledged push of its shards, and whether any push is lost.

    python -m benchmarks.failover [--kills 20] [--freezes 20] [--servers 3] [--copies 3] [--min-in-sync 2]
        [--seed 1] [--json FILE]

Three controllers and the parameter servers are processes on loopback. For each server one client pushes ones
to an array on it, one push after the other, so that an array counts the pushes that were applied to it. A
fault ends the process of a primary (SIGKILL) or freezes it (SIGSTOP), in random order. A killed server is
started again, and a frozen one is woken, once the clients have gone on; the next fault comes when all shards
have all copies in sync again.

One row for each kind of fault: faults; p50, p99 and maximum of the seconds from the fault to the first
acknowledgement of a push that began after it, over the arrays of the lost primary; and p50 and maximum of the
seconds until all copies are in sync again. `lost` and `twice` are the differences of acknowledged and applied
pushes at the end; both have to be 0.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import asyncio
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from adam_async import ParameterStore, Sgd
from adam_async.run.cluster_map import ClusterMap
from benchmarks.controllers import Controllers

PAUSE_S = 0.002
"""Pause of a client between two pushes, in seconds."""

SETTLE_S = 0.5
"""Time with all copies in sync before a fault, in seconds."""

PATIENCE_S = 60.0
"""Maximum time for pushes to go on, and for all copies to be in sync, in seconds."""

VALUES = 256
"""Values of each array."""


class Servers:
    """Parameter servers, each a process.

    Args:
        controllers: Addresses of the controllers, joined by commas.
    """

    def __init__(self, names: Sequence[str], controllers: str) -> None:
        self._controllers = controllers
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._names = names

    def __enter__(self) -> "Servers":
        for name in self._names:
            self.start(name)
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def start(self, name: str) -> None:
        """Start one, again if it was killed."""
        words = ["ps", "--id", name, "--controller", self._controllers, "--bind", "tcp://127.0.0.1:0"]
        self._processes[name] = subprocess.Popen(
            [sys.executable, "-m", "adam_async", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def send(self, name: str, number: int) -> None:
        """Send a signal to one."""
        self._processes[name].send_signal(number)
        if number == signal.SIGKILL:
            self._processes[name].wait()


class Pusher:
    """A client that pushes to one array."""

    def __init__(self, store: ParameterStore, array: str) -> None:
        self.store = store
        self.array = array
        self.acknowledged = 0
        self._begun_at = 0.0
        self._ending = False
        self._waiting: list[tuple[float, asyncio.Future[float]]] = []

    async def run(self) -> None:
        """Push until `end`; a failure raises."""
        loop = asyncio.get_running_loop()
        ones = {self.array: np.ones(VALUES)}
        while not self._ending:
            begun_at = loop.time()
            await self.store.push(ones)
            self.acknowledged += 1
            now = loop.time()
            for since, future in self._waiting:
                if begun_at > since and not future.done():
                    future.set_result(now - since)
            self._waiting = [each for each in self._waiting if not each[1].done()]
            await asyncio.sleep(PAUSE_S)

    def next_after(self, fault: float) -> "asyncio.Future[float]":
        """Return the seconds from a fault to the acknowledgement of the first push that begins after it."""
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((fault, future))
        return future

    def end(self) -> None:
        """End `run` after the push in progress."""
        self._ending = True


class Faults:
    """Faults of the servers, and their times."""

    def __init__(self, servers: Servers, pushers: Sequence[Pusher]) -> None:
        self._servers = servers
        self._pushers = pushers
        self._name = pushers[0].store.name
        self._membership = pushers[0].store._link._membership
        self.resumed_s: dict[str, list[float]] = {"kill": [], "freeze": []}
        self.whole_s: dict[str, list[float]] = {"kill": [], "freeze": []}
        self.faults = {"kill": 0, "freeze": 0}

    def _primaries(self) -> dict[str, str]:
        """Primary of the shards of each array."""
        cluster = self._membership.map
        found = {}
        for pusher in self._pushers:
            layout = pusher.store._link.layout
            home = layout.plan((pusher.array,)).messages[0].server
            bundle = cluster.bundle(cluster.stores[self._name].id, home)
            assert bundle is not None, f"array {pusher.array} has no bundle"
            found[pusher.array] = bundle.in_sync[0][0]
        return found

    def _is_whole(self, cluster: ClusterMap) -> bool:
        copies = cluster.stores[self._name].copies
        return all(len(each.in_sync) >= copies for each in cluster.bundles.values())

    async def whole(self) -> None:
        """Wait until all shards have all copies in sync."""
        await self._membership.wait_for(self._is_whole, "all copies in sync", PATIENCE_S)

    async def inject(self, kind: str, dice: random.Random) -> None:
        """Kill or freeze a primary, measure, and bring it back."""
        loop = asyncio.get_running_loop()
        primaries = self._primaries()
        victim = dice.choice(sorted(set(primaries.values())))
        affected = [each for each in self._pushers if primaries[each.array] == victim]
        self._servers.send(victim, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        fault = loop.time()
        waits = [each.next_after(fault) for each in affected]
        async with asyncio.timeout(PATIENCE_S):
            self.resumed_s[kind] += [await wait for wait in waits]
        self.faults[kind] += 1
        if kind == "kill":
            self._servers.start(victim)
        else:
            self._servers.send(victim, signal.SIGCONT)
        await self._membership.wait_for(lambda cluster: not self._is_whole(cluster), "the loss", PATIENCE_S)
        await self.whole()
        self.whole_s[kind].append(loop.time() - fault)


def _row(kind: str, faults: Faults) -> dict[str, Any]:
    seconds, whole = sorted(faults.resumed_s[kind]), sorted(faults.whole_s[kind])
    at_99 = seconds[min(int(0.99 * len(seconds)), len(seconds) - 1)]
    return {
        "case": kind,
        "faults": faults.faults[kind],
        "p50_s": round(statistics.median(seconds), 3),
        "p99_s": round(at_99, 3),
        "max_s": round(seconds[-1], 3),
        "copies_back_p50_s": round(statistics.median(whole), 2),
        "copies_back_max_s": round(whole[-1], 2),
    }


async def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The rows."""
    dice = random.Random(arguments.seed)
    names = [f"ps-{number}" for number in range(arguments.servers)]
    kinds = ["kill"] * arguments.kills + ["freeze"] * arguments.freezes
    dice.shuffle(kinds)
    arrays = {f"a{number}": np.zeros(VALUES) for number in range(arguments.servers)}
    with Controllers(folder) as controllers, Servers(names, ",".join(controllers.addresses)) as servers:
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            stores = [
                await stack.enter_async_context(
                    ParameterStore.open(
                        ",".join(controllers.addresses),
                        arrays,
                        name="counters",
                        rule=Sgd(rate=1.0),
                        servers=arguments.servers,
                        copies=arguments.copies,
                        min_in_sync=arguments.min_in_sync,
                    )
                )
                for _ in arrays
            ]
            pushers = [Pusher(store, array) for store, array in zip(stores, arrays, strict=True)]
            faults = Faults(servers, pushers)
            await faults.whole()
            tasks = [group.create_task(pusher.run(), name=pusher.array) for pusher in pushers]
            for number, kind in enumerate(kinds, start=1):
                await asyncio.sleep(SETTLE_S)
                await faults.inject(kind, dice)
                print(f"{number} {kind}: {faults.resumed_s[kind][-1]:.3f} s", file=sys.stderr)
            for pusher in pushers:
                pusher.end()
            await asyncio.gather(*tasks)
            values = await stores[0].pull()
            rows = [_row(kind, faults) for kind in ("kill", "freeze") if faults.faults[kind]]
            differences = [int(-values[each.array].max()) - each.acknowledged for each in pushers]
            assert all(np.ptp(values[each.array]) == 0 for each in pushers), "values of one array differ"
            audit = {
                "case": "audit",
                "acknowledged": sum(each.acknowledged for each in pushers),
                "lost": -sum(min(each, 0) for each in differences),
                "twice": sum(max(each, 0) for each in differences),
            }
    return [*rows, audit]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--freezes", type=int, default=20)
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--copies", type=int, default=3)
    parser.add_argument("--min-in-sync", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="adam-async-failover-") as folder:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            rows = runner.run(measure(arguments, Path(folder)))
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
