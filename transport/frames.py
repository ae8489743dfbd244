"""Pure: the frames of messages, and their encoder; `decoder` decodes them.

A frame is a prelude of 32 bytes, a meta of at most 16 KiB, and a payload of at most 1 MiB:

    offset  0   4         5      6       8            16       20         28
            magic  version  kind   flags   request id   meta     payload    CRC-32 of the 28 bytes
            TLNK   2        u8     u16     u64          length   length     before it and the meta
                                                        u32      u64        u32        (little endian)

A frame with the flag PLACED has its payload in shared memory (`regions`) and none in the stream. The last 8
bytes of its meta are the region's number, and where the payload starts there, in units of 4 bytes. A FREED
returns blocks to their owner, a DROPPED ends blocks of its sender: its meta is their numbers.

A frame with the flag CHECKED has the CRC-32C of its payload in the last 4 bytes of its meta, which the CRC-32
of the prelude covers. The sender decides for each frame; a receiver checks each frame with the flag.

A frame's meta is msgpack: ``[type, meta, descriptions of the tensors]``, a text and two strings of bytes. The
owner of a message decodes its meta. Tensors bypass msgpack, which would copy them. A payload is the tensors'
bytes, each padded to start at a multiple of 64.

If a message's payload exceeds the sender's `LinkConfig.chunk_bytes`, the message is a frame with the flag
MORE and the first part of the payload. CHUNK frames with the rest follow, all but the last flagged MORE. A
sender has at most one such message in progress; whole frames of other messages may come between its chunks.
"""

from collections.abc import Iterable
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

import msgpack
import numpy as np
from google_crc32c import extend

from transport.errors import LocalProtocolError
from transport.messages import Message
from transport.tensors import Tensor

MAGIC: Final = b"TLNK"
VERSION: Final = 2
PRELUDE_BYTES: Final = 32
MAX_CHUNK_BYTES: Final = 1 << 20
CHECKSUM_BYTES: Final = 4
"""Length of a payload's CRC-32C on the wire, in bytes."""
PLACE: Final = Struct("<II")
"""Place of a payload on the wire: its region's number, and its start in units of `PLACE_UNIT`."""

PLACE_UNIT: Final = 4
"""Unit of the starts of payloads in regions, in bytes: no value of a parameter is smaller, so arrays of any
sizes can lie without gaps."""

_UINT8 = np.dtype(np.uint8)
_ENCODE = Struct("<4sBBHQIQ").pack
_PACK = msgpack.Packer().pack


MESSAGE: Final = 1
REQUEST: Final = 2
REPLY: Final = 3
ERROR: Final = 4
CLOSE: Final = 5
CHUNK: Final = 6
PING: Final = 7
PONG: Final = 8
FREED: Final = 9
DROPPED: Final = 10

KIND_NAMES = (
    "none",
    "message",
    "request",
    "reply",
    "error",
    "close",
    "chunk",
    "ping",
    "pong",
    "freed",
    "dropped",
)
MORE: Final = 1
"""Flag: the payload continues in CHUNK frames."""

CHECKED: Final = 2
"""Flag: the last 4 bytes of the meta are the CRC-32C of the frame's payload."""

PLACED: Final = 4
"""Flag: the payload is in shared memory, at the `PLACE` in the last bytes of the meta."""


def checksum(parts: Iterable[bytes | memoryview | Tensor], begun: int = 0) -> int:
    """Return the CRC-32C of contiguous parts in order, continued from the checksum ``begun``.

    The CRC-32C finds errors that the 16-bit checksum of TCP misses. ``checksum([b"123456789"])`` is
    0xE3069283.
    """
    for part in parts:
        # The extension accepts arrays, but not memoryviews.
        begun = extend(begun, np.frombuffer(part, _UINT8))
    return begun


def kind_name(kind: int) -> str:
    """Return the name of a frame kind for logs and errors."""
    return KIND_NAMES[kind] if 0 < kind < len(KIND_NAMES) else f"kind {kind}"


class Frame(NamedTuple):
    """One whole message or signal, as received.

    ``message`` is None for signals. ``frame_bytes`` are all bytes on the wire except tensor bytes.
    """

    kind: int
    request_id: int
    message: Message | None
    payload_bytes: int
    frame_bytes: int


def pack_meta(message: Message, described: bytes, limit_bytes: int) -> bytes:
    """Pack the meta of a frame; ``described`` is the `Layout.packed` of the tensors.

    Raises:
        LocalProtocolError: The message's meta is not bytes, or too large.
    """
    meta = message.meta
    if type(meta) is not bytes:
        raise LocalProtocolError(
            "meta",
            f"meta of {message.type!r} is {type(meta).__name__}: encode it, as with msgspec.msgpack.encode",
        )
    packed: bytes = _PACK((message.type, meta, described))
    if len(packed) > limit_bytes:
        raise LocalProtocolError(
            "meta-length",
            f"meta of {message.type!r} is {len(packed)} bytes packed, {limit_bytes} are the most: split the "
            "message or send the data as a tensor",
        )
    return packed


def head(
    kind: int,
    request_id: int,
    meta: bytes,
    payload_bytes: int,
    flags: int = 0,
    payload: Iterable[bytes | memoryview | Tensor] = (),
) -> bytes:
    """Build prelude and meta of one frame, followed by a copy of ``payload``."""
    # The CRC continues from the prelude over the meta, so the receiver needs one comparison.
    checked = _ENCODE(MAGIC, VERSION, kind, flags, request_id, len(meta), payload_bytes)
    # One join: a small payload goes into the buffer of its head, and so into one write.
    return b"".join((checked, crc32(meta, crc32(checked)).to_bytes(4, "little"), meta, *payload))  # type: ignore[arg-type]
