"""Networks, which make links: `TcpNetwork` between machines, `LocalNetwork` within one loop.

Both networks have the same interface, so callers work with either.

A listener exists during an ``async with`` block. Each link gets a task in the block's task group, which runs
``on_link`` and then closes the link. A server that only answers requests ends its ``on_link`` with ``await
link.wait_closed()``. An error of an ended link (LinkClosed, LinkBroken, RemoteProtocolError) may leave
``on_link``; any other exception ends the block, which raises it. The end of the block stops listening,
cancels every ``on_link``, and waits until all links are closed.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from transport.budget import Budget
from transport.config import LinkConfig
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
from transport.messages import Identity, RoleTable
from transport.regions import Allowance, Side
from transport.sockets import (
    deepen_backlog,
    format_tcp_address,
    is_loopback,
    leave_to_loop,
    parse_tcp_address,
    stop_accepting,
)
from transport.stream import StreamLink
from transport.tensors import BufferPool
from transport.unix import HAS_SHARED, UnixConnection, UnixListener, UnixSockets

logger = logging.getLogger(__name__)

OnLink = Callable[[Link], Awaitable[object]]

DIAL_S = 10.0
"""Default time limit of a dial, in seconds."""

TEMPORARY = ("crowded", "late")
"""Refusal codes after which a dial tries again, because a busy listener may have room at the next attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrySchedule:
    """Waits between attempts to dial, each ``factor`` times longer: ``first_s`` to ``longest_s``.

    Attempts end with the dial's ``timeout_s``, or after ``attempts`` attempts; with 1 a dial never tries
    again.
    """

    first_s: float = 0.05
    factor: float = 2.0
    longest_s: float = 2.0
    attempts: int = 1_000_000

    def __post_init__(self) -> None:
        if self.first_s <= 0 or self.longest_s < self.first_s:
            raise ValueError(f"need 0 < first_s <= longest_s, not {self.first_s} and {self.longest_s}")
        if self.factor < 1:
            raise ValueError(f"factor must be at least 1, not {self.factor}")
        if self.attempts < 1:
            raise ValueError(f"attempts must be at least 1, not {self.attempts}")

    def waits(self) -> Iterator[float]:
        """Yield the seconds to wait after each failed attempt; ends when no attempt is left."""
        wait_s = self.first_s
        for _ in range(self.attempts - 1):
            yield wait_s
            wait_s = min(wait_s * self.factor, self.longest_s)


class Listener:
    """A listening address and the links made through it.

    Attributes:
        address: Address of the listener, with the port that the kernel chose in place of port 0.
        identity: Identity of the listening party.
    """

    def __init__(self, address: str, identity: Identity, on_link: OnLink, group: asyncio.TaskGroup) -> None:
        self.address = address
        self.identity = identity
        self._on_link = on_link
        self._group = group
        self._serving: dict[asyncio.Task[None], Link] = {}
        self._open = True

    @property
    def links(self) -> tuple[Link, ...]:
        """The open links, oldest first."""
        return tuple(self._serving.values())

    def start(self, greeting: Coroutine[None, None, None]) -> None:
        """Start a task that gives a connection to its greeter."""
        try:
            self._group.create_task(greeting, name=f"{self.identity.node}/greeting")
        except RuntimeError:  # the block has failed, and its group starts no further task
            greeting.close()

    def serve(self, link: Link) -> None:
        """Start a task that runs ``on_link`` for a new link; abort the link after `close`."""
        if not self._open:
            link.abort()
            return
        serving = self._serve(link)
        try:
            task = self._group.create_task(serving, name=f"{self.identity.node}/link-{link.peer.node}")
        except RuntimeError:  # the block has failed, and its group starts no further task
            serving.close()
            link.abort()
            return
        self._serving[task] = link
        task.add_done_callback(self._serving.pop)

    async def _serve(self, link: Link) -> None:
        try:
            await self._on_link(link)
        except (LinkClosed, LinkBroken, RemoteProtocolError) as error:
            logger.debug("%r: ended: %s", link, error)
        finally:
            await link.aclose()

    def close(self) -> tuple[Link, ...]:
        """Abort all further links and cancel the tasks of the open ones; return the open ones."""
        self._open = False
        links = self.links
        for task in list(self._serving):
            task.cancel()
        return links

    def __repr__(self) -> str:
        return f"<Listener {self.address} of {self.identity}, {len(self._serving)} links>"


@asynccontextmanager
async def _listener(address: str, identity: Identity, on_link: OnLink) -> AsyncIterator[Listener]:
    """Run a listener's task group. An error of the block itself is raised alone, not in a group."""
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
            raise raised from raised.__cause__
        raise
    finally:
        # A task cancelled before its first step does not close its link.
        for link in links:
            await link.aclose()


class Network(ABC):
    """Makes links."""

    @abstractmethod
    def listen(
        self, address: str, identity: Identity, on_link: OnLink
    ) -> AbstractAsyncContextManager[Listener]:
        """Listen on ``address`` while the block runs. See the module.

        Raises:
            BindRefused: Other machines could reach the address, and the network has no token.
            HandshakeRejected: The keys of this network belong to another role.
            OSError: The address is taken, or belongs to another machine.
            ValueError: ``address`` is not an address of this network.
        """

    async def dial(
        self,
        address: str,
        identity: Identity,
        *,
        timeout_s: float = DIAL_S,
        retry: RetrySchedule | None = None,
        peer_role: str | None = None,
    ) -> Link:
        """Make a link to the peer at ``address``; the caller closes it.

        The dial tries again on the schedule ``retry`` (default: with growing waits) until ``timeout_s`` have
        passed. A refusal is final, unless it is `TEMPORARY`. With ``peer_role``, the dial refuses a peer of
        another role. Cancelling leaves no link open.

        Raises:
            DialFailed: No attempt succeeded in time, or ``address`` is not an address of this network. The
                error has the number of attempts and the last reason.
            HandshakeRejected: One side refuses the other; the text has the remedy.
            RemoteProtocolError: The address answers in another protocol.
        """
        waits = (retry or RetrySchedule()).waits()
        attempts = 0
        reason = f"no answer within {timeout_s:g} s"
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    attempts += 1
                    try:
                        return await self.dial_once(address, identity, peer_role)
                    except (OSError, LinkBroken, ValueError, OverflowError) as error:
                        # An address is a peer's word: one with another form, or refused by the resolver, is
                        # as unreachable as one without a listener.
                        reason = str(error) or type(error).__name__
                    except HandshakeRejected as error:
                        if error.code not in TEMPORARY:
                            raise
                        reason = str(error)
                    wait_s = next(waits, None)
                    if wait_s is None:
                        break
                    await asyncio.sleep(wait_s)
        except TimeoutError:
            pass
        raise DialFailed(address, attempts, reason)

    @abstractmethod
    async def dial_once(self, address: str, identity: Identity, peer_role: str | None) -> Link:
        """Attempt a `dial` once. `dial` also tries again after OSError, LinkBroken and ValueError."""

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
        """Dial as `dial` does, in a block that closes the link at its end."""
        link = await self.dial(address, identity, timeout_s=timeout_s, retry=retry, peer_role=peer_role)
        try:
            yield link
        finally:
            await link.aclose()


class TcpNetwork(Network):
    """Links over TCP. Addresses are ``tcp://host:port``.

    Args:
        config: Limits and time-outs of the links.
        token: The cluster's root token, or one role's keys derived from it; None only on addresses that no
            other machine can reach.
        entropy: Function that returns as many unpredictable bytes as requested.
        pool: Memory in which the links receive.
        budget: Bytes that all links together may hold for their peers, and share with them in addition;
            default 512 MiB.
        rules: Table of the messages that each role may send.
        advertise: ``tcp://host:port`` that listeners report as their address, for listeners on every
            interface or behind a gateway; port 0 means the listening port. Empty: the listening address.
        unix: Sockets within this host; by default those of the kernel.

    With `LinkConfig.link` the links between processes of one host use a Unix socket and shared memory.
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
        unix: UnixSockets | None = None,
    ) -> None:
        check_secret(token)
        self.config = config or LinkConfig()
        self._link = self.config.link if HAS_SHARED else "tcp"
        if self._link != self.config.link == "shared":
            raise ValueError("this system has no shared links: use link='auto'")
        self.pool = pool or BufferPool()
        self.budget = budget or Budget()
        self._allowance = Allowance(self.budget.limit_bytes)
        self.rules = rules
        self._token = token
        self._entropy = entropy
        self._advertise = advertise
        self._unix = unix or UnixSockets()

    @asynccontextmanager
    async def listen(self, address: str, identity: Identity, on_link: OnLink) -> AsyncIterator[Listener]:
        host, port = parse_tcp_address(address)
        check_role(self._token, identity.role)
        async with _listener(address, identity, on_link) as listener:

            def greet(side: Side | None = None) -> Greeter:
                def done(outcome: StreamLink | TransportError) -> None:
                    entrance.left(greeter)
                    if isinstance(outcome, StreamLink):
                        listener.serve(outcome)
                        return
                    logger.info("%r: refused a peer: %s", listener, outcome)
                    if isinstance(outcome, HandshakeRejected):
                        entrance.refused(greeter, outcome)

                handshake = ServerHandshake(
                    identity, token=self._token, entropy=self._entropy, rules=self.rules
                )
                greeter = self._greeter(handshake, done, entrance, side)
                entrance.accepted(greeter)
                return greeter

            entrance = Entrance(self.config.max_unauthenticated)
            beside = self._unix.listener(greet, self.config, listener.start)
            # Serving starts in a separate step: if `create_server` waited for it too, cancelling that wait
            # would lose the server with its socket open.
            server = await asyncio.get_running_loop().create_server(greet, host, port, start_serving=False)
            try:
                self._check_bound(address, [sock.getsockname()[0] for sock in server.sockets])
                bound = server.sockets[0].getsockname()
                host, port = parse_tcp_address(self._advertise) if self._advertise else (bound[0], 0)
                listener.address = format_tcp_address(host, port or bound[1])
                await server.start_serving()
                deepen_backlog(server, self.config.backlog)
                if self._link != "tcp":
                    self._listen_unix(beside, [sock.getsockname()[:2] for sock in server.sockets])
                yield listener
            finally:
                beside.close()
                stop_accepting(server)
                try:
                    await entrance.aclose(self.config.close_s)
                finally:
                    server.close()
        await server.wait_closed()

    def _listen_unix(self, beside: UnixListener, addresses: list[tuple[str, int]]) -> None:
        try:
            beside.listen(addresses)
        except OSError as error:
            if self._link == "shared":
                raise OSError(
                    error.errno, f"the Unix socket beside the listener: {error.strerror}"
                ) from error
            logger.warning("processes of this host will use TCP, the Unix socket cannot listen: %s", error)

    def _check_bound(self, address: str, hosts: list[str]) -> None:
        """Check the addresses to which a listener is bound, before it accepts a peer.

        A name may mean another address than it seems to: Debian maps a machine's own name to 127.0.1.1.

        Raises:
            BindRefused: Other machines can reach an address, and the network has no token.
        """
        others = [host for host in hosts if not is_loopback(host)]
        if others and self._token is None:
            means = "" if others[0] in address else f", which is {others[0]},"
            raise BindRefused(
                f"refusing to listen on {address}{means} without a token, because other machines can reach "
                "it: set the cluster's token, or listen on tcp://127.0.0.1:0"
            )
        if not others and not is_loopback(parse_tcp_address(address)[0]):
            logger.warning(
                "%s is %s on this machine, which no other machine can reach: if roles run on others, listen "
                "on the address of an interface",
                *(address, hosts[0]),
            )

    def _greeter(
        self,
        handshake: ClientHandshake | ServerHandshake,
        done: Callable[[StreamLink | TransportError], None],
        entrance: Entrance | None = None,
        side: Side | None = None,
    ) -> Greeter:
        return Greeter(
            handshake, config=self.config, rules=self.rules, memory=self.pool, budget=self.budget,
            done=done, entrance=entrance, side=side, allowance=self._allowance,
        )  # fmt: skip

    async def dial_once(self, address: str, identity: Identity, peer_role: str | None) -> Link:
        """Dial once; a link that comes after a cancellation is aborted."""
        check_role(self._token, identity.role)
        host, port = parse_tcp_address(address)
        found = None
        if self._link != "tcp":
            try:
                found = await self._unix.dial(host, port)
            except OSError as error:
                if self._link == "shared":
                    raise OSError(f"{error} (link is 'shared'; 'auto' would try TCP)") from None
        if found is not None:
            try:
                return await self._dial_socket(host, port, found, identity, peer_role)
            except (OSError, TransportError) as error:
                if self._link == "shared":
                    raise
                # Any process of this user can take the Unix socket's name, but not the listener's port.
                logger.debug("no link within this host to %s, trying TCP: %s", address, error)
        return await self._dial_socket(host, port, None, identity, peer_role)

    async def _dial_socket(
        self, host: str, port: int, found: UnixConnection | None, identity: Identity, peer_role: str | None
    ) -> Link:
        """Make a link over a connection within this host, or without one over TCP."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[StreamLink | TransportError] = loop.create_future()

        def done(result: StreamLink | TransportError) -> None:
            if not outcome.done():
                outcome.set_result(result)
            elif isinstance(result, StreamLink):
                result.abort()

        handshake = ClientHandshake(
            identity, token=self._token, entropy=self._entropy, rules=self.rules, peer_role=peer_role
        )
        greeter = self._greeter(handshake, done, side=found and found[1])
        try:
            if found is None:
                await loop.create_connection(lambda: greeter, host, port)
            else:
                try:
                    await loop.create_unix_connection(lambda: greeter, sock=found[0])
                finally:
                    leave_to_loop(found[0])
            result = await outcome
        except BaseException:
            greeter.abandon()
            if outcome.done() and not outcome.cancelled():
                late = outcome.result()
                if isinstance(late, StreamLink):
                    late.abort()
            raise
        if isinstance(result, TransportError):
            raise result
        return result

    def __repr__(self) -> str:
        return f"<TcpNetwork {'with' if self._token else 'without'} token, {self.pool!r}>"


class LocalNetwork(Network):
    """Links within one event loop. Addresses are ``local://name``, valid only for this object.

    ``local://`` listens under a generated name.

    Args:
        rules: Table of the messages that each role may send.
        config: Limits and waiting times of the links.
        budget: Bytes that all links together may hold for their peers; default 512 MiB.
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

    async def dial_once(self, address: str, identity: Identity, peer_role: str | None) -> Link:
        """Make both ends of a link with the listener, or refuse it as a handshake would."""
        _check_local(address)
        listener = self._listeners.get(address)
        if listener is None:
            raise OSError(f"no listener on {address}")
        peer = listener.identity
        if peer_role is not None and peer.role != peer_role:
            raise HandshakeRejected(
                "role", f"dialled a {peer_role}, but a {peer.role} answered: check the address"
            )
        if not self.rules.may_talk(identity.role, peer.role):
            raise HandshakeRejected(
                "role", f"{identity.role} and {peer.role} exchange no messages: check the address"
            )
        ours, theirs = link_ends(
            identity, peer,
            config=self.config, rules=self.rules, budget=self.budget, loop=asyncio.get_running_loop(),
        )  # fmt: skip
        listener.serve(theirs)
        return ours

    def __repr__(self) -> str:
        return f"<LocalNetwork {sorted(self._listeners)}>"


def _check_local(address: str) -> None:
    if not address.startswith("local://"):
        raise ValueError(f"address {address[:80]!r} is not of the form local://name")
