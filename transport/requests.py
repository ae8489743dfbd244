"""The requests of the peer, each until its answer."""

import logging
from abc import abstractmethod
from collections.abc import Callable
from operator import attrgetter

from transport.budget import Account
from transport.errors import LocalProtocolError, RemoteProtocolError, TransportError
from transport.frames import REPLY
from transport.intake import Intake
from transport.link import Link, Request
from transport.messages import Message
from transport.release import Release

logger = logging.getLogger(__name__)

UNCHARGED_BYTES = 1 << 20
"""Maximum payload of an answer without a charge, in bytes, unless the request is larger."""


_BYTES = attrgetter("nbytes")


class AnsweringLink(Link):
    """The part of a link that its requests use."""

    __slots__ = ()

    _account: Account
    _error: TransportError | None
    _intake: Intake
    _may_send: frozenset[str]
    _requests: "dict[int, InboundRequest]"

    @abstractmethod
    def _check(self, message: Message) -> None:
        """Raise the error of an ended link, or LocalProtocolError for a message without a row."""

    @abstractmethod
    def _transmit(
        self, kind: int, request_id: int, message: Message, release: Release | None, ordered: bool
    ) -> None:
        """Send a message that passed `_check`, or raise LocalProtocolError without an effect."""

    @abstractmethod
    def _send_error(self, request_id: int, code: str, text: str) -> None:
        """Answer a request with an error."""


class InboundRequest(Request):
    """A request of the peer, until it is answered."""

    # Class attributes, because a plain call never changes them: this saves two assignments.
    _answered = False

    announced = 0
    """Bytes charged for the answer."""

    _charged = False

    def __init__(self, link: AnsweringLink, request_id: int, message: Message, cost: int) -> None:
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

    def charge(self, nbytes: int, then: Callable[[], object]) -> None:
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

    def reply(self, message: Message) -> None:
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
            link._transmit(REPLY, self._id, message, None, False)
        self._close()

    def fail(self, code: str, text: str) -> None:
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
