"""Tools for tests with links: pairs of links, links with faults, and the checks that every link passes.

async with link_pair(LocalNetwork(rules=open_rules())) as (near, far): ...
network = FaultyNetwork(network, random.Random(7)); network.faults = Faults(drop=0.1)
await check_link(lambda: link_pair(network))
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, fields

from tests.transport.conformance import check_link
from transport.errors import CallTimeout, TransportError
from transport.link import Link, LinkStatistics, Observer, Request
from transport.messages import ANY_ROLE, Identity, Message, RoleTable
from transport.network import Listener, LocalNetwork, Network, OnLink
from transport.protocol import OnAnswer
from transport.slow import RandomSource
from transport.tensors import Release, Tensor

__all__ = ["Faults", "FaultyLink", "FaultyNetwork", "RandomSource", "check_link", "link_pair", "open_rules"]

NEAR = Identity(role="near", node="near-1", incarnation=1)
FAR = Identity(role="far", node="far-1", incarnation=1)


def open_rules(*types: str) -> RoleTable:
    """Return a table in which every role may send ``types``, by default those of `check_link`."""
    return RoleTable({name: {(ANY_ROLE, ANY_ROLE)} for name in types or ("ask", "answer", "note")})


@asynccontextmanager
async def link_pair(
    network: Network, *, address: str | None = None, near: Identity = NEAR, far: Identity = FAR
) -> AsyncIterator[tuple[Link, Link]]:
    """Listen, dial as ``near``, and yield both ends. The end of the block closes both."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[Link] = loop.create_future()

    async def on_link(link: Link) -> None:
        arrived.set_result(link)
        await link.wait_closed()

    if address is None:
        inner = network.inner if isinstance(network, FaultyNetwork) else network
        address = "local://" if isinstance(inner, LocalNetwork) else "tcp://127.0.0.1:0"
    async with (
        network.listen(address, far, on_link) as listener,
        network.connect(listener.address, near) as link,
    ):
        yield link, await arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Probabilities of faults of a message or call; the sum is at most 1.

    Attributes:
        drop: The message is not sent. A call then times out.
        delay: The message is sent ``delay_s`` later; later messages may overtake it.
        cut: The link is aborted in place of sending the message.
        drop_reply: A call is carried out, and its reply is dropped; it times out.
        delay_s: Delay in seconds.
    """

    drop: float = 0.0
    delay: float = 0.0
    cut: float = 0.0
    drop_reply: float = 0.0
    delay_s: float = 0.01

    def __post_init__(self) -> None:
        chances = [getattr(self, field.name) for field in fields(self)]
        if min(chances) < 0 or sum(chances[:-1]) > 1:
            raise ValueError(f"chances must not be negative nor sum to more than 1: {self}")

    def draw(self, dice: RandomSource) -> str:
        """Draw a fault and return its name, or an empty string for none."""
        number = dice.random()
        for name in ("drop", "delay", "cut", "drop_reply"):
            number -= getattr(self, name)
            if number < 0:
                return name
        return ""


class FaultyNetwork(Network):
    """A network whose dialled links have ``faults``, drawn reproducibly from ``dice``.

    Attributes:
        inner: The network that makes the links.
        faults: Probabilities of faults; may be replaced at any time.
        links: The dialled links, oldest first, with closed ones.
    """

    def __init__(self, inner: Network, dice: RandomSource, faults: Faults | None = None) -> None:
        self.inner = inner
        self.dice = dice
        self.faults = faults or Faults()
        self.links: list[FaultyLink] = []

    def listen(
        self, address: str, identity: Identity, on_link: OnLink
    ) -> AbstractAsyncContextManager[Listener]:
        return self.inner.listen(address, identity, on_link)

    async def dial_once(self, address: str, identity: Identity, peer_role: str | None) -> Link:
        inner = await self.inner.dial_once(address, identity, peer_role)
        link = FaultyLink(inner, self)
        self.links.append(link)
        return link

    def cut_all(self) -> None:
        """Abort all dialled links, as a lost network does."""
        for link in self.links:
            link.abort()


class FaultyLink(Link):
    """A link that loses, delays or breaks on messages of this side."""

    def __init__(self, inner: Link, network: FaultyNetwork) -> None:
        self.inner = inner
        self.identity = inner.identity
        self.peer = inner.peer
        self.max_message_bytes = inner.max_message_bytes
        self._network = network

    def _draw(self, release: Release | None) -> str:
        if self.inner.closed:
            return ""
        fault = self._network.faults.draw(self._network.dice)
        if fault == "cut":
            self.inner.abort()
        elif fault == "drop" and release is not None:
            release()
        return fault

    @property
    def closed(self) -> bool:
        return self.inner.closed

    async def wait_closed(self) -> None:
        await self.inner.wait_closed()

    async def aclose(self) -> None:
        await self.inner.aclose()

    def abort(self) -> None:
        self.inner.abort()

    async def send(self, message: Message, release: Release | None = None, *, ordered: bool = False) -> None:
        fault = self._draw(release)
        if fault == "drop":
            return
        if fault == "delay":
            await asyncio.sleep(self._network.faults.delay_s)
        await self.inner.send(message, release, ordered=ordered)

    def send_nowait(self, message: Message, release: Release | None = None, *, ordered: bool = False) -> None:
        fault = self._draw(release)
        if fault == "delay":
            asyncio.get_running_loop().call_later(
                self._network.faults.delay_s, self._send_late, message, release, ordered
            )
        elif fault != "drop":
            self.inner.send_nowait(message, release, ordered=ordered)

    def _send_late(self, message: Message, release: Release | None, ordered: bool) -> None:
        if not self.inner.closed:
            self.inner.send_nowait(message, release, ordered=ordered)
        elif release is not None:
            release()

    def hold_large(self, is_held: bool) -> None:
        self.inner.hold_large(is_held)

    async def wait_writable(self) -> None:
        await self.inner.wait_writable()

    async def receive(self) -> Message:
        return await self.inner.receive()

    async def call(
        self,
        message: Message,
        *,
        timeout_s: float,
        release: Release | None = None,
        into: Sequence[Tensor] | None = None,
        ordered: bool = False,
    ) -> Message:
        fault = self._draw(release)
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + timeout_s
        if fault == "delay":
            await asyncio.sleep(self._network.faults.delay_s)
        if fault != "drop":
            reply = await self.inner.call(
                message, timeout_s=timeout_s, release=release, into=into, ordered=ordered
            )
            if fault != "drop_reply":
                return reply
        try:
            async with asyncio.timeout_at(ends_at):
                await self.inner.wait_closed()
        except TimeoutError:
            raise CallTimeout(message.type, timeout_s, str(self.peer)) from None
        return await self.inner.call(message, timeout_s=timeout_s)  # raises how the link ended

    def call_nowait(
        self,
        message: Message,
        *,
        timeout_s: float,
        release: Release | None = None,
        into: Sequence[Tensor] | None = None,
        ordered: bool = False,
    ) -> "asyncio.Future[Message]":
        fault = self._draw(release)
        loop = asyncio.get_running_loop()
        outer: asyncio.Future[Message] = loop.create_future()

        def time_out() -> None:
            if not outer.done():
                outer.set_exception(CallTimeout(message.type, timeout_s, str(self.peer)))
                outer.exception()

        def forward() -> None:
            inner = self.inner.call_nowait(
                message, timeout_s=timeout_s, release=release, into=into, ordered=ordered
            )
            inner.add_done_callback(copy)

        def forward_late() -> None:
            if not self.inner.closed:
                forward()
            elif release is not None:
                release()

        def copy(inner: "asyncio.Future[Message]") -> None:
            if outer.done() or inner.cancelled():
                return
            error = inner.exception()
            if error is not None:
                outer.set_exception(error)
                outer.exception()
            elif fault != "drop_reply":
                outer.set_result(inner.result())

        timer = loop.call_later(timeout_s, time_out)
        outer.add_done_callback(lambda _: timer.cancel())
        if fault == "delay":
            loop.call_later(self._network.faults.delay_s, forward_late)
        elif fault != "drop":
            try:
                forward()
            except BaseException:
                timer.cancel()
                raise
        return outer

    def ask(
        self,
        message: Message,
        on_answer: OnAnswer,
        *,
        timeout_s: float,
        release: Release | None = None,
        into: Sequence[Tensor] | None = None,
        ordered: bool = False,
    ) -> None:
        def forward(future: "asyncio.Future[Message]") -> None:
            error = future.exception()
            if error is None:
                on_answer(future.result())
            elif isinstance(error, TransportError):
                on_answer(error)

        self.call_nowait(
            message, timeout_s=timeout_s, release=release, into=into, ordered=ordered
        ).add_done_callback(forward)

    def serve(self, handler: Callable[[Request], None], *, receives: bool = True) -> None:
        self.inner.serve(handler, receives=receives)

    def observe(self, observer: Observer) -> None:
        self.inner.observe(observer)

    @property
    def unsent_bytes(self) -> int:
        return self.inner.unsent_bytes

    def statistics(self) -> LinkStatistics:
        return self.inner.statistics()

    def __repr__(self) -> str:
        return f"<FaultyLink over {self.inner!r}>"
