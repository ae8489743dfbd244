"""The other controllers of a group: links to them, their identities, and the next membership change.

Theory of operation
-------------------
Each controller dials every other one, and sends only over its own link. The node drops a message that it
cannot send at once: the core repeats all important messages. The two controllers of a new link exchange their
identities, and repeat this every `ASK_S` until the group has the dialling controller as a voter.

*Names and identities.* All controllers get the same names and addresses once (`set_addresses`); the node
ignores messages under other names. A controller gets a new identity after each loss of its disk
(`bootstrap`); the leader adds the newest identity to the group.

*Membership.* A controller with an empty disk has a new identity. The leader adds it as a learner, removes the
silent old identity of the same name, and promotes the new one. These are three membership changes, which a
next leader can continue. `next_step` names the next one; the consensus node proposes it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

from adam_async.controller.bootstrap import Bootstrap, name_of
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
from adam_async.messages.body import MOST_AGREE_BYTES
from adam_async.runtime import fault_points
from adam_async.runtime.channel import Channel, Endpoint
from transport import DialFailed, Link, LocalProtocolError, RemoteError, RetrySchedule, TransportError
from transport import Message as LinkMessage

logger = logging.getLogger(__name__)

ASK_S = 0.2
"""Interval in seconds between two requests for the other controllers' identities."""

DIAL_S = 2.0
"""Deadline in seconds of one dial, after which another one follows."""

REFUSED_S = 1.0
"""Pause in seconds after a refusal, or after another controller answered at the address."""

INTRODUCE_S = 2.0
"""Deadline of an answer with an identity, in seconds."""

RETRY = RetrySchedule(first_s=0.02, longest_s=0.3)
"""Pauses in seconds between the attempts of one dial."""

WARN_S = 5.0
"""Wait for the first members of a group above which a warning names the missing ones, in seconds."""

SMALL_BYTES = 4096
"""Maximum size of a core's message that is sent in the fields of a link's message, in bytes. A larger message
is sent as a tensor, which would take twice the time for a small message."""


def packed_agree(message: Message, *, group: str) -> LinkMessage:
    """Pack a core's message for a link."""
    packed = packed_tensor(message)
    if packed.nbytes > SMALL_BYTES:
        return pack(Agree(group=group), [packed])
    return pack(Agree(group=group, packed=packed.tobytes()))


def read_agree(message: LinkMessage) -> tuple[str, Message]:
    """Return the sender's group, and its core's message.

    Raises:
        RemoteProtocolError: The message is not one of a core.
    """
    agree = unpack(message, Agree)
    if agree.packed:
        return agree.group, read_packed(agree.packed, Message, of=message)
    return agree.group, read_packed_tensor(message, Message, MOST_AGREE_BYTES)


class PeerControllers:
    """The other controllers of a group.

    Args:
        endpoint: This controller; its node is its name in the group.
        is_settled: Returns whether the group has this controller's present identity as a voter.

    Attributes:
        me: Identity in the group; empty until durable.
    """

    def __init__(self, endpoint: Endpoint, *, is_settled: Callable[[], bool]) -> None:
        self._endpoint = endpoint
        self._identity = endpoint.identity
        self._is_settled = is_settled
        self.me = ""
        self._addresses: dict[str, str] = {}
        """Addresses of all controllers, including this one, by name."""
        self._links: dict[str, Link] = {}
        self._known: dict[str, str] = {}
        """Newest reported identity of each controller, by name."""
        self._complaints: dict[str, str] = {}
        """Last warning about each controller since the last link to it, by name."""
        self._bootstrap: Bootstrap | None = None
        self._decided = asyncio.Event()
        """Set when the first members of the group are decided."""

    def set_addresses(self, addresses: Mapping[str, str]) -> None:
        """Set names and addresses of all controllers, including this one.

        Raises:
            ValueError: This controller is not among them.
        """
        if self._identity.node not in addresses:
            raise ValueError(
                f"{self._identity.node} is not one of the controllers {', '.join(sorted(addresses))}"
            )
        self._addresses = dict(addresses)

    def begin(self, group: asyncio.TaskGroup, me: str) -> None:
        """Keep a link to each other controller, in tasks of `group`, under the identity `me`."""
        self.me = me
        for name in sorted(set(self._addresses) - {self._identity.node}):
            group.create_task(self._keep_link(name), name=f"{self._identity.node}/to {name}")

    async def first_voters(self) -> tuple[str, ...]:
        """Wait until the first members of the group are decided.

        Returns:
            The first voters if this controller begins the group; empty if it joins one.
        """
        bootstrap = Bootstrap(self.me, name=self._identity.node, names=self._addresses)
        self._bootstrap = bootstrap
        warned: list[str] = []
        while not bootstrap.is_decided:
            try:
                async with asyncio.timeout(WARN_S):
                    await self._decided.wait()
            except TimeoutError:
                if bootstrap.missing != warned:
                    warned = bootstrap.missing
                    logger.warning("%s waits for %s to begin a group", self._identity.node, ", ".join(warned))
        return bootstrap.voters

    # --- identities --------------------------------------------------------------------------

    @property
    def linked(self) -> set[str]:
        """Names of the controllers with an open link."""
        return {name for name, link in self._links.items() if not link.closed}

    @property
    def names(self) -> list[str]:
        """Names of all known controllers, including this one."""
        return sorted(self._addresses)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of all known controllers sorted by name; empty for a single controller."""
        several = self.names if len(self._addresses) > 1 else []
        return tuple(self._addresses[name] for name in several)

    def address(self, identity: str) -> str:
        """Return the address of an identity; empty for an unknown name."""
        return self._addresses.get(name_of(identity), "")

    def introduced(self, name: str, identity: str) -> None:
        """Note the identity of another controller."""
        if len(identity.encode()) > NAME_BYTES:
            return  # a member with so long a name would be a violation
        if name_of(identity) == name and name in self._addresses and name != self._identity.node:
            self._known[name] = identity

    def listens_to(self, name: str, message: Message) -> bool:
        """Return whether `name` is another controller with a known address, and the message's sender."""
        return name in self._addresses and name != self._identity.node and name_of(message.sender) == name

    def next_step(self, core: Core, *, silent_s: float, now: float) -> Step | None:
        """Return the next membership change; None if no known identity needs or permits one now.

        Args:
            silent_s: Silence in seconds after which a new identity may replace an old one.
        """
        members = core.members
        for name, me in sorted(self._known.items()):
            olds = [node for node in members.all if name_of(node) == name and node != me]
            if any(core.silent_s(node, now=now) < silent_s for node in olds):
                continue  # an old identity may still run, as a second controller of this name
            if me not in members.all:
                return Step("add", me)
            if olds:
                return Step("remove", olds[0])
            if me not in members.voters:
                return Step("promote", me)
        return None

    # --- links -------------------------------------------------------------------------------

    def send(self, message: Message, *, group: str) -> None:
        """Send a message to another core, as a member of `group`, if it can leave at once."""
        link = self._links.get(name_of(message.to))
        if link is None or link.closed:
            return
        try:
            link.send_nowait(packed_agree(message, group=group))
            if fault_points.ON and fault_points.fires("controller.message.twice"):
                link.send_nowait(packed_agree(message, group=group))
        except LocalProtocolError as error:  # a defect, which no repetition cures
            self._complain(link.peer.node, f"no link can take {type(message).__name__}: {error}")
        except TransportError:
            return  # the core repeats all important messages

    async def _keep_link(self, name: str) -> None:
        """Keep a link to another controller, and keep its known identity up to date."""
        channel = Channel(
            self._endpoint,
            peer=name,
            address=self._addresses[name],
            peer_role="controller",
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

    def _complain(self, name: str, problem: str) -> None:
        """Warn of a problem with a controller, once while the problem stays the same."""
        if self._complaints.get(name) != problem:
            self._complaints[name] = problem
            logger.warning("%s: %s", self._identity.node, problem)

    async def _stay(self, name: str, link: Link) -> None:
        self._links[name] = link
        self._complaints.pop(name, None)
        while not link.closed:
            await self._ask_identity(name, link)
            try:
                async with asyncio.timeout(None if self._is_settled() else ASK_S):
                    await link.wait_closed()
            except TimeoutError:
                continue

    async def _ask_identity(self, name: str, link: Link) -> None:
        try:
            reply = unpack(
                await link.call(pack(Introduce(identity=self.me)), timeout_s=INTRODUCE_S), Introduced
            )
        except RemoteError:
            return  # the other has no durable identity yet
        self.introduced(name, reply.identity)
        if self._bootstrap is not None:
            self._bootstrap.introduced(name, reply.identity, belongs=bool(reply.members))
            if self._bootstrap.is_decided:
                self._decided.set()

    def __repr__(self) -> str:
        names = ", ".join(sorted(self._addresses)) or "no addresses"
        return f"<PeerControllers of {self._identity.node}: {names}>"
