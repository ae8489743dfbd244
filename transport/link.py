"""The interface of a link: one conversation between two parties, in one process or over a network.

Ownership: the caller does not write to arrays of a sent message until the link calls ``release`` (without
``release``: until the reply, or forever). The link calls ``release`` exactly once if the sending method
returned, even if the link ends, possibly before the method returns and on any thread.

Order: messages keep their order, with one exception. Over TCP a message of more than ``chunk_bytes`` is sent
in pieces, and other messages pass it unless they were sent with ``ordered=True``. Replies may come in any
order.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from transport.errors import TransportError
from transport.messages import Identity, Message
from transport.release import Release
from transport.tensors import Tensor

Observer = Callable[[bool, str, int, int], None]
"""Callback for each counted message; its arguments are whether this side sent the message, and the type,
payload bytes and frame bytes of the message."""


@dataclass(frozen=True, slots=True)
class TypeTraffic:
    """Traffic of one message type, in each direction. ``frame_bytes`` excludes tensor bytes."""

    messages_out: int = 0
    payload_bytes_out: int = 0
    frame_bytes_out: int = 0
    messages_in: int = 0
    payload_bytes_in: int = 0
    frame_bytes_in: int = 0


def traffic_by_type(out: Mapping[str, list[int]], into: Mapping[str, list[int]]) -> dict[str, TypeTraffic]:
    """Return the traffic of each message type, from its messages, payload and frame bytes by direction."""
    none = [0, 0, 0]
    return {
        name: TypeTraffic(*out.get(name, none), *into.get(name, none))
        for name in sorted(out.keys() | into.keys())
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStatistics:
    """Traffic of a link by message type, and its current state.

    ``bytes_moved`` is the number of bytes copied after receipt; 0 on local links.
    """

    by_type: dict[str, TypeTraffic]
    bytes_moved: int
    unsent_bytes: int
    outstanding_calls: int
    unanswered_requests: int
    held_bytes: int = 0
    """Bytes that the link holds for its peer, as charged to the budgets."""
    waits: str = ""
    """Reason of a pause of reading, as a clause; empty while the link reads."""


class Request(ABC):
    """A request of the peer, which is answered once."""

    message: Message
    link: "Link"
    """The link that received the request."""

    @abstractmethod
    def charge(self, nbytes: int, then: Callable[[], object]) -> None:
        """Announce an answer of about ``nbytes``; ``then`` makes and sends it when the budgets have room.

        Call this method before the work, and before any answer of more than 1 MiB. The link calls ``then`` at
        once if the budgets of the link and of the process have room, otherwise in a later iteration of the
        loop, and never if the link ends first. A `RemoteProtocolError` of ``then`` answers the request with
        code ``malformed``; any other error answers with ``internal`` and is logged.
        """

    @abstractmethod
    def reply(self, message: Message) -> None:
        """Answer the request. An ended link drops the answer.

        Raises:
            LocalProtocolError: The request was answered before, the role table has no row for the answer, no
                frame has room for it, or it is larger than 1 MiB and than the request, and was not announced
                with `charge`.
        """

    @abstractmethod
    def fail(self, code: str, text: str) -> None:
        """Answer with an error, a `RemoteError` at the caller; ``text`` is cut to 200 characters."""


OnAnswer = Callable[[Message | TransportError], None]
"""Callback for the reply to a request, or for the error in its place."""


class Link(ABC):
    """One conversation between two parties. See the module's text for ownership and order."""

    __slots__ = ()

    identity: Identity
    """Identity of this side."""
    peer: Identity
    """Identity of the other side, as authenticated in the handshake."""
    turn: int
    """Number of the times that this side has read: messages with the same number arrived together."""

    max_message_bytes: int
    """Maximum payload of one message, in bytes with padding; a larger message cannot be sent."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether the conversation is over, for any reason."""

    @abstractmethod
    async def wait_closed(self) -> None:
        """Wait until the conversation is over. Never raises; cancelling has no effect."""

    @abstractmethod
    async def aclose(self) -> None:
        """Send queued messages and CLOSE, then close, within ``close_s``. Cancelling closes at once."""

    @abstractmethod
    def abort(self) -> None:
        """Close at once; drop and release unsent messages. The peer sees a broken link."""

    @abstractmethod
    async def send(self, message: Message, release: Release | None = None, *, ordered: bool = False) -> None:
        """Send a message without an answer; wait while the peer does not read.

        Cancelling sends nothing.

        Raises:
            LinkClosed, LinkBroken: The conversation is over.
            LocalProtocolError: The role table has no row for the message, or no frame has room for it.
        """

    @abstractmethod
    def send_nowait(self, message: Message, release: Release | None = None, *, ordered: bool = False) -> None:
        """Send a message as `send` does, but raise `WouldBlock` instead of waiting."""

    @abstractmethod
    async def wait_writable(self) -> None:
        """Wait until `send_nowait` and `call_nowait` may proceed, or the conversation is over. Never raises.

        The link of a stalled peer ends, and with it the wait. Cancelling loses nothing.
        """

    @abstractmethod
    def hold_large(self, is_held: bool) -> None:
        """Stop sending large messages after their present chunks, or go on; send other messages as before.

        Held messages make no progress, so a link ends if they are held for ``stalled_after_s``.
        """

    @abstractmethod
    async def receive(self) -> Message:
        """Return the next message that is neither request nor reply. Cancelling loses no message.

        Messages that arrived before the end are returned first.

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

        ``into`` registers arrays that receive the reply's tensors and must match them in dtype and shape; the
        reply then has these same arrays. The link does not write to the arrays after the call returns or
        raises. A reply without tensors leaves the arrays unchanged, and is returned as received. Cancelling
        drops the reply; the request may take effect.

        Raises:
            CallTimeout: No room to send within ``timeout_s``, or no reply within ``timeout_s`` of sending.
            RemoteError: The peer answered with an error.
            LinkClosed, LinkBroken, RemoteProtocolError: The link ended before the answer.
            LocalProtocolError: The role table has no row for the message, no frame has room for it, or the
                reply does not match ``into``.
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
        """Send a request as `call_nowait` does, but with a callback, which saves an iteration of the loop.

        The link calls ``on_answer`` once, during the delivery of the reply, with the reply or with the error
        that `call` would raise. An error of ``on_answer`` goes to the loop's exception handler.

        Raises:
            WouldBlock: The peer does not read fast enough; ``on_answer`` is not called.
        """

    @abstractmethod
    def serve(self, handler: Callable[[Request], None], *, receives: bool = True) -> None:
        """Handle requests with a plain function, called inline, beginning with requests that have arrived.

        An error of the handler is logged, and the answer has code ``internal``. Without ``receives`` this
        side takes no messages: the first one ends the link with a RemoteProtocolError.

        Raises:
            TypeError: The handler is a coroutine function.
        """

    @abstractmethod
    def observe(self, observer: Observer) -> None:
        """Call a plain function for each further message, when it is counted. The function must not raise."""

    @abstractmethod
    def statistics(self) -> LinkStatistics:
        """Return the traffic so far and the current state."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
