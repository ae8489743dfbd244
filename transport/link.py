"""The interface of a link: one conversation between two parties, in one process or over a network.

Ownership: arrays given to a sending method are not written to until ``release`` is called (without
``release``: until the reply, or forever). It is called exactly once if the method returned, whatever
becomes of the link, possibly before the method returns and on any thread.

Order: messages keep their order, with one exception. A message of more than one chunk (1 MiB) leaves piece
by piece, and others pass it on the way unless they were sent with ``ordered=True``. Replies overtake freely.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from transport.errors import TransportError
from transport.messages import Identity, Message
from transport.release import Release
from transport.tensors import Tensor

__all__ = ["Link", "LinkStatistics", "Observer", "Request", "TypeTraffic"]

Observer = Callable[[bool, str, int, int], None]
"""Told of a message as it is counted: whether it was sent, its type, its payload and frame bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeTraffic:
    """Traffic of one message type, each way. ``frame_bytes`` is everything on the wire but tensor bytes."""

    messages_out: int = 0
    payload_bytes_out: int = 0
    frame_bytes_out: int = 0
    messages_in: int = 0
    payload_bytes_in: int = 0
    frame_bytes_in: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStatistics:
    """Traffic of a link by message type, and its state now.

    ``bytes_moved`` counts bytes copied after they were received; 0 on local links.
    """

    by_type: dict[str, TypeTraffic]
    bytes_moved: int
    unsent_bytes: int
    outstanding_calls: int
    unanswered_requests: int
    held_bytes: int = 0
    """Bytes that the link holds for its peer, as charged to the budgets."""
    waits: str = ""
    """What reading waits for, as a clause; empty while the link reads."""


class Request(ABC):
    """A request of the peer, to be answered once."""

    message: Message

    @property
    @abstractmethod
    def link(self) -> "Link":
        """The link it came by."""

    @abstractmethod
    def charge(self, nbytes: int, then: Callable[[], object]) -> None:
        """Announce an answer of about ``nbytes``; ``then`` makes and sends it when the budgets have room.

        Call this before the work, and before any answer of more than 1 MiB. The link calls ``then`` at
        once if the budgets of the link and of the process have room, otherwise in a later iteration of the
        loop, and never if the link ends first. A `RemoteProtocolError` of ``then`` answers the request with
        code ``malformed``; any other error answers with ``internal`` and is logged.
        """

    @abstractmethod
    def reply(self, message: Message, release: Release | None = None) -> None:
        """Answer the request. If the link has ended, the answer is dropped and released.

        Raises:
            LocalProtocolError: The request was answered before, the role table has no row for the answer, no
                frame can hold it, or it has more than 1 MiB and was not announced with `charge`.
        """

    @abstractmethod
    def fail(self, code: str, text: str) -> None:
        """Answer with an error; `RemoteError` at the caller. 200 characters pass."""


OnAnswer = Callable[[Message | TransportError], None]
"""Takes the reply to a question, or why there is none."""


class Link(ABC):
    """One conversation between two parties. See the module's text for ownership and order."""

    __slots__ = ()

    identity: Identity
    """This side."""
    peer: Identity
    """The other side, as it proved itself in the handshake."""

    @property
    @abstractmethod
    def max_message_bytes(self) -> int:
        """Largest payload of one message, in bytes with padding; a larger one cannot be sent."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether the conversation is over, for whatever reason."""

    @abstractmethod
    async def wait_closed(self) -> None:
        """Wait until the conversation is over. Never raises; cancelling changes nothing."""

    @abstractmethod
    async def aclose(self) -> None:
        """Send what is queued, say goodbye, close; at most ``close_s``. Cancelling closes at once."""

    @abstractmethod
    def abort(self) -> None:
        """Close at once; what is unsent is dropped and released, the peer sees a broken link."""

    @abstractmethod
    async def send(self, message: Message, release: Release | None = None, *, ordered: bool = False) -> None:
        """Send a message that gets no answer; waits while the peer does not read.

        Cancelling sends nothing.

        Raises:
            LinkClosed, LinkBroken: The conversation is over.
            LocalProtocolError: No row in the role table, or it cannot travel.
        """

    @abstractmethod
    def send_nowait(self, message: Message, release: Release | None = None, *, ordered: bool = False) -> None:
        """Like `send`, but raises `WouldBlock` instead of waiting."""

    @abstractmethod
    async def wait_writable(self) -> None:
        """Wait until `send_nowait` and `call_nowait` may go on, or the conversation is over. Never raises.

        A peer that stalls ends the link first. Cancelling loses nothing.
        """

    @abstractmethod
    async def receive(self) -> Message:
        """Return the next message that is neither request nor reply. Cancelling loses nothing.

        What arrived before the end is returned first.

        Raises:
            LinkClosed, LinkBroken, RemoteProtocolError: The conversation is over.
        """

    @abstractmethod
    async def call(
        self,
        message: Message,
        *,
        timeout_s: float,
        release: Release | None = None,
        into: Sequence[Tensor] | None = None,
        ordered: bool = False,
    ) -> Message:
        """Send a request and return its reply.

        ``into`` registers arrays that the reply's tensors must match in dtype and shape, and land in; the
        reply then holds these very arrays. They are not written to after this returns or raises, nor by a
        reply without any tensors, which comes as it is.
        Cancelling gives up the reply; the request may take effect.

        Raises:
            CallTimeout: No reply within ``timeout_s``.
            RemoteError: The peer answered with an error.
            LinkClosed, LinkBroken, RemoteProtocolError: The link went before the answer.
            LocalProtocolError: No row in the role table, it cannot travel, or the reply is not like ``into``.
        """

    @abstractmethod
    def call_nowait(
        self,
        message: Message,
        *,
        timeout_s: float,
        release: Release | None = None,
        into: Sequence[Tensor] | None = None,
        ordered: bool = False,
    ) -> "asyncio.Future[Message]":
        """Send a request now and return the future of its reply; many may be outstanding.

        Raises:
            WouldBlock: The peer does not read fast enough.
        """

    @abstractmethod
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
        """Like `call_nowait`, with a callback in place of a future: cheaper, for it waits for no turn.

        ``on_answer`` is called once, within the turn in which the reply comes, with the reply or with what
        `call` would raise. What it raises goes to the loop's exception handler.

        Raises:
            WouldBlock: The peer does not read fast enough; ``on_answer`` is not called.
        """

    @abstractmethod
    def serve(self, handler: Callable[[Request], None], *, receives: bool = True) -> None:
        """Have requests handled by a plain function, called inline; those that already came are next.

        A handler that raises answers with code ``internal`` and is logged. Without ``receives`` this side
        takes no messages: the first one that comes ends the link with a RemoteProtocolError.
        """

    @abstractmethod
    async def serve_forever(
        self, handler: Callable[[Request], Awaitable[object]], *, concurrency: int = 64
    ) -> None:
        """Handle requests with a coroutine function until the link is over; never raises for its end.

        Cancelling cancels the handlers.
        """

    @abstractmethod
    def observe(self, observer: Observer) -> None:
        """Have a plain function called with each message from now on, as it is counted. It must not raise."""

    @abstractmethod
    def statistics(self) -> LinkStatistics:
        """Count traffic and look at the state now."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
