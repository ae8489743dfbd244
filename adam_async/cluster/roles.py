"""One function per role: from where it stands in a cluster to the running role, as an `async with` block.

The command line, child processes and programs that start single roles all come through here. A role
serves run after run until its block is left.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from adam_async.controller.log_file import LogFile
from adam_async.controller.service import Controller
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.service import DataServer
from adam_async.data_server.standalone import DataHost
from adam_async.errors import BindFailed, ConfigError, first_cause
from adam_async.messages import role_table
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.parameter_server.service import ParameterServer
from adam_async.run.cache_size import read_budget
from adam_async.run.config import Config, Waits
from adam_async.run.stragglers import slow_links
from adam_async.run.token_file import read_token_text
from adam_async.runtime.timeline import Timeline
from adam_async.worker.service import ModelWorker
from dataflow import ComputePool
from transport import Budget, BufferPool, Identity, LinkConfig, Network, TcpNetwork
from transport.config import Checksum
from transport.slow import SlowNetwork
from transport.sockets import is_loopback, parse_tcp_address

LOOPBACK = "tcp://127.0.0.1:0"
"""Where a role listens that was told nothing else: any free port that only this machine can reach."""


class Role(Protocol):
    """What all running roles have in common."""

    address: str

    async def joined(self) -> None:
        """Wait until the controller has given it its seat."""


_R = TypeVar("_R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a role stands.

    Attributes:
        node: Its id, unique in the cluster.
        bind: Where it listens, ``tcp://host:port``; port 0 is any free one.
        controller: The controller's address, or those of several joined by commas; a controller does not
            need it.
        network: How it reaches the others.
        buffers: Where it receives; the network's own pool.
        waits: Deadlines.
        entropy: Dice for its incarnation and session ids.
        timeline: Where it notes what it does.
        layers: Kinds of layers that models may use, the same in all of a cluster.
    """

    node: str
    bind: str
    controller: str = ""
    network: Network
    buffers: BufferPool
    waits: Waits
    entropy: Callable[[int], bytes]
    timeline: Timeline | None = None
    layers: Mapping[str, type[Layer]] = field(default_factory=lambda: BUILTIN_LAYERS)

    def identity(self, role: str) -> Identity:
        """A new life of this node."""
        return Identity(role=role, node=self.node, incarnation=int.from_bytes(self.entropy(7), "little"))


def memory_budget(text: str) -> Budget:
    """Make the budget that the links of a process share, from a size such as ``512M``.

    Raises:
        ConfigError: See `read_budget`.
    """
    return Budget(read_budget("--memory-budget", text))


def cluster_network(
    token: str | None,
    *,
    entropy: Callable[[int], bytes],
    buffers: BufferPool,
    checksum: Checksum = "auto",
    budget: Budget | None = None,
    advertise: str = "",
) -> TcpNetwork:
    """Links over TCP for one process.

    Args:
        token: The text of a token file; see `token_text`.
        entropy: Returns that many unpredictable bytes.
        buffers: Where its links receive.
        checksum: Whether sent payloads carry a CRC-32C; see `LinkConfig.checksum`.
        budget: Bytes that its links together may hold for their peers; default 512 MiB.
        advertise: Address that others are told instead of the one that is listened on; see `TcpNetwork`.

    Raises:
        ConfigError: The token is too short, or is a damaged line of keys.
    """
    secret = read_token_text(token) if token else None
    try:
        return TcpNetwork(
            token=secret,
            entropy=entropy,
            rules=role_table(),
            config=LinkConfig(checksum=checksum),
            pool=buffers,
            budget=budget,
            advertise=advertise,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def network_for(
    config: Config, token: str | None, *, entropy: Callable[[int], bytes], buffers: BufferPool
) -> TcpNetwork:
    """Links over TCP for the process of a driver, as its run is configured. See `cluster_network`."""
    return cluster_network(
        token,
        entropy=entropy,
        buffers=buffers,
        checksum=config.checksum,
        budget=memory_budget(config.memory_budget),
    )


@asynccontextmanager
async def slowed(network: Network, slow: Sequence[str]) -> AsyncIterator[Network]:
    """The network with the slow links that `Config.slow` speaks of; the network itself if there are none."""
    async with AsyncExitStack() as stack:
        for link in slow_links(slow):
            network = await stack.enter_async_context(
                SlowNetwork(
                    network,
                    delay_s=link.delay_s,
                    jitter_s=link.jitter_s,
                    dice=link.dice,
                    between=link.nodes,
                )
            )
        yield network


async def address_towards(peers: str) -> str:
    """Where a role listens by default: any port of the interface through which it reaches its peers.

    Args:
        peers: Addresses joined by commas: the controllers; for a controller, data hosts that are to join it.
            One that is on another machine decides.

    Raises:
        ConfigError: There is no way to that host.
    """
    places = [(peer, *parse_tcp_address(peer)) for peer in peers.split(",")]
    away = [place for place in places if not is_loopback(place[1])]
    if not away:
        return LOOPBACK
    peer, host, port = away[0]
    loop = asyncio.get_running_loop()
    try:
        # A datagram socket that sends nothing: connecting it only asks the routing table.
        probe, _ = await loop.create_datagram_endpoint(
            asyncio.DatagramProtocol, remote_addr=(host, port or 9)
        )
    except OSError as error:
        raise ConfigError(f"no way to {peer}: {error.strerror or error}") from None
    try:
        own = str(probe.get_extra_info("sockname")[0])
    finally:
        probe.close()
    return f"tcp://[{own}]:0" if ":" in own else f"tcp://{own}:0"


@asynccontextmanager
async def _listening(role: AbstractAsyncContextManager[_R], place: Place) -> AsyncIterator[_R]:
    async with AsyncExitStack() as stack:
        try:
            running = await stack.enter_async_context(role)
        except (OSError, ExceptionGroup) as error:
            cause = first_cause(error)
            if isinstance(cause, OSError):
                # Loops put "error while attempting to bind on address (...): " before the system's words.
                raise BindFailed(place.bind, (cause.strerror or str(cause)).split("): ")[-1]) from None
            raise
        yield running


def controller(
    place: Place, *, peers: Mapping[str, str] = {}, alone: bool = True, file: LogFile | None = None
) -> AbstractAsyncContextManager[Controller]:
    """Run a controller.

    Args:
        place: Where it stands.
        peers: All controllers of its group, itself among them: node ids and addresses.
        alone: Whether it is a group of its own, without `peers`; otherwise `Controller.group.meet` is told
            them later, when all listen.
        file: What it must not forget is kept there, and taken up from there.

    Raises:
        BindFailed: It cannot listen there.
        BindRefused: Others could reach that address, and there is no token.
    """
    role = Controller(
        network=place.network,
        address=place.bind,
        identity=place.identity("controller"),
        waits=place.waits,
        peers=peers,
        alone=alone,
        file=file,
        layers=place.layers,
        entropy=place.entropy,
    )
    return _listening(role, place)


def parameter_server(place: Place) -> AbstractAsyncContextManager[ParameterServer]:
    """Run a parameter server. Raises what `controller` raises."""
    role = ParameterServer(
        make_pool=ComputePool,
        network=place.network,
        address=place.bind,
        controller=place.controller,
        identity=place.identity("ps"),
        waits=place.waits,
        timeline=place.timeline,
        buffers=place.buffers,
        layers=place.layers,
    )
    return _listening(role, place)


def data_server(place: Place, dataset: Dataset) -> AbstractAsyncContextManager[DataServer]:
    """Run a data server over a data set. Raises what `controller` raises."""
    role = DataServer(
        network=place.network,
        address=place.bind,
        controller=place.controller,
        identity=place.identity("data"),
        waits=place.waits,
        timeline=place.timeline,
        dataset=dataset,
    )
    return _listening(role, place)


def data_host(place: Place, dataset: Dataset) -> AbstractAsyncContextManager[DataHost]:
    """Run a data server that stands alone, to be asked into clusters. Raises what `controller` raises."""
    role = DataHost(
        network=place.network,
        address=place.bind,
        identity=place.identity("data"),
        waits=place.waits,
        dataset=dataset,
        entropy=place.entropy,
    )
    return _listening(role, place)


def model_worker(
    place: Place, *, threads: int, in_flight: int, pace: float = 1.0
) -> AbstractAsyncContextManager[ModelWorker]:
    """Run a model worker. Raises what `controller` raises.

    Args:
        place: Where it stands.
        threads: Compute threads.
        in_flight: Groups in flight; 0 is twice the threads of its replica.
        pace: Share of a core's time that each thread may use.
    """
    role = ModelWorker(
        network=place.network,
        address=place.bind,
        controller=place.controller,
        identity=place.identity("worker"),
        waits=place.waits,
        timeline=place.timeline,
        buffers=place.buffers,
        threads=threads,
        in_flight=in_flight,
        pace=pace,
        entropy=place.entropy,
        layers=place.layers,
    )
    return _listening(role, place)
