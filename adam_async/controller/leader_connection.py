"""One link to whichever controller leads: finding it, noticing that it leads no more, finding it again.

Theory of operation
-------------------
Whoever has a question and finds no link looks for the leader: where it was said to be, then at all addresses
in turn, with a pause after each round. A machine that is gone does not even refuse, so nobody waits for it
alone: after `NEXT_S` the next address is tried beside it, or the next round begun. A link is taken for the
leader's once a first word is answered on it, and that ends all other attempts. The answer also says whose
group it is, before anything is asked that would mean something else in another group.

Who has looked for `SAID_S` says once whom it waits for, and what came of each address.

A link is given up when it breaks, when the controller says that it does not lead, and, where there are others
to turn to, when it has been silent for `SILENT_S` beyond the time that it was given: it is frozen or cut off.
While our own loop stands still nobody's silence counts.
"""

import asyncio
import logging

from adam_async.errors import ConfigError, Leaderless, RoleDied, RoleUnreachable, first_cause
from adam_async.messages import NOT_LEADER, UNKNOWN, MapChanges, MapState, WatchMap, pack, unpack
from adam_async.run.config import Waits
from adam_async.runtime.channel import Channel
from adam_async.runtime.traffic import Traffic
from transport import (
    CallTimeout,
    DialFailed,
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
"""One attempt to reach one of several controllers."""

NEXT_S = 0.2
"""An attempt that takes longer gets the next one beside it."""

SILENT_S = 1.5
"""How much longer than it was given a leader may be silent, where there are several controllers."""

LOOKS = 3
"""Into so many parts that time is cut; only those count in which our own loop ran."""

LATE_S = 0.2
"""A part that took this much longer was not ours to wait in: our own loop stood still."""

PAUSES = RetrySchedule(first_s=0.05, longest_s=0.5)
"""Between rounds in which no controller led."""

SAID_S = 2.0
"""Who has found no leader for so long says so."""

ONCE = RetrySchedule(attempts=1)

BUSY = "busy"
"""A leader that cannot take a question just now; nothing was done."""

LOST = (LinkClosed, LinkBroken, RemoteProtocolError, CallTimeout)
"""What becomes of a question whose fate is not known."""


def parse_controllers(text: str) -> tuple[str, ...]:
    """Read the addresses of the controllers: one, or several with commas between them.

    Raises:
        ConfigError: One is empty, no address, or there twice.
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
    """What a controller says of the map, whole or not.

    Raises:
        RemoteProtocolError: It is something else.
    """
    if answer.type == MapState.__name__:
        return unpack(answer, MapState)
    return unpack(answer, MapChanges)


class LeaderLink:
    """Holds a link to the leader.

    Args:
        network: How to reach the controllers.
        controllers: Their addresses, with commas between them. One is enough while it is there: it names the
            leader, and the leader all others.
        identity: Who we are.
        waits: Deadlines. Before any controller was reached they are given `start_s`, later `patience_s`.
        traffic: Where the links are counted.

    Attributes:
        link: The link; None while there is none.
        group: Of the controller at the end of the last link.
        first_word: Position and answer of the first word on this link, until somebody takes it.

    Raises:
        ConfigError: See `parse_controllers`.
    """

    def __init__(
        self, *, network: Network, controllers: str, identity: Identity, waits: Waits, traffic: Traffic
    ) -> None:
        self._network = network
        self._controllers = controllers
        self._addresses = parse_controllers(controllers)
        self._identity = identity
        self._waits = waits
        self._traffic = traffic
        self._order = list(self._addresses)
        """In which they are tried, with those that were named to us: who could not be reached is the last."""
        self._named_all: tuple[str, ...] = ()
        """What a leader named."""
        self._hint = ""
        """Where the leader was, or was said to be."""
        self._ahead: list[str] = []
        """Whose turn it is in this round, and of those that had theirs."""
        self._channels: dict[str, Channel] = {}
        """By address."""
        self._attempts: dict[str, asyncio.Task[None]] = {}
        """The last one at each address."""
        self._at = ""
        self.link: Link | None = None
        self.group = ""
        self.first_word: tuple[int, str, Message] | None = None
        self._finding = asyncio.Lock()
        self._met = False
        self._looks_since: float | None = None
        self._said = False
        """Whether we said that none leads."""
        self._reason = ""
        self._words: dict[str, str] = {}
        """By address, what came of the last attempt."""
        self._closed = False

    @property
    def address(self) -> str:
        """Of the controller that leads, as far as we know; empty while we look for it."""
        return self._at if self.link is not None else ""

    @property
    def node(self) -> str:
        """Id of that controller."""
        return self.link.peer.node if self.link is not None else ""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of all controllers: those that we were given, or what a leader named where that was one."""
        return self._addresses if len(self._addresses) > 1 else self._named_all or self._addresses

    @property
    def several(self) -> bool:
        """Whether there are others to turn to."""
        return len(self._order) > 1

    def close(self) -> None:
        """Give up the link. Whoever asks, now or later, is told with `LinkClosed`."""
        self._closed = True
        if self.link is not None:
            self._give_up()

    # --- one question ------------------------------------------------------------------------

    async def say(self, link: Link, message: Message, wait_s: float) -> Message:
        """Say something and wait for the answer: `wait_s`, and what silence is allowed beyond that.

        Raises:
            CallTimeout: There was none.
            RemoteError, LinkClosed, LinkBroken, RemoteProtocolError: As `Link.call` raises it.
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
            part_s, left = SILENT_S / LOOKS, LOOKS
            pause_s = wait_s + part_s
            while left:
                begin = loop.time()
                await asyncio.wait((answer,), timeout=pause_s)
                if answer.done():
                    return answer.result()
                if loop.time() - begin < pause_s + LATE_S:
                    left -= 1
                pause_s = part_s
            raise CallTimeout(message.type, wait_s + SILENT_S, str(link.peer))
        finally:
            answer.cancel()

    async def refused(self, link: Link, error: RemoteError) -> None:
        """Turn elsewhere, or wait, if who refused does not lead or is busy; otherwise raise the refusal."""
        if error.code == BUSY:
            await asyncio.sleep(PAUSES.first_s)
        elif error.code in (NOT_LEADER, UNKNOWN):
            if link is self.link:
                logger.info("%s: the controller at %s leads no more", self._identity.node, self._at)
                self._named(error)
                self._give_up()
        else:
            raise error

    def lose(self, link: Link, error: TransportError) -> None:
        """The link broke, or the controller was silent on it."""
        if link is not self.link:
            return
        if isinstance(error, CallTimeout):
            if not self.several:
                return  # the answer was lost; if the controller is gone the link will tell
            self._put_last(self._at)
        # Where there are several the next one leads in a moment; if it does not, that is said.
        logger.log(
            logging.INFO if self.several else logging.WARNING,
            "%s: lost the controller at %s (%s); trying for %g s",
            self._identity.node,
            self._at,
            error,
            self._waits.patience_s,
        )
        self._reason = str(error)
        self._give_up()

    def _give_up(self) -> None:
        self.link = None
        self._channels[self._at].drop()

    def _named(self, error: RemoteError) -> None:
        """Note who leads, as one says who does not."""
        self._hint = error.text if error.code == NOT_LEADER else ""
        if self._hint and self._hint not in self._order:
            self._order.append(self._hint)

    def _put_last(self, address: str) -> None:
        """Try it only after all others."""
        if self._hint == address:
            self._hint = ""
        if address in self._order:
            self._order.remove(address)
            self._order.append(address)

    # --- finding it --------------------------------------------------------------------------

    async def find(self, after: int, group: str) -> Link:
        """Return the link, or make one.

        Args:
            after: The first word on a new link asks what became of the map since this version, -1: for all.
            group: Of whose map that is a version.

        Raises:
            RoleUnreachable: No controller was ever there.
            RoleDied: None has led for `patience_s`; `Leaderless` where there are several.
            HandshakeRejected: One refused us.
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
        if self._looks_since is None:
            self._looks_since = loop.time()
        saying = loop.call_at(self._looks_since + SAID_S, self._say_that_none_leads)
        try:
            async with asyncio.TaskGroup() as task_group:
                return await self._look(task_group, after, group)
        except BaseExceptionGroup as errors:
            cause = first_cause(errors)
            raise cause from cause.__cause__
        finally:
            saying.cancel()

    async def _look(self, task_group: asyncio.TaskGroup, after: int, group: str) -> Link:
        pauses = PAUSES.waits()
        while True:
            await self._round(task_group, after, group)
            if self.link is not None:
                return self.link
            if self._left_s() <= 0:
                if not self._met:
                    raise RoleUnreachable("the controller", self._controllers, self._reason)
                if self.several:
                    raise Leaderless(sorted(self._order), self._waits.patience_s, self._reason)
                raise RoleDied("the controller", self._reason)
            await asyncio.sleep(min(next(pauses), self._left_s()))

    def _say_that_none_leads(self) -> None:
        if self._said or self._closed or self.link is not None:
            return
        self._said = True
        words = [f"{address}: {self._words.get(address, 'no answer yet')}" for address in sorted(self._order)]
        one_of = f"one of {len(words)} controllers to lead, for which more than half must run"
        logger.warning(
            "%s waits for %s, for %.0f s more; tried %s",
            self._identity.node,
            one_of if self.several else "the controller",
            max(0.0, self._left_s()),
            "; ".join(words),
        )

    def _left_s(self) -> float:
        """How much longer we look for a leader."""
        assert self._looks_since is not None
        waits_s = self._waits.patience_s if self._met else self._waits.start_s
        return self._looks_since + waits_s - asyncio.get_running_loop().time()

    async def _round(self, task_group: asyncio.TaskGroup, after: int, group: str) -> None:
        """Try where the leader is said to be, then every other controller, each once, until one leads.

        Who is silent for `NEXT_S` may answer in a later round, and is not tried beside itself.
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
                peer="the controller",
                address=address,
                network=self._network,
                identity=self._identity,
                traffic=self._traffic,
            )
        return self._channels[address]

    async def _dial(self, channel: Channel) -> Link | None:
        left_s = self._left_s()
        # Whoever looked last may have been cancelled long ago: one round is always tried.
        timeout_s = DIAL_S if self.several or left_s <= 0 else left_s
        retry = ONCE if self.several else None
        try:
            link = await channel.dial(timeout_s, retry=retry)
        except (TransportError, ValueError) as error:
            address = channel.address
            if not isinstance(error, DialFailed) and address in self._addresses:
                raise  # and not one that a controller named, which reaches the others in another way
            self._words[address] = error.reason if isinstance(error, DialFailed) else str(error)
            self._reason = self._words[address] if not self._met else str(error)
            self._put_last(address)
            return None
        self._met = True
        return link

    async def _attempt(self, address: str, after: int, group: str) -> None:
        """Hear a first word from a controller, and take its link if it leads; else who does is the next."""
        channel = self._channel_to(address)
        link = await self._dial(channel)
        if link is None:
            return
        try:
            first = WatchMap(after=after, group=group, wait_s=0.0)
            answer = await self.say(link, pack(first), 0.0)
            said = unpack_answer(answer)
            if not said.group:
                self._found(address, "belongs to no group yet")
            elif not self._closed:
                self._take(link, address)
                self.group, self.first_word = said.group, (after, group, answer)
                if isinstance(said, MapState) and said.controllers:
                    self._named_all = said.controllers
                    self._order += [each for each in said.controllers if each not in self._order]
        except TransportError as error:
            if isinstance(error, RemoteError) and error.code in (NOT_LEADER, UNKNOWN, BUSY):
                self._named(error)
                self._ahead.insert(0, self._hint)
                self._found(address, "does not lead, nor does any other")
            elif isinstance(error, LOST) or address not in self._addresses:
                self._found(address, f"said nothing: {error}")
                self._put_last(address)
            else:
                raise
        finally:
            if link is not self.link:
                channel.drop()

    def _take(self, link: Link, address: str) -> None:
        """This is the leader's link. No other attempt does anything any more."""
        for other, attempt in self._attempts.items():
            if other != address:
                attempt.cancel()
        self.link, self._at, self._hint = link, address, address
        if self._said:
            logger.warning("%s: the controller at %s leads", self._identity.node, address)
        self._looks_since, self._said = None, False
        self._words.clear()

    def _found(self, address: str, what: str) -> None:
        self._words[address] = what
        self._reason = f"the controller at {address} {what}"

    def __repr__(self) -> str:
        return f"<LeaderLink {self._identity.node} {f'to {self._at}' if self.link is not None else 'away'}>"
