"""Servers for tests of stores: one controller and parameter servers over TCP, in this loop or a thread."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from adam_async.cluster.networks import LOOPBACK, cluster_network
from adam_async.cluster.roles.controller import controller
from adam_async.cluster.roles.parameter_server import parameter_server
from adam_async.cluster.roles.place import Place
from adam_async.model.rules import UserRule
from adam_async.parameter_server.service import ParameterServer
from adam_async.parameter_server.state import ServerState
from adam_async.run.config import Waits
from adam_async.run.user_rules import RuleSource
from adam_async.runtime.clock import system_entropy
from tests.transport.testing import FaultyNetwork
from transport import BufferPool

WAITS = Waits()

SHORT = Waits(dial_s=0.5, call_s=2.0, prepare_s=1.0, patience_s=2.0, clock_s=1.0, answer_s=0.8, grace_s=0.2)
"""Deadlines of tests in which a wait has to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreServers:
    """Running servers of stores.

    Attributes:
        address: Address of the controller.
        servers: The parameter servers.
    """

    address: str
    servers: tuple[ParameterServer, ...]

    def states(self) -> list[ServerState]:
        """The states of all stores on all servers."""
        return [served.state for server in self.servers for served in server.served.values()]


@asynccontextmanager
async def store_servers(
    count: int = 3,
    *,
    token: str | None = None,
    waits: Waits = WAITS,
    rules: Sequence[type[UserRule]] = (),
    disks: Path | None = None,
) -> AsyncIterator[StoreServers]:
    """Run a controller and parameter servers, which allow some rules, until the end of the block.

    Args:
        disks: Folder with one folder for each server; None: they have no disks.
    """

    def place(node, address=""):
        buffers = BufferPool()
        network = cluster_network(token, entropy=system_entropy, buffers=buffers)
        return Place(
            node=node,
            bind=LOOPBACK,
            controller=address,
            network=network,
            buffers=buffers,
            waits=waits,
            entropy=system_entropy,
        )

    async with AsyncExitStack() as stack:
        leader = await stack.enter_async_context(controller(place("controller")))
        allowed = RuleSource(rules)
        servers = [
            await stack.enter_async_context(
                parameter_server(
                    place(node, leader.address), rules=allowed, folder=disks / node if disks else None
                )
            )
            for node in [f"ps-{number}" for number in range(count)]
        ]
        for server in servers:
            await server.joined()
        yield StoreServers(address=leader.address, servers=tuple(servers))


def faulty_clients(monkeypatch: pytest.MonkeyPatch) -> list[FaultyNetwork]:
    """Let the links of clients fail as their networks say, which the list has as soon as a store opens."""
    networks: list[FaultyNetwork] = []

    def faulty(*args: Any, **options: Any) -> FaultyNetwork:
        networks.append(FaultyNetwork(cluster_network(*args, **options), random.Random(len(networks))))
        return networks[-1]

    monkeypatch.setattr("adam_async.store.opening.cluster_network", faulty)
    return networks


@asynccontextmanager
async def servers(count: int, *, token: str | None = None, waits: Waits = WAITS) -> AsyncIterator[str]:
    """Run a controller and parameter servers; yields the controller's address."""
    async with store_servers(count, token=token, waits=waits) as running:
        yield running.address


@contextmanager
def cluster(count: int = 3, *, token: str | None = None, waits: Waits = WAITS) -> Iterator[StoreServers]:
    """Run a controller and parameter servers in a thread of their own, for callers that block theirs."""
    started: Future[tuple[StoreServers, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        async with store_servers(count, token=token, waits=waits) as running:
            ending = asyncio.Event()
            started.set_result((running, asyncio.get_running_loop(), ending))
            await ending.wait()

    with ThreadPoolExecutor(1) as executor:
        serving = executor.submit(lambda: asyncio.run(serve()))
        running, loop, ending = started.result(20.0)
        try:
            yield running
        finally:
            loop.call_soon_threadsafe(ending.set)
            serving.result(20.0)
