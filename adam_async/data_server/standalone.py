"""A data server that stands by itself: it holds its data, and serves clusters that ask for them.

Theory of operation
-------------------
A data host is no member of any cluster. Who begins one asks it to `Serve`, and keeps the link on which it
asked. For each that asks, the host opens a `DataServer` over the same images, on a port of its own beside
the host's; that one takes its seat in the asker's cluster and is like any other data server there.

It serves until the asker says goodbye on that link. If the link breaks, the cluster may be sound all the
same: then the data server stays until the cluster map says that the asker is gone, or until its seat gives
up the controller (`patience_s`). What ends one data server, whatever it is, is logged, and touches neither
the host nor the others.
"""

import logging
from collections.abc import Callable
from typing import Any

from adam_async.controller.role import Role, RoleSettings
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.service import DataServer, describe
from adam_async.errors import first_cause
from adam_async.messages import Body, Serve, Serving, pack, text_tensor
from adam_async.run.config import Waits
from adam_async.runtime.machine import ProcessMemory, available_bytes, process_memory
from dataflow import ComputePool, MakePool
from transport import Identity, Link, LinkClosed, Network, Request, TransportError
from transport.sockets import parse_tcp_address

logger = logging.getLogger(__name__)

MOST_CLUSTERS = 32
"""That are served at a time: each has a thread, and groups that wait for its workers."""


class DataHost(Role):
    """One data host, from `async with` to its end, which is the end of all data servers that it opened.

    Args:
        network: Where it listens, and how data servers reach the controllers of their clusters.
        address: What it binds, ``tcp://host:port``; data servers take any free port of that host.
        identity: Its role, ``data``, node id and incarnation.
        waits: Deadlines.
        dataset: What it serves.
        entropy: Dice for the incarnations of data servers.
        make_pool: What data servers are given; see `Supply`.
        available_bytes: The same.
        process_memory: See `Role`.
    """

    def __init__(
        self,
        *,
        network: Network,
        address: str,
        identity: Identity,
        waits: Waits,
        dataset: Dataset,
        entropy: Callable[[int], bytes],
        make_pool: MakePool = ComputePool,
        available_bytes: Callable[[], int] = available_bytes,
        process_memory: Callable[[], ProcessMemory] = process_memory,
    ) -> None:
        super().__init__(
            RoleSettings(
                network=network,
                address=address,
                identity=identity,
                waits=waits,
                process_memory=process_memory,
            )
        )
        describe(dataset)  # refuses a description that the map of no cluster has room for
        self._dataset = dataset
        self._make_pool = make_pool
        self._available_bytes = available_bytes
        self._entropy = entropy
        self._asked = 0
        self.serving: dict[str, DataServer] = {}
        """The data servers, by the controllers of their clusters; those too that are still to take a seat."""

    # --- questions ---------------------------------------------------------------------------

    def _answer(self, request: Request, body: Body) -> None:
        match body:
            case Serve() if body.controller in self.serving:
                request.fail("busy", f"it serves the cluster at {body.controller} already")
            case Serve() if len(self.serving) >= MOST_CLUSTERS:
                request.fail("busy", f"it serves {MOST_CLUSTERS} clusters, and no more at a time")
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
        server = DataServer(
            network=self._network,
            address=f"{self.address.rpartition(':')[0]}:0",
            controller=controller,
            identity=Identity(
                role=self._identity.role, node=node, incarnation=int.from_bytes(self._entropy(7), "little")
            ),
            waits=self._waits,
            dataset=self._dataset,
            make_pool=self._make_pool,
            available_bytes=self._available_bytes,
            process_memory=self.process_memory,
        )
        self.serving[controller] = server
        self._spawn(f"cluster-{self._asked}", self._serve(request, node, controller, server))

    async def _serve(self, request: Request, node: str, controller: str, server: DataServer) -> None:
        """Run one data server to its end, and log what it was."""
        ended = "the asker said goodbye"
        joined = False
        try:
            async with server:
                await server.joined()
                joined = True
                logger.info("%s serves the cluster at %s", node, controller)
                request.reply(pack(Serving(node=node), [text_tensor(server.info)]))
                if not await _said_goodbye(request.link):
                    ended = "the asker is gone"
                    await _left(server, request.link.peer)
        except Exception as error:  # one cluster's trouble is not another's
            ended = str(first_cause(error))
            if not joined:
                request.fail("failed", ended)
            logger.warning("%s could not go on serving the cluster at %s: %s", node, controller, ended)
        else:
            logger.info("%s serves the cluster at %s no more: %s", node, controller, ended)
        finally:
            del self.serving[controller]

    def statistics(self) -> dict[str, Any]:
        """Where the data servers listen, by controller, and what every role counts."""
        serving = {controller: server.address for controller, server in self.serving.items()}
        return {"serving": serving, **super().statistics()}

    def __repr__(self) -> str:
        return f"<DataHost {self._identity.node} at {self.address} serves {len(self.serving)} clusters>"


async def _said_goodbye(link: Link) -> bool:
    """Wait for the end of a link; returns whether the peer ended it in good order."""
    try:
        while True:
            await link.receive()  # an asker tells nothing; it is the end that is waited for
    except LinkClosed:
        return True
    except TransportError:
        return False


async def _left(server: DataServer, asker: Identity) -> None:
    """Wait until the cluster map says that a life of a node is over."""
    async for cluster in server.changes():
        node = cluster.nodes.get(asker.node)
        if node is not None and (not node.live or node.incarnation != asker.incarnation):
            return
