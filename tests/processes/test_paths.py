"""Servers on three paths: copies on one of their own, which may be slow or cut without harm to clients.

Needs root and iproute2's namespaces; without them a test is skipped with the reason.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager

import numpy as np
import pytest

from adam_async import ParameterStore, Sgd
from adam_async.parameter_server.shard_pieces import PIECE_BYTES
from adam_async.run.store_record import BundleRecord
from tests.drill.network_namespaces import NamespaceNetwork
from tests.processes.commands import Command, address_of
from tests.processes.namespaces import hosts

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

SERVERS = ("ps-0", "ps-1", "ps-2")
TRAINING, COPIES, CONTROL = range(3)
"""The paths, by number."""
TOKEN = "a token of more than sixteen bytes"
SLOW = 20_000_000
"""Rate of a slow path, in bits per second; a piece takes 0.4 s there."""
SMALL, BIG = np.zeros(1 << 10, np.float32), np.zeros(2 << 20, np.float32)
"""An array of 4 KiB that is updated, and one of 8 MiB that joining servers receive."""


class Cluster:
    """A controller and three servers, each on a host with three paths, and a store with three copies."""

    def __init__(self, network: NamespaceNetwork, stack: ExitStack) -> None:
        self.network = network
        self._stack = stack
        self.controller = f"tcp://{network.address_of('ctl', CONTROL)}:7070"
        self.servers: dict[str, Command] = {}
        self.store: ParameterStore

    def start(self, host: str, *words: str) -> Command:
        within, environment = self.network.within(host), {"ADAM_TOKEN": TOKEN}
        return self._stack.enter_context(Command(*words, within=within, environment=environment))

    def start_server(self, host: str) -> None:
        copies = f"tcp://{self.network.address_of(host, COPIES)}:0"
        bind = f"tcp://{self.network.address_of(host, TRAINING)}:0"
        where = ("--controller", self.controller, "--bind", bind, "--copies-bind", copies)
        self.servers[host] = self.start(host, "ps", "--id", host, *where)
        assert address_of(self.servers[host]).startswith(bind.removesuffix("0"))

    @property
    def record(self) -> BundleRecord:
        (bundle,) = self.store.link.membership.map.bundles.values()
        return bundle

    async def until_in_sync(self, count: int) -> None:
        membership = self.store.link.membership
        await membership.wait_for(lambda _: len(self.record.in_sync) == count, f"{count} in sync", 60.0)

    async def push(self) -> float:
        """Push once; return the seconds until the acknowledgement."""
        begin = time.perf_counter()
        await self.store.push({"small": np.ones_like(SMALL)})
        return time.perf_counter() - begin


@asynccontextmanager
async def cluster() -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(hosts(("ctl", *SERVERS), paths=3))
        running = Cluster(network, stack.enter_context(ExitStack()))
        assert address_of(running.start("ctl", "controller", "--bind", running.controller))
        for host in SERVERS:
            running.start_server(host)
        running.store = await stack.enter_async_context(
            ParameterStore.open(
                running.controller,
                {"small": SMALL, "big": BIG},
                name="model",
                rule=Sgd(rate=1.0),
                copies=3,
                servers=1,
                token=TOKEN,
            )
        )
        await running.until_in_sync(3)
        yield running


async def test_each_kind_of_traffic_has_its_path_and_a_cut_copies_path_costs_one_copy() -> None:
    async with cluster() as running:
        network = running.network
        primary, second, third = (node for node, _ in running.record.in_sync)
        await running.push()
        before = {(host, path): await network.sent_bytes(host, path) for host in SERVERS for path in range(3)}
        for _ in range(50):
            await running.push()
        sent = {key: await network.sent_bytes(*key) - was for key, was in before.items()}
        # Two members get each push; the client gets an answer, and the controllers nothing of it.
        assert sent[primary, COPIES] > 2 * 50 * SMALL.nbytes
        assert max(sent[primary, TRAINING], sent[primary, CONTROL]) < sent[primary, COPIES] / 4
        # A member acknowledges on the path of the copies.
        assert sent[second, COPIES] > 4 * sent[second, TRAINING]

        await network.cut(third, COPIES)
        await running.until_in_sync(2)
        assert [node for node, _ in running.record.in_sync] == [primary, second]
        await running.push()
        await network.heal(third, COPIES)
        await running.until_in_sync(3)
        assert (await running.store.pull(["small"]))["small"].tolist() == [-52.0] * SMALL.size


async def test_entries_pass_the_pieces_of_a_catch_up_on_a_slow_path() -> None:
    async with cluster() as running:
        network = running.network
        primary, _, gone = (node for node, _ in running.record.in_sync)
        await network.limit(primary, SLOW, COPIES)
        running.servers[gone].process.kill()
        running.servers[gone].process.wait()
        await running.until_in_sync(2)
        sent = await network.sent_bytes(primary, COPIES)
        await asyncio.to_thread(running.start_server, gone)
        await running.store.link.membership.wait_for(
            lambda _: bool(running.record.joining), "a joining server", 30.0
        )
        seconds = []
        while running.record.joining:
            seconds.append(await running.push())
            await asyncio.sleep(0)
        assert len(running.record.in_sync) == 3, "the server did not join"
        assert await network.sent_bytes(primary, COPIES) - sent > BIG.nbytes

    piece_s = 8 * PIECE_BYTES / SLOW
    median = statistics.median(seconds)
    print(f"{len(seconds)} pushes, median {median * 1e3:.1f} ms")  # noqa: T201 - shown with -s
    assert len(seconds) >= 20
    assert median < piece_s / 4, f"a push waits for pieces of {piece_s:.2f} s each"
