"""The other controllers of a group: links to them, who they say they are, and who is to be taken in.

Theory of operation
-------------------
Each controller dials each other one, and says things only over the link that it dialled itself; what cannot
be sent at once is dropped: the core says everything again that matters. At the beginning of a link both say
who they are, and again every `ASK_S` until those who have to know us do.

*Names and identities.* The names and addresses are told once, to all the same (`meet`); who has another name
is a stranger, whatever it says it is. A name stands for as many identities as its disk was lost (`founding`);
the latest that was told is the one to take in.

*Who belongs to the group.* A node whose disk was lost, or who never had one, comes with an identity of its
own. The leader takes it in, as a learner, then in place of the identity of the same name that nobody has
heard of lately: three changes of the membership, one after the other, each of which can be taken up by the
next leader. `next_step` says which one is next; the group makes it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

from adam_async.controller.bootstrap import Founding, name_of
from adam_async.controller.consensus import Core, Message, Step
from adam_async.controller.consensus.violations import NAME_BYTES
from adam_async.messages import (
    Agree,
    Introduce,
    Introduced,
    pack,
    packed_tensor,
    read_packed,
    read_packed_tensor,
    unpack,
)
from adam_async.messages.sizes import MOST_AGREE_BYTES
from adam_async.runtime import fault_points
from adam_async.runtime.channel import Channel
from adam_async.runtime.traffic import Traffic
from transport import (
    DialFailed,
    Identity,
    Link,
    Network,
    RemoteError,
    RetrySchedule,
    TransportError,
    WouldBlock,
)
from transport import Message as LinkMessage

logger = logging.getLogger(__name__)

ASK_S = 0.2
"""Between two questions to those who have not said what we wait for."""

DIAL_S = 2.0
"""One attempt to reach another controller; there is always a next one."""

REFUSED_S = 1.0
"""Before one that let us not in, or is another one, is tried again."""

INTRODUCE_S = 2.0
"""What another controller may take to say who it is."""

RETRY = RetrySchedule(first_s=0.02, longest_s=0.3)

WAITS_SAID_S = 5.0
"""Who waits for others to found a group says so after this long, and again when it waits for others."""

SMALL_BYTES = 4096
"""What is no larger than this travels in a message, in place of beside it: that takes half the time."""


def say(message: Message, *, group: str) -> LinkMessage:
    """Turn what a core says into what a link carries."""
    packed = packed_tensor(message)
    if packed.nbytes > SMALL_BYTES:
        return pack(Agree(group=group), [packed])
    return pack(Agree(group=group, said=packed.tobytes()))


def hear(message: LinkMessage) -> tuple[str, Message]:
    """Read what another controller's core says; the group that it is of comes first.

    Raises:
        RemoteProtocolError: It is something else.
    """
    agree = unpack(message, Agree)
    if agree.said:
        return agree.group, read_packed(agree.said, Message, of=message)
    return agree.group, read_packed_tensor(message, Message, MOST_AGREE_BYTES)


class Peers:
    """All other controllers of a group, as one of them knows them.

    Args:
        identity: Who we are; its node is our name in the group.
        network: How to reach the others.
        traffic: Where the links to them are counted.
        is_settled: Says whether the others know all of us that they need to know.

    Attributes:
        me: Our identity in the group; empty until it is written down.
    """

    def __init__(
        self, *, identity: Identity, network: Network, traffic: Traffic, is_settled: Callable[[], bool]
    ) -> None:
        self._identity = identity
        self._network = network
        self._traffic = traffic
        self._is_settled = is_settled
        self.me = ""
        self._addresses: dict[str, str] = {}
        """Of all controllers, us among them, by name."""
        self._links: dict[str, Link] = {}
        self._known: dict[str, str] = {}
        """By name, the identities that others have told."""
        self._complaints: dict[str, str] = {}
        """By name, what was said of it last, since there was a link to it."""
        self._founding: Founding | None = None
        self._decided = asyncio.Event()
        """Set when it is clear who founds the group."""

    def meet(self, addresses: Mapping[str, str]) -> None:
        """Learn who founds the group: names and addresses, ours among them.

        Raises:
            ValueError: We are not among them.
        """
        if self._identity.node not in addresses:
            raise ValueError(
                f"{self._identity.node} is not one of the controllers {', '.join(sorted(addresses))}"
            )
        self._addresses = dict(addresses)

    def begin(self, group: asyncio.TaskGroup, me: str) -> None:
        """Keep a link to each of them from now on, by tasks of `group`, and say that we are `me`."""
        self.me = me
        for name in sorted(set(self._addresses) - {self._identity.node}):
            group.create_task(self._talk(name), name=f"{self._identity.node}/to {name}")

    async def founders(self) -> tuple[str, ...]:
        """Ask the others until it is clear who founds the group. Returns with whom, if it is for us to do."""
        founding = Founding(self.me, name=self._identity.node, names=self._addresses)
        self._founding = founding
        said: list[str] = []
        while not founding.is_decided:
            try:
                async with asyncio.timeout(WAITS_SAID_S):
                    await self._decided.wait()
            except TimeoutError:
                if founding.lacking != said:
                    said = founding.lacking
                    logger.warning("%s waits for %s to found a group", self._identity.node, ", ".join(said))
        return founding.voters

    # --- who they are ------------------------------------------------------------------------

    @property
    def linked(self) -> set[str]:
        """Names of those to whom something can be said."""
        return {name for name, link in self._links.items() if not link.closed}

    @property
    def names(self) -> list[str]:
        """Of all controllers that we were told of, ourselves among them."""
        return sorted(self._addresses)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where all controllers listen that we were told of, in the order of names; empty for one alone."""
        several = self.names if len(self._addresses) > 1 else []
        return tuple(self._addresses[name] for name in several)

    def address(self, identity: str) -> str:
        """Where an identity is; empty if we were not told of its name."""
        return self._addresses.get(name_of(identity), "")

    def introduced(self, name: str, identity: str) -> None:
        """Another controller said who it is."""
        if len(identity.encode()) > NAME_BYTES:
            return  # adding a member with so long a name would be a violation
        if name_of(identity) == name and name in self._addresses and name != self._identity.node:
            self._known[name] = identity

    def listens_to(self, name: str, message: Message) -> bool:
        """Whether `name` is another controller with a known address, and sends in its own name."""
        return name in self._addresses and name != self._identity.node and name_of(message.sender) == name

    def next_step(self, core: Core, *, silent_s: float, now: float) -> Step | None:
        """The next change by which somebody is taken in; None if all whom we know are.

        Args:
            core: Ours, which leads.
            silent_s: An identity that was heard of since then keeps its name to itself.
            now: The core's time.
        """
        members = core.members
        for name, me in sorted(self._known.items()):
            olds = [node for node in members.all if name_of(node) == name and node != me]
            if any(core.silent_s(node, now=now) < silent_s for node in olds):
                continue  # that identity is about: somebody was given a name that is taken
            if me not in members.all:
                return Step("add", me)
            if olds:
                return Step("remove", olds[0])
            if me not in members.voters:
                return Step("promote", me)
        return None

    # --- links -------------------------------------------------------------------------------

    def send(self, message: Message, *, group: str) -> None:
        """Say something to another core, as one of `group`, if it can be said at once."""
        link = self._links.get(name_of(message.to))
        if link is None or link.closed:
            return
        try:
            link.send_nowait(say(message, group=group))
            if fault_points.ON and fault_points.fires("controller.message.twice"):
                link.send_nowait(say(message, group=group))
        except (WouldBlock, TransportError):
            return  # the core says again what matters

    async def _talk(self, name: str) -> None:
        """Keep a link to another controller, and know who it is."""
        channel = Channel(
            peer=name,
            address=self._addresses[name],
            network=self._network,
            identity=self._identity,
            peer_role="controller",
            traffic=self._traffic,
            pauses=RetrySchedule(first_s=REFUSED_S, longest_s=REFUSED_S),
        )
        while True:
            try:
                link = await channel.dial(DIAL_S, retry=RETRY)
            except DialFailed:
                continue  # the dial itself has paused between its attempts
            except TransportError as error:  # another role listens there, or refuses this controller
                self._complain(name, f"no controller {channel}: {error}")
                await channel.pause()
                continue
            try:
                if link.peer.node == name:
                    await self._stay(name, link)
                else:
                    self._complain(name, f"at {channel.address} is {link.peer.node} instead of {name}")
                    await channel.pause()
            except TransportError as error:
                logger.info("%s: lost %s (%s)", self._identity.node, name, error)
            finally:
                if self._links.get(name) is link:
                    del self._links[name]
                channel.drop()

    def _complain(self, name: str, words: str) -> None:
        """Say what is wrong with a place, once for as long as it stays so."""
        if self._complaints.get(name) != words:
            self._complaints[name] = words
            logger.warning("%s: %s", self._identity.node, words)

    async def _stay(self, name: str, link: Link) -> None:
        self._links[name] = link
        self._complaints.pop(name, None)
        while not link.closed:
            await self._ask_who(name, link)
            try:
                async with asyncio.timeout(None if self._is_settled() else ASK_S):
                    await link.wait_closed()
            except TimeoutError:
                continue

    async def _ask_who(self, name: str, link: Link) -> None:
        try:
            reply = unpack(
                await link.call(pack(Introduce(identity=self.me)), timeout_s=INTRODUCE_S), Introduced
            )
        except RemoteError:
            return  # it does not know it yet
        self.introduced(name, reply.identity)
        if self._founding is not None:
            self._founding.heard(name, reply.identity, belongs=bool(reply.members))
            if self._founding.is_decided:
                self._decided.set()

    def __repr__(self) -> str:
        return f"<Peers of {self._identity.node}: {', '.join(sorted(self._addresses)) or 'not met'}>"
