"""The link to the leading controller: search for the leader, detection of its loss, search again.

Theory of operation
-------------------
The first request without a link starts the search: at the leader's last known address, then at all addresses
in turn, with a pause after each round. A dead host does not even refuse a connection, so the search never
waits for one address alone. After `NEXT_S` it tries the next address in parallel, or begins the next round. A
link belongs to the leader once it has answered a first request; the answer ends all other attempts. The
answer also names the controllers' group, so a client of another group stops before it sends a request.

After `WARN_S` without a leader a warning names the result of the last attempt at each address.

Servers and store clients can work without a controller, so they search for `controller_s`; other roles search
for `patience_s`. A restarted single controller asks a server for its stores before it leads (`learned_map`).
The server reports its stores during its search.

The connection gives up a link that breaks, or that leads to a controller which does not lead. If there are
other controllers, it also gives up a link that stays silent for `SILENT_S` beyond the request's own time: its
controller is frozen or cut off. Silence does not count while this process's own loop stands still.
"""

import asyncio
import logging
from collections.abc import Callable

from adam_async.errors import ConfigError, Leaderless, RoleDied, RoleUnreachable, first_cause
from adam_async.messages import LEARNING, NOT_LEADER, UNKNOWN, MapChanges, MapState, WatchMap, pack, unpack
from adam_async.run.cluster_map import STORE_ROLES
from adam_async.run.config import Waits
from adam_async.runtime.channel import Channel, Endpoint
from adam_async.runtime.traffic import Traffic
from transport import (
    CallTimeout,
    DialFailed,
    HandshakeRejected,
    Identity,
    Link,
    LinkBroken,
    LinkClosed,
    Message,
    Network,
    RemoteError,
    RemoteProtocolError,
    RetrySchedule,
    TransportError,
    WouldBlock,
)

logger = logging.getLogger(__name__)

DIAL_S = 1.0
"""Deadline in seconds of one attempt at one of several controllers."""

NEXT_S = 0.2
"""Delay after which the next address is tried in parallel, in seconds."""

SILENT_S = 1.5
"""Silence in seconds, beyond a request's own time, that ends the link to one of several controllers."""

PARTS = 3
"""Number of equal parts of `SILENT_S`; a part counts as silence only if this process's loop ran on time."""

LATE_S = 0.2
"""Lateness in seconds of a wake-up which shows that this process's loop stood still."""

PAUSES = RetrySchedule(first_s=0.05, longest_s=0.5)
"""Pauses between rounds without a leader, in seconds."""

WARN_S = 5.0
"""Duration in seconds of a search that logs a warning: longer than a starting controller's `LISTEN_S`."""

ONCE = RetrySchedule(attempts=1)

BUSY = "busy"
"""Code of a temporary refusal by a leader; the request had no effect."""

LOST = (LinkClosed, LinkBroken, RemoteProtocolError, CallTimeout)
"""Errors after which the outcome of a request is unknown."""


def parse_controllers(text: str) -> tuple[str, ...]:
    """Read the addresses of the controllers: one, or several separated by commas.

    Raises:
        ConfigError: An address is empty, invalid, or given twice.
    """
    addresses = tuple(address.strip() for address in text.split(","))
    for address in addresses:
        if "://" not in address:
            raise ConfigError(
                f"{address!r} in {text!r} is no address of a controller: give one, such as "
                "tcp://10.0.0.1:7070, or several with commas between them"
            )
        if addresses.count(address) > 1:
            raise ConfigError(f"{text!r} names the controller at {address} twice: give each of them once")
    return addresses


def unpack_answer(answer: Message) -> MapState | MapChanges:
    """Unpack a controller's answer: the whole map, or changes.

    Raises:
        RemoteProtocolError: The message is neither.
    """
    if answer.type == MapState.__name__:
        return unpack(answer, MapState)
    return unpack(answer, MapChanges)


class LeaderConnection:
    """Connection to the leader, whichever controller leads.

    Args:
        network: Network of the controllers.
        controllers: Their addresses, separated by commas. One is enough while it runs: it names the leader,
            and the leader names all others.
        identity: The dialling node.
        waits: Deadlines. The search may take `start_s` before a first contact, later `patience_s`, or
            `controller_s` for a server or client of stores.
        traffic: Counts of the links.
        report: Returns the report of a server's stores for a controller that asks; None if this node is not a
            server.

    Attributes:
        link: The link to the leader; None without one.
        group: Group of the controller on the last link.
        first_answer: Version, group and answer of the first request on this link, until the answer is used.

    Raises:
        ConfigError: See `parse_controllers`.
    """

    def __init__(
        self,
        *,
        network: Network,
        controllers: str,
        identity: Identity,
        waits: Waits,
        traffic: Traffic,
        report: Callable[[], Message] | None = None,
    ) -> None:
        self._report = report
        self._is_of_stores = identity.role in STORE_ROLES
        self._patience_s = waits.controller_s if self._is_of_stores else waits.patience_s
        self._controllers = controllers
        self._addresses = parse_controllers(controllers)
        self._identity = identity
        self._waits = waits
        self._endpoint = Endpoint(network, identity, traffic)
        self._order = list(self._addresses)
        """Addresses in the order of attempts, including addresses named by controllers; unreachable ones are
        last."""
        self._named_all: tuple[str, ...] = ()
        """All controllers' addresses as a leader named them."""
        self._hint = ""
        """Likely address of the leader."""
        self._ahead: list[str] = []
        """Addresses of this round, including those already tried."""
        self._channels: dict[str, Channel] = {}
        """Channels by address."""
        self._attempts: dict[str, asyncio.Task[None]] = {}
        """Last attempt at each address."""
        self._at = ""
        self.link: Link | None = None
        self.group = ""
        self.first_answer: tuple[int, str, Message] | None = None
        self._finding = asyncio.Lock()
        self._reached = False
        """Whether any controller was ever reached."""
        self._search_since: float | None = None
        self._warned = False
        self._reason = ""
        self._results: dict[str, str] = {}
        """Result of the last attempt, by address."""
        self._closed = False

    @property
    def address(self) -> str:
        """Address of the known leader; empty during the search for it."""
        return self._at if self.link is not None else ""

    @property
    def node(self) -> str:
        """Node id of the known leader; empty during the search for it."""
        return self.link.peer.node if self.link is not None else ""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of all controllers: the given ones or, if just one was given, the leader's list."""
        return self._addresses if len(self._addresses) > 1 else self._named_all or self._addresses

    @property
    def several(self) -> bool:
        """Whether more than one controller is known."""
        return len(self._order) > 1

    def close(self) -> None:
        """Give up the link. Present and later requests raise `LinkClosed`."""
        self._closed = True
        if self.link is not None:
            self._give_up()

    # --- one request -------------------------------------------------------------------------

    async def call(self, link: Link, message: Message, wait_s: float) -> Message:
        """Send a request; wait `wait_s` plus `SILENT_S` for its answer, or with one controller plus `call_s`.

        Raises:
            CallTimeout: There was no answer.
            RemoteError, LinkClosed, LinkBroken, RemoteProtocolError: See `Link.call`.
        """
        longest_s = wait_s + self._waits.call_s
        if not self.several:
            return await link.call(message, timeout_s=longest_s)
        loop = asyncio.get_running_loop()
        try:
            answer = link.call_nowait(message, timeout_s=longest_s)
        except WouldBlock:
            raise CallTimeout(message.type, wait_s, str(link.peer)) from None
        try:
            part_s, left = SILENT_S / PARTS, PARTS
            pause_s = wait_s + part_s
            while left:
                begin = loop.time()
                await asyncio.wait((answer,), timeout=pause_s)
                if answer.done():
                    return answer.result()
                # A late wake-up shows that this process stood still: the answer may lie unread in the socket.
                if loop.time() - begin < pause_s + LATE_S:
                    left -= 1
                pause_s = part_s
            raise CallTimeout(message.type, wait_s + SILENT_S, str(link.peer))
        finally:
            answer.cancel()

    async def refused(self, link: Link, error: RemoteError) -> None:
        """Search again after a follower's refusal, pause after a busy leader's, raise any other."""
        if error.code == BUSY:
            await asyncio.sleep(PAUSES.first_s)
        elif error.code in (NOT_LEADER, UNKNOWN):
            if link is self.link:
                logger.info("%s: the controller at %s leads no more", self._identity.node, self._at)
                self._note_leader(error)
                self._give_up()
        else:
            raise error

    def lose(self, link: Link, error: TransportError) -> None:
        """Give up a broken link, or a link to a silent controller."""
        if link is not self.link:
            return
        if isinstance(error, CallTimeout):
            if not self.several:
                return  # only the answer was lost: a link to a dead controller ends by itself
            self._put_last(self._at)
        # With several controllers a new leader is normal within seconds, and store nodes work without one; a
        # longer search logs its own warning.
        logger.log(
            logging.INFO if self.several or self._is_of_stores else logging.WARNING,
            "%s: lost the controller at %s (%s); trying for %g s",
            self._identity.node,
            self._at,
            error,
            self._patience_s,
        )
        self._reason = str(error)
        self._give_up()

    def _give_up(self) -> None:
        self.link = None
        self._channels[self._at].drop()

    def _note_leader(self, error: RemoteError) -> None:
        """Note the leader's address from a follower's refusal."""
        self._hint = error.text if error.code == NOT_LEADER else ""
        if self._hint and self._hint not in self._order:
            self._order.append(self._hint)

    def _put_last(self, address: str) -> None:
        """Try an address only after all others."""
        if self._hint == address:
            self._hint = ""
        if address in self._order:
            self._order.remove(address)
            self._order.append(address)

    # --- search ------------------------------------------------------------------------------

    async def find(self, after: int, group: str) -> Link:
        """Return the link to the leader, after a search if there is none.

        Args:
            after: Version after which the first request on a new link asks for changes; -1: the whole map.
            group: Group of that version.

        Raises:
            RoleUnreachable: No controller was ever reached.
            RoleDied: No controller has led for `patience_s`, or `controller_s` for a node of stores;
                `Leaderless` if there are several.
            HandshakeRejected: A controller refused the handshake.
            LinkClosed: See `close`.
        """
        async with self._finding:
            self._check_open()
            return self.link if self.link is not None else await self._find(after, group)

    def _check_open(self) -> None:
        if self._closed:
            raise LinkClosed(f"{self._identity.node} asks the controllers no more")

    async def _find(self, after: int, group: str) -> Link:
        loop = asyncio.get_running_loop()
        # The next request continues a cancelled search, whose time counts from the first request.
        if self._search_since is None:
            self._search_since = loop.time()
        warning = loop.call_at(self._search_since + WARN_S, self._warn)
        try:
            async with asyncio.TaskGroup() as task_group:
                return await self._search(task_group, after, group)
        except BaseExceptionGroup as errors:
            cause = first_cause(errors)
            raise cause from cause.__cause__
        finally:
            warning.cancel()

    async def _search(self, task_group: asyncio.TaskGroup, after: int, group: str) -> Link:
        pauses = PAUSES.waits()
        while True:
            await self._round(task_group, after, group)
            if self.link is not None:
                return self.link
            if self._left_s() <= 0:
                if not self._reached:
                    why = f"{self._reason}; start it there, or check the address"
                    raise RoleUnreachable("the controller", self._controllers, why)
                if self.several:
                    raise Leaderless(sorted(self._order), self._patience_s, self._reason)
                raise RoleDied("the controller", self._reason)
            await asyncio.sleep(min(next(pauses), self._left_s()))

    def _warn(self) -> None:
        """Warn that no controller leads, once in a search."""
        if self._warned or self._closed or self.link is not None:
            return
        self._warned = True
        results = [f"{each}: {self._results.get(each, 'no answer yet')}" for each in sorted(self._order)]
        one_of = f"one of {len(results)} controllers to lead, for which more than half must run"
        logger.warning(
            "%s waits for %s, for %.0f s more%s; tried %s",
            self._identity.node,
            one_of if self.several else "the controller",
            max(0.0, self._left_s()),
            "; its stores go on meanwhile" if self._is_of_stores and self.group else "",
            "; ".join(results),
        )

    def _left_s(self) -> float:
        """Return the seconds left of the search."""
        assert self._search_since is not None
        waits_s = self._patience_s if self._reached else self._waits.start_s
        return self._search_since + waits_s - asyncio.get_running_loop().time()

    async def _round(self, task_group: asyncio.TaskGroup, after: int, group: str) -> None:
        """Try the likely leader, then every other controller, each once, until one leads.

        A controller that is silent for `NEXT_S` may still answer in a later round; each controller has at
        most one attempt at a time.
        """
        self._ahead, tried = [self._hint, *self._order], {""}
        while self.link is None:
            self._check_open()
            under_way = {each: task for each, task in self._attempts.items() if not task.done()}
            address = next((each for each in self._ahead if each not in tried | under_way.keys()), "")
            if address:
                tried.add(address)
                attempt = self._attempt(address, after, group)
                name = f"{self._identity.node}/find-{address}"
                self._attempts[address] = under_way[address] = task_group.create_task(attempt, name=name)
            if not under_way:
                break
            # After the last address of a round, silent ones do not hold up the next round.
            again = self.several and self._left_s() > 0
            wait_s = NEXT_S if address or again else None
            ended, _ = await asyncio.wait(
                under_way.values(), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not ended:
                if not address:
                    break
                self._put_last(address)

    def _channel_to(self, address: str) -> Channel:
        if address not in self._channels:
            self._channels[address] = Channel(
                self._endpoint, peer="the controller", address=address, peer_role="controller"
            )
        return self._channels[address]

    async def _dial(self, channel: Channel) -> Link | None:
        left_s = self._left_s()
        # The search may have begun long ago and been cancelled: always try one round.
        timeout_s = DIAL_S if self.several or left_s <= 0 else min(left_s, self._waits.dial_s)
        retry = ONCE if self.several else PAUSES
        try:
            link = await channel.dial(timeout_s, retry=retry)
        except (TransportError, ValueError) as error:
            address = channel.address
            if not isinstance(error, DialFailed) and address in self._addresses:
                if isinstance(error, HandshakeRejected) and error.code == "role":
                    text = f"the controller's address {address} is that of another role: {error.text}"
                    raise HandshakeRejected(error.code, text) from error
                raise  # not for an address that a controller named: perhaps only that host can reach it
            self._results[address] = error.reason if isinstance(error, DialFailed) else str(error)
            self._reason = self._results[address] if not self._reached else str(error)
            self._put_last(address)
            return None
        self._reached = True
        return link

    async def _attempt(self, address: str, after: int, group: str) -> None:
        """Send a controller a first request, and take its link if it leads; else try its leader next."""
        channel = self._channel_to(address)
        link = await self._dial(channel)
        if link is None:
            return
        try:
            first = WatchMap(after=after, group=group, wait_s=0.0)
            answer = await self._first_answer(link, pack(first))
            body = unpack_answer(answer)
            if not body.group:
                self._note_result(address, "belongs to no group yet")
            elif not self._closed:
                self._take(link, address)
                self.group, self.first_answer = body.group, (after, group, answer)
                if isinstance(body, MapState) and body.controllers:
                    self._named_all = body.controllers
                    self._order += [each for each in body.controllers if each not in self._order]
        except TransportError as error:
            if isinstance(error, RemoteError) and error.code in (NOT_LEADER, UNKNOWN, BUSY):
                self._note_leader(error)
                self._ahead.insert(0, self._hint)
                why = "does not lead, nor does any other" if self.several else "does not lead yet"
                self._note_result(address, why)
            elif isinstance(error, LOST) or address not in self._addresses:
                self._note_result(address, f"sent no answer: {error}")
                self._put_last(address)
            else:
                raise
        finally:
            if link is not self.link:
                channel.drop()

    async def _first_answer(self, link: Link, first: Message) -> Message:
        """Send a first request; if a learning controller asks first, send it a server's report."""
        try:
            return await self.call(link, first, 0.0)
        except RemoteError as error:
            if error.code != LEARNING or self._report is None:
                raise
        return await self.call(link, self._report(), 0.0)

    def _take(self, link: Link, address: str) -> None:
        """Keep the leader's link, and end all other attempts."""
        for other, attempt in self._attempts.items():
            if other != address:
                attempt.cancel()
        self.link, self._at, self._hint = link, address, address
        if self._warned:
            logger.warning("%s: the controller at %s leads", self._identity.node, address)
        self._search_since, self._warned = None, False
        self._results.clear()

    def _note_result(self, address: str, result: str) -> None:
        self._results[address] = result
        self._reason = f"the controller at {address} {result}"

    def __repr__(self) -> str:
        state = f"to {self._at}" if self.link is not None else "away"
        return f"<{type(self).__name__} {self._identity.node} {state}>"
