"""A standalone data server, which serves its data to the clusters that ask for them.

Theory of operation
-------------------
A data host is not a member of any cluster. The node that starts a cluster asks the host to `Serve`, and keeps
that question's link open. For each question the host opens a `DataServer` over the same images on another
port, which joins the asker's cluster like any other data server.

The data server serves until the asker closes the link. If the link breaks, the cluster may still work. The
data server then stays until the cluster map reports the asker's loss, or until it has had no controller for
`patience_s`. The host logs why a data server ends; the end affects neither the host nor the other servers.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from adam_async.controller.role import Role, RoleSettings
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.service import DataServer, describe
from adam_async.errors import first_cause
from adam_async.messages import Body, Serve, Serving, pack, text_tensor
from adam_async.run.counts import Counts
from transport import Identity, Link, LinkClosed, Request, TransportError
from transport.sockets import parse_tcp_address

logger = logging.getLogger(__name__)

MOST_CLUSTERS = 32
"""Maximum number of clusters served at once; each has a thread, and prepared groups for its workers."""


class HostCounts(Counts, kw_only=True):
    """Counts of a data host."""

    serving: dict[str, str]
    """Addresses of the data servers, by their clusters' controllers."""


class DataHost(Role):
    """One data host, for the duration of its `async with`; its end also ends the data servers that it opened.

    Args:
        settings: Settings of the host, without a controller. The role is ``data``, the address
            ``tcp://host:port``; data servers take any free port of that host.
        dataset: Data to serve.
        entropy: Source of the data servers' incarnations.
        functions: Kinds of transforms that are user functions; the servers refuse runs that name others.
    """

    def __init__(
        self,
        settings: RoleSettings,
        dataset: Dataset,
        *,
        entropy: Callable[[int], bytes],
        functions: Mapping[str, Callable[..., Any]] = {},
    ) -> None:
        super().__init__(settings)
        describe(dataset)  # refuses a description that the map of no cluster has room for
        self._dataset = dataset
        self._entropy = entropy
        self._functions = functions
        self._asked = 0
        self.serving: dict[str, DataServer] = {}
        """Data servers by the controllers of their clusters, before and after they join."""

    # --- questions ---------------------------------------------------------------------------

    def _answer(self, request: Request, body: Body) -> None:
        match body:
            case Serve() if body.controller in self.serving:
                request.fail("busy", f"{self._identity.node} serves the cluster at {body.controller} already")
            case Serve() if len(self.serving) >= MOST_CLUSTERS:
                request.fail("busy", f"{self._identity.node} serves {MOST_CLUSTERS} clusters, the maximum")
            case Serve():
                self._open(request, body.controller)
            case _:
                super()._answer(request, body)

    def _open(self, request: Request, controller: str) -> None:
        try:
            for address in controller.split(","):
                parse_tcp_address(address)
        except ValueError as error:
            request.fail("malformed", f"the controller's {error}")
            return
        self._asked += 1
        node = f"{self._identity.node}-{self._asked}"
        incarnation = int.from_bytes(self._entropy(7), "little")
        settings = RoleSettings(
            network=self._network,
            address=f"{self.address.rpartition(':')[0]}:0",
            identity=Identity(role=self._identity.role, node=node, incarnation=incarnation),
            waits=self._waits,
            controller=controller,
            process_memory=self.process_memory,
        )
        server = DataServer(settings, self._dataset, functions=self._functions)
        self.serving[controller] = server
        self._spawn(f"cluster-{self._asked}", self._serve(request, node, controller, server))

    async def _serve(self, request: Request, node: str, controller: str, server: DataServer) -> None:
        """Run one data server to its end, and log why it ends."""
        ended = "the asker has closed its link"
        joined = False
        try:
            async with server:
                await server.joined()
                joined = True
                logger.info("%s serves the cluster at %s", node, controller)
                request.reply(pack(Serving(node=node), [text_tensor(server.info)]))
                if not await _closed_in_order(request.link):
                    ended = "the asker is gone"
                    await _left(server, request.link.peer)
        except Exception as error:  # the end of one data server must not end the others
            ended = str(first_cause(error))
            if not joined:
                request.fail("failed", ended)
            logger.warning("%s ended its service for the cluster at %s: %s", node, controller, ended)
        else:
            logger.info("%s no longer serves the cluster at %s: %s", node, controller, ended)
        finally:
            del self.serving[controller]

    def statistics(self) -> HostCounts:
        """Return the addresses of the data servers by controller, and the statistics of every role."""
        serving = {controller: server.address for controller, server in self.serving.items()}
        return self._with_common(HostCounts(serving=serving))

    def __repr__(self) -> str:
        return f"<DataHost {self._identity.node} at {self.address} serves {len(self.serving)} clusters>"


async def _closed_in_order(link: Link) -> bool:
    """Wait for a link's end; return whether the peer closed it in order."""
    try:
        while True:
            await link.receive()  # the asker sends no more messages: this waits for the end
    except LinkClosed:
        return True
    except TransportError:
        return False


async def _left(server: DataServer, asker: Identity) -> None:
    """Wait until an incarnation of a node has left the cluster map."""
    async for cluster in server.changes():
        node = cluster.nodes.get(asker.node)
        if node is not None and (not node.live or node.incarnation != asker.incarnation):
            return
