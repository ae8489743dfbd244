"""A request of the peer, until it is answered."""

from typing import TYPE_CHECKING

from transport.errors import LocalProtocolError
from transport.frames import REPLY
from transport.link import Link, Request
from transport.messages import Message
from transport.release import Release

if TYPE_CHECKING:
    from transport.endpoint import Endpoint

__all__ = ["InboundRequest"]


class InboundRequest(Request):
    """A request of the peer, until it is answered."""

    # What a plain call never changes stays in the class.
    _answered = False

    def __init__(self, link: "Endpoint", request_id: int, message: Message) -> None:
        self._link = link
        self._id = request_id
        self.message = message

    @property
    def link(self) -> Link:
        return self._link

    def reply(self, message: Message, release: Release | None = None) -> None:
        if self._answered:
            raise LocalProtocolError(
                "reply", f"request {self._id} ({self.message.type!r}) was answered before"
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
        self._answered = True
        self._link._requests.pop(self._id, None)
        if not self._link.closed:
            self._link._send_error(self._id, code, text)

    def __repr__(self) -> str:
        return f"<Request {self._id} {self.message.type} from {self._link.peer}>"
