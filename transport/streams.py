"""The two ends of a request: the one being answered, and the reading side of a stream.

A stream's window: the serving side may have `STREAM_WINDOW` items under way; the reader grants more as it
takes them, half a window at a time.
"""

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from transport.errors import CallTimeout, LinkClosed, LocalProtocolError, TransportError
from transport.frames import CANCEL, CREDIT, END, ITEM, REPLY
from transport.link import Link, ReplyStream, Request
from transport.messages import Message
from transport.protocol import STREAM_WINDOW
from transport.release import Release

if TYPE_CHECKING:
    from transport.endpoint import Endpoint

__all__ = ["InboundRequest", "OutboundStream"]


class InboundRequest(Request):
    """A request of the peer, until it is answered."""

    # What a plain call never changes stays in the class.
    _answered = False
    _cancelled = False
    _credit = STREAM_WINDOW
    _waiter: "asyncio.Future[None] | None" = None

    def __init__(self, link: "Endpoint", request_id: int, message: Message, streaming: bool) -> None:
        self._link = link
        self._id = request_id
        self.message = message
        self.streaming = streaming

    @property
    def link(self) -> Link:
        return self._link

    def reply(self, message: Message, release: Release | None = None) -> None:
        if self._answered or self.streaming:
            raise LocalProtocolError(
                "reply",
                f"{self.message.type!r} opened a stream: answer with send() and end()"
                if self.streaming
                else f"request {self._id} ({self.message.type!r}) was answered before",
            )
        link = self._link
        if link._error is None:
            if message.type not in link._may_say:
                link._check(message)
            link._transmit(REPLY, self._id, message, release, False)
        elif release is not None:
            release()
        self._answered = True
        link._requests.pop(self._id, None)

    def fail(self, code: str, text: str) -> None:
        if self._answered:
            return
        self._done()
        if not self._link.closed:
            self._link._send_error(self._id, code, text)

    async def send(self, item: Message, release: Release | None = None) -> None:
        self._check_streaming()
        link = self._link
        link._check(item)
        while (self._credit <= 0 or link._over_water(item, True)) and not self._cancelled:
            if self._credit > 0:
                await link._wait_room()
                continue
            # A reader that stops reading for good ends with its link or by closing the stream.
            self._waiter = link._loop.create_future()
            await self._waiter
        if self._cancelled:
            raise link._error or LinkClosed(f"the reader of {self.message.type!r} has closed the stream")
        self._credit -= 1
        link._transmit(ITEM, self._id, item, release, True)

    def end(self) -> None:
        self._check_streaming()
        self._done()
        if not self._link.closed and not self._cancelled:
            self._link._signal(END, self._id)

    def _check_streaming(self) -> None:
        if self._answered or not self.streaming:
            raise LocalProtocolError(
                "stream", f"request {self._id} ({self.message.type!r}) has ended or is a call: use reply()"
            )

    def _done(self) -> None:
        self._answered = True
        self._link._answered(self._id)

    def on_credit(self, count: int) -> None:
        """The reader has taken ``count`` more items."""
        self._credit += count
        self._wake()

    def on_cancel(self) -> None:
        """The reader has gone."""
        self._cancelled = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __repr__(self) -> str:
        return f"<Request {self._id} {self.message.type} from {self._link.peer}>"


class OutboundStream(ReplyStream):
    """The reading side of a stream."""

    def __init__(self, link: "Endpoint", request_id: int, message_type: str, timeout_s: float) -> None:
        self._link = link
        self._id = request_id
        self._type = message_type
        self._timeout_s = timeout_s
        self._items: deque[Message] = deque()
        self._taken = 0
        self._ended = False
        self._error: TransportError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def on_item(self, message: Message) -> None:
        """An item has arrived."""
        self._items.append(message)
        self._wake()

    def on_end(self, error: TransportError | None) -> None:
        """No more items will come."""
        self._ended = True
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def __anext__(self) -> Message:
        while not self._items:
            if self._ended:
                if self._error is not None:
                    raise self._error.with_traceback(None)
                raise StopAsyncIteration
            self._waiter = self._link._loop.create_future()
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._waiter
            except TimeoutError:
                raise CallTimeout(self._type, self._timeout_s, str(self._link.peer)) from None
        item = self._items.popleft()
        self._taken += 1
        if self._taken * 2 >= STREAM_WINDOW and not self._ended:
            self._link._signal(CREDIT, self._id, self._taken)
            self._taken = 0
        return item

    async def aclose(self) -> None:
        self._items.clear()
        if not self._ended:
            self.on_end(None)
            self._link._streams.pop(self._id, None)
            if not self._link.closed:
                self._link._signal(CANCEL, self._id)

    def __repr__(self) -> str:
        return f"<ReplyStream {self._id} {self._type}, {len(self._items)} waiting>"
