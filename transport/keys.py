"""Pure: one key for each pair of roles, derived from the cluster's root token.

A holder of the root token can derive the key of every pair. `RoleKeys` hold the keys of only one role's
pairs: a party with them can prove this role to other roles, and no other role.

The derivation is HKDF-SHA-256 (RFC 5869). The derivation's info is a fixed label and both names in
alphabetical order, so both sides of a link derive the same key, whichever side dials.

The keys are symmetric. A party with role A's keys can claim to be any other party of role A; to these, it can
claim any role that exchanges messages with A.
"""

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from transport.errors import HandshakeRejected
from transport.messages import RoleTable

KEY_BYTES: Final = 32
"""Length of the key of a pair of roles, in bytes."""

LEAST_TOKEN_BYTES: Final = 16
"""Minimum length of a root token, in bytes; an attacker can guess a shorter token."""

_HASH_BYTES = 32
_SALT = b"transport root token"
_LABEL = b"transport pair key v1"


def hkdf(secret: bytes, *, salt: bytes, info: bytes, length: int) -> bytes:
    """Derive ``length`` bytes from a secret: HKDF-SHA-256, RFC 5869.

    Raises:
        ValueError: ``length`` is above 8160, the limit of the function.
    """
    if length > 255 * _HASH_BYTES:
        raise ValueError(f"HKDF-SHA-256 gives at most {255 * _HASH_BYTES} bytes, not {length}")
    key = hmac.digest(salt or bytes(_HASH_BYTES), secret, "sha256")
    block, found = b"", b""
    for count in range(1, -(-length // _HASH_BYTES) + 1):
        block = hmac.digest(key, block + info + bytes([count]), "sha256")
        found += block
    return found[:length]


@dataclass(frozen=True, slots=True, repr=False)
class RoleKeys:
    """One role's keys, one for each pair.

    Attributes:
        role: Role of the holder.
        keys: Keys by the other role of the pair, `KEY_BYTES` each.

    Raises:
        ValueError: A key has another length, or ``keys`` is empty.
    """

    role: str
    keys: Mapping[str, bytes]

    def __post_init__(self) -> None:
        if not self.keys:
            raise ValueError(f"role {self.role!r} exchanges messages with no other role: it has no keys")
        for other, key in self.keys.items():
            if len(key) != KEY_BYTES:
                raise ValueError(f"the key for {self.role} and {other} has {len(key)} bytes, not {KEY_BYTES}")

    def __repr__(self) -> str:
        return f"<RoleKeys of {self.role} for {', '.join(self.keys)}>"


Secret = bytes | RoleKeys
"""Secret of a party: the root token, or the keys of its role."""


def check_secret(secret: Secret | None) -> None:
    """Refuse a root token that an attacker can guess.

    Raises:
        ValueError: The token is too short.
    """
    if isinstance(secret, bytes) and len(secret) < LEAST_TOKEN_BYTES:
        raise ValueError(
            f"a token of {len(secret)} bytes can be guessed: use {LEAST_TOKEN_BYTES} random bytes or more"
        )


def derive(token: bytes, role: str, others: Iterable[str], rules: RoleTable) -> RoleKeys:
    """Derive the keys of one role from the root token.

    Args:
        token: The root token.
        role: Role to derive keys for.
        others: All roles of the cluster; a role that has no rules with ``role`` gets no key.
        rules: Table of the messages that each role may send.

    Raises:
        ValueError: The role exchanges messages with no other, or the token is too short.
    """
    check_secret(token)
    return RoleKeys(
        role, {other: pair_key(token, role, other) for other in others if rules.may_talk(role, other)}
    )


def pair_key(secret: Secret, role: str, other: str) -> bytes:
    """Return the key that this side's role ``role`` shares with ``other``.

    Raises:
        HandshakeRejected: The keys belong to another role, or have none for this pair.
    """
    if isinstance(secret, bytes):
        return hkdf(secret, salt=_SALT, info=_pair_info(role, other), length=KEY_BYTES)
    check_role(secret, role)
    key = secret.keys.get(other)
    if key is None:
        raise HandshakeRejected(
            "token",
            f"the keys of role {role} here have none for role {other}: derive them again from the token",
            peer_text=f"the other side, a {role}, has no key for role {other}: derive its keys again",
        )
    return key


def _pair_info(role: str, other: str) -> bytes:
    first, second = sorted((role, other))
    return b"\0".join((_LABEL, first.encode(), second.encode()))


def check_role(secret: Secret | None, role: str) -> None:
    """Refuse to act in a role with the keys of another.

    Raises:
        HandshakeRejected: The keys belong to another role.
    """
    if isinstance(secret, RoleKeys) and secret.role != role:
        raise HandshakeRejected(
            "token",
            f"the keys here are those of role {secret.role}, and this side is a {role}: give it the keys of "
            f"role {role}, or the token",
        )
