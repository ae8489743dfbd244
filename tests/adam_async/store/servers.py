"""Servers of stores over real sockets, in the loop of a test."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from adam_async.cluster.networks import LOOPBACK, cluster_network
from adam_async.cluster.roles import Place, controller, parameter_server
from adam_async.run.config import Waits
from adam_async.runtime.clock import system_entropy
from transport import BufferPool

SHORT = Waits(dial_s=0.5, call_s=2.0, prepare_s=1.0, patience_s=2.0, clock_s=1.0, answer_s=0.8, grace_s=0.2)
"""Deadlines of tests in which a wait has to end."""


@asynccontextmanager
async def servers(count: int, *, token: str | None = None, waits: Waits = Waits()) -> AsyncIterator[str]:  # noqa: B008
    """Run a controller and parameter servers; yields the controller's address."""
    async with AsyncExitStack() as stack:
        buffers = BufferPool()
        place = Place(
            node="controller",
            bind=LOOPBACK,
            network=cluster_network(token, entropy=system_entropy, buffers=buffers),
            buffers=buffers,
            waits=waits,
            entropy=system_entropy,
        )
        leader = await stack.enter_async_context(controller(place))
        for number in range(count):
            its = replace(place, node=f"ps-{number}", controller=leader.address)
            await (await stack.enter_async_context(parameter_server(its))).joined()
        yield leader.address
