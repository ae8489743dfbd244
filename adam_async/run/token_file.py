"""Pure: the text of a token file: the cluster's root token, or the keys of one role.

A root token is any text of 16 bytes or more. A role's keys are one line with its format, the role, and each
other role with a base64 key:

    adam-async-keys/1 worker controller=K3Zx... data=9sQp... ps=Ty2m...

A process with such a line can join only as that role (`transport/keys.py`).
"""

import binascii
from base64 import b64decode, b64encode

from adam_async.errors import ConfigError
from adam_async.messages import role_table
from adam_async.messages.body import ROLES
from transport import RoleKeys, Secret
from transport.keys import check_secret, derive

PREFIX = "adam-async-keys/"
"""Begin of a line of keys; a version follows it."""

VERSION = "1"

AGAIN = "write it again with: adam-async token derive --role"
"""Remedy in error messages, followed by the role."""


def read_token_text(text: str, *, origin: str = "the token") -> Secret:
    """Read a root token, or the keys of a role.

    Raises:
        ConfigError: The root token is too short; or the line of keys is malformed, or has another version.
    """
    if not text.startswith(PREFIX):
        token = text.encode()
        try:
            check_secret(token)
        except ValueError as error:
            raise ConfigError(f"{origin}: {error}; adam-async token new makes one") from None
        return token
    version, *words = text.removeprefix(PREFIX).split(" ")
    if version != VERSION:
        raise ConfigError(
            f"{origin} holds keys in format {version[:16]!r}, and this release reads {VERSION!r}: "
            f"{AGAIN} ROLE"
        )
    role, *pairs = words or [""]
    if role not in ROLES:
        raise ConfigError(f"{origin} holds keys of role {role[:32]!r}; roles are {', '.join(ROLES)}")
    keys: dict[str, bytes] = {}
    for pair in pairs:
        other, _, key = pair.partition("=")
        if other not in ROLES or other in keys:
            raise ConfigError(
                f"{origin} holds a key for role {other[:32]!r}, unknown or twice: {AGAIN} {role}"
            )
        keys[other] = _key(key, f"{origin}: the key for role {other}", role)
    try:
        return RoleKeys(role, keys)
    except ValueError as error:
        raise ConfigError(f"{origin}: {error}: {AGAIN} {role}") from None


def _key(text: str, what: str, role: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError(f"{what} is not base64: {AGAIN} {role}") from None


def keys_text(keys: RoleKeys) -> str:
    """Write a role's keys as one line, without a line break."""
    pairs = [f"{other}={b64encode(key).decode()}" for other, key in sorted(keys.keys.items())]
    return " ".join((PREFIX + VERSION, keys.role, *pairs))


def derived_text(token: str, role: str, *, origin: str = "the token") -> str:
    """Derive a role's keys from a root token, as one line.

    Raises:
        ConfigError: The token is too short, or is itself a line of keys; or the role is unknown.
    """
    if role not in ROLES:
        raise ConfigError(f"there is no role {role!r}; roles are {', '.join(ROLES)}")
    return keys_text(derive(root_token(token, origin=origin), role, ROLES, role_table()))


def root_token(token: str, *, origin: str = "the token") -> bytes:
    """Read a root token. Raises ConfigError: the text has the keys of a role, or is too short."""
    secret = read_token_text(token, origin=origin)
    if isinstance(secret, RoleKeys):
        raise ConfigError(
            f"{origin} holds the keys of role {secret.role} alone, from which no others follow: "
            "give the token"
        )
    return secret


def holds_keys(token: str) -> bool:
    """Return whether a text has the keys of one role, and is no root token."""
    return token.startswith(PREFIX)


def holds_keys_of(token: str, role: str) -> bool:
    """Return whether a text has the keys of this role alone. Raises ConfigError: see `read_token_text`."""
    secret = read_token_text(token)
    return isinstance(secret, RoleKeys) and secret.role == role


def check_token_is_for(token: str, role: str, *, origin: str) -> None:
    """Check that keys belong to the command's role.

    Raises:
        ConfigError: The keys belong to another role, or `read_token_text` refuses them.
    """
    secret = read_token_text(token, origin=origin)
    if isinstance(secret, RoleKeys) and secret.role != role:
        raise ConfigError(
            f"{origin} holds the keys of role {secret.role}, and this is a {role}: give it those that "
            f"`adam-async token derive --role {role}` writes, or the token"
        )
