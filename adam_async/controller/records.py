"""Pure: what a record of the map may be like, before the map's rules look at it."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from adam_async.cluster_map import MOST_REASON, RUN_PIECES, NodeRecord, RunInPieces, RunPiece, RunRecord
from adam_async.messages.body import ROLES
from adam_async.messages.sizes import MOST_VALUE_BYTES

MAX_DEPTH = 32
"""Containers in a record of the map may nest so deep. Far deeper ones can be written by some and not be read
by others, as far as the stack of each goes."""

MOST_ADDRESS = 1024
"""Characters of an address."""

MOST_WORD = 512
"""Characters of what a node is ready for."""

MOST_INFO = 8192
"""Bytes of what a node says of itself, as JSON text."""

PIECE_BYTES = 45 << 10
"""Bytes of JSON text in one piece of a run; as a record of the map they are a third more."""

_PACK = msgspec.msgpack.Encoder()


def nests_too_deep(text: bytes, most: int = MAX_DEPTH) -> bool:
    """Whether a record has containers over `MAX_DEPTH` deep. Such a one must not come into the log.

    Args:
        text: JSON that can be decoded. Its brackets are counted: a walk through what it decodes to may take
            twenty times as long.
        most: How deep they may be.
    """
    codes = np.frombuffer(text.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    outside = ~np.logical_xor.accumulate(codes == ord('"'))  # of strings
    braces = codes | 0x20  # of both kinds of brackets
    opened = ((braces == ord("{")) & outside).astype(np.int32)
    depth = np.cumsum(opened - ((braces == ord("}")) & outside))
    return bool(depth.max(initial=0) > most)


def value_too_large(key: str, size: int) -> str:
    """Say why a record of the map is refused undecoded, and what to do."""
    return f"{key} of {size} bytes is above the limit of {MOST_VALUE_BYTES}: say less in it"


def check_node(record: NodeRecord) -> str:
    """Say what is wrong with the record of a node; empty if there is nothing.

    It is small, for a while the map also holds the records of nodes that have left.
    """
    if record.role not in ROLES:
        return f"there is no role {record.role[:80]!r}; there are {', '.join(ROLES)}"
    for name, most in (("address", MOST_ADDRESS), ("ready", MOST_WORD), ("failed", MOST_REASON)):
        length = len(getattr(record, name))
        if length > most:
            return f"{name} has {length} characters; {most} are the most"
    size = len(msgspec.json.encode(record.info))
    return f"info has {size} bytes as JSON text; {MOST_INFO} are the most" if size > MOST_INFO else ""


# --- runs in pieces --------------------------------------------------------------------------


def cut(record: RunRecord) -> list[RunPiece]:
    """Cut the record of a run into pieces; empty if it is short enough to be one value.

    Raises:
        ValueError: It is too long for `RUN_PIECES` pieces.
    """
    text = msgspec.json.encode(record)
    if len(text) <= MOST_VALUE_BYTES:
        return []
    if len(text) > RUN_PIECES * PIECE_BYTES:
        raise ValueError(
            f"the run's record has {len(text)} bytes, {RUN_PIECES * PIECE_BYTES} are the most: its model has "
            f"{len(msgspec.json.encode(record.spec))} of them, its plan "
            f"{len(msgspec.json.encode(record.plan))}, what it continues "
            f"{len(msgspec.json.encode((record.resumed, record.carried)))}; use fewer layers or partitions"
        )
    starts = range(0, len(text), PIECE_BYTES)
    return [RunPiece(run=record.id, text=text[start : start + PIECE_BYTES]) for start in starts]


def joined(whole: RunInPieces, pieces: Mapping[str, RunPiece]) -> RunRecord | str:
    """The record of a run of which the map has the pieces; or what is wrong with them."""
    if not 1 <= whole.pieces <= RUN_PIECES:
        return f"a run has 1 to {RUN_PIECES} pieces, not {whole.pieces}"
    found = [pieces.get(f"run/{number}") for number in range(whole.pieces)]
    lacking = [number for number, piece in enumerate(found) if piece is None or piece.run != whole.id]
    if lacking:
        return f"of run {whole.id} piece {lacking[0]} of {whole.pieces} is not there: submit it again"
    text = b"".join(piece.text for piece in found if piece is not None)
    try:
        value = msgspec.json.decode(text, type=dict[str, Any])
        if nests_too_deep(text):
            return f"it nests over {MAX_DEPTH} deep"
        _PACK.encode(value)  # not all that JSON says can be written down
        return msgspec.convert(value, RunRecord)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        return str(error)


def is_piece(key: str) -> bool:
    """Whether a key of the map is that of a piece of a run."""
    kind, _, number = key.partition("/")
    return kind == "run" and number in _NUMBERS


_NUMBERS = frozenset(map(str, range(RUN_PIECES)))
