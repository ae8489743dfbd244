"""The connection of a client to one bundle: links to its primary, and repeated requests over them.

A `BundleConnection` keeps the session, and one link at a time to the bundle's primary. After any fault of a
link (it breaks, an answer is late, a push left a gap) the connection drops the link and dials again. Then it
repeats all open requests, in order, under the same numbers (`session.py`).

If the primary moves, the connection drops the link, and its next link leads to the new primary. All copies of
the bundle have the applied push numbers: a push that the old primary acknowledged stays acknowledged, and an
open push is applied once. If a server refuses because it does not serve the bundle (`NOT_SERVING`), the
request stays open: the connection pauses, at most until the primary moves, and asks again. If the oldest open
request gets no answer for `patience_s`, the connection fails, and the error names the bundle and its primary.
While the bundle lacks copies for its pushes, a run waits for `copies_s`.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from adam_async.client.session import Exchange, PushExchange, Receiver, Session, SessionIdentity
from adam_async.errors import ShardUnavailable, StoreError
from adam_async.run.config import Waits
from adam_async.run.run_copies import Primary
from adam_async.runtime.callbacks import Callbacks
from adam_async.runtime.channel import Channel, Endpoint, wait_set
from transport import (
    DialFailed,
    Link,
    LocalProtocolError,
    ProtocolError,
    RemoteError,
    TransportError,
    WouldBlock,
)

logger = logging.getLogger(__name__)

MAX_UNACKNOWLEDGED = 8
"""Maximum number of unanswered pushes to one bundle; at this number `admit` waits."""

NOT_SERVING = frozenset({"not-primary", "not-ready", "wrong-run"})
"""Refusal codes of a server that is not, not yet or no longer a bundle's primary."""


class BundleConnection(Session):
    """The session with one bundle, over one link after the other to its primary."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        home: str,
        primary: Primary | None,
        identity: SessionIdentity,
        waits: Waits,
        callbacks: Callbacks,
        copies: bool,
    ) -> None:
        self._progress = asyncio.Event()
        super().__init__(
            identity,
            limit=MAX_UNACKNOWLEDGED,
            answer_s=waits.answer_s,
            copies=copies,
            on_progress=self._progress.set,
            running_loop=asyncio._get_running_loop,
        )
        self.home = home
        self.primary = primary
        """The primary in the newest map; None while the bundle has none."""
        self._last = primary
        """The last primary that the bundle had; None before the first."""
        peer, address = (primary.node, primary.address) if primary is not None else (home, "")
        self.channel = Channel(endpoint, peer=peer, address=address, patience_s=waits.patience_s)
        self._callbacks = callbacks
        self._node = endpoint.identity.node
        self._waits = waits
        self._loop = asyncio.get_running_loop()
        self._moved = asyncio.Event()
        """Event that is set when the primary changes, or when the bundle begins or ceases to lack copies; the
        next dial clears it."""
        self._dialling: asyncio.Timeout | None = None
        """Timeout of the dial in progress, which a change of the primary ends early; None between dials."""
        self._trouble = asyncio.Event()
        self._backlog: deque[Exchange] = deque()
        self._has_backlog = asyncio.Event()
        self.lacks_copies = False
        """Whether pushes wait for another copy of the bundle; if so, the patience is `copies_s`."""
        self._refusal = ""
        """Text of the last refusal on the last link; empty if there was none."""
        self.reconnects = -1
        self.moves = 0

    async def run(self) -> None:
        """Keep a link, and repeat all open requests on each new one, until cancelled.

        Raises:
            ShardUnavailable: The oldest open request got no answer for `patience_s`, or for `copies_s` while
                the bundle lacked copies; the error names the bundle and its primary.
        """
        channel = self.channel
        channel.renew()
        while channel.left_s > 0:
            link = await self._dial()
            if link is None:
                continue
            self.reconnects += 1
            # Answers to other requests are not progress: a server may never answer this one.
            oldest = next(iter(self.open), None)
            settled = await self._attend(link)
            if settled and (oldest is None or oldest not in self.open):
                channel.progressed()
            elif oldest is None:
                # The link began without an open request, perhaps long ago, so the patience begins now.
                channel.renew()
            if self._refusal or not settled:
                await channel.pause(self._moved)
        raise ShardUnavailable(f"{self}{self.refusal}", channel.patience_s)

    @property
    def shares(self) -> bool:
        """Whether the present link has shared memory."""
        return self.channel.link is not None and self.channel.link.shares

    @property
    def refusal(self) -> str:
        """Text of the last refusal on the last link, to append to an error; empty if there was none."""
        return f"; its last answer is {self._refusal}" if self._refusal else ""

    def primary_changed(self, primary: Primary | None) -> None:
        """Take up another primary, or its absence: drop the link, and end a dial to the old primary."""
        channel, last = self.channel, self._last
        self.primary = primary
        if primary is not None:
            if last is not None and primary != last:
                self.moves += 1
                moved = f"primary of bundle {self.home} moved from {last.node} to {primary.node}"
                # The driver, or the controller, has a line for an operator.
                logger.debug("%s: %s", self._node, moved)
            self._last, self._refusal = primary, ""
            channel.peer, channel.address = primary.node, primary.address
            channel.progressed()  # the new primary has the whole patience
            self._progress.set()
        channel.drop()
        self._moved.set()
        self._trouble.set()
        if self._dialling is not None:
            self._dialling.reschedule(asyncio.get_running_loop().time())

    def wait_for_copies(self, lacks_copies: bool) -> None:
        """Wait for `copies_s` instead of `patience_s` while the bundle lacks copies."""
        if lacks_copies != self.lacks_copies:
            self.lacks_copies = lacks_copies
            self.channel.patience_s = self._waits.copies_s if lacks_copies else self._waits.patience_s
            self.channel.progressed()
            self._progress.set()
            self._moved.set()  # ends a pause: the primary may answer again

    async def _dial(self) -> Link | None:
        """Return a link to the primary; None without a primary, or if the dial failed or ended early."""
        channel = self.channel
        self._moved.clear()
        if self.primary is None:
            await wait_set(self._moved, channel.left_s)
            return None
        try:
            async with asyncio.timeout(None) as self._dialling:
                link = await channel.dial()
        except (DialFailed, TimeoutError):
            return None
        finally:
            self._dialling = None
        peer = link.peer
        if (peer.role, peer.node, peer.incarnation) != ("ps", self.primary.node, self.primary.incarnation):
            # The primary has changed, or another process has its address: the map will name the new primary.
            channel.drop()
            await channel.pause(self._moved)
            return None
        return link

    async def _attend(self, link: Link) -> bool:
        """Use one link until a fault. Returns whether any request was settled on the link."""
        self._trouble.clear()
        self.settled, self._refusal = 0, ""
        node, bundle = self._node, self.home
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(link), name=f"{node}/watch-{bundle}")
            self._backlog.clear()
            self._backlog.extend(self.to_send_again())
            pump = group.create_task(self._pump(link), name=f"{node}/pump-{bundle}")
            try:
                await self._trouble.wait()
            finally:
                pump.cancel()
                self.channel.drop()
        return self.settled > 0

    async def _watch(self, link: Link) -> None:
        await link.wait_closed()
        self._trouble.set()

    def _send(self, exchange: Exchange) -> None:
        """See `Session`. Without a link the exchange is sent on the next one."""
        link = self.channel.link
        if link is None:
            return
        if self._backlog or not self._ask(link, exchange):
            self._backlog.append(exchange)
            self._has_backlog.set()

    async def _pump(self, link: Link) -> None:
        """Send the backlog in order, as fast as the server reads."""
        while True:
            while self._backlog:
                if self._ask(link, self._backlog[0]):
                    self._backlog.popleft()
                else:
                    await link.wait_writable()
            self._has_backlog.clear()
            await self._has_backlog.wait()

    def _ask(self, link: Link, exchange: Exchange) -> bool:
        """Send a request on this link. Returns False if the server does not read fast enough."""
        push = exchange if isinstance(exchange, PushExchange) and not self._copies else None
        if push is not None:
            push.reading += 1
        exchange.sent += 1
        try:
            link.ask(
                exchange.message,
                exchange.arrived,
                timeout_s=self._answer_s,
                into=exchange.into,
                release=None if push is None else push.released,
                ordered=True,
            )
        except (WouldBlock, TransportError) as error:
            # The transport did not take the message, so it will not release it.
            exchange.sent -= 1
            if push is not None:
                push.reading -= 1
            if isinstance(error, WouldBlock):
                return False
            if isinstance(error, LocalProtocolError):
                self.fail(error)  # no other link would take the message
            else:
                self._trouble.set()
        return True

    def refused(self, exchange: Exchange, error: TransportError | None) -> None:
        """See `Session`; if the link was dropped, all its questions have failed already."""
        if self.channel.link is None:
            return
        if isinstance(error, ProtocolError):  # an answer that does not fit its question
            # As text: a handler may keep the record, and the frames of the error hold the answer's tensors.
            self._refusal = str(error)
            logger.warning("%s sent an invalid answer: %s", self.channel.peer, self._refusal)
        elif isinstance(error, RemoteError):
            self._refusal = str(error)
            if error.code == "partly-known":  # a repetition would get the same answer
                self.fail(StoreError(f"{error.text}, and lacks others: always push the same groups together"))
            elif error.code not in NOT_SERVING:
                asked = f"{exchange.message.type} of bundle {self.home}"
                logger.warning("%s refused %s: %s", self.channel.peer, asked, error)
        self._trouble.set()

    def fail(self, error: Exception) -> None:
        """See `Session`."""
        self._callbacks.fail(error)

    def free(self, call: Receiver) -> None:
        """See `Session`."""
        try:
            call.freed()
        except Exception as error:
            self._callbacks.fail(error)

    def pass_on(self, callback: Callable[[], None]) -> None:
        """See `Session`."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback)

    async def wait_progress(self) -> None:
        """Wait for an answer, a new primary, or a change of `lacks_copies`. Cancelling it loses nothing."""
        self._progress.clear()
        await self._progress.wait()

    def __repr__(self) -> str:
        return f"<BundleConnection {self.home} over {self.channel!r}, {len(self.open)} open>"

    def __str__(self) -> str:
        if self.primary is None:
            return f"a primary of bundle {self.home}{f' after {self._last.node}' if self._last else ''}"
        return f"{self.channel}, the primary of bundle {self.home}"
