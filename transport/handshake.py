"""Pure: the handshake, which proves the identities of both sides in four records of 256 bytes.

    client                                         server
    HELLO      identity, nonce C           --->
               <---    CHALLENGE   identity, nonce S
    PROOF      HMAC(key, "client", both) --->
               <---    ACCEPT      HMAC(key, "server", both)        or REJECT code, text at any point

The key belongs to the pair of roles (`keys`). A root token gives the key; a party with only one role's keys
can prove no other role to other roles.

Both proofs cover the first two records, and so both identities and both nonces; the label prevents the replay
of one proof as the other. The client proves first, so a client without the key receives nothing from which to
guess the token. A side without a token uses an empty key and flags this in its record, so the refusal can
name the side that lacks the token. Magic and version keep their place in every later version.

The proof shows that the peer knew the pair's key when the conversation began. The handshake encrypts nothing,
and the frames' CRCs authenticate nothing: use it on networks that you trust.
"""

import hmac
from collections.abc import Callable
from struct import Struct
from typing import Final

from transport.errors import HandshakeRejected, RemoteProtocolError
from transport.keys import Secret, pair_key
from transport.messages import Identity, RoleTable

RECORD_BYTES: Final = 256
PROTOCOL_VERSION: Final = 15
NONCE_BYTES: Final = 32
MAGIC: Final = b"TLNKHAND"

_HELLO, _CHALLENGE, _PROOF, _ACCEPT, _REJECT = 1, 2, 3, 4, 5
_HEAD = Struct("<8sHBB")
_BODY = Struct("<32s80s64sQ32s")
_REASON = Struct("<16s200s")


def _record(kind: int, body: bytes, *, has_token: bool = False) -> bytes:
    head = _HEAD.pack(MAGIC, PROTOCOL_VERSION, kind, has_token)
    return (head + body).ljust(RECORD_BYTES, b"\0")


def reject_record(error: HandshakeRejected) -> bytes:
    """Return the record that refuses the peer; code and text are cut to 16 and 200 bytes."""
    return _record(_REJECT, _REASON.pack(error.code.encode()[:16], error.peer_text.encode()[:200]))


def _text(raw: bytes) -> str:
    try:
        return raw.rstrip(b"\0").decode()
    except UnicodeDecodeError:
        raise RemoteProtocolError("handshake", "a name is not UTF-8") from None


class Handshake:
    """The common part of a handshake's two sides.

    Pass whole records to `receive`, which returns the record of the answer, or nothing. The handshake is over
    once `peer` is set.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        token: Secret | None,
        entropy: Callable[[int], bytes],
        rules: RoleTable,
        peer_role: str | None = None,
    ) -> None:
        self.identity = identity
        self.peer: Identity | None = None
        self._candidate: Identity | None = None
        self._token = token
        self._rules = rules
        self._peer_role = peer_role
        self._nonce = entropy(NONCE_BYTES)
        if len(self._nonce) != NONCE_BYTES:
            raise ValueError(f"entropy({NONCE_BYTES}) returned {len(self._nonce)} bytes")
        self._ours = b""
        self._theirs = b""

    def _introduce(self, kind: int) -> bytes:
        me = self.identity
        body = _BODY.pack(me.role.encode(), me.node.encode(), me.run.encode(), me.incarnation, self._nonce)
        self._ours = _record(kind, body, has_token=self._token is not None)
        return self._ours

    def _open(self, record: bytes, expected: int) -> bytes:
        """Check the head of a record, raise the error of a REJECT, return the body."""
        magic, version, kind, has_token = _HEAD.unpack_from(record)
        if magic != MAGIC:
            raise RemoteProtocolError("handshake", "the peer uses another protocol: check the address")
        if version != PROTOCOL_VERSION:
            raise HandshakeRejected(
                "version",
                f"the peer has version {version}, this side {PROTOCOL_VERSION}: run the same release on both",
            )
        body = record[_HEAD.size :]
        if kind == _REJECT:
            code, text = _REASON.unpack_from(body)
            raise HandshakeRejected(_text(code), f"the peer refused: {_text(text)}")
        if kind != expected:
            raise RemoteProtocolError("handshake", f"record {kind} in place of {expected}")
        if expected in (_HELLO, _CHALLENGE) and bool(has_token) != (self._token is not None):
            we_lack = "the other side has a token and this side has none: give it the same"
            they_lack = "this side has a token and the other side has none: give both the same, or none"
            text, peer_text = (we_lack, they_lack) if has_token else (they_lack, we_lack)
            raise HandshakeRejected("token", text, peer_text=peer_text)
        return body

    def _introduced(self, record: bytes, body: bytes) -> None:
        role, node, run, incarnation, _nonce = _BODY.unpack_from(body)
        self._theirs = record
        try:
            peer = Identity(role=_text(role), node=_text(node), run=_text(run), incarnation=incarnation)
        except ValueError as error:
            raise RemoteProtocolError("handshake", str(error)) from None
        if self._peer_role is not None and peer.role != self._peer_role:
            raise HandshakeRejected(
                "role", f"dialled a {self._peer_role}, but a {peer.role} answered: check the address"
            )
        if not self._rules.may_talk(self.identity.role, peer.role):
            raise HandshakeRejected(
                "role", f"{self.identity.role} and {peer.role} exchange no messages: check the address"
            )
        self._candidate = peer

    def _proof(self, label: bytes, client: bytes, server: bytes) -> bytes:
        assert self._candidate is not None
        key = b""
        if self._token is not None:
            key = pair_key(self._token, self.identity.role, self._candidate.role)
        return hmac.digest(key, label + client + server, "sha256")

    def _check_proof(self, body: bytes, expected: bytes) -> None:
        if not hmac.compare_digest(body[: len(expected)], expected):
            raise HandshakeRejected(
                "token", "the tokens differ: start both sides with the same token, or keys from it"
            )
        self.peer = self._candidate

    def receive(self, record: bytes) -> bytes:
        """Take one record of `RECORD_BYTES`; return the answer, or nothing.

        Raises:
            HandshakeRejected: This side refuses the peer, which must get the `reject_record`.
            RemoteProtocolError: The record breaks a rule.
        """
        raise NotImplementedError


class ClientHandshake(Handshake):
    """The dialling side. Begins with `hello`."""

    def hello(self) -> bytes:
        """Return the first record to send."""
        return self._introduce(_HELLO)

    def receive(self, record: bytes) -> bytes:
        """Take the server's next record. See `Handshake.receive`."""
        if self._candidate is None:
            self._introduced(record, self._open(record, _CHALLENGE))
            return _record(_PROOF, self._proof(b"client", self._ours, self._theirs))
        self._check_proof(self._open(record, _ACCEPT), self._proof(b"server", self._ours, self._theirs))
        return b""


class ServerHandshake(Handshake):
    """The listening side."""

    def receive(self, record: bytes) -> bytes:
        """Take the client's next record. See `Handshake.receive`."""
        if self._candidate is None:
            self._introduced(record, self._open(record, _HELLO))
            return self._introduce(_CHALLENGE)
        self._check_proof(self._open(record, _PROOF), self._proof(b"client", self._theirs, self._ours))
        return _record(_ACCEPT, self._proof(b"server", self._theirs, self._ours))
