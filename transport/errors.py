"""Pure: everything that can go wrong between two parties, and whose fault it was.

TransportError
├── LinkClosed            the conversation ended in good order, by either side
├── LinkBroken            the conversation was lost: the peer vanished, fell silent or stopped reading
├── ProtocolError         a rule was broken ...
│   ├── LocalProtocolError    ... by our own caller; nothing was sent
│   └── RemoteProtocolError   ... by the peer; the link is closed
├── HandshakeRejected     the two sides may not or cannot talk
├── DialFailed            nobody could be reached at the address in the time given
├── BindRefused           an address that others can reach needs a token
├── CallTimeout           (also a TimeoutError) no reply in the time given
├── RemoteError           the peer answered a request with an error
└── WouldBlock            the peer is not reading fast enough; wait or drop
"""

from typing import Self

__all__ = [
    "BindRefused",
    "CallTimeout",
    "DialFailed",
    "HandshakeRejected",
    "LinkBroken",
    "LinkClosed",
    "LocalProtocolError",
    "ProtocolError",
    "RemoteError",
    "RemoteProtocolError",
    "TransportError",
    "WouldBlock",
]


class TransportError(Exception):
    """Base of every error of this package."""

    def again(self) -> Self:
        """Return an equal error that was not raised yet.

        An error that was raised keeps the frames that it passed, and with them messages of the peer. A link
        that stored such an error would keep them until the garbage collector finds the circle.
        """
        twin = type(self).__new__(type(self), *self.args)
        twin.args = self.args
        twin.__dict__.update(self.__dict__)
        return twin


class LinkClosed(TransportError):
    """The link was closed in good order, by this side or by the peer."""


class LinkBroken(TransportError):
    """The conversation was lost without a goodbye; whether unanswered requests took effect is unknown."""


class ProtocolError(TransportError):
    """A rule of the protocol was broken.

    Attributes:
        rule: Short fixed name of the rule, such as ``"meta-length"``.
        detail: What was found and what was expected.
    """

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule
        self.detail = detail


class LocalProtocolError(ProtocolError):
    """Our own caller asked for something the protocol forbids; nothing was sent and the link lives on."""


class RemoteProtocolError(ProtocolError):
    """The peer broke a rule; its link is closed, no other link is touched."""


class HandshakeRejected(TransportError):
    """The two sides may not or cannot talk.

    Attributes:
        code: Short fixed name of the reason, such as ``"token"`` or ``"version"``.
        text: The reason, as the side that refuses says it to itself.
        told: The reason as it says it to the other side.
    """

    def __init__(self, code: str, text: str, *, told: str = "") -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text
        self.told = told or text


class DialFailed(TransportError):
    """Nobody could be reached.

    Attributes:
        address: The address that was dialled.
        attempts: How often it was tried.
        reason: What went wrong the last time.
    """

    def __init__(self, address: str, attempts: int, text: str) -> None:
        super().__init__(f"cannot reach {address} after {attempts} attempt(s): {text}")
        self.address = address
        self.attempts = attempts
        self.reason = text


class BindRefused(TransportError):
    """Listening where other machines can reach us is refused without a token."""


class CallTimeout(TransportError, TimeoutError):
    """No reply arrived in time; whether the request took effect is unknown."""

    def __init__(self, message_type: str, timeout_s: float, peer: str) -> None:
        super().__init__(f"{peer} did not answer {message_type!r} within {timeout_s:g} s")
        self.message_type = message_type
        self.timeout_s = timeout_s


class RemoteError(TransportError):
    """The peer answered a request with an error.

    Attributes:
        code: Short fixed name chosen by the peer's handler.
        text: One short sentence; never a traceback.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class WouldBlock(TransportError):
    """More bytes wait for the peer than the high water mark allows; await `send` or `call`, or drop."""
