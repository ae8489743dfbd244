"""Pure: the errors of links, by cause and by the party at fault.

TransportError
├── LinkClosed            one of the two sides closed the conversation
├── LinkBroken            the conversation was lost: the peer vanished, fell silent or stopped reading
├── ProtocolError         a rule was broken
│   ├── LocalProtocolError    by the caller of this side; the link stays open
│   └── RemoteProtocolError   by the peer; the link is closed
├── HandshakeRejected     one side refused the other
├── DialFailed            no peer answered at the address within the time limit
├── BindRefused           an address that other machines can reach needs a token
├── CallTimeout           no reply within the time limit (also a TimeoutError)
├── RemoteError           the peer answered a request with an error
└── WouldBlock            the peer reads too slowly; wait or drop the message
"""

from typing import Self


class TransportError(Exception):
    """Base of every error of this package."""

    def again(self) -> Self:
        """Return an equal error that was not raised.

        A raised error keeps the frames that it passed, and with them the peer's messages. A link that stored
        such an error would keep the messages until the garbage collector finds the cycle.
        """
        twin = type(self).__new__(type(self), *self.args)
        twin.args = self.args
        twin.__dict__.update(self.__dict__)
        return twin


class LinkClosed(TransportError):
    """The link was closed by this side or by the peer, without an error."""


class LinkBroken(TransportError):
    """The conversation was lost without a CLOSE; unanswered requests may or may not have taken effect."""


class ProtocolError(TransportError):
    """A rule of the protocol was broken.

    Attributes:
        rule: Short fixed name of the rule, such as ``"meta-length"``.
        detail: The value found and the value expected.
    """

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule
        self.detail = detail


class LocalProtocolError(ProtocolError):
    """The caller requested a forbidden action, or registered arrays that the reply does not match; the link
    stays open."""


class RemoteProtocolError(ProtocolError):
    """The peer broke a rule; only its link is closed."""


class HandshakeRejected(TransportError):
    """One side refused the other.

    Attributes:
        code: Short fixed name of the reason, such as ``"token"`` or ``"version"``.
        text: The reason, in words for the side that refuses.
        peer_text: The reason, in words for the other side.
    """

    def __init__(self, code: str, text: str, *, peer_text: str = "") -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text
        self.peer_text = peer_text or text


class DialFailed(TransportError):
    """No peer answered.

    Attributes:
        address: The dialled address.
        attempts: Number of attempts.
        reason: Error of the last attempt.
    """

    def __init__(self, address: str, attempts: int, text: str) -> None:
        super().__init__(f"cannot reach {address} after {attempts} attempt(s): {text}")
        self.address = address
        self.attempts = attempts
        self.reason = text


class BindRefused(TransportError):
    """The listener was refused, because it has no token and other machines can reach its address."""


class CallTimeout(TransportError, TimeoutError):
    """No reply arrived in time; the request may or may not have taken effect."""

    def __init__(self, message_type: str, timeout_s: float, peer: str) -> None:
        super().__init__(f"{peer} did not answer {message_type!r} within {timeout_s:g} s")
        self.message_type = message_type
        self.timeout_s = timeout_s


class RemoteError(TransportError):
    """The peer answered a request with an error.

    Attributes:
        code: Short fixed name chosen by the peer's handler.
        text: One short sentence, never a traceback.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class WouldBlock(TransportError):
    """Too many bytes wait for the peer (high water mark); await `send` or `call`, or drop the message."""
