"""Pure: the choice of the unauthenticated connections that a listener closes when it has too many.

A connection is *unauthenticated* from accept to the end of its handshake. A connection is *silent* until its
first record is complete, and *proving* afterwards. Above the limit the listener closes connections of the
source with the most: first the oldest silent ones, and once more than half of that source's connections are
proving, the oldest of these. Neither silent connections nor valid first records can therefore fill the
listener, and a flood from one source displaces no connection of another.

    admission = Admission(limit=2)
    admission.arrived("a", "10.0.0.1"); admission.arrived("b", "10.0.0.1"); admission.arrived("c", "10.0.0.2")
    admission.take_excess()         # ["a"]

A source is an IPv4 address, or the /64 network of an IPv6 address, because one host can use that whole
network.
"""

import heapq
import ipaddress
from typing import Generic, TypeVar

Connection = TypeVar("Connection")


def source_of(host: str) -> str:
    """Return the source of a ``host``: its IPv4 address or IPv6 network; a name is its own source."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        return str(mapped) if mapped is not None else f"{address.packed[:8].hex()}/64"
    return str(address)


class _Source(Generic[Connection]):
    """The connections of one source, oldest first."""

    __slots__ = ("proving", "silent")

    def __init__(self) -> None:
        self.silent: dict[Connection, None] = {}
        self.proving: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self.silent) + len(self.proving)

    def take_victim(self) -> Connection:
        """Remove and return the connection to close: the oldest of the larger kind, or silent on a tie."""
        # Proving connections yield only above half: else every new silent one would be the victim.
        victims = self.silent if len(self.silent) >= len(self.proving) else self.proving
        victim = next(iter(victims))
        del victims[victim]
        return victim


class Admission(Generic[Connection]):
    """The unauthenticated connections of one listener.

    Args:
        limit: Maximum number of connections that may stay; at least 1.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"limit must be at least 1, not {limit}")
        self._limit = limit
        self._sources: dict[str, _Source[Connection]] = {}
        self._source_of: dict[Connection, str] = {}

    def __len__(self) -> int:
        return len(self._source_of)

    @property
    def over_limit(self) -> bool:
        """Whether `take_excess` would return a connection."""
        return len(self._source_of) > self._limit

    def arrived(self, connection: Connection, source: str) -> None:
        """Add a silent connection from a source, as `source_of` returns it."""
        self._source_of[connection] = source
        self._sources.setdefault(source, _Source()).silent[connection] = None

    def introduced(self, connection: Connection) -> None:
        """Note that the first record of a connection is complete and valid."""
        source = self._sources[self._source_of[connection]]
        del source.silent[connection]
        source.proving[connection] = None

    def left(self, connection: Connection) -> None:
        """Remove a connection that was authenticated, refused or closed; ignore an unknown connection."""
        name = self._source_of.pop(connection, None)
        if name is not None:
            source = self._sources[name]
            source.silent.pop(connection, None)
            source.proving.pop(connection, None)
            if not source:
                del self._sources[name]

    def take_excess(self) -> list[Connection]:
        """Remove and return the connections above the limit, which the caller closes."""
        excess = len(self._source_of) - self._limit
        victims: list[Connection] = []
        if excess <= 0:
            return victims
        # Among sources of equal size the first source yields first.
        fullest = [(-len(source), place, name) for place, (name, source) in enumerate(self._sources.items())]
        heapq.heapify(fullest)
        for _ in range(excess):
            size, place, name = fullest[0]
            victim = self._sources[name].take_victim()
            victims.append(victim)
            del self._source_of[victim]
            heapq.heapreplace(fullest, (size + 1, place, name))
        for _, _, name in fullest:
            if not self._sources[name]:
                del self._sources[name]
        return victims
