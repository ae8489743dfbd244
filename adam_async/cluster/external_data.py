"""Standalone data servers: a cluster invites them at its start, and releases them at its end."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from adam_async.errors import ConfigError, DeadlineExceeded, RoleUnreachable, RunFailed
from adam_async.messages import Serve, Serving, pack, read_text_tensor, unpack
from adam_async.messages.body import MOST_INFO_BYTES
from adam_async.run.cluster_map import DATA_FACTS
from adam_async.run.config import Waits
from adam_async.runtime.channel import Channel, Endpoint
from transport import (
    CallTimeout,
    DialFailed,
    HandshakeRejected,
    Identity,
    Link,
    Network,
    RemoteError,
    RemoteProtocolError,
)


class DataHosts:
    """Links to data hosts during a cluster: `async with` connects, and its end closes the links.

    Args:
        addresses: Addresses of the data hosts.
        network: Network of the hosts, with their token.
        identity: The cluster's driver.
        waits: Deadlines: `dial_s` to reach the hosts, `prepare_s` for the join of each host.

    Raises:
        RoleUnreachable: No program listens at an address.
        HandshakeRejected: A host refused the handshake, or is no data server.
        RemoteProtocolError: Another program listens at an address.
    """

    def __init__(
        self, addresses: Sequence[str], *, network: Network, identity: Identity, waits: Waits
    ) -> None:
        self._addresses = addresses
        self._endpoint = Endpoint(network, identity)
        self._waits = waits
        self._links: dict[str, Link] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for address in self._addresses:
                channel = Channel(self._endpoint, peer="a data server", address=address, peer_role="data")
                self._links[address] = await self._dial(channel)
                stack.push_async_callback(channel.aclose)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, trace)

    async def _dial(self, channel: Channel) -> Link:
        address = channel.address
        try:
            return await channel.dial(self._waits.dial_s)
        except DialFailed as error:
            why = f"{error.reason}; start one there with: adam-async data --bind {address}"
            raise RoleUnreachable(channel.peer, address, why) from error
        except HandshakeRejected as error:
            raise HandshakeRejected(error.code, f"{error.text}, at {address}") from error
        except RemoteProtocolError as error:
            raise RemoteProtocolError(error.rule, f"{address}: {error.detail}") from error

    async def serve(self, controller: str) -> dict[str, Any]:
        """Make all hosts join a cluster, one after the other; return the description of their data.

        Args:
            controller: The controller's address, or the addresses of several, joined by commas.

        Raises:
            ConfigError: A host belongs to a cluster already, or the hosts have different data.
            DeadlineExceeded: A host did not join within `prepare_s`.
            RunFailed: A host cannot serve, with the reason.
            LinkBroken, LinkClosed: A host was lost during the call.
        """
        infos = {address: await self._ask(address, controller) for address in self._links}
        first, *others = infos
        for other in others:
            differing = [name for name in DATA_FACTS if infos[first].get(name) != infos[other].get(name)]
            if differing:
                raise ConfigError(
                    f"data: {first} has {_named(differing, infos[first])}, but {other} has "
                    f"{_named(differing, infos[other])}; start all data servers over the same data"
                )
        return infos[first]

    async def _ask(self, address: str, controller: str) -> dict[str, Any]:
        """Ask a standalone data server to join the cluster; return its data set's facts.

        Raises:
            DeadlineExceeded: The data server did not join within `prepare_s`.
            ConfigError: The data server belongs to a cluster already.
            RunFailed: The data server refused; the error has the reason.
        """
        timeout_s = self._waits.prepare_s
        try:
            reply = await self._links[address].call(pack(Serve(controller=controller)), timeout_s=timeout_s)
        except CallTimeout:
            raise DeadlineExceeded(f"the data server at {address} to join", timeout_s) from None
        except RemoteError as error:
            if error.code == "unexpected":
                raise ConfigError(
                    f"data: the data server at {address} belongs to a cluster already; name one that was "
                    "started without --controller"
                ) from error
            raise RunFailed(f"the data server at {address} cannot serve: {error.text}") from error
        unpack(reply, Serving)
        info: dict[str, Any] = read_text_tensor(reply, dict[str, Any], MOST_INFO_BYTES)
        return info

    def __repr__(self) -> str:
        return f"<DataHosts {', '.join(self._addresses)}>"


def _named(names: Sequence[str], info: dict[str, Any]) -> str:
    return ", ".join(f"{name} {info.get(name)}" for name in names)
