"""A role's place in its cluster and in its process, and the errors of its address."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from adam_async.controller.role import RoleSettings
from adam_async.errors import binding
from adam_async.parameter_server.server_links import CopiesPath
from adam_async.run.config import Waits
from adam_async.runtime.timeline import Timeline
from transport import BufferPool, Identity, Network

_R = TypeVar("_R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The parameters of a role in its cluster and in its process.

    Attributes:
        node: Node id, unique in the cluster.
        bind: Address to listen on, ``tcp://host:port``; port 0: any free port.
        controller: Address of the controller, or of several, joined by commas; empty for a controller.
        network: Links to the other roles.
        buffers: Memory for received messages: the pool of `network`.
        waits: Deadlines.
        entropy: Random bytes for the incarnation and session ids.
        timeline: Records the work of the role.
        copies: Path of a parameter server to the other servers; None: they use `bind` too.
    """

    node: str
    bind: str
    controller: str = ""
    network: Network
    buffers: BufferPool
    waits: Waits
    entropy: Callable[[int], bytes]
    timeline: Timeline | None = None
    copies: CopiesPath | None = None

    def settings(self, role: str) -> RoleSettings:
        """Return the settings of a role for a new incarnation of the node."""
        incarnation = int.from_bytes(self.entropy(7), "little")
        return RoleSettings(
            network=self.network,
            address=self.bind,
            identity=Identity(role=role, node=self.node, incarnation=incarnation),
            waits=self.waits,
            controller=self.controller,
            # The driver reads the profiles of members only.
            timeline=self.timeline if self.controller else None,
        )


@asynccontextmanager
async def listening(role: AbstractAsyncContextManager[_R], place: Place) -> AsyncIterator[_R]:
    """Open a role.

    Raises:
        BindFailed: The address is not available.
        BindRefused: Other machines can reach the address, and the role has no token.
    """
    async with AsyncExitStack() as stack:
        with binding(place.bind):
            running = await stack.enter_async_context(role)
        yield running
