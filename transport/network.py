"""The network port: how links are made. `TcpNetwork` between machines, `LocalNetwork` within one loop.

Both understand the same calls; the code that uses them does not know which one it has.

A listener is a block. Each peer gets a task of the block's own task group that runs ``on_link`` and closes
the link when that returns: a server that only answers requests ends its ``on_link`` with
``await link.wait_closed()``. That the peer left (LinkClosed, LinkBroken, RemoteProtocolError) may leave
``on_link`` and is no failure; any other exception ends the block, loudly. Leaving the block closes
the door, cancels every ``on_link``, and waits until all links are closed.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

from transport.budget import Budget
from transport.buffers import BufferPool
from transport.config import LinkConfig
from transport.dial import RetrySchedule
from transport.entrance import Entrance
from transport.errors import (
    BindRefused,
    DialFailed,
    HandshakeRejected,
    LinkBroken,
    LinkClosed,
    RemoteProtocolError,
    TransportError,
)
from transport.greeter import Greeter
from transport.handshake import ClientHandshake, ServerHandshake
from transport.keys import Secret, check_role, check_secret
from transport.link import Link
from transport.local import link_ends
from transport.messages import Identity
from transport.roles import RoleTable
from transport.sockets import deepen_backlog, format_tcp_address, is_loopback, parse_tcp_address
from transport.tcp import TcpLink

__all__ = ["Listener", "LocalNetwork", "Network", "OnLink", "TcpNetwork"]

logger = logging.getLogger(__name__)

OnLink = Callable[[Link], Awaitable[object]]

DIAL_S = 10.0

NOT_NOW = ("crowded", "late")
"""Refusals that are no last word: who was too busy to finish a handshake may be less so the next time."""


class Listener:
    """An open door.

    Attributes:
        address: Where it stands; with the port that was chosen if 0 was asked for.
        identity: Who answers there.
    """

    def __init__(self, address: str, identity: Identity, on_link: OnLink, group: asyncio.TaskGroup) -> None:
        self.address = address
        self.identity = identity
        self._on_link = on_link
        self._group = group
        self._hosts: dict[asyncio.Task[None], Link] = {}
        self._open = True

    @property
    def links(self) -> tuple[Link, ...]:
        """The links that are being served, oldest first."""
        return tuple(self._hosts.values())

    def welcome(self, link: Link) -> None:
        """Serve one more link."""
        if not self._open:
            link.abort()
            return
        serving = self._host(link)
        try:
            task = self._group.create_task(serving, name=f"{self.identity.node}/link-{link.peer.node}")
        except RuntimeError:  # the owner has failed, and its group takes nobody any more
            serving.close()
            link.abort()
            return
        self._hosts[task] = link
        task.add_done_callback(self._hosts.pop)

    async def _host(self, link: Link) -> None:
        try:
            await self._on_link(link)
        except (LinkClosed, LinkBroken, RemoteProtocolError) as error:
            logger.debug("%r: left: %s", link, error)
        finally:
            await link.aclose()

    def close(self) -> tuple[Link, ...]:
        """Welcome nobody any more and cancel whoever serves; return the links that were being served."""
        self._open = False
        links = self.links
        for task in list(self._hosts):
            task.cancel()
        return links

    def __repr__(self) -> str:
        return f"<Listener {self.address} of {self.identity}, {len(self._hosts)} links>"


@asynccontextmanager
async def _listener(address: str, identity: Identity, on_link: OnLink) -> AsyncIterator[Listener]:
    """Run a listener's task group. What the block itself raises leaves as it is, not as a group."""
    raised: Exception | None = None
    links: tuple[Link, ...] = ()
    try:
        async with asyncio.TaskGroup() as group:
            listener = Listener(address, identity, on_link, group)
            try:
                yield listener
            except Exception as error:
                raised = error
                raise
            finally:
                links = listener.close()
    except BaseExceptionGroup as errors:
        if raised is not None and errors.exceptions == (raised,):
            raise raised from None
        raise
    finally:
        # A task that is cancelled before its first step never gets to close its link.
        for link in links:
            await link.aclose()


class Network(ABC):
    """Makes links."""

    @abstractmethod
    def listen(
        self, address: str, identity: Identity, on_link: OnLink
    ) -> AbstractAsyncContextManager[Listener]:
        """Open a door at ``address`` for as long as the block runs. See the module's text.

        Raises:
            BindRefused: Others could reach the address, and there is no token.
            HandshakeRejected: The keys of this network are those of another role.
            OSError: The address is taken or not ours.
            ValueError: Not an address of this network.
        """

    @abstractmethod
    async def dial(
        self,
        address: str,
        identity: Identity,
        *,
        timeout_s: float = DIAL_S,
        retry: RetrySchedule | None = None,
        peer_role: str | None = None,
    ) -> Link:
        """Reach the peer at ``address``; the caller closes the link.

        Tries again as ``retry`` says (default: with growing waits) until ``timeout_s`` have passed. A
        refusal is final, but for those of who is too busy. With ``peer_role``, any other role is refused.
        Cancelling leaves nothing behind.

        Raises:
            DialFailed: Nobody answered in time.
            HandshakeRejected: The two may not or cannot talk; the text says what to do.
            RemoteProtocolError: Somebody else answers there.
            ValueError: Not an address of this network.
        """

    @asynccontextmanager
    async def connect(
        self,
        address: str,
        identity: Identity,
        *,
        timeout_s: float = DIAL_S,
        retry: RetrySchedule | None = None,
        peer_role: str | None = None,
    ) -> AsyncIterator[Link]:
        """Like `dial`, as a block that closes the link at its end."""
        link = await self.dial(address, identity, timeout_s=timeout_s, retry=retry, peer_role=peer_role)
        try:
            yield link
        finally:
            await link.aclose()

    async def _try(
        self,
        address: str,
        attempt: Callable[[], Awaitable[Link]],
        *,
        timeout_s: float,
        retry: RetrySchedule | None,
    ) -> Link:
        waits = (retry or RetrySchedule()).waits()
        attempts = 0
        reason = f"no answer within {timeout_s:g} s"
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    attempts += 1
                    try:
                        return await attempt()
                    except (OSError, LinkBroken) as error:
                        reason = str(error) or type(error).__name__
                    except HandshakeRejected as error:
                        if error.code not in NOT_NOW:
                            raise
                        reason = str(error)
                    wait_s = next(waits, None)
                    if wait_s is None:
                        break
                    await asyncio.sleep(wait_s)
        except TimeoutError:
            pass
        raise DialFailed(address, attempts, reason)


class TcpNetwork(Network):
    """Links over TCP. Addresses are ``tcp://host:port``.

    Args:
        config: Limits and waiting times of its links.
        token: The cluster's root token, or the keys of one role that were derived from it; None only on
            addresses that no other machine can reach.
        entropy: Returns that many unpredictable bytes.
        pool: Where its links receive.
        budget: What its links may hold for their peers together; 512 MiB without it.
        rules: Who may say what.
        advertise: ``tcp://host:port`` that listeners name as their address, for those that listen on every
            interface or behind a gateway; port 0 is the port that is listened on. Empty: where they listen.
    """

    def __init__(
        self,
        *,
        token: Secret | None,
        entropy: Callable[[int], bytes],
        rules: RoleTable,
        config: LinkConfig | None = None,
        pool: BufferPool | None = None,
        budget: Budget | None = None,
        advertise: str = "",
    ) -> None:
        check_secret(token)
        self.config = config or LinkConfig()
        self.pool = pool or BufferPool()
        self.budget = budget or Budget()
        self.rules = rules
        self._token = token
        self._entropy = entropy
        self._advertise = advertise

    @asynccontextmanager
    async def listen(self, address: str, identity: Identity, on_link: OnLink) -> AsyncIterator[Listener]:
        host, port = parse_tcp_address(address)
        if self._token is None and not is_loopback(host):
            raise BindRefused(
                f"refusing to listen on {address} without a token, where others can reach it: "
                "set the cluster's token, or listen on tcp://127.0.0.1:0"
            )
        check_role(self._token, identity.role)
        async with _listener(address, identity, on_link) as listener:

            def greet() -> Greeter:
                def done(outcome: TcpLink | TransportError) -> None:
                    entrance.left(greeter)
                    if isinstance(outcome, TcpLink):
                        listener.welcome(outcome)
                        return
                    logger.info("%r: a peer was not let in: %s", listener, outcome)
                    if isinstance(outcome, HandshakeRejected):
                        entrance.refused(greeter, outcome)

                handshake = ServerHandshake(
                    identity, token=self._token, entropy=self._entropy, rules=self.rules
                )
                greeter = self._greeter(handshake, done, entrance)
                entrance.accepted(greeter)
                return greeter

            entrance = Entrance(self.config.max_unauthenticated)
            # Serving starts in a step of its own: cancelled in the middle of both, the loop would lose the
            # server with its socket open.
            server = await asyncio.get_running_loop().create_server(greet, host, port, start_serving=False)
            try:
                bound = server.sockets[0].getsockname()
                told = parse_tcp_address(self._advertise) if self._advertise else (bound[0], 0)
                listener.address = format_tcp_address(told[0], told[1] or bound[1])
                await server.start_serving()
                deepen_backlog(server, self.config.backlog)
                yield listener
            finally:
                server.close()
                entrance.close()
        await server.wait_closed()

    def _greeter(
        self,
        handshake: ClientHandshake | ServerHandshake,
        done: Callable[[TcpLink | TransportError], None],
        entrance: Entrance | None = None,
    ) -> Greeter:
        return Greeter(
            handshake, config=self.config, rules=self.rules, memory=self.pool, budget=self.budget,
            done=done, entrance=entrance,
        )  # fmt: skip

    async def dial(
        self,
        address: str,
        identity: Identity,
        *,
        timeout_s: float = DIAL_S,
        retry: RetrySchedule | None = None,
        peer_role: str | None = None,
    ) -> Link:
        host, port = parse_tcp_address(address)
        check_role(self._token, identity.role)
        attempt = partial(self._attempt, host, port, identity, peer_role)
        return await self._try(address, attempt, timeout_s=timeout_s, retry=retry)

    async def _attempt(self, host: str, port: int, identity: Identity, peer_role: str | None) -> Link:
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[TcpLink | TransportError] = loop.create_future()

        def done(result: TcpLink | TransportError) -> None:
            if not outcome.done():
                outcome.set_result(result)
            elif isinstance(result, TcpLink):
                result.abort()

        handshake = ClientHandshake(
            identity, token=self._token, entropy=self._entropy, rules=self.rules, peer_role=peer_role
        )
        greeter = self._greeter(handshake, done)
        try:
            await loop.create_connection(lambda: greeter, host, port)
            result = await outcome
        except BaseException:
            greeter.abandon()
            if outcome.done() and not outcome.cancelled():
                late = outcome.result()
                if isinstance(late, TcpLink):
                    late.abort()
            raise
        if isinstance(result, TransportError):
            raise result
        return result

    def __repr__(self) -> str:
        return f"<TcpNetwork {'with' if self._token else 'without'} token, {self.pool!r}>"


class LocalNetwork(Network):
    """Links within one event loop. Addresses are ``local://name``, known to this object only.

    ``local://`` listens under a name of its own choosing.

    Args:
        rules: Table of the messages that each role may send.
        config: Limits and waiting times of its links.
        budget: Bytes that all its links together may hold for their peers; default 512 MiB.
    """

    def __init__(
        self, *, rules: RoleTable, config: LinkConfig | None = None, budget: Budget | None = None
    ) -> None:
        self.config = config or LinkConfig()
        self.rules = rules
        self.budget = budget or Budget()
        self._listeners: dict[str, Listener] = {}
        self._numbered = 0

    @asynccontextmanager
    async def listen(self, address: str, identity: Identity, on_link: OnLink) -> AsyncIterator[Listener]:
        _check_local(address)
        if address == "local://":
            self._numbered += 1
            address = f"local://{identity.node}-{self._numbered}"
        if address in self._listeners:
            raise OSError(f"address {address} is taken by {self._listeners[address].identity}")
        async with _listener(address, identity, on_link) as listener:
            self._listeners[address] = listener
            try:
                yield listener
            finally:
                del self._listeners[address]

    async def dial(
        self,
        address: str,
        identity: Identity,
        *,
        timeout_s: float = DIAL_S,
        retry: RetrySchedule | None = None,
        peer_role: str | None = None,
    ) -> Link:
        _check_local(address)
        attempt = partial(self._attempt, address, identity, peer_role)
        return await self._try(address, attempt, timeout_s=timeout_s, retry=retry)

    async def _attempt(self, address: str, identity: Identity, peer_role: str | None) -> Link:
        listener = self._listeners.get(address)
        if listener is None:
            raise OSError(f"nobody listens on {address}")
        peer = listener.identity
        if peer_role is not None and peer.role != peer_role:
            raise HandshakeRejected(
                "role", f"a {peer_role} was dialled, a {peer.role} answered: check the address"
            )
        if not self.rules.may_talk(identity.role, peer.role):
            raise HandshakeRejected(
                "role",
                f"{identity.role} and {peer.role} have nothing to say to each other: check the address",
            )
        ours, theirs = link_ends(
            identity, peer,
            config=self.config, rules=self.rules, budget=self.budget, loop=asyncio.get_running_loop(),
        )  # fmt: skip
        listener.welcome(theirs)
        return ours

    def __repr__(self) -> str:
        return f"<LocalNetwork {sorted(self._listeners)}>"


def _check_local(address: str) -> None:
    if not address.startswith("local://"):
        raise ValueError(f"address {address!r} is not of the form local://name")
