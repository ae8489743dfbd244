"""Networks of a cluster's processes: over TCP, slowed on purpose, or several by scheme.

network = SchemeNetworks(local=LocalNetwork(...), tcp=TcpNetwork(...))
network.listen("local://", ...)                       # by reference, within this loop
network.dial("tcp://10.0.0.1:7070", ...)              # to a data server elsewhere
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import numpy as np

from adam_async.errors import ConfigError, failing_as
from adam_async.messages import role_table, table_among
from adam_async.model.keyed_random import Dice
from adam_async.parameter_server.piece_link import PIECES_CONFIG
from adam_async.parameter_server.server_links import CopiesPath
from adam_async.run.config import Config
from adam_async.run.memory_sizes import read_budget
from adam_async.run.stragglers import slow_links
from adam_async.run.token_file import read_token_text
from transport import (
    Budget,
    BufferPool,
    DialFailed,
    Identity,
    Link,
    LinkConfig,
    Listener,
    Network,
    TcpNetwork,
)
from transport.config import Checksum, LinkKind
from transport.network import OnLink
from transport.slow import SlowNetwork
from transport.sockets import is_loopback, parse_tcp_address

LOOPBACK = "tcp://127.0.0.1:0"
"""Default address of a role: any free port, reachable only from this machine."""


def memory_budget(text: str) -> Budget:
    """Make the budget that a process's links share, from a size such as ``512M``.

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
    link: LinkKind = "auto",
    budget: Budget | None = None,
    advertise: str = "",
) -> TcpNetwork:
    """Make the network of one process: over TCP, and with shared memory to processes of its host.

    Args:
        token: The text of a token file; see `read_token_text`.
        entropy: Returns unpredictable bytes, as many as asked.
        buffers: Memory for received messages.
        checksum: Whether sent payloads carry a CRC-32C; see `LinkConfig.checksum`.
        link: Kind of the links; see `LinkConfig.link`.
        budget: Bytes that all links together may use for their peers; default 512 MiB.
        advertise: Address to publish instead of the listener's address; see `TcpNetwork`.

    Raises:
        ConfigError: The token is too short, or is a damaged line of keys.
    """
    secret = read_token_text(token) if token else None
    try:
        return TcpNetwork(
            token=secret,
            entropy=entropy,
            rules=role_table(),
            config=LinkConfig(checksum=checksum, link=link),
            pool=buffers,
            budget=budget,
            advertise=advertise,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def copies_path(
    token: str | None,
    address: str,
    *,
    entropy: Callable[[int], bytes],
    buffers: BufferPool,
    checksum: Checksum = "auto",
    link: LinkKind = "auto",
    budget: Budget | None = None,
) -> CopiesPath:
    """Make the path of a parameter server to the other servers. For the arguments see `cluster_network`.

    Args:
        address: Address to listen on, ``tcp://host:port``.
    """
    secret = read_token_text(token) if token else None

    def network(config: LinkConfig) -> TcpNetwork:
        return TcpNetwork(
            token=secret, entropy=entropy, rules=table_among("ps"), config=config, pool=buffers, budget=budget
        )

    return CopiesPath(
        address=address,
        network=network(LinkConfig(checksum=checksum, link=link)),
        pieces=network(dataclasses.replace(PIECES_CONFIG, checksum=checksum)),
    )


def network_for(
    config: Config, token: str | None, *, entropy: Callable[[int], bytes], buffers: BufferPool
) -> TcpNetwork:
    """Make the network of a driver's process with the options of its run. See `cluster_network`."""
    return cluster_network(
        token,
        entropy=entropy,
        buffers=buffers,
        checksum=config.checksum,
        link=config.link,
        budget=memory_budget(config.memory_budget),
    )


class JitterSource:
    """Numbers in [0, 1), one after the other, for one pair of nodes; the same in every run."""

    def __init__(self, nodes: tuple[str, str]) -> None:
        self._path = "~".join(sorted(nodes))
        self._drawn = 0

    def random(self) -> float:
        """Return the next number."""
        self._drawn += 1
        drawn = Dice(0).uniform("jitter", keys=(self._path,), start=self._drawn, count=1, dtype=np.float64)
        return float(drawn[0])


@asynccontextmanager
async def slowed(network: Network, slow: Sequence[str]) -> AsyncIterator[Network]:
    """Return the network with the slow links of `Config.slow`; without slow links, the network itself."""
    async with AsyncExitStack() as stack:
        for link in slow_links(slow):
            network = await stack.enter_async_context(
                SlowNetwork(
                    network,
                    delay_s=link.delay_s,
                    jitter_s=link.jitter_s,
                    dice=JitterSource(link.nodes),
                    between=link.nodes,
                )
            )
        yield network


async def address_towards(peers: str) -> str:
    """Return a role's default address: any port of the interface through which it reaches its peers.

    Args:
        peers: Addresses joined by commas: the controllers; for a controller, the data hosts that join it. The
            first peer on another machine decides.

    Raises:
        ConfigError: No route leads to that machine.
    """
    addresses = [(peer, *parse_tcp_address(peer)) for peer in peers.split(",")]
    remote = [address for address in addresses if not is_loopback(address[1])]
    if not remote:
        return LOOPBACK
    peer, host, port = remote[0]
    loop = asyncio.get_running_loop()
    with failing_as(ConfigError, f"no way to {peer}"):
        # Connecting a datagram socket sends nothing and only asks the routing table.
        probe, _ = await loop.create_datagram_endpoint(
            asyncio.DatagramProtocol, remote_addr=(host, port or 9)
        )
    try:
        own = str(probe.get_extra_info("sockname")[0])
    finally:
        probe.close()
    return f"tcp://[{own}]:0" if ":" in own else f"tcp://{own}:0"


class SchemeNetworks(Network):
    """Several networks, chosen by the scheme of an address. Each network keeps its own guarantees.

    Args:
        networks: Networks by scheme, the part of an address before ``://``.
    """

    def __init__(self, **networks: Network) -> None:
        self.networks = networks

    def listen(
        self, address: str, identity: Identity, on_link: OnLink
    ) -> AbstractAsyncContextManager[Listener]:
        """Listen in the network of the address; see `Network.listen`."""
        return self._network_of(address).listen(address, identity, on_link)

    async def dial_once(self, address: str, identity: Identity, peer_role: str | None) -> Link:
        """Dial in the network of the address; see `Network.dial_once`.

        Raises:
            DialFailed: No network has the scheme of the address.
        """
        try:
            network = self._network_of(address)
        except ValueError as error:
            raise DialFailed(address, 0, str(error)) from None
        return await network.dial_once(address, identity, peer_role)

    def _network_of(self, address: str) -> Network:
        network = self.networks.get(address.partition("://")[0])
        if network is None:
            known = ", ".join(f"{scheme}://" for scheme in sorted(self.networks))
            raise ValueError(f"address {address[:80]!r} is of none of these networks: {known}")
        return network

    def __repr__(self) -> str:
        return f"<SchemeNetworks {', '.join(map(repr, self.networks.values()))}>"
