"""Addresses and options of TCP sockets."""

import asyncio
import ipaddress
import os
import re
import socket
from collections.abc import Sequence

from transport.config import PROBES, LinkConfig

MOST_HOST = 253
"""Maximum length of a host's name, in characters, as in the DNS."""

_LABEL = "[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"

_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?|\*")
"""Pattern of host names and IPv4 addresses; an asterisk means every interface."""

_ADDRESS = re.compile(r"tcp://(?:\[([0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?)\]|([^][:/?#@]+)):([0-9]{1,5})")


def parse_tcp_address(address: str) -> tuple[str, int]:
    """Split ``tcp://host:port``; an IPv6 host is in brackets.

    The host is an IP address, or a name that a resolver can look up; no lookup takes place.

    Raises:
        ValueError: ``address`` has another form.
    """
    # The length comes first, because a peer may have chosen it.
    found = _ADDRESS.fullmatch(address) if len(address) <= 2 * MOST_HOST else None
    if found is None or int(found[3]) > 65535 or not _is_host(found[1], found[2]):
        raise ValueError(f"address {address[:80]!r} is not of the form tcp://host:port")
    return found[1] or found[2], int(found[3])


def _is_host(ipv6: str | None, name: str) -> bool:
    try:
        if ipv6 is not None:
            ipaddress.IPv6Address(ipv6)
            return True
        ascii_name = name.encode("idna").decode()  # as Python's resolver does
    except ValueError:
        return False
    return len(ascii_name) <= MOST_HOST and _NAME.fullmatch(ascii_name) is not None


def format_tcp_address(host: str, port: int) -> str:
    """Return ``tcp://host:port``; an IPv6 host is in brackets."""
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server bound to ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def resolved(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    """Return a host's addresses with their families; only a name takes a lookup."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return [(family, str(name[0])) for family, *_, name in found]
    # An IPv6 address has several spellings; a listener uses the short one.
    return [(socket.AF_INET if address.version == 4 else socket.AF_INET6, str(address))]


def tune(transport: asyncio.Transport, config: LinkConfig) -> None:
    """Set the socket options of a new link.

    The kernel's own probes end the connection to a lost machine even while this side does not read.
    """
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", config.probe_after_s),
        ("TCP_KEEPINTVL", config.probe_every_s),
        ("TCP_KEEPCNT", PROBES),
        ("TCP_USER_TIMEOUT", config.unacknowledged_s * 1000),
    ):
        option = getattr(socket, name, None)
        if option is not None:  # a platform may lack this option
            sock.setsockopt(socket.IPPROTO_TCP, option, max(1, round(value)))
    if config.socket_buffer_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, config.socket_buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, config.socket_buffer_bytes)


def checks_payloads(config: LinkConfig, transport: asyncio.Transport) -> bool:
    """Return whether the payloads sent on a connection carry a checksum."""
    if config.checksum != "auto":
        return config.checksum == "on"
    ours, theirs = (transport.get_extra_info(name) for name in ("sockname", "peername"))
    # Bytes within a host cross no wire. A peer that has already hung up has no peername.
    return not (ours and theirs and (ours[0] == theirs[0] or is_loopback(theirs[0])))


def leave_to_loop(sock: socket.socket) -> None:
    """Leave closing a socket to the transport that a loop has made, or failed to make, for it.

    uvloop closes the descriptor by its number. If the socket closed it again, this would be another
    descriptor.
    """
    if type(asyncio.get_running_loop()).__module__.startswith("uvloop"):
        sock.detach()


def descriptor_of(transport: asyncio.Transport) -> int:
    """Return the descriptor of a connection's socket; -1 without one, as on a simulated network."""
    fileno = getattr(transport.get_extra_info("socket"), "fileno", None)
    return -1 if fileno is None else int(fileno())


def write_now(descriptor: int, buffers: Sequence[bytes | memoryview]) -> int:
    """Write to a socket what the kernel takes without waiting; return how many bytes.

    After an error the number is 0, also for -1: the transport meets and reports the same error.
    """
    try:
        return os.writev(descriptor, buffers)
    except OSError:
        return 0


def deepen_backlog(server: asyncio.AbstractServer, backlog: int) -> None:
    """Let the kernel accept ``backlog`` connections of a serving server before its loop takes them.

    asyncio's own backlog also limits the connections that it takes in one iteration; this backlog is set only
    in the kernel.
    """
    for sock in server.sockets:  # type: ignore[attr-defined]
        if hasattr(sock, "fileno"):  # not on a simulated network
            with socket.socket(fileno=os.dup(sock.fileno())) as same:
                same.listen(backlog)


def stop_accepting(server: asyncio.AbstractServer) -> None:
    """Accept no further connection; the caller closes the server in a later iteration of the loop.

    asyncio makes the transport of an accepted connection in the next iteration. If its server is closed by
    then, the transport fails and its socket stays open until it is collected (CPython issue 109564).
    """
    loop = asyncio.get_running_loop()
    if isinstance(loop, asyncio.SelectorEventLoop):
        for sock in server.sockets:  # type: ignore[attr-defined]
            loop.remove_reader(sock.fileno())
    else:
        server.close()
