"""Tracks one listener's unauthenticated connections, and closes some if there are too many.

A connection is *unauthenticated* from accept to the end of its handshake. A connection is *silent* until its
first record is complete, and *proving* afterwards. Above the limit the listener closes connections from the
source that has the most. The listener closes the oldest silent ones first and, once more than half of that
source's connections are proving, the oldest of these. So neither silent connections nor valid first records
can fill the listener, and a flood from one source displaces no connection of another. A source is an IPv4
address, or the /64 network of an IPv6 address, because one host can use that whole network.

A log warning names the address and the reason of a refused handshake, at most once per reason and
`NEWS_EVERY_S`.

The listener closes connections above the limit only in a later iteration of the loop. The listener first
reads once from all connections accepted together, so a client that sent its first record at once counts as
proving.
"""

import asyncio
import heapq
import ipaddress
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from transport.errors import HandshakeRejected
from transport.greeter import Greeter

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


logger = logging.getLogger(__name__)

ROUND_S = 0.005
"""Seconds from the first connection above the limit to the choice of connections to close."""

NEWS_EVERY_S = 10.0
"""Minimum interval in seconds between two log lines about closed connections, or one refusal reason."""


@dataclass(slots=True)
class _Refusals:
    """The refusals for one reason."""

    news_at: float = 0.0
    """Loop time in seconds from which another refusal for this reason is logged."""
    unlogged: int = 0


class Entrance:
    """Tracks the greeters of one listener.

    Args:
        limit: Maximum number of connections in their handshake; the listener closes excess ones after
            `ROUND_S`.
    """

    def __init__(self, limit: int) -> None:
        self._admission = Admission[Greeter](limit)
        self._greeters: dict[Greeter, None] = {}
        """The greeters that have a connection, or will get one."""
        self._all_gone: asyncio.Event | None = None
        """Set once no greeter is left, from `aclose` on."""
        self._round: asyncio.TimerHandle | None = None
        self._crowded_out = 0
        self._news_at = 0.0
        self._refusals: dict[str, _Refusals] = {}

    def accepted(self, greeter: Greeter) -> None:
        """Record a connection's greeter before its `connected`; abandon it after `aclose`."""
        self._greeters[greeter] = None
        if self._all_gone is not None:
            self._all_gone.clear()
            greeter.abandon()

    def connected(self, greeter: Greeter, host: str) -> None:
        """Note the connection of a greeter from a remote ``host``."""
        self._admission.arrived(greeter, source_of(host))
        if self._admission.over_limit and self._round is None:
            self._round = asyncio.get_running_loop().call_later(ROUND_S, self._make_room)

    def introduced(self, greeter: Greeter) -> None:
        """Note that the first record of a greeter's client is complete and valid."""
        self._admission.introduced(greeter)

    def left(self, greeter: Greeter) -> None:
        """Note the end of a handshake."""
        self._admission.left(greeter)

    def gone(self, greeter: Greeter) -> None:
        """Note that a greeter's connection is closed, or belongs to a link."""
        self._greeters.pop(greeter, None)
        if self._all_gone is not None and not self._greeters:
            self._all_gone.set()

    def refused(self, greeter: Greeter, error: HandshakeRejected) -> None:
        """Log the refusal of a handshake, unless a line about the same reason is recent."""
        if error.code == "crowded":  # `_make_room` logs these
            return
        # The peer chooses code and text of its own refusals, so all of them count as one reason.
        reason = "" if error.text.startswith("the peer refused") else error.code
        refusals = self._refusals.setdefault(reason, _Refusals())
        now = asyncio.get_running_loop().time()
        if now < refusals.news_at:
            refusals.unlogged += 1
            return
        more = f" ({refusals.unlogged} more since the last such line)" if refusals.unlogged else ""
        refusals.news_at, refusals.unlogged = now + NEWS_EVERY_S, 0
        # An unauthenticated client may have chosen the text, so its line breaks must not reach the log.
        text = str(error).encode("unicode_escape").decode()
        logger.warning("no link with %s: %s%s", greeter.address or "a peer", text, more)

    async def aclose(self, within_s: float) -> None:
        """End all handshakes, and wait at most ``within_s`` seconds until their connections are closed."""
        self._all_gone = asyncio.Event()
        if self._round is not None:
            self._round.cancel()
        for greeter in list(self._greeters):
            greeter.abandon()
        # A connection that asyncio has accepted gets its greeter from a task in the loop's next iteration.
        await asyncio.sleep(0)
        if self._greeters:
            with suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._all_gone.wait()

    def _make_room(self) -> None:
        """Close the connections above the limit, and warn at most once per `NEWS_EVERY_S`."""
        self._round = None
        victims = self._admission.take_excess()
        for greeter in victims:
            greeter.crowd_out()
        self._crowded_out += len(victims)
        now = asyncio.get_running_loop().time()
        if victims and now >= self._news_at:
            self._news_at = now + NEWS_EVERY_S
            logger.warning(
                "too many connections are in their handshake: %d were closed so far, "
                "those of the source with the most first",
                self._crowded_out,
            )
