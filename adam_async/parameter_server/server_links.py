"""The links among parameter servers that share bundles: one for entries, another for heartbeats.

Theory of operation
-------------------
A primary dials the other members of its bundles. This link carries entries and their acknowledgements, in
order. Each server also dials every other server for heartbeats, so that no beat waits behind an entry. A
server counts another server as silent if no beat arrives. A silent server counts as gone if `GONE_DIALS`
dials in a row fail, because the process has probably ended. After its own stall, a server counts no other
server as silent, because its sockets may have unread beats.

*A path of their own.* A server with a `CopiesPath` has a second listener, which accepts servers only. The
cluster map has the address of this listener. Other servers dial that address for all links to this server;
clients dial the address of the first listener. Pieces of the state for a joining server are sent on a third
link, a `PieceLink`, and wait for entries there. The core sends a piece only once the member has all entries
in it, and the member applies no later entry before the piece. So the order of the two links does not matter.
If the link for pieces ends, the link for entries ends too, and its successor begins a new session.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from adam_async.messages import Body, pack, unpack_any
from adam_async.messages.replication import Beat, PieceCopy
from adam_async.parameter_server.piece_link import PieceLink, PieceTurns
from adam_async.parameter_server.replication.local_copy import MESSAGES
from adam_async.parameter_server.replication.local_copy import Message as ReplicationMessage
from adam_async.run.store_record import Member
from adam_async.runtime.channel import Channel, Endpoint
from transport import (
    DialFailed,
    Link,
    LocalProtocolError,
    Message,
    Network,
    ProtocolError,
    RemoteProtocolError,
    RetrySchedule,
    TransportError,
    WouldBlock,
)

logger = logging.getLogger(__name__)

BEAT_S = 0.1
"""Interval of the heartbeats, in seconds."""

LATE_S = 0.3
"""Delay of a tick in seconds, beyond `BEAT_S`, above which this process has stalled."""

DIAL_S = 1.0
"""Maximum time of one attempt to dial another server, in seconds."""

GONE_DIALS = 2
"""Number of failed dials in a row after which a server counts as gone."""

OnMessage = Callable[[Member, ReplicationMessage, Sequence[Any]], None]
"""Callback with another server's message and its tensors. Raises `ProtocolError` for an invalid message."""

MOST_ANSWERS = 1 << 16
"""Maximum number of answers that wait for a primary that does not read; more of them end the link."""

MOST_BEGUN = 1 << 12
"""Maximum number of bundles that a link notes as begun; from then on all bundles count as begun."""

_ONCE = RetrySchedule(attempts=1)
"""Schedule of a single attempt, because each failed dial counts for `GONE_DIALS`."""

_DIALS = RetrySchedule(first_s=0.05, longest_s=0.5)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopiesPath:
    """The path of a server to the other servers, separate from its clients' path.

    Attributes:
        address: Address to listen on; the cluster map gets the address that the listener has bound.
        network: Listener of the path, which accepts only servers.
        pieces: Links for pieces, with `PIECES_CONFIG`.
    """

    address: str
    network: Network
    pieces: Network


class _Peer:
    """One other server: its address, its beats, and the link for entries if this server is a primary.

    Args:
        pieces: Endpoint of the link for pieces; None: pieces use the link for entries.
    """

    def __init__(
        self, endpoint: Endpoint, pieces: Endpoint | None, member: Member, address: str, now: float
    ) -> None:
        self.member = member
        self.pieces: PieceLink | None = None
        if pieces is not None:
            self.pieces = PieceLink(Channel(pieces, peer=member[0], address=address, peer_role="ps"))
        self.entries = Channel(endpoint, peer=member[0], address=address, peer_role="ps")
        self.beats = Channel(endpoint, peer=member[0], address=address, peer_role="ps", pauses=_DIALS)
        self.is_wanted = asyncio.Event()
        """Event that is set while this server has entries for the other server."""
        self.heard = now
        """Time of the other server's last beat, moved later by each stall of this process since then."""
        self.failed_dials = 0
        self.tasks: list[asyncio.Task[None]] = []


class ServerLinks:
    """The links of one server.

    Args:
        endpoint: Endpoint of the server.
        pieces: Endpoint of the links for pieces; None: pieces travel on the links for entries.
        spawn: Starts a task of the server, by name.
        now: Returns the time of the loop's clock, in seconds.
        on_message: Takes the messages of the other servers.
        on_link: Called with a member if its link for entries begins (True) or ends (False).
        on_tick: Called with each heartbeat.
        entries_wait: Returns whether a member in sync lacks an entry of this server.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        pieces: Endpoint | None = None,
        spawn: Callable[[str, Coroutine[Any, Any, None]], "asyncio.Task[None]"],
        now: Callable[[], float],
        on_message: OnMessage,
        on_link: Callable[[Member, bool], None],
        on_tick: Callable[[], None],
        entries_wait: Callable[[], bool],
    ) -> None:
        self._endpoint = endpoint
        self._pieces = pieces
        self._spawn = spawn
        self._now = now
        self._on_message = on_message
        self._on_link = on_link
        self._on_tick = on_tick
        self._peers: dict[Member, _Peer] = {}
        self._out: dict[Member, _Outgoing] = {}
        """Links for entries that this server dialled."""
        self._into: dict[Member, _Outgoing] = {}
        """Links for entries that the primary of a bundle dialled."""
        self._turns = PieceTurns(entries_wait, self._hold_pieces, asyncio.get_running_loop().call_later)
        self._last_tick = now()
        self._is_over = False

    async def run(self) -> None:
        """Tick until cancelled, which ends the links that this server dialled."""
        try:
            while True:
                await asyncio.sleep(BEAT_S)
                self._tick()
        finally:
            self._is_over = True
            self._turns.end()
            self.follow({}, frozenset())

    def _tick(self) -> None:
        now = self._now()
        late = now - self._last_tick - BEAT_S
        self._last_tick = now
        if late > LATE_S:
            for peer in self._peers.values():
                peer.heard = min(now, peer.heard + late)
        self._on_tick()

    # --- members -----------------------------------------------------------------------------

    @property
    def up(self) -> tuple[Member, ...]:
        """Members with a link for entries that this server dialled."""
        return tuple(self._out)

    def follow(self, addresses: Mapping[Member, str], entries: Set[Member]) -> None:
        """Keep links to these servers, and links for entries to some of them."""
        for member in [member for member in self._peers if member not in addresses]:
            peer = self._peers.pop(member)
            for task in peer.tasks:
                task.cancel()
        for member, address in addresses.items() if not self._is_over else ():
            peer = self._peers.get(member) or self._new_peer(member, address)
            if member in entries:
                peer.is_wanted.set()
            elif peer.is_wanted.is_set():
                peer.is_wanted.clear()
                peer.entries.drop()  # the peer's queue has entries for a server that is no member

    def _new_peer(self, member: Member, address: str) -> _Peer:
        peer = self._peers[member] = _Peer(self._endpoint, self._pieces, member, address, self._now())
        peer.tasks = [
            self._spawn(f"beats-{member[0]}", self._beat(peer)),
            self._spawn(f"entries-{member[0]}", self._dial_entries(peer)),
        ]
        if peer.pieces is not None:
            peer.tasks.append(self._spawn(f"pieces-{member[0]}", self._send_pieces(peer, peer.pieces)))
        return peer

    def silent_s(self, member: Member) -> float:
        """Return the seconds since a server's last beat; infinite for a lost server, 0 for an unknown one."""
        peer = self._peers.get(member)
        if peer is None:
            return 0.0
        return float("inf") if peer.failed_dials >= GONE_DIALS else self._now() - peer.heard

    def dial_again(self, member: Member) -> None:
        """Drop the link for beats to a silent server, and dial it until it answers."""
        if member in self._peers:
            self._peers[member].beats.drop()

    def expect(self, member: Member) -> None:
        """Begin to wait for the beats of a server, which becomes a member."""
        if member in self._peers:
            self._peers[member].heard = self._now()

    def answers(self, member: Member) -> bool:
        """Return whether the link for a server's beats is up; `dial_again` drops it."""
        peer = self._peers.get(member)
        return peer is not None and peer.beats.link is not None

    # --- heartbeats --------------------------------------------------------------------------

    async def _beat(self, peer: _Peer) -> None:
        while True:
            try:
                link = await peer.beats.dial(DIAL_S, retry=_ONCE)
            except TransportError:
                peer.failed_dials += 1
                await peer.beats.pause()
                continue
            if link.peer.incarnation != peer.member[1]:  # another incarnation has the address
                peer.failed_dials += 1
                peer.beats.drop()
                await peer.beats.pause()
                continue
            peer.failed_dials = 0
            peer.beats.progressed()
            try:
                while not link.closed:
                    await link.send(pack(Beat()))
                    await asyncio.sleep(BEAT_S)
            except TransportError as error:
                logger.debug("%s: the beats to %s: %s", self._endpoint.identity.node, peer.member[0], error)
            finally:
                peer.beats.drop()

    # --- entries -----------------------------------------------------------------------------

    async def _dial_entries(self, peer: _Peer) -> None:
        while True:
            await peer.is_wanted.wait()
            try:
                link = await peer.entries.dial(DIAL_S, retry=_ONCE)
            except (DialFailed, TransportError):
                await peer.entries.pause()
                continue
            outgoing = self._out[peer.member] = _Outgoing(link)
            self._on_link(peer.member, True)
            try:
                await self._attend(link, peer.member, outgoing)
            finally:
                self._out.pop(peer.member, None)
                peer.entries.drop()
                if peer.pieces is not None:
                    peer.pieces.drop()  # the pieces are of a session that has ended
                self._on_link(peer.member, False)
            await peer.entries.pause()

    async def _send_pieces(self, peer: _Peer, pieces: PieceLink) -> None:
        """Send the queued pieces on their own link, which the first piece opens."""
        channel = pieces.channel
        try:
            while True:
                await pieces.has_queue.wait()
                link = None
                try:
                    link = await channel.dial(DIAL_S, retry=_ONCE)
                    await pieces.attend(link)
                except TransportError as error:
                    node = self._endpoint.identity.node
                    logger.debug("%s: no link for pieces to %s: %s", node, peer.member[0], error)
                if channel.link is link:  # else the end of the session has ended the link
                    pieces.drop()
                    peer.entries.drop()  # pieces may be lost: the next link begins a new session
                await channel.pause()
        finally:
            pieces.drop()

    def yield_pieces(self) -> None:
        """Make pieces wait while a member lacks an entry; let them go on after that."""
        if self._pieces is not None:
            self._turns.update()

    def _hold_pieces(self, waits: bool) -> None:
        for peer in self._peers.values():
            if peer.pieces is not None:
                peer.pieces.hold(waits)

    async def attend(self, link: Link) -> None:
        """Take the messages on a link that another server dialled, until the link ends."""
        member = (link.peer.node, link.peer.incarnation)
        outgoing = _Outgoing(link, most=MOST_ANSWERS)
        try:
            await self._attend(link, member, outgoing, dialled=False)
        finally:
            link.abort()
            if self._into.get(member) is outgoing:
                del self._into[member]

    async def _attend(
        self, link: Link, member: Member, outgoing: "_Outgoing", *, dialled: bool = True
    ) -> None:
        async with asyncio.TaskGroup() as group:
            node = self._endpoint.identity.node
            pump = group.create_task(outgoing.pump(), name=f"{node}/pump-{member[0]}")
            try:
                while True:
                    message = await link.receive()
                    body = unpack_any(message)
                    if isinstance(body, Beat):
                        self._heard(member)
                        continue
                    if not isinstance(body, MESSAGES):
                        raise RemoteProtocolError("message", f"{message.type} is for clients")
                    if not dialled and not isinstance(body, PieceCopy):
                        self._into[member] = outgoing  # a link for pieces takes no answers
                    self._on_message(member, body, message.tensors)
            except ProtocolError as error:
                logger.warning("%s: %s sent an invalid message: %s", node, member[0], error)
                link.abort()
            except TransportError as error:
                logger.debug("%s: the link to %s ended: %s", node, member[0], error)
            finally:
                pump.cancel()

    def began(self, member: Member, bundle: tuple[str, str]) -> None:
        """Note a session of a bundle, by store and home, on the link that its primary dialled."""
        outgoing = self._into.get(member)
        if outgoing is not None and len(outgoing.begun) < MOST_BEGUN:
            outgoing.begun.add(bundle)

    def begin_again(self, member: Member, bundle: tuple[str, str]) -> None:
        """End the primary's link that has begun a session of a bundle which this server now takes up.

        The new copy has not taken the `Begin`: the message came before the map, or an earlier copy took it.
        The primary begins again on its next link.
        """
        outgoing = self._into.get(member)
        if outgoing is not None and (bundle in outgoing.begun or len(outgoing.begun) == MOST_BEGUN):
            outgoing.abort()

    def hang_up(self, member: Member) -> None:
        """End the link that the primary of a bundle dialled; the primary dials again."""
        outgoing = self._into.get(member)
        if outgoing is not None:
            outgoing.abort()

    def _heard(self, member: Member) -> None:
        if member in self._peers:
            self._peers[member].heard = self._now()

    def send(self, to: Member, body: Body, tensors: Sequence[Any] = (), *, as_primary: bool) -> None:
        """Send a message to another member; it is lost without a link. A piece may use a separate link."""
        outgoing = (self._out if as_primary else self._into).get(to)
        if outgoing is None:
            return
        pieces = self._peers[to].pieces if to in self._peers and isinstance(body, PieceCopy) else None
        if pieces is None:
            outgoing.send(pack(body, tensors))
        else:
            pieces.send(pack(body, tensors))

    def __repr__(self) -> str:
        return f"<ServerLinks of {self._endpoint.identity.node} to {len(self._peers)} servers>"


class _Outgoing:
    """Messages that are being sent to another server, in order.

    Args:
        most: Number of waiting messages beyond which the link ends; None for no bound, because the primary's
            log already bounds its entries.
    """

    def __init__(self, link: Link, *, most: int | None = None) -> None:
        self._link = link
        self._most = most
        self._queue: deque[Message] = deque()
        self._has_queue = asyncio.Event()
        self.begun: set[tuple[str, str]] = set()
        """Store and home of each bundle of which the other server has begun a session."""

    def send(self, message: Message) -> None:
        if self._queue or not self._try(message):
            if self._most is not None and len(self._queue) >= self._most:
                self._link.abort()
                return
            self._queue.append(message)
            self._has_queue.set()

    def _try(self, message: Message) -> bool:
        """Send a message now. Returns False if the other server does not read fast enough."""
        try:
            self._link.send_nowait(message, ordered=True)
        except WouldBlock:
            return False
        except LocalProtocolError as error:  # a defect: the copy has to begin anew without this message
            logger.error("no link to %s can take %s: %s", self._link.peer.node, message.type, error)
            self._link.abort()
        except TransportError:
            return True  # its loss ends the link
        return True

    def abort(self) -> None:
        self._link.abort()

    async def pump(self) -> None:
        """Send the queue as fast as the other server reads, until cancelled."""
        while True:
            while self._queue:
                if self._try(self._queue[0]):
                    self._queue.popleft()
                else:
                    await self._link.wait_writable()
            self._has_queue.clear()
            await self._has_queue.wait()
