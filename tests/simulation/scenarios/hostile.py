"""Pure: invalid handshakes, and frames that break a rule of the wire.

The server answers an invalid handshake with a refusal or closes the connection. Invalid frames after a valid
handshake end the link. Each entry has the refusal's code, or the broken rule's name.

    BREACHES["breach-checksum"].data      # ends the link: RemoteProtocolError, rule "checksum"
"""

from collections.abc import Mapping
from dataclasses import dataclass
from struct import Struct
from zlib import crc32

from transport import LinkConfig, Message
from transport.frames import CHUNK, DROPPED, MESSAGE, MORE, PONG, REQUEST, VERSION, pack_meta
from transport.handshake import PROTOCOL_VERSION, RECORD_BYTES

MIB = 1 << 20

_PRELUDE = Struct("<4sBBHQIQ")
_HEAD = Struct("<8sHBB")
_PEER = Struct("<32s80s64sQ32s")


@dataclass(frozen=True, slots=True)
class BadHandshake:
    """Bytes in place of a handshake."""

    data: bytes
    code: str
    """Code of the refusal; empty if the server closes the connection without one."""


@dataclass(frozen=True, slots=True)
class BadFrames:
    """Bytes on an authenticated link."""

    data: bytes
    rule: str
    """Name of the broken rule, in the error that ends the link."""


def _hello(*, version: int = PROTOCOL_VERSION, kind: int = 1, role: bytes = b"client") -> bytes:
    body = _PEER.pack(role, b"stranger", b"", 1, bytes(32))
    return (_HEAD.pack(b"TLNKHAND", version, kind, True) + body).ljust(RECORD_BYTES, b"\0")


def _refusal() -> bytes:
    return (_HEAD.pack(b"TLNKHAND", PROTOCOL_VERSION, 5, False) + b"token").ljust(RECORD_BYTES, b"\0")


HANDSHAKES: Mapping[str, BadHandshake] = {
    "knock-noise": BadHandshake(b"GET / HTTP/1.1\r\n".ljust(RECORD_BYTES, b"\n"), ""),
    "knock-version": BadHandshake(_hello(version=PROTOCOL_VERSION + 1), "version"),
    "knock-kind": BadHandshake(_hello(kind=3), ""),
    "knock-name": BadHandshake(_hello(role=b"\xff\xfe"), ""),
    "knock-nobody": BadHandshake(_hello(role=b""), ""),
    "knock-role": BadHandshake(_hello(role=b"ghost"), "role"),
    "knock-proof": BadHandshake(_hello() + _hello(kind=3), "token"),
    "knock-refusal": BadHandshake(_refusal(), ""),
    "knock-half": BadHandshake(_hello()[:100], "late"),
    "knock-silent": BadHandshake(b"", "late"),
}


def _frame(
    kind: int = MESSAGE,
    *,
    magic: bytes = b"TLNK",
    version: int = VERSION,
    flags: int = 0,
    request: int = 1,
    meta: bytes = b"",
    claims: tuple[int, int] | None = None,
    spoilt: int = 0,
    payload: bytes = b"",
) -> bytes:
    """Build a frame, possibly with wrong lengths or a wrong checksum."""
    lengths = claims or (len(meta), len(payload))
    checked = _PRELUDE.pack(magic, version, kind, flags, request, *lengths)
    crc = crc32(meta, crc32(checked)) ^ spoilt
    return checked + crc.to_bytes(4, "little") + meta + payload


def request_frame(number: int, message: Message) -> bytes:
    """Return a request's frame without tensors, for a peer without the shipped transport."""
    return _frame(REQUEST, request=number, meta=pack_meta(message, b"", LinkConfig().max_meta_bytes))


def _packed(name: str, described: bytes = b"", meta: bytes = b"") -> bytes:
    """Pack the valid meta of a frame."""
    return pack_meta(Message(type=name, meta=meta), described, LinkConfig().max_meta_bytes)


BYTES = 9
"""Code of the bytes dtype."""

NOTE = _packed("note")
NOTE_X = b"\x93\xa4note"
"""First bytes of a frame's meta; the message's meta and the descriptions of tensors follow."""

TENSOR = bytes([BYTES, 1]) + (1 << 16).to_bytes(4, "little")
"""Description of a tensor of 64 KiB."""

LARGEST = bytes([BYTES, 1]) + LinkConfig().max_message_bytes.to_bytes(4, "little")
"""Description of a tensor as large as a message may be."""


FIRST = _frame(flags=MORE, meta=_packed("note", TENSOR), payload=bytes(999))
"""Valid first frame of a message that has several frames."""

BREACHES: Mapping[str, BadFrames] = {
    "breach-magic": BadFrames(_frame(magic=b"GET ", meta=NOTE), "magic"),
    "breach-version": BadFrames(_frame(version=9, meta=NOTE), "version"),
    "breach-kind": BadFrames(_frame(99, meta=NOTE), "kind"),
    "breach-flags": BadFrames(_frame(flags=4, meta=NOTE), "flags"),
    "breach-meta-length": BadFrames(_frame(claims=(MIB, 0)), "meta-length"),
    "breach-signal-length": BadFrames(_frame(PONG, claims=(5, 0)), "meta-length"),
    "breach-payload-length": BadFrames(_frame(meta=NOTE, claims=(len(NOTE), 1 << 40)), "payload-length"),
    "breach-checksum": BadFrames(_frame(meta=NOTE, spoilt=1), "checksum"),
    "breach-msgpack": BadFrames(_frame(meta=b"\xc1" * 9), "meta"),
    "breach-extension": BadFrames(_frame(meta=NOTE_X + b"\xc7\x00\x04\xc4\x00"), "meta"),
    "breach-parts": BadFrames(_frame(meta=b"\x91\xa4note"), "meta"),
    "breach-types": BadFrames(_frame(meta=b"\x93\x07\xc4\x00\xc4\x00"), "meta"),
    "breach-map": BadFrames(_frame(meta=NOTE_X + b"\x80\xc4\x00"), "meta"),
    "breach-text": BadFrames(_frame(meta=b"\x93\xa4\xff\xff\xff\xff\xc4\x00\xc4\x00"), "meta"),
    "breach-tail": BadFrames(_frame(meta=NOTE + b"\x00"), "meta"),
    "breach-depth": BadFrames(_frame(meta=b"\x91" * 5000), "meta"),
    "breach-chunk": BadFrames(_frame(CHUNK, payload=b"x"), "chunk"),
    "breach-specs": BadFrames(_frame(meta=_packed("note", b"\x00\x09\x00"), payload=b"x"), "tensor-specs"),
    "breach-dtype": BadFrames(
        _frame(meta=_packed("note", b"\xee\x01\x01\x00\x00\x00"), payload=b"x"), "tensor-dtype"
    ),
    "breach-size": BadFrames(
        _frame(meta=_packed("note", b"\x01\x02" + b"\xff" * 8), payload=b"x"), "message-size"
    ),
    "breach-dims": BadFrames(
        _frame(meta=_packed("note", bytes([BYTES, 9]) + bytes([1, 0, 0, 0]) * 9), payload=b"x"),
        "tensor-specs",
    ),
    "breach-sum": BadFrames(_frame(meta=_packed("note", 2 * LARGEST), payload=b"x"), "message-size"),
    "breach-tensors": BadFrames(
        _frame(meta=_packed("note", b"\x01\x00"), payload=b"x" * 999), "payload-length"
    ),
    "breach-type": BadFrames(_frame(meta=_packed("give me everything")), "role"),
    "breach-first": BadFrames(_frame(flags=MORE, meta=_packed("note", TENSOR)), "payload-length"),
    "breach-large": BadFrames(2 * FIRST, "chunk"),
    "breach-chunk-length": BadFrames(FIRST + _frame(CHUNK, payload=bytes(1 << 16)), "chunk"),
    "breach-twice": BadFrames(2 * _frame(REQUEST, meta=_packed("count", meta=b"1")), "request-id"),
    "breach-signal": BadFrames(_frame(DROPPED + 1), "kind"),
}
"""Invalid frames, by kind of fault."""

DEAF = b"".join(
    _frame(REQUEST, request=number, meta=_packed("echo", TENSOR), payload=bytes(65_536))
    for number in range(1, 17)
)
"""Questions with large answers, for a peer that reads none of them."""
