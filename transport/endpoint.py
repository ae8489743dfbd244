"""The common part of all links: calls, the inbox, roles, counts, and the end.

A kind of link adds `_transmit`, which sends a message, and `_over_water` for back-pressure. The link passes
each complete received message to `_deliver`.

Back-pressure has two parts. The water marks limit unsent bytes. The inbox limits and the budgets of the link
and of the process limit the bytes held for the peer: requests, messages and unsent answers. At a limit
reading pauses (`intake.py`), and then the peer reaches its own water marks.
"""

import asyncio
import logging
from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from inspect import iscoroutinefunction
from math import inf

from transport.budget import Account, Budget
from transport.calls import Call, CallTable, make_call, settle
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
from transport.link import LinkStatistics, Observer, OnAnswer, Request, traffic_by_type
from transport.messages import Identity, Message, RoleTable
from transport.release import Release
from transport.requests import AnsweringLink, InboundRequest
from transport.tensors import Tensor, lay_out

logger = logging.getLogger(__name__)

MAX_ERROR_TEXT = 200

_no_traffic = [0, 0, 0].copy
"""Compiled function that returns the counts of a message type without traffic."""


class Endpoint(AnsweringLink):
    """Common part of all links. A link belongs to one event loop."""

    # Slots: beyond 30 attributes an instance's dictionary is no longer shared, and every access is slower.
    __slots__ = (
        "__weakref__",
        "_account",
        "_calls",
        "_config",
        "_error",
        "_handler",
        "_in",
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
        self._requests: dict[int, InboundRequest] = {}
        self._unhandled: deque[InboundRequest] = deque()
        self._handler: Callable[[Request], None] | None = None
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
    def _over_water(self, message: Message | None, ordered: bool) -> bool:
        """Return whether the unsent bytes before a message (for None: all) reach the high water mark."""

    @abstractmethod
    def _unsent_bytes(self) -> int:
        """Return the number of unsent bytes."""

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
        """Check the time-outs of this kind of link; return the time of the next check."""

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
        self._check(message)
        while self._over_water(message, ordered):
            await self._wait_room()
            self._check(message)
        self._transmit(MESSAGE, 0, message, release, ordered)

    def send_nowait(self, message: Message, release: Release | None = None, *, ordered: bool = False) -> None:
        self._check(message)
        self._refuse_over_water(message, ordered)
        self._transmit(MESSAGE, 0, message, release, ordered)

    def _refuse_over_water(self, message: Message, ordered: bool) -> None:
        if self._over_water(message, ordered):
            raise WouldBlock(
                f"{self._unsent_bytes()} bytes wait for {self.peer}; {message.type!r} was not sent"
            )

    async def wait_writable(self) -> None:
        if self._over_water(None, True) and self._error is None:
            await self._wait_room()

    def hold_large(self, is_held: bool) -> None:
        pass  # within a process a message arrives at once

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
        # Both tests of `_check` inline, because every request runs them.
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
        request = InboundRequest(self, request_id, message, cost)
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

    def _handle(self, request: InboundRequest) -> None:
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
        """Wake the next receiver in place of one that was cancelled after its wake-up."""
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
        owed = self._owed = min(was + replied_bytes, self._unsent_bytes())
        if owed > was:
            self._account.charge(owed - was)
        elif owed < was:
            self._intake.release(was - owed)

    # Serving

    def serve(self, handler: Callable[[Request], None], *, receives: bool = True) -> None:
        if iscoroutinefunction(handler):
            raise TypeError(f"the handler {handler!r} is a coroutine function: let it start a task instead")
        self._receives = receives
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
        # Not before the timer's own time: a loop with a coarse clock may still show an earlier one, and the
        # timer would be set for the same time again and again.
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
        return self._error is not None

    async def wait_closed(self) -> None:
        if not self._over.done():
            waiter = self._loop.create_future()
            # A separate future: cancelling a waiter on `_over` itself would cancel it for all waiters.
            self._over.add_done_callback(lambda _: None if waiter.done() else waiter.set_result(None))
            await waiter

    def _finish(self, error: TransportError) -> bool:
        """End the conversation and all waits on it; the first error counts. Return False if it was over."""
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
        self._observer = observer

    def statistics(self) -> LinkStatistics:
        return LinkStatistics(
            by_type=traffic_by_type(self._out, self._in),
            bytes_moved=self._bytes_moved(),
            unsent_bytes=self._unsent_bytes(),
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
