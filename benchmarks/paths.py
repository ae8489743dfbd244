"""Time to the acknowledgement of an update while a server catches up: separate links, and one link.

    python -m benchmarks.paths --json FILE [--rounds 3] [--seconds 6] [--kib 16] [--mib-per-s 5]
        [--big-mib 128] [--layout "three links"] [--joining-yields]

A controller and three parameter servers run in network namespaces, each a host with three links of 200, 200
and 20 Mbit/s (a token bucket at the exit of each host). A store with three copies has one bundle: a small
array, which one client updates at a fixed rate, and a big one, which only a server that joins receives. The
update is acknowledged once all members in sync hold it, so it travels on the client's link, and then to the
members on the copies link. A latency counts from the time at which its push is due.

Layouts: *three links*: `ps --bind`, `ps --copies-bind` and `controller --bind` name a link each; *one link*:
everything on the first link, as without the options; *one link, pieces apart*: `ps --copies-bind` names the
first link, so that only the yielding of pieces differs.

States: *idle*: three members in sync; *two copies*: a member is gone, and none joins; *catch-up*: the third
member was killed and joins again; *foreign*: another program sends one TCP stream from the primary's host to
another server's on the link of the copies. A round measures all states in turn, and the rows have the
latencies of all rounds, so that slow changes of the machine concern all states.

A row has the update's size, percentiles of the latency, and what left the primary's host on the link of the
copies; that of *catch-up* also has the number of attempts: a member that is struck out as silent begins
again. `ratio` is the p99 over that of `idle` in the same layout; the goal is at most 1.2 for *catch-up* on
*three links*. With `--joining-yields` the joining server gets only processor time that no other process
wants, because on a machine of its own it would take none from the others. Needs root.
"""

import asyncio
import os
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from adam_async import ParameterStore, Sgd
from adam_async.run.store_record import BundleRecord
from adam_async.runtime.role_handle import address_in
from benchmarks.harness import Option, Row, run
from tests.drill.judging import percentile
from tests.drill.network_namespaces import NamespaceNetwork, namespace_network

RATES = (200_000_000, 200_000_000, 20_000_000)
"""Rate of each link of a host, in bits per second."""
SERVERS = ("ps-0", "ps-1", "ps-2")
MOST_WAITING = 256
"""Number of unacknowledged updates at which the client waits before the next one."""
CALM = 3
"""Maximum number of unacknowledged updates while none is late."""
SETTLE_S = 0.5
"""Pause before a measurement, in seconds."""
STATE_S = 120.0
"""Deadline of a change of the members, in seconds."""
START_S = 60.0
"""Deadline of the start of a role, in seconds."""
TOKEN = "the token of a benchmark, of more than sixteen bytes"

SINK = """
import socket, sys
with socket.create_server((sys.argv[1], 9999)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    while connection.recv(1 << 20): pass
"""
SOURCE = """
import socket, sys
with socket.create_connection((sys.argv[1], 9999)) as connection:
    while True: connection.sendall(bytes(1 << 20))
"""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The link of each kind of traffic, by number."""

    name: str
    copies: int = 0
    control: int = 0
    apart: bool = False
    """Whether servers get `--copies-bind`."""


LAYOUTS = (
    Layout(name="three links", copies=1, control=2, apart=True),
    Layout(name="one link"),
    Layout(name="one link, pieces apart", apart=True),
)


class Cluster:
    """The roles of one layout, each a process on its host."""

    def __init__(self, network: NamespaceNetwork, layout: Layout) -> None:
        self.network = network
        self.layout = layout
        self.controller = f"tcp://{network.address_of('ctl', layout.control)}:7070"
        self.processes: dict[str, asyncio.subprocess.Process] = {}

    async def program(self, host: str, *words: str) -> asyncio.subprocess.Process:
        """Start a Python program on a host."""
        process = await asyncio.create_subprocess_exec(
            *self.network.within(host),
            sys.executable,
            *words,
            env={**os.environ, "ADAM_TOKEN": TOKEN},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        self.processes[f"{host} {len(self.processes)}"] = process
        return process

    async def role(self, host: str, *words: str) -> None:
        """Start a role on a host, and wait for the line with its address."""
        process = await self.program(host, "-m", "adam_async", *words)
        self.processes[host] = process
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            line = (await process.stdout.readline()).decode()
        assert address_in(line), f"{host} printed {line!r}"

    async def start(self) -> None:
        await self.role("ctl", "controller", "--bind", self.controller)
        for host in SERVERS:
            await self.server(host)

    async def server(self, host: str) -> None:
        """Start a server, also again after a kill."""
        words = ["ps", "--id", host, "--controller", self.controller]
        words += ["--bind", f"tcp://{self.network.address_of(host)}:0"]
        if self.layout.apart:
            words += ["--copies-bind", f"tcp://{self.network.address_of(host, self.layout.copies)}:0"]
        await self.role(host, *words)

    def yield_processors(self, host: str, yields: bool) -> None:
        """Let a role use only processor time that no other process wants, or share it again."""
        policy = os.SCHED_IDLE if yields else os.SCHED_OTHER
        for thread in Path(f"/proc/{self.processes[host].pid}/task").iterdir():
            os.sched_setscheduler(int(thread.name), policy, os.sched_param(0))

    async def kill(self, host: str) -> None:
        self.processes[host].kill()
        await self.processes[host].wait()

    async def end(self) -> None:
        for process in self.processes.values():
            if process.returncode is None:
                process.kill()
            await process.wait()


@asynccontextmanager
async def started(network: NamespaceNetwork, layout: Layout) -> AsyncIterator[Cluster]:
    cluster = Cluster(network, layout)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.end()


class Load:
    """Updates of one size at a fixed rate, and their latencies by the time at which they were due."""

    def __init__(self, store: ParameterStore, nbytes: int, per_s: float) -> None:
        self._store = store
        self._gradient = {"small": np.full(nbytes // 4, 1e-3, np.float32)}
        self._period_s = 1 / per_s
        self.latencies: list[tuple[float, float]] = []
        self.waiting: set[asyncio.Task[None]] = set()
        """Unacknowledged updates."""

    async def run(self) -> None:
        """Push until cancelled."""
        waiting = self.waiting
        due = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                while len(waiting) >= MOST_WAITING:
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                task = group.create_task(self._push(due))
                waiting.add(task)
                task.add_done_callback(waiting.discard)
                due += self._period_s

    async def _push(self, due: float) -> None:
        await self._store.push(self._gradient)
        self.latencies.append((due, time.perf_counter() - due))

    def between(self, begin: float, end: float) -> list[float]:
        """Return the latencies of the updates that were due within a time."""
        return [latency for due, latency in self.latencies if begin <= due <= end]


@dataclass(slots=True)
class State:
    """The windows in which a state was measured, and their sums."""

    windows: list[tuple[float, float]] = field(default_factory=list)
    sent_bytes: int = 0
    seconds: float = 0.0


class Measurement:
    """One layout and one size of updates."""

    def __init__(self, cluster: Cluster, store: ParameterStore, load: Load, options: Namespace) -> None:
        self._cluster = cluster
        self._store = store
        self._load = load
        self._seconds = options.seconds
        self._joining_yields = options.joining_yields
        self.states: dict[str, State] = {}
        self.attempts = 0
        """Number of times at which a member began to join."""

    @property
    def record(self) -> BundleRecord:
        """The only bundle of the store."""
        (bundle,) = self._store.link.membership.map.bundles.values()
        return bundle

    @property
    def primary(self) -> str:
        assert self.record.primary is not None
        return self.record.primary[0]

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a change of the members."""
        deadline = time.perf_counter() + STATE_S
        while not condition():
            assert time.perf_counter() < deadline, f"{what}: {self.record}"
            await asyncio.sleep(0.005)

    async def calm(self, members: int) -> None:
        """Wait for a number of members in sync, and until the updates that waited are acknowledged."""
        await self.until(lambda: len(self.record.in_sync) == members, f"{members} members in sync")
        await asyncio.sleep(SETTLE_S)
        await self.until(lambda: len(self._load.waiting) <= CALM, "the acknowledgement of late updates")
        await asyncio.sleep(SETTLE_S)

    async def _sent(self) -> int:
        return await self._cluster.network.sent_bytes(self.primary, self._cluster.layout.copies)

    @asynccontextmanager
    async def window(self, state: str) -> AsyncIterator[None]:
        """Measure in a state for as long as the block lasts."""
        found = self.states.setdefault(state, State())
        sent = await self._sent()
        begin = time.perf_counter()
        yield
        end = time.perf_counter()
        found.sent_bytes += await self._sent() - sent
        found.seconds += end - begin
        found.windows.append((begin, end))

    async def round(self) -> None:
        """Measure all states once."""
        await self.calm(3)
        async with self.window("idle"):
            await asyncio.sleep(self._seconds)
        gone = self.record.in_sync[-1][0]
        await self._cluster.kill(gone)
        await self.calm(2)
        async with self.window("two copies"):
            await asyncio.sleep(self._seconds)
        await self._cluster.server(gone)
        self._cluster.yield_processors(gone, self._joining_yields)
        await self.until(lambda: bool(self.record.joining), "a joining member")
        async with self.window("catch-up"):
            self.attempts += await self._attempts()
        self._cluster.yield_processors(gone, False)
        await self.calm(3)
        async with self._foreign(), self.window("foreign"):
            await asyncio.sleep(self._seconds)

    async def _attempts(self) -> int:
        """Wait for a third member in sync; return how often it began to join, at least 1."""
        attempts, was_joining = 1, True

        def is_whole() -> bool:
            nonlocal attempts, was_joining
            is_joining = bool(self.record.joining)
            attempts += is_joining and not was_joining
            was_joining = is_joining
            return len(self.record.in_sync) == 3

        await self.until(is_whole, "a third member in sync")
        return attempts

    @asynccontextmanager
    async def _foreign(self) -> AsyncIterator[None]:
        """Let another program send from the primary's host to another server's."""
        to = self.record.in_sync[-1][0]
        address = self._cluster.network.address_of(to, self._cluster.layout.copies)
        sink = await self._cluster.program(to, "-c", SINK, address)
        assert sink.stdout is not None
        await sink.stdout.readline()
        source = await self._cluster.program(self.primary, "-c", SOURCE, address)
        await asyncio.sleep(SETTLE_S)
        yield
        for process in (source, sink):
            process.kill()
            await process.wait()

    def rows(self) -> dict[str, Row]:
        """Return the row of each state. All updates must be acknowledged."""
        return {
            name: row_of(
                [each for window in state.windows for each in self._load.between(*window)],
                state.sent_bytes,
                state.seconds,
            )
            for name, state in self.states.items()
        }


def row_of(latencies: Sequence[float], sent_bytes: int, seconds: float) -> Row:
    values = {
        name: round(1e3 * (percentile(latencies, share) or 0.0), 2)
        for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99), ("max_ms", 1.0))
    }
    mbit = round(sent_bytes * 8 / seconds / 1e6, 1)
    return {"updates": len(latencies), **values, "sent_mbit_per_s": mbit, "seconds": round(seconds, 1)}


async def rows_of(network: NamespaceNetwork, layout: Layout, kib: int, options: Namespace) -> list[Row]:
    """Return the rows of one layout and one size of updates."""
    arrays = {"small": np.zeros(kib << 8, np.float32), "big": np.zeros(options.big_mib << 18, np.float32)}
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(started(network, layout))
        store = await stack.enter_async_context(
            ParameterStore.open(
                cluster.controller, arrays, name="model", rule=Sgd(rate=1.0), copies=3, servers=1, token=TOKEN
            )
        )
        load = Load(store, kib << 10, options.mib_per_s * 1024 / kib)
        measurement = Measurement(cluster, store, load, options)
        pushing = asyncio.create_task(load.run())
        try:
            for _ in range(options.rounds):
                await measurement.round()
            await measurement.calm(3)
        finally:
            pushing.cancel()
            await asyncio.wait([pushing])
    rows = measurement.rows()
    rows["catch-up"]["attempts"] = measurement.attempts
    return [
        {
            "case": f"{layout.name}, updates of {kib} KiB, {state}",
            "layout": layout.name,
            "update_kib": kib,
            "state": state,
            **row,
            "ratio": round(row["p99_ms"] / rows["idle"]["p99_ms"], 2),
        }
        for state, row in rows.items()
    ]


async def measure(options: Namespace) -> AsyncIterator[Row]:
    """Yield the rows of all sizes and layouts."""
    async with namespace_network(("ctl", *SERVERS), paths=len(RATES)) as network:
        for host in ("ctl", *SERVERS):
            for path, rate in enumerate(RATES):
                await network.limit(host, rate, path)
        for kib in options.kib:
            for layout in [each for each in LAYOUTS if each.name in options.layout]:
                for row in await rows_of(network, layout, kib, options):
                    yield row


if __name__ == "__main__":
    names = [layout.name for layout in LAYOUTS]
    run(
        __doc__,
        measure,
        rounds=3,
        seconds=Option(6.0, "length of a window except catch-ups"),
        kib=Option([16, 128, 512], "size of an update"),
        mib_per_s=Option(5.0, "updates: 5 is a fifth of a link, and two fifths of the copies link"),
        big_mib=128,
        layout=Option(names, choices=names),
        joining_yields=False,
    )
