"""Unix sockets beside TCP listeners, by which processes of one host find each other.

A listener on ``tcp://host:port`` has a second socket, whose abstract name has its address. The socket is in
no file system, is in the address's network namespace, and ends with its process. A dial of an address of this
host tries it first. Both ends ask the kernel for the other's user before they read a byte, and use TCP if the
users differ. The dialling end sends one byte with the descriptor of a socket over which regions are handed
over (`regions.py`); then the handshake is that of TCP.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass

from transport.config import LinkConfig
from transport.errors import LinkBroken
from transport.greeter import Greeter
from transport.regions import Region, Side, receive_descriptors, send_descriptor
from transport.shared import user_of
from transport.sockets import is_loopback, leave_to_loop, resolved

HAS_SHARED = hasattr(os, "memfd_create") and hasattr(socket, "SO_PEERCRED")
"""Whether this system has what shared links need."""


def shares_memory() -> bool:
    """Return whether the kernel has common regions, and descriptors of processes."""
    try:
        Region.allocate(1, is_common=True)
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return HAS_SHARED


UnixConnection = tuple[socket.socket, Side]
"""A connection within this host, and its side."""

logger = logging.getLogger(__name__)

_FIRST = b"\x01"
"""First byte of a connection; the byte carries the descriptor."""

LEAST_FREE = 16
"""Number of free descriptors below which a process makes no link with shared memory. Each region takes one. A
link without one ends, and its successor must not end in the same way."""

PAUSE_S = 1.0
"""Seconds without accepting after descriptors ran out."""

_WILDCARDS = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}


def unix_name(host: str, port: int) -> str:
    """Return the abstract name of the Unix socket beside a listener on an address."""
    return f"\0adam-async/{host}/{port}"


def is_of_this_host(family: socket.AddressFamily, host: str) -> bool:
    """Return whether an address belongs to an interface of this network namespace."""
    if is_loopback(host):
        return True
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Nothing is sent. Binding would prove nothing on a host with `net.ipv4.ip_nonlocal_bind`.
            probe.connect((host, 9))
            return bool(probe.getsockname()[0] == host)
    except OSError:
        return False


def has_free_descriptors(sock: socket.socket) -> bool:
    """Return whether this process could have `LEAST_FREE` copies of a socket."""
    copies: list[int] = []
    try:
        while len(copies) < LEAST_FREE:
            copies.append(os.dup(sock.fileno()))
    except OSError:
        return False
    finally:
        for copy in copies:
            os.close(copy)
    return True


async def dial_unix(host: str, port: int) -> UnixConnection:
    """Connect to the Unix socket beside a listener; return the connection and its side.

    Raises:
        OSError: The text says why there is no such connection.
    """
    fault = OSError(f"{host} has no address")
    for family, address in await resolved(host, port):
        try:
            return _connected(family, address, port)
        except OSError as error:
            fault = error
    raise fault


def _connected(family: socket.AddressFamily, host: str, port: int) -> UnixConnection:
    """Connect to the Unix socket beside a listener on one address of its host. Raises OSError."""
    if not is_of_this_host(family, host):
        raise OSError(f"{host} is no address of this host")
    for name in dict.fromkeys((host, _WILDCARDS.get(family, host))):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            connection.connect(unix_name(name, port))
            if user_of(connection) != os.geteuid():
                raise OSError(f"the process at {host}:{port} belongs to another user")
            if not has_free_descriptors(connection):
                raise OSError(f"fewer than {LEAST_FREE} descriptors are free for shared memory")
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                ours.setblocking(False)
                theirs.setblocking(False)
                try:
                    send_descriptor(connection, _FIRST, theirs.fileno())
                except BaseException:
                    ours.close()
                    raise
            return connection, Side(ours)
        except ConnectionRefusedError:  # no process has this name
            connection.close()
        except OSError:
            connection.close()
            raise
    raise OSError(f"no process of this host offers shared memory at {host}:{port}")


async def _accepted(peer: socket.socket, greeter: Greeter) -> None:
    """Give an accepted connection to its greeter."""
    try:
        await asyncio.get_running_loop().connect_accepted_socket(lambda: greeter, peer)
    except BaseException as error:
        leave_to_loop(peer)
        peer.close()
        greeter.abandon()
        if not isinstance(error, OSError):  # the peer has gone
            raise
    leave_to_loop(peer)


class UnixListener:
    """The Unix sockets beside one TCP listener, until `close`.

    Args:
        greet: Makes the protocol of a connection, given the connection's side.
        start: Starts a task, which ends with the listener.
    """

    def __init__(
        self,
        greet: Callable[[Side], Greeter],
        config: LinkConfig,
        start: Callable[[Coroutine[None, None, None]], object],
    ) -> None:
        self._greet = greet
        self._config = config
        self._start = start
        self._loop = asyncio.get_running_loop()
        self._listeners: list[socket.socket] = []
        self._waiting: dict[socket.socket, asyncio.TimerHandle] = {}
        """Accepted connections without a first byte, and when their time ends."""
        self._pauses: dict[socket.socket, asyncio.TimerHandle] = {}

    def listen(self, addresses: Iterable[tuple[str, int]]) -> None:
        """Listen beside TCP listeners on some addresses.

        Raises:
            OSError: Another process has the name.
        """
        for host, port in addresses:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            self._listeners.append(listener)
            listener.bind(unix_name(host, port))
            listener.listen(self._config.backlog)
            self._listen(listener)

    def _listen(self, listener: socket.socket) -> None:
        self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            peer, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the peer has gone
            return
        except OSError as error:
            # No descriptor is free: the connection waits, and the loop would report it again at once.
            logger.warning("no connection within this host can be accepted: %s", error)
            self._loop.remove_reader(listener)
            self._pauses[listener] = self._loop.call_later(PAUSE_S, self._listen, listener)
            return
        peer.setblocking(False)
        if user_of(peer) != os.geteuid():
            peer.close()
            return
        if len(self._waiting) >= self._config.max_unauthenticated:
            # The oldest: a dial sends its first byte at once, and does not wait for long.
            self._drop(next(iter(self._waiting)))
        self._waiting[peer] = self._loop.call_later(self._config.first_record_s, self._drop, peer)
        self._loop.add_reader(peer, self._begin, peer)

    def _forget(self, peer: socket.socket) -> None:
        self._loop.remove_reader(peer)
        self._waiting.pop(peer).cancel()

    def _drop(self, peer: socket.socket) -> None:
        self._forget(peer)
        peer.close()

    def _begin(self, peer: socket.socket) -> None:
        """Take the first byte of a connection and its descriptor, and begin the handshake."""
        side = self._side_of(peer)
        if side is None:
            self._drop(peer)
        else:
            self._forget(peer)
            self._start(_accepted(peer, self._greet(side)))

    def _side_of(self, peer: socket.socket) -> Side | None:
        """Return the side that came with the first byte; None if the peer sent something else, or if few
        descriptors are free."""
        descriptors: list[int] = []
        try:
            first, descriptors = receive_descriptors(peer, 1)
            if first != _FIRST or len(descriptors) != 1 or not has_free_descriptors(peer):
                return None
            side = socket.socket(fileno=descriptors[0])
        except (OSError, LinkBroken):  # the peer has gone, its descriptor is no socket, or none is free
            return None
        else:
            descriptors.clear()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if side.family != socket.AF_UNIX or side.type != socket.SOCK_SEQPACKET:
            side.close()
            return None
        side.setblocking(False)
        return Side(side)

    def close(self) -> None:
        """Accept no further connection."""
        for pause in self._pauses.values():
            pause.cancel()
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()
        for peer in list(self._waiting):
            self._drop(peer)


@dataclass(frozen=True)
class UnixSockets:
    """How processes of one host find each other; the simulator has other functions."""

    dial: Callable[[str, int], Awaitable[UnixConnection]] = dial_unix
    listener: Callable[..., UnixListener] = UnixListener
