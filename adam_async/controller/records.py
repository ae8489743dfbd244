"""Pure: limits of a record in the cluster map, checked before the map's own rules."""

import msgspec
import numpy as np

from adam_async.errors import ConfigError
from adam_async.messages.body import MOST_INFO_BYTES, MOST_VALUE_BYTES, ROLES, SMALL_INFO_BYTES, Count
from adam_async.messages.notes import USERS
from adam_async.run.addresses import check_address
from adam_async.run.cluster_map import COPIES, ELSEWHERE, MOST_REASON, NodeRecord
from transport.sockets import parse_tcp_address

MAX_DEPTH = 32
"""Maximum nesting depth of a record in the map, in containers. Controllers with a smaller stack could not
read a far deeper record of another controller."""

MOST_ADDRESS = 1024
"""Maximum length of an address, in characters."""

MOST_WORD = 512
"""Maximum length of a node's `ready` and `store`, and of each store in `serves`, in characters."""

MOST_SERVED = 128
"""Maximum number of stores that a server reports."""

DEAF = ("driver", "client", "reader")
"""Roles that have no listener."""


class _ServerInfo(msgspec.Struct):
    memory_bytes: Count = 0
    copies: str = ""
    elsewhere: str = ""


_IRRELEVANT = bytes(set(range(256)).difference(b'"[]{}'))


def nests_too_deep(text: bytes, most: int = MAX_DEPTH) -> bool:
    """Return whether a record is nested deeper than `most`. A deeper record must not enter the log.

    Args:
        text: Valid JSON. Counting brackets takes as little as a twentieth of the time of a walk through the
            decoded value.
        most: Maximum depth, in containers.
    """
    quotes_and_brackets = text.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _IRRELEVANT)
    # Two adjacent quotes change nothing for the brackets around them.
    codes = np.frombuffer(quotes_and_brackets.replace(b'""', b""), np.uint8)
    outside = ~np.logical_xor.accumulate(codes == ord('"'))  # outside of strings
    braces = codes | 0x20  # maps both kinds of brackets to braces
    opened = ((braces == ord("{")) & outside).astype(np.int32)
    depth = np.cumsum(opened - ((braces == ord("}")) & outside))
    return bool(depth.max(initial=0) > most)


def value_too_large(key: str, size: int) -> str:
    """Explain why the controller refuses a record of the map undecoded, and how to repair it."""
    return f"{key} of {size} bytes is above the limit of {MOST_VALUE_BYTES}: put less into it"


def _address_problem(name: str, address: str) -> str:
    """Return why other roles cannot dial an address; empty if they can."""
    if address.startswith("local://"):
        return ""
    try:
        check_address(address, name)
    except ConfigError as error:
        return f"{error}; others could not dial it"
    return "" if parse_tcp_address(address)[1] else f"{name}: {address} has port 0; others could not dial it"


def check_node(record: NodeRecord) -> str:
    """Return what is wrong with a node's record; empty if nothing is.

    The record must be small, because the map keeps departed nodes' records for a while.
    """
    if record.role not in ROLES:
        return f"there is no role {record.role[:80]!r}; there are {', '.join(ROLES)}"
    if len(record.serves) > MOST_SERVED or any(len(store) > MOST_WORD for store in record.serves):
        return (
            f"serves names {len(record.serves)} stores; {MOST_SERVED} of {MOST_WORD} characters are the most"
        )
    if record.store and record.role != "client":
        return f"only a client pushes to a store, and this node is a {record.role}"
    if record.serves and record.role != "ps":
        return f"only a parameter server serves stores, and this node is a {record.role}"
    if (record.ready or record.failed) and record.role in USERS:
        return f"ready and failed are of a run, in which a {record.role} has no part"
    texts = (("address", MOST_ADDRESS), ("ready", MOST_WORD), ("store", MOST_WORD), ("failed", MOST_REASON))
    for name, most in texts:
        length = len(getattr(record, name))
        if length > most:
            return f"{name} has {length} characters; {most} are the most"
    # Drivers, clients and readers have no listener; peers dial live nodes of all other roles.
    if record.live and record.role not in DEAF and (problem := _address_problem("address", record.address)):
        return problem
    size, most = len(msgspec.json.encode(record.info)), MOST_INFO_BYTES
    if record.role in ("worker", *USERS):
        most = SMALL_INFO_BYTES
    if size > most:
        return (
            f"info has {size} bytes as JSON text; {most} are the most for a {record.role}: put less into it"
        )
    return _server_problem(record) if record.role == "ps" else ""


def _server_problem(record: NodeRecord) -> str:
    """Return what is wrong with a parameter server's info; empty if nothing is."""
    if problem := info_problem(record, _ServerInfo):
        return problem
    named = [(name, address) for name in (COPIES, ELSEWHERE) if (address := record.info.get(name))]
    return next((problem for each in named if (problem := _address_problem(*each))), "")


def info_problem(record: NodeRecord, kind: type[msgspec.Struct]) -> str:
    """Return why a node's info does not fit the fields of a type; empty if it fits."""
    try:
        msgspec.convert(record.info, kind)
    except msgspec.ValidationError as error:
        return f"info of the role {record.role}: {error}"
    return ""
