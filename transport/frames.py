"""Pure: the frames of messages, and their encoder; `decoder` decodes them.

A frame is a prelude of 32 bytes, a meta of at most 16 KiB, and a payload of at most 1 MiB:

    offset  0   4         5      6       8            16       20         28
            magic  version  kind   flags   request id   meta     payload    CRC-32 of the 28 bytes
            TLNK   1        u8     u16     u64          length   length     before it and the meta
                                                        u32      u64        u32        (little endian)

A frame with the flag CHECKED has the CRC-32C of its payload in the last 4 bytes of its meta, which the CRC-32
of the prelude covers. The sender decides for each frame; a receiver checks each frame with the flag.

Meta is msgpack: ``[type, meta]`` or ``[type, meta, descriptions of the tensors]``. Tensors bypass msgpack,
because it would copy them and would make the expansion of a packed byte unbounded. A payload is the tensors'
bytes, each padded to start at a multiple of 64.

A message whose payload exceeds the sender's `LinkConfig.chunk_bytes` is a frame with the flag MORE and the
first part of the payload, then CHUNK frames with the rest, all but the last flagged MORE. A sender has at
most one such message in progress; whole frames of other messages may come between its chunks.
"""

from collections.abc import Iterable
from struct import Struct
from typing import Any, Final, NamedTuple
from zlib import crc32

import msgpack
import numpy as np
from google_crc32c import extend

from transport.config import LinkConfig
from transport.errors import LocalProtocolError, RemoteProtocolError
from transport.messages import Message
from transport.tensors import Tensor

MAGIC: Final = b"TLNK"
VERSION: Final = 1
PRELUDE_BYTES: Final = 32
MAX_CHUNK_BYTES: Final = 1 << 20
CHECKSUM_BYTES: Final = 4
"""Length of a payload's CRC-32C on the wire, in bytes."""

MAX_DEPTH: Final = 8
_UINT8 = np.dtype(np.uint8)
_ENCODE = Struct("<4sBBHQIQ").pack


MESSAGE: Final = 1
REQUEST: Final = 2
REPLY: Final = 3
ERROR: Final = 4
CLOSE: Final = 5
CHUNK: Final = 6
PING: Final = 7
PONG: Final = 8

KIND_NAMES = ("none", "message", "request", "reply", "error", "close", "chunk", "ping", "pong")
MORE: Final = 1
"""Flag: the payload continues in CHUNK frames."""

CHECKED: Final = 2
"""Flag: the last 4 bytes of the meta are the CRC-32C of the frame's payload."""


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


_CONTAINERS = frozenset((dict, list, tuple))


def _is_too_deep(meta: dict[str, Any]) -> bool:
    """Return whether a meta nests over `MAX_DEPTH` deep."""
    # By levels, without recursion: a peer chooses the depth, and must not reach the recursion limit.
    containers: list[Any] = [meta]
    left = MAX_DEPTH
    while containers and left:
        left -= 1
        containers = [
            item
            for container in containers
            for item in (container.values() if type(container) is dict else container)
            if type(item) in _CONTAINERS
        ]
    return bool(containers)


class FrameEncoder:
    """Encodes the heads of the frames of one conversation."""

    def __init__(self, config: LinkConfig) -> None:
        self._max_meta_bytes = config.max_meta_bytes
        # One packer: msgpack.packb would make a packer and its buffer for each message.
        self._pack = msgpack.Packer().pack

    def pack(self, message: Message, described: bytes) -> bytes:
        """Pack the meta of a message; ``described`` is the `Layout.packed` of its tensors, or empty.

        Raises:
            LocalProtocolError: The meta has a value that msgpack cannot pack, or is too deep or too large.
        """
        meta = message.meta
        try:
            packed: bytes = self._pack((message.type, meta, described) if described else (message.type, meta))
        except (TypeError, ValueError, OverflowError) as error:
            raise LocalProtocolError(
                "meta", f"meta of {message.type!r} is not plain builtins: {error}"
            ) from None
        if len(packed) > self._max_meta_bytes:
            raise LocalProtocolError(
                "meta-length",
                f"meta of {message.type!r} is {len(packed)} bytes packed, {self._max_meta_bytes} are the "
                "most: split the message or send the data as a tensor",
            )
        # Most metas are flat: walk the levels only if a value is a container.
        nests = False
        for key, value in meta.items():
            # The receiver's msgpack refuses other keys, which would cost the whole link.
            if type(key) is not str:
                raise LocalProtocolError("meta", f"key {key!r} of {message.type!r} is not a str")
            if type(value) in _CONTAINERS:
                nests = True
        if nests and _is_too_deep(meta):
            raise LocalProtocolError("meta-depth", f"meta of {message.type!r} nests over {MAX_DEPTH} deep")
        return packed

    @staticmethod
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
        # One join: a small payload is sent in the buffer of its head, so in one write.
        return b"".join((checked, crc32(meta, crc32(checked)).to_bytes(4, "little"), meta, *payload))  # type: ignore[arg-type]


def _refuse_extension(code: int, data: bytes) -> None:
    raise ValueError(f"extension type {code}")


def unpack_meta(packed: bytes | bytearray) -> tuple[str, dict[str, Any], bytes]:
    """Unpack a meta into type, meta and the undecoded descriptions of the tensors."""
    # msgpack itself limits strings, arrays and maps to the length of its input, which is at most 16 KiB.
    # A timestamp (extension -1) never reaches the hook, so the length of extensions is limited as well.
    try:
        parts = msgpack.unpackb(
            packed,
            max_ext_len=0,
            ext_hook=_refuse_extension,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise RemoteProtocolError("meta", f"not msgpack within limits: {type(error).__name__}") from None
    if type(parts) is not list or not 2 <= len(parts) <= 3:
        raise RemoteProtocolError("meta", "not a list of type, meta and tensor descriptions")
    name, meta = parts[0], parts[1]
    described = parts[2] if len(parts) == 3 else b""
    if type(name) is not str or type(meta) is not dict or type(described) is not bytes:
        raise RemoteProtocolError("meta", "type is not a str, meta no map, or descriptions no bytes")
    for value in meta.values():
        # The walk begins at the meta itself, so the first container decides for all.
        if type(value) in _CONTAINERS:
            if _is_too_deep(meta):
                raise RemoteProtocolError("meta-depth", f"meta nests over {MAX_DEPTH} deep")
            break
    return name, meta, described
