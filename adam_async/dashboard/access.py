"""Pure: a dashboard's visitors: its token, their sessions, and the hosts that a request may name.

A visitor exchanges the token for a session: a cookie that scripts cannot read, and a text that each operation
repeats in a header. Another site can at most make a browser send the cookie, but not that text.
"""

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address

from adam_async.errors import ConfigError

MOST_SESSIONS = 64
"""Maximum number of sessions; a further one ends the least recently used one."""

SESSION_S = 12 * 3600.0
"""Time without a request after which a session ends, in seconds."""

LEAST_TOKEN = 16
"""Minimum length of a token, in characters."""

SECRET_BYTES = 24
"""Size of random secrets, in bytes."""


@dataclass(slots=True)
class Session:
    """One visitor with the token."""

    proof: str
    """Text that each operation of the session repeats."""
    used_at: float


class Access:
    """Decides which requests are answered.

    Args:
        token: Secret of the visitors.
        host: Host that the server listens on.
        entropy: Returns this many random bytes.

    Attributes:
        token: The secret.

    Raises:
        ConfigError: The token is too short.
    """

    def __init__(self, token: str, *, host: str, entropy: Callable[[int], bytes]) -> None:
        if len(token) < LEAST_TOKEN:
            raise ConfigError(
                f"the token of --dashboard-token-file has {len(token)} characters; {LEAST_TOKEN} or more "
                "are needed: adam-async token new writes one"
            )
        self.token = token
        self._host = host
        self._entropy = entropy
        self._sessions: dict[str, Session] = {}
        """Sessions by cookie, the least recently used first."""

    def begin(self, token: str, now: float) -> str | None:
        """Return the cookie of a new session; None if the token is wrong. `now` is in seconds."""
        if not hmac.compare_digest(token.encode(errors="replace"), self.token.encode()):
            return None
        while len(self._sessions) >= MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        cookie = self._entropy(SECRET_BYTES).hex()
        self._sessions[cookie] = Session(self._entropy(SECRET_BYTES).hex(), now)
        return cookie

    def session(self, cookie: str, now: float) -> Session | None:
        """Return a cookie's session; None for an unknown or ended one."""
        session = self._sessions.pop(cookie, None)
        if session is None or now > session.used_at + SESSION_S:
            return None
        session.used_at = now
        self._sessions[cookie] = session
        return session

    def proves(self, session: Session, proof: str) -> bool:
        """Return whether a request repeats the proof of its session."""
        return hmac.compare_digest(proof.encode(errors="replace"), session.proof.encode())

    def names_host(self, header: str) -> bool:
        """Return whether the Host header of a request names this server.

        A browser that was tricked by a changed name server entry sends that name. So only the host of the
        option, localhost, and literal addresses count.
        """
        host = header.rpartition(":")[0] if header.rpartition(":")[2].isdecimal() else header
        host = host.removeprefix("[").removesuffix("]").lower()
        return host in ("localhost", self._host.lower()) or is_address(host)


def is_address(host: str) -> bool:
    """Return whether a host is a literal IP address."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether only programs of this machine reach a host."""
    return host == "localhost" or (is_address(host) and ip_address(host).is_loopback)
