"""A link: one conversation between two parties, in one process or over a network.

Ownership: the caller does not write to a sent message's arrays until the link calls ``release`` (without
``release``: until the reply, or forever). If the sending method returned, the link calls ``release`` exactly
once, even if the link ends. The link may call ``release`` before the method returns, and on any thread.

Order: messages keep their order, with one exception. Over TCP a message of more than ``chunk_bytes`` is sent
in pieces, and other messages pass it unless they were sent with ``ordered=True``. Replies may come in any
order.

A kind of link adds `_transmit`, which sends a message, and `_over_water` for back-pressure. The link passes
each complete received message to `_deliver`.

Back-pressure has two parts. The water marks limit unsent bytes. The inbox limits and the budgets of link and
process limit the bytes held for the peer: requests, messages and unsent answers. At a limit reading pauses
(`intake.py`), and then the peer reaches its own water marks.
"""

import asyncio
import logging
from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import iscoroutinefunction
from math import inf
from operator import attrgetter
from types import TracebackType
from typing import Self

from transport.budget import Account, Budget
from transport.config import LinkConfig
from transport.decoder import Registered
from transport.errors import (
    CallTimeout,
    LinkBroken,
    LocalProtocolError,
    ProtocolError,
    RemoteError,
    RemoteProtocolError,
    TransportError,
    WouldBlock,
)
from transport.frames import ERROR, MESSAGE, REPLY, REQUEST, Frame, kind_name
from transport.intake import MESSAGE_COST_BYTES, META_COST, UNCHECKED_BYTES, Intake, frame_cost
from transport.messages import Identity, Message, Placed, RoleTable
from transport.protocol import Call, CallTable, OnAnswer, make_call
from transport.tensors import LENT, Release, Tensor, lay_out

Observer = Callable[[bool, str, int, int], None]
"""Callback for each counted message: whether this side sent it, its type, payload and frame bytes."""


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
    """Why reading pauses, as a clause; empty while the link reads."""


logger = logging.getLogger(__name__)

MAX_ERROR_TEXT = 200
"""Maximum length in characters of an error's text that answers a request."""

UNCHARGED_BYTES = 1 << 20
"""Maximum payload in bytes of an answer without a charge, unless the request is larger."""


_BYTES = attrgetter("nbytes")

_no_traffic = [0, 0, 0].copy
"""Compiled function that returns the counts of a message type without traffic."""


class Request:
    """A request of the peer, which is answered once."""

    # Class attributes, because a plain call never changes them: this saves two assignments.
    _answered = False

    announced = 0
    """Bytes charged for the answer."""

    _charged = False

    def __init__(self, link: "Link", request_id: int, message: Message, cost: int) -> None:
        self._link = self.link = link
        self._id = request_id
        self._cost = cost
        self.message = message

    @property
    def is_open(self) -> bool:
        """Whether an answer may still be given."""
        return not self._answered and self._link._error is None

    @property
    def held_bytes(self) -> int:
        """Bytes that the link holds for the request and its answer."""
        return self._cost + self.announced

    def copy_out(self) -> None:
        """Copy a `Placed` message into memory of this process; other messages are there."""
        if type(self.message) is Placed:
            self.message = self._link._copied(self.message)

    def charge(self, nbytes: int, then: Callable[[], object]) -> None:
        """Announce an answer of about ``nbytes``; ``then`` makes and sends it when the budgets have room.

        Call this method before the work, and before any answer of more than 1 MiB. The link calls ``then`` at
        once if the budgets of link and process have room, otherwise in a later iteration of the loop, and
        never if the link ends first. A `RemoteProtocolError` of ``then`` answers the request with code
        ``malformed``; any other error answers with ``internal`` and is logged.
        """
        link = self._link
        if not self._answered and link._error is None:
            link._intake.charge(self, nbytes, then)

    def begin(self, nbytes: int, then: Callable[[], object]) -> None:
        """Make the answer, after a charge of ``nbytes`` for it."""
        self._charged = True  # also by a charge of 0 bytes
        self.announced += nbytes
        try:
            then()
        except RemoteProtocolError as error:
            self.fail("malformed", str(error))
        except Exception as error:
            logger.exception("%r: answering %r failed", self._link, self.message.type)
            self.fail("internal", f"answering {self.message.type!r} failed: {type(error).__name__}")

    def reply(self, message: Message, *, lent: bool = False) -> None:
        """Answer the request. An ended link drops the answer.

        With ``lent`` the caller may change the tensors after the return: the link sends what the kernel takes
        now, and copies the rest.

        Raises:
            LocalProtocolError: The request was answered before, the role table has no row for the answer, no
                frame has room for it, or it is larger than 1 MiB and than the request, and was not announced
                with `charge`.
        """
        if self._answered:
            raise LocalProtocolError(
                "reply", f"request {self._id} ({self.message.type!r}) was answered before"
            )
        link = self._link
        if link._error is None:
            if message.type not in link._may_send:
                link._check(message)
            if not self._charged and (size := sum(map(_BYTES, message.tensors))) > UNCHARGED_BYTES:
                self._check_size(message, size)
            link._transmit(REPLY, self._id, message, LENT if lent else None, False)
        self._close()

    def fail(self, code: str, text: str) -> None:
        """Answer with an error, a `RemoteError` at the caller; ``text`` is cut to 200 characters."""
        if self._answered:
            return
        self._close()
        if not self._link.closed:
            self._link._send_error(self._id, code, text)

    def _check_size(self, message: Message, size: int) -> None:
        if size > self._cost:
            raise LocalProtocolError(
                "charge",
                f"{size} bytes of {message.type!r} answer {self.message.type!r} and were not charged: "
                f"call charge() before an answer of more than {UNCHARGED_BYTES} bytes is made",
            )

    def _close(self) -> None:
        """Release the bytes held for the request, after its answer."""
        self._answered = True
        link = self._link
        if link._requests.pop(self._id, None) is not None:
            link._account.release(self._cost + self.announced)
            if link._intake.reason:
                link._intake.look_soon()

    def __repr__(self) -> str:
        return f"<Request {self._id} {self.message.type} from {self._link.peer}>"


class Link:
    """One conversation between two parties. See the module's text for ownership and order.

    A link belongs to one event loop.
    """

    # Slots: beyond 30 attributes an instance's dictionary is no longer shared, and every access is slower.
    __slots__ = (
        "__weakref__",
        "_account",
        "_calls",
        "_config",
        "_error",
        "_handler",
        "_in",
        "_in_place",
        "_inbox",
        "_inbox_bytes",
        "_intake",
        "_into",
        "_loop",
        "_may_receive",
        "_may_send",
        "_observer",
        "_out",
        "_over",
        "_owed",
        "_receivers",
        "_receives",
        "_requests",
        "_room",
        "_timer",
        "_timer_at",
        "_unchecked",
        "_unhandled",
        "_writing",
        "identity",
        "max_message_bytes",
        "peer",
        "turn",
    )

    identity: Identity
    """Identity of this side."""
    peer: Identity
    """Identity of the other side, as authenticated in the handshake."""
    turn: int
    """Number of the times that this side has read: messages with the same number arrived together."""

    max_message_bytes: int
    """Maximum payload of one message, in bytes with padding; a larger message cannot be sent."""
    shares: bool = False
    """Whether large payloads travel in shared memory."""
    lend_bytes: float = inf
    """Smallest answer that can be a loan of a published region, in bytes."""
    takes_lent: bool = False
    """Whether lent tensors go to the kernel without a copy of all of them, see `Request.reply`."""

    def __init__(
        self,
        identity: Identity,
        peer: Identity,
        *,
        config: LinkConfig,
        rules: RoleTable,
        budget: Budget,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.identity = identity
        self.peer = peer
        self.max_message_bytes = config.max_message_bytes
        self._config = config
        self._loop = loop
        self.turn = 0
        self._may_send = rules.sendable(identity.role, peer.role)
        self._may_receive = rules.sendable(peer.role, identity.role)
        self._error: TransportError | None = None
        self._writing = False
        """Whether the transport accepts all sent bytes; while it does, senders skip `_over_water`."""
        self._over = loop.create_future()
        self._calls = CallTable()
        self._into: dict[int, Registered] = {}
        self._requests: dict[int, Request] = {}
        self._unhandled: deque[Request] = deque()
        self._handler: Callable[[Request], None] | None = None
        self._in_place: Collection[str] = ()
        self._inbox: deque[tuple[Message, int, int]] = deque()
        self._inbox_bytes = 0
        self._receivers: deque[asyncio.Future[None]] = deque()
        self._room: deque[asyncio.Future[None]] = deque()
        self._receives = True
        self._owed = 0
        self._account = Account(budget, config.link_budget_bytes)
        self._intake = Intake(self, self._account, config, loop)
        self._unchecked = min(UNCHECKED_BYTES, config.link_budget_bytes - 1)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf
        self._observer: Observer | None = None
        self._out: defaultdict[str, list[int]] = defaultdict(_no_traffic)
        self._in: defaultdict[str, list[int]] = defaultdict(_no_traffic)

    # Added by each kind of link

    @abstractmethod
    async def aclose(self) -> None:
        """Send queued messages and CLOSE, then close, within ``close_s``. Cancelling closes at once."""

    @abstractmethod
    def abort(self) -> None:
        """Close at once; drop and release unsent messages. The peer sees a broken link."""

    @abstractmethod
    def _transmit(
        self, kind: int, request_id: int, message: Message, release: Release | None, ordered: bool
    ) -> None:
        """Send a message that passed `_check`, or raise LocalProtocolError without an effect."""

    @abstractmethod
    def _over_water(self, message: Message | None, ordered: bool) -> bool:
        """Return whether the unsent bytes before a message (for None: all) reach the high water mark."""

    @property
    @abstractmethod
    def unsent_bytes(self) -> int:
        """Number of bytes that wait for the peer."""

    @abstractmethod
    def _arriving_bytes(self) -> int:
        """Bytes charged for undelivered input: messages in progress and kept frames."""

    @abstractmethod
    def _pause_reading(self) -> None:
        """Stop delivering."""

    @abstractmethod
    def _resume_reading(self) -> None:
        """Deliver again."""

    @abstractmethod
    def _tick(self, now: float) -> float | None:
        """Check this kind of link's time-outs; return the time of the next check."""

    @abstractmethod
    def _give_up(self, error: TransportError) -> None:
        """End the conversation at once, for both sides."""

    @abstractmethod
    def _bytes_moved(self) -> int:
        """Return the number of bytes copied after receipt."""

    # Sending

    def _check(self, message: Message) -> None:
        if self._error is not None:
            raise self._error.again()
        if message.type not in self._may_send:
            raise LocalProtocolError(
                "role",
                f"the role table has no row for {message.type!r} "
                f"from {self.identity.role} to {self.peer.role}",
            )

    async def send(self, message: Message, release: Release | None = None, *, ordered: bool = False) -> None:
        """Send a message without an answer; wait while the peer does not read.

        Cancelling sends nothing.

        Raises:
            LinkClosed, LinkBroken: The conversation is over.
            LocalProtocolError: The role table has no row for the message, or no frame has room for it.
        """
        self._check(message)
        while self._over_water(message, ordered):
            await self._wait_room()
            self._check(message)
        self._transmit(MESSAGE, 0, message, release, ordered)

    def send_nowait(self, message: Message, release: Release | None = None, *, ordered: bool = False) -> None:
        """Send a message as `send` does, but raise `WouldBlock` instead of waiting."""
        self._check(message)
        self._refuse_over_water(message, ordered)
        self._transmit(MESSAGE, 0, message, release, ordered)

    def _refuse_over_water(self, message: Message, ordered: bool) -> None:
        if self._over_water(message, ordered):
            raise WouldBlock(f"{self.unsent_bytes} bytes wait for {self.peer}; {message.type!r} was not sent")

    async def wait_writable(self) -> None:
        """Wait until `send_nowait` and `call_nowait` may proceed, or the conversation is over. Never raises.

        The link of a stalled peer ends, which ends the wait. Cancelling loses nothing.
        """
        if self._over_water(None, True) and self._error is None:
            await self._wait_room()

    def hold_large(self, is_held: bool) -> None:
        """Stop sending large messages after their present chunks, or resume; send other messages as before.

        Held messages make no progress, so a link ends if they are held for ``stalled_after_s``.
        """
        # within a process a message arrives at once

    async def _wait_room(self) -> None:
        """Wait until the unsent bytes fall to the low water mark, or the link ends."""
        waiter = self._loop.create_future()
        self._room.append(waiter)
        await waiter

    def _wake_senders(self) -> None:
        waiters, self._room = self._room, deque()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # Calling

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
        if not self._writing and self._over_water(message, ordered):
            # First, because a message that may not be sent should not wait for room.
            self._check(message)
            try:
                async with asyncio.timeout(timeout_s):
                    while self._over_water(message, ordered):
                        await self._wait_room()
                        self._check(message)
            except TimeoutError:
                raise CallTimeout(message.type, timeout_s, str(self.peer)) from None
        return await self._request(message, timeout_s, release, into, ordered)

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
        if not self._writing:
            self._refuse_over_water(message, ordered)
        return self._request(message, timeout_s, release, into, ordered)

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
        if not self._writing:
            self._refuse_over_water(message, ordered)
        self._send_request(message, on_answer, timeout_s, release, into, ordered)

    def _request(
        self,
        message: Message,
        timeout_s: float,
        release: Release | None,
        into: Sequence[Tensor] | None,
        ordered: bool,
    ) -> "asyncio.Future[Message]":
        future: asyncio.Future[Message] = self._loop.create_future()
        on_answer = partial(settle, future)
        request_id = self._send_request(message, on_answer, timeout_s, release, into, ordered)
        if into is not None:
            future.add_done_callback(lambda _: self._detach(request_id))
        return future

    def _send_request(
        self,
        message: Message,
        on_answer: OnAnswer,
        timeout_s: float,
        release: Release | None,
        into: Sequence[Tensor] | None,
        ordered: bool,
    ) -> int:
        """Send a request, and return its id."""
        # Both tests of `_check` are inline, because every request runs them.
        if self._error is not None or message.type not in self._may_send:
            self._check(message)
        layout = None if into is None else lay_out(into, self.max_message_bytes, to_fill=True)
        request_id = self._calls.next_id()
        self._transmit(REQUEST, request_id, message, release, ordered)
        deadline = self._loop.time() + timeout_s
        self._calls.waiting[request_id] = make_call((on_answer, message.type, timeout_s, deadline))
        if into is not None and layout is not None:
            self._into[request_id] = Registered(tuple(into), layout.packed)
        if deadline < self._timer_at:
            self._arm(deadline)
        return request_id

    def _detach(self, request_id: int) -> None:
        """Stop writing into the arrays registered for a reply."""
        self._into.pop(request_id, None)

    def hand_over(self, memory: Tensor) -> int:
        """Hand a kept or common region over, and return its number, which a later message has to name.

        Raises:
            LinkBroken: The peer cannot take it.
        """
        raise NotImplementedError  # only a link within a host has such memory

    def publish(self, nbytes: int) -> Tensor:
        """Allocate a published region, on any thread; see `Region.allocate`."""
        raise NotImplementedError  # only a link within a host has such memory

    def lends(self, values: Tensor) -> bool:
        """Return whether an answer of these values is a loan of the published region that has them."""
        return False  # only a link within a host has such memory

    def region(self, number: int, *, is_common: bool) -> Tensor:
        """Return the bytes of a region of the peer; see `Inbox.whole`."""
        raise NotImplementedError  # only a link within a host has such memory

    def peer_process(self) -> int:
        """Return a descriptor of the process that dialled this link; raises OSError."""
        raise NotImplementedError  # only a link within a host knows the process

    def _received(self, placed: Placed) -> Message:
        """Return a message out of shared memory: a copy, or views for a handler that reads in place."""
        raise NotImplementedError  # only a link within a host has such memory

    def _copied(self, placed: Placed) -> Message:
        """Return a copy of a message with views."""
        raise NotImplementedError  # only a link within a host has such memory

    # Delivery: every arrived frame passes through here

    def _deliver(self, frame: Frame) -> None:
        """Act on one whole frame.

        Raises:
            RemoteProtocolError: The frame breaks a rule; the caller closes the link.
        """
        kind, request_id, message, payload_bytes, frame_bytes = frame
        if message is None:
            raise RemoteProtocolError("kind", f"unexpected {kind_name(kind)}")
        # Before the role table: the type of an ERROR is a code.
        if kind == ERROR:
            self._on_error(request_id, RemoteError(message.type, message.meta.decode(errors="replace")))
            return
        if message.type not in self._may_receive:
            raise RemoteProtocolError(
                "role", f"{self.peer.role} may not send {message.type[:64]!r} to {self.identity.role}"
            )
        if type(message) is Placed:
            message = self._received(message)
        counts = self._in[message.type]
        counts[:] = counts[0] + 1, counts[1] + payload_bytes, counts[2] + frame_bytes
        if self._observer is not None:
            self._observer(False, message.type, payload_bytes, frame_bytes)
        if kind == REPLY:
            self._on_reply(request_id, message)
        elif kind == REQUEST:
            self._on_request(
                request_id, message, payload_bytes + META_COST * frame_bytes + MESSAGE_COST_BYTES
            )
        elif kind == MESSAGE:
            self._on_message(message, payload_bytes, frame_cost(payload_bytes, frame_bytes))
        else:
            raise RemoteProtocolError("kind", f"unexpected {kind_name(kind)}")

    def _count_out(self, message_type: str, payload_bytes: int, frame_bytes: int) -> None:
        counts = self._out[message_type]
        counts[:] = counts[0] + 1, counts[1] + payload_bytes, counts[2] + frame_bytes
        if self._observer is not None:
            self._observer(True, message_type, payload_bytes, frame_bytes)

    def _on_reply(self, request_id: int, message: Message) -> None:
        """Pass a reply to its call, or an error if the reply does not match the registered arrays."""
        call = self._calls.waiting.pop(request_id, None)
        if call is None:
            return  # the call timed out
        answer: Message | TransportError = message
        registered = self._into.get(request_id)
        if registered is not None:
            self._detach(request_id)
            # The decoder puts the registered arrays themselves into a reply that matches them.
            if message.tensors and message.tensors is not registered.tensors:
                into = Message(type="into", tensors=registered.tensors)
                answer = LocalProtocolError(
                    "into",
                    f"the reply to {call.message_type!r} is {message!r}, the registered arrays are {into!r}",
                )
        self._answer(call, answer)

    def _on_error(self, request_id: int, error: RemoteError) -> None:
        call = self._calls.waiting.pop(request_id, None)
        if call is not None:
            self._detach(request_id)
            self._answer(call, error)

    def _answer(self, call: Call, answer: Message | TransportError) -> None:
        """Pass an answer to the callback of a call; an error of the callback goes to the loop's handler."""
        try:
            call.on_answer(answer)
        except Exception as error:
            self._loop.call_exception_handler(
                {"message": "the callback of an answer raised", "exception": error}
            )

    def _on_request(self, request_id: int, message: Message, cost: int) -> None:
        """Charge a request, and handle it after earlier requests; refuse it if too many are unanswered."""
        if request_id in self._requests:
            raise RemoteProtocolError("request-id", f"request {request_id} is still unanswered")
        request = Request(self, request_id, message, cost)
        if len(self._requests) >= self._config.max_requests:
            request.fail(
                "busy", f"{self._config.max_requests} requests are unanswered: make fewer calls at once"
            )
            self._intake.look()
            return
        self._requests[request_id] = request
        self._account.charge(cost)
        # Requests keep their order: after an unhandled one, this one waits as well.
        if self._handler is None or self._unhandled:
            self._unhandled.append(request)
            self._intake.look()
        else:
            self._handle(request)
            # Checking the budgets on every small request would cost speed, so the first 64 KiB pass
            # unchecked.
            if self._account.held_bytes > self._unchecked:
                self._intake.look()

    def _handle(self, request: Request) -> None:
        assert self._handler is not None
        try:
            self._handler(request)
        except Exception as error:
            logger.exception("%r: handler failed on %r", self, request.message.type)
            request.fail("internal", f"handling {request.message.type!r} failed: {type(error).__name__}")

    def _on_message(self, message: Message, payload_bytes: int, held_bytes: int) -> None:
        """Charge a message, and put it into the inbox for the next receiver."""
        if not self._receives:
            raise RemoteProtocolError(
                "message",
                f"{self.peer.node} sent {message.type!r} as a message: this side takes only requests",
            )
        cost = payload_bytes + MESSAGE_COST_BYTES
        self._inbox.append((message, cost, held_bytes))
        self._inbox_bytes += cost
        self._account.charge(held_bytes)
        while self._receivers:
            waiter = self._receivers.popleft()
            if not waiter.done():
                waiter.set_result(None)
                break
        if self._account.held_bytes > self._unchecked or self._inbox_full():
            self._intake.look()

    # Receiving

    async def receive(self) -> Message:
        """Return the next message that is neither a request nor a reply. Cancelling loses no message.

        Messages that arrived before the end are returned first.

        Raises:
            LinkClosed, LinkBroken, RemoteProtocolError: The conversation is over.
        """
        while not self._inbox:
            if self._error is not None:
                raise self._error.again()
            waiter = self._loop.create_future()
            self._receivers.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake_next_receiver()
                raise
        message, cost, held_bytes = self._inbox.popleft()
        self._inbox_bytes -= cost
        self._taken(cost)
        if self._error is None:
            self._intake.release(held_bytes)
        return message

    def _wake_next_receiver(self) -> None:
        """Wake the next receiver in place of a woken one that was cancelled."""
        while self._receivers and self._inbox:
            waiter = self._receivers.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _taken(self, cost: int) -> None:
        """Note that the application has received a message from the inbox."""

    def _inbox_full(self) -> bool:
        """Return whether the messages not yet received or handled reach the limit of the inbox."""
        config = self._config
        return (
            self._inbox_bytes >= config.inbox_bytes
            or len(self._inbox) + len(self._unhandled) >= config.inbox_messages
        )

    @property
    def _announced_bytes(self) -> int:
        return sum([request.announced for request in self._requests.values()])

    def _note_owed(self, replied_bytes: int = 0) -> None:
        """Charge for unsent answers: add ``replied_bytes``, and release the bytes that have left."""
        was = self._owed
        owed = self._owed = min(was + replied_bytes, self.unsent_bytes)
        if owed > was:
            self._account.charge(owed - was)
        elif owed < was:
            self._intake.release(was - owed)

    # Serving

    def serve(
        self, handler: Callable[[Request], None], *, receives: bool = True, in_place: Collection[str] = ()
    ) -> None:
        """Handle requests with a plain function, called inline, beginning with requests that have arrived.

        An error of the handler is logged, and the answer has code ``internal``. Without ``receives`` this
        side takes no messages: the first one ends the link with a RemoteProtocolError. Requests of the types
        ``in_place`` may be `Placed` in memory of the peer, which can change it. So the handler checks what it
        uses, or takes a copy (`Request.copy_out`), and reads nothing there after its answer.

        Raises:
            TypeError: The handler is a coroutine function.
        """
        if iscoroutinefunction(handler):
            raise TypeError(f"the handler {handler!r} is a coroutine function: let it start a task instead")
        self._receives = receives
        self._in_place = in_place
        if not receives and self._inbox and self._error is None:
            message = self._inbox[0][0]
            self._give_up(
                RemoteProtocolError(
                    "message", f"{message.type!r} came as a message; this side takes only requests"
                )
            )
        self._handler = handler
        while self._unhandled:
            self._handle(self._unhandled.popleft())
        self._intake.look()

    def _send_error(self, request_id: int, code: str, text: str) -> None:
        # The text may have lone surrogates, as a file name has for bytes that are not UTF-8.
        meta = text[:MAX_ERROR_TEXT].encode(errors="backslashreplace")
        message = Message(type=code[:64], meta=meta)
        self._transmit(ERROR, request_id, message, None, True)

    # Time

    def _arm_by(self, deadline: float) -> None:
        """Set the timer to ``deadline``, unless it is set to an earlier time."""
        if deadline < self._timer_at:
            self._arm(deadline)

    def _arm(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        """Time out calls, check the time-outs of the link, and set the timer for the next deadline."""
        timer_at, self._timer, self._timer_at = self._timer_at, None, inf
        # Not before the timer's own time: a coarse clock may still show an earlier time, and the timer would
        # be set for the same time again and again.
        now = max(self._loop.time(), timer_at)
        try:
            for request_id, call in self._calls.expire(now=now):
                self._detach(request_id)
                self._answer(call, CallTimeout(call.message_type, call.timeout_s, str(self.peer)))
            deadlines = (self._tick(now), self._intake.tick(now), self._calls.next_deadline())
        except Exception as error:  # a link without its timer detects no silent peer
            self._defect("its timer", error)
            return
        deadline = min((one for one in deadlines if one is not None), default=None)
        if deadline is not None and self._error is None:
            self._arm(deadline)

    # The end

    def _defect(self, callback: str, error: Exception) -> None:
        """Close the link after an unexpected error in one of its callbacks, and report the error."""
        self._loop.call_exception_handler(
            {"message": f"{self!r}: closed, {callback} raised", "exception": error, "protocol": self}
        )
        self._give_up(LinkBroken(f"closed by a defect of {self.identity}: {type(error).__name__}: {error}"))

    @property
    def closed(self) -> bool:
        """Whether the conversation is over, for any reason."""
        return self._error is not None

    async def wait_closed(self) -> None:
        """Wait until the conversation is over. Never raises; cancelling has no effect."""
        if not self._over.done():
            waiter = self._loop.create_future()
            # A separate future: cancelling a waiter on `_over` itself would cancel it for all waiters.
            self._over.add_done_callback(lambda _: None if waiter.done() else waiter.set_result(None))
            await waiter

    def _finish(self, error: TransportError) -> bool:
        """End the conversation and all waits on it; the first error counts. Return False if already ended."""
        if self._error is not None:
            return False
        self._error = error.again()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for request_id, call in self._calls.drain():
            self._detach(request_id)
            self._answer(call, error.again())
        self._requests.clear()
        self._unhandled.clear()
        self._intake.close()
        # Unsent answers stay charged until the transport has released their memory.
        self._account.release(self._account.held_bytes - self._owed)
        self._wake_senders()
        while self._receivers:
            waiter = self._receivers.popleft()
            if not waiter.done():
                waiter.set_result(None)
        self._over.set_result(None)
        if isinstance(error, ProtocolError):
            logger.warning("%r: closed, the peer broke a rule: %s", self, error)
        else:
            logger.debug("%r: %s", self, error)
        return True

    def observe(self, observer: Observer) -> None:
        """Call a plain function for each further message, when it is counted. The function must not raise."""
        self._observer = observer

    def statistics(self) -> LinkStatistics:
        """Return the traffic so far and the current state."""
        return LinkStatistics(
            by_type=traffic_by_type(self._out, self._in),
            bytes_moved=self._bytes_moved(),
            unsent_bytes=self.unsent_bytes,
            outstanding_calls=len(self._calls.waiting),
            unanswered_requests=len(self._requests),
            held_bytes=self._account.held_bytes,
            waits=self._intake.waits,
        )

    def __repr__(self) -> str:
        state = "open" if self._error is None else type(self._error).__name__
        waits = f", waits: {self._intake.waits}" if self._intake.waits else ""
        calls = len(self._calls.waiting)
        return f"<{type(self).__name__} {self.identity} - {self.peer} {state}, {calls} calls{waits}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def settle(future: "asyncio.Future[Message]", answer: Message | TransportError) -> None:
    """Give a future its answer, unless it is cancelled."""
    if future.done():
        return
    if isinstance(answer, TransportError):
        future.set_exception(answer)
        future.exception()  # marks the error as retrieved, because the caller may have dropped the future
    else:
        future.set_result(answer)
