"""Pure: frames, from messages to bytes and back.

A frame is a prelude of 32 bytes, a meta of at most 16 KiB, and a payload of at most 1 MiB:

    offset  0   4         5      6       8            16       20         28
            magic  version  kind   flags   request id   meta     payload    CRC-32 of the 28 bytes
            TLNK   1        u8     u16     u64          length   length     before it and the meta
                                                        u32      u64        u32        (little endian)

A frame with the flag CHECKED has the CRC-32C of its payload in the last 4 bytes of its meta, where the CRC-32
of the prelude covers it. The sender decides for each frame; a receiver checks each frame with the flag.

Meta is msgpack: ``[type, meta]`` or ``[type, meta, descriptions of the tensors]``. Tensors never pass
through msgpack: it would copy them, and what a packed byte can expand to would no longer be bounded. A
payload is the tensors' bytes, each padded to start at a multiple of 64.

A message whose payload exceeds 1 MiB is a frame with the flag MORE and the first part of the payload,
then CHUNK frames with the rest, all but the last flagged MORE. Of each sender at most one such message is
in progress; whole frames of other messages may come between its chunks.

The decoder tells its caller where the next bytes belong. While a header is awaited that is a scratch of
8 KiB, so that a small frame arrives in one read; payload bytes that came with the header are moved once.
From then on bytes go straight to their destination: memory registered for this reply, or one pooled
buffer for the whole message. Between the chunks of a message only the 32 bytes of the next prelude are
asked for, so that nothing of a chunk has to be moved.

Memory: a claim is checked against the limit before anything is reserved. Up to 1 MiB is allocated, more is
mapped, and mapped pages exist only once bytes have been written to them: what a peer can make us hold is
what it sent, plus 1 MiB, plus at most 1.2 MB while a meta of 16 KiB is decoded. A link assembles one large
message at a time, so address space is bounded as well.

Only `ProtocolError` leaves the decoder; after one, the decoder is of no further use.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from struct import Struct
from typing import Any, Final, NamedTuple, Protocol
from zlib import crc32

import msgpack
import numpy as np

from transport.checksum import CHECKSUM_BYTES, checksum
from transport.config import LinkConfig
from transport.errors import LocalProtocolError, RemoteProtocolError
from transport.messages import Message
from transport.tensors import Layout, Tensor, lay_out, raw_bytes, read_layout

__all__ = [
    "CHECKED",
    "CHUNK",
    "CLOSE",
    "ERROR",
    "MESSAGE",
    "MORE",
    "PING",
    "PONG",
    "PRELUDE_BYTES",
    "REPLY",
    "REQUEST",
    "Frame",
    "FrameDecoder",
    "FrameEncoder",
    "Memory",
    "Registered",
    "kind_name",
]

MAGIC: Final = b"TLNK"
VERSION: Final = 1
PRELUDE_BYTES: Final = 32
MAX_CHUNK_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 8
_CHECKED_BYTES: Final = 28
_UINT8 = np.dtype(np.uint8)
_ENCODE = Struct("<4sBBHQIQ").pack
_DECODE = Struct("<QQIQI").unpack_from
"""Unpacks a prelude: magic, version, kind and flags as one number, request id, both lengths, checksum."""
_DECODE_START = Struct("<4sBBH").unpack

MESSAGE: Final = 1
REQUEST: Final = 2
REPLY: Final = 3
ERROR: Final = 4
CLOSE: Final = 5
CHUNK: Final = 6
PING: Final = 7
PONG: Final = 8

_NAMES = ("none", "message", "request", "reply", "error", "close", "chunk", "ping", "pong")
_LAST_WITH_PAYLOAD: Final = REPLY
_LAST_WITH_META: Final = CLOSE

MORE: Final = 1
"""Flag: the payload goes on in CHUNK frames."""

CHECKED: Final = 2
"""Flag: the last 4 bytes of the meta are the CRC-32C of the frame's payload."""

_FLAGS: Final = MORE | CHECKED

_STARTS: Final = {
    int.from_bytes(Struct("<4sBBH").pack(MAGIC, VERSION, kind, flags), "little"): (kind, flags)
    for kind in (MESSAGE, REQUEST, REPLY)
    for flags in range(_FLAGS + 1)
}
"""Kind and flags of the messages that may have a payload, by the first 8 bytes of their prelude."""


def kind_name(kind: int) -> str:
    """Name a frame kind for people."""
    return _NAMES[kind] if 0 < kind < len(_NAMES) else f"kind {kind}"


class Frame(NamedTuple):
    """One whole message or signal, as received.

    ``message`` is None for signals. ``frame_bytes`` are all bytes on the wire that are not tensor bytes.
    """

    kind: int
    request_id: int
    message: Message | None
    payload_bytes: int
    frame_bytes: int


_make_frame = partial(tuple.__new__, Frame)
"""Makes a Frame from a tuple, in half the time: a named tuple's own ``__new__`` runs in the interpreter."""


class Memory(Protocol):
    """Where payloads are received: the part of a buffer pool that a decoder needs."""

    def lend(
        self, size_bytes: int, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> tuple[Tensor, memoryview]:
        """Lend an array in 64-byte aligned memory, and the bytes of it (or more) for filling it."""


class Registered:
    """Arrays of the caller that the tensors of one reply are to land in.

    Raises:
        LocalProtocolError: An array cannot be described, see `describe`, or cannot be written to.
    """

    __slots__ = ("layout", "tensors")

    def __init__(self, tensors: Sequence[Tensor], limit_bytes: int) -> None:
        self.tensors = tuple(tensors)
        self.layout = lay_out(self.tensors, limit_bytes)
        for tensor in self.tensors:
            if not tensor.flags.writeable:
                raise LocalProtocolError("into", "an array registered for a reply is read-only")


_CONTAINERS = frozenset((dict, list, tuple))


def _is_too_deep(meta: dict[str, Any]) -> bool:
    """Whether a meta nests over `MAX_DEPTH` deep."""
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
    """Turns messages into the heads of their frames. One per conversation."""

    def __init__(self, config: LinkConfig) -> None:
        self._max_meta_bytes = config.max_meta_bytes
        self._pack = msgpack.Packer().pack

    def pack(self, message: Message, described: bytes) -> bytes:
        """Pack the meta of a message; ``described`` is what its layout says, or empty.

        Raises:
            LocalProtocolError: It holds what msgpack does not carry, is too deep or too large.
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
        nests = False
        for key, value in meta.items():
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
        checked = _ENCODE(MAGIC, VERSION, kind, flags, request_id, len(meta), payload_bytes)
        return b"".join((checked, crc32(meta, crc32(checked)).to_bytes(4, "little"), meta, *payload))  # type: ignore[arg-type]


def _refuse_extension(code: int, data: bytes) -> None:
    raise ValueError(f"extension type {code}")


def _unpack(packed: bytes | bytearray) -> tuple[str, dict[str, Any], bytes]:
    """Unpack a meta into type, meta and the descriptions of the tensors, which are not looked at yet."""
    # Strings, arrays and maps are bounded by msgpack itself to what the 16 KiB could hold.
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
        if type(value) in _CONTAINERS:
            if _is_too_deep(meta):
                raise RemoteProtocolError("meta-depth", f"meta nests over {MAX_DEPTH} deep")
            break
    return name, meta, described


class _Scatter:
    """The places, one after the other, that the coming payload bytes belong to."""

    __slots__ = ("_pieces", "piece")

    def __init__(self, pieces: list[memoryview]) -> None:
        self._pieces = pieces[::-1]
        self.piece = self._pieces.pop()

    def room(self, limit: int) -> memoryview:
        return self.piece if len(self.piece) <= limit else self.piece[:limit]

    def advance(self, count: int) -> None:
        if count < len(self.piece):
            self.piece = self.piece[count:]
        elif self._pieces:
            self.piece = self._pieces.pop()

    def fill(self, source: memoryview) -> None:
        while source:
            room = self.room(len(source))
            room[:] = source[: len(room)]
            source = source[len(room) :]
            self.advance(len(room))


class _Discard(_Scatter):
    """Takes bytes nobody waits for any more."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__([memoryview(bytearray(64 << 10))])

    def advance(self, count: int) -> None:
        pass


class _Arrival:
    """A message whose payload is still arriving."""

    __slots__ = (
        "frame_bytes", "kind", "lacking", "meta", "name", "payload_bytes", "request_id", "scatter", "tensors",
        "total",
    )  # fmt: skip

    def __init__(
        self,
        kind: int,
        request_id: int,
        name: str,
        meta: dict[str, Any],
        tensors: tuple[Tensor, ...],
        scatter: _Scatter,
        payload_bytes: int,
        frame_bytes: int,
    ) -> None:
        self.kind = kind
        self.request_id = request_id
        self.name = name
        self.meta = meta
        self.tensors = tensors
        self.scatter = scatter
        self.payload_bytes = payload_bytes
        self.frame_bytes = frame_bytes
        self.lacking = 0
        self.total = 0

    def discard(self) -> None:
        self.scatter = _Discard()
        self.tensors = ()

    def frame(self) -> Frame:
        message = Message(type=self.name, meta=self.meta, tensors=self.tensors)
        return _make_frame((self.kind, self.request_id, message, self.payload_bytes, self.frame_bytes))


def _pieces(layout: Layout, tensors: tuple[Tensor, ...]) -> list[memoryview]:
    """List the memory of registered arrays, with somewhere for the padding between them."""
    pieces: list[memoryview] = []
    end = 0
    for spec, tensor in zip(layout.specs, tensors, strict=True):
        if spec.offset > end:
            pieces.append(memoryview(bytearray(spec.offset - end)))
        if spec.nbytes:
            pieces.append(raw_bytes(tensor))
        end = spec.offset + spec.nbytes
    return pieces


class FrameDecoder:
    """Decodes one direction of a conversation, in place.

    Ask `get_buffer` where the next bytes belong, put some there, tell `updated` how many.

    Attributes:
        registered: Destinations of replies, by request id; filled and emptied by the owner.
        bytes_moved: Bytes that had to be copied after they were received.
    """

    def __init__(self, config: LinkConfig, memory: Memory) -> None:
        self.registered: dict[int, Registered] = {}
        self.bytes_moved = 0
        self._max_meta_bytes = config.max_meta_bytes
        self._max_message_bytes = config.max_message_bytes
        self._scratch_bytes = config.scratch_bytes
        self._memory = memory
        self._scratch = bytearray(
            PRELUDE_BYTES + config.max_meta_bytes + CHECKSUM_BYTES + config.scratch_bytes
        )
        self._view = memoryview(self._scratch)
        self._offer = self._view[: config.scratch_bytes]
        self._prelude = self._view[:PRELUDE_BYTES]
        self._end = 0
        self._current: _Arrival | None = None
        self._large: _Arrival | None = None
        self._need = 0
        self._expected: int | None = None  # checksum of the payload that is arriving, if it has one
        self._computed = 0  # checksum of the part of it that has arrived
        self._discards = False

    def get_buffer(self, sizehint: int = -1) -> memoryview:
        """Return where the next received bytes belong; never empty. The hint of an event loop is ignored."""
        if self._need:
            assert self._current is not None
            return self._current.scatter.room(self._need)
        end = self._end
        if end == 0:
            return self._offer if self._large is None else self._prelude
        return self._view[end : end + self._scratch_bytes]

    def updated(self, count: int) -> list[Frame]:
        """Take note of ``count`` bytes put where `get_buffer` said; return what they complete.

        Raises:
            RemoteProtocolError: The bytes break a rule; frames complete before them are lost with it.
        """
        if not self._need:
            self._end += count
            return self._parse()
        arrival = self._current
        assert arrival is not None
        if self._expected is not None:
            self._computed = checksum((arrival.scatter.piece[:count],), self._computed)
        arrival.scatter.advance(count)
        self._need -= count
        if self._need:
            return []
        self._current = None
        if self._expected is not None:
            self._compare()
        return self._finished(arrival)

    @property
    def lacking_bytes(self) -> int:
        """Bytes of messages in progress that have not arrived; 0 if none is in progress."""
        large = self._large
        return self._need + (large.lacking if large is not None else 0)

    @property
    def arriving_bytes(self) -> int:
        """Arrived bytes of requests and messages in progress; requested replies do not count."""
        found = 0
        large, current = self._large, self._current
        if large is not None and large.kind != REPLY:
            found = large.total - large.lacking - (self._need if current is large else 0)
        if current is not None and current is not large and current.kind != REPLY:
            found += current.total - self._need
        return found

    def drop(self) -> None:
        """Release messages in progress, because the stream has ended."""
        self._current = self._large = None
        self._need = 0

    def discard(self) -> None:
        """Store nothing more, because the conversation is over; only the peer's goodbye is still read for."""
        self._discards = True
        for arrival in (self._current, self._large):
            if arrival is not None:
                arrival.discard()

    def forget(self, request_id: int) -> None:
        """Stop writing to the memory registered for a reply, even if the reply is half received."""
        self.registered.pop(request_id, None)
        for arrival in (self._current, self._large):
            if arrival is not None and arrival.kind == REPLY and arrival.request_id == request_id:
                arrival.discard()

    def _finished(self, arrival: _Arrival) -> list[Frame]:
        if arrival.lacking:
            return []
        if arrival is self._large:
            self._large = None
        return [arrival.frame()]

    def _parse(self) -> list[Frame]:
        frames: list[Frame] = []
        scratch = self._scratch
        view = self._view
        start = 0
        end = self._end
        while end - start >= PRELUDE_BYTES:
            first, request_id, meta_length, payload_length, crc = _DECODE(scratch, start)
            body = start + PRELUDE_BYTES
            # One test lets the common case pass; `_check_prelude` finds out what is wrong or unusual.
            known = _STARTS.get(first)
            if known is None or meta_length > self._max_meta_bytes or payload_length > MAX_CHUNK_BYTES:
                known = self._check_prelude(first, meta_length, payload_length)
            kind, flags = known
            if end - body < meta_length:
                break
            position = body + meta_length
            packed = scratch[body:position]
            if crc32(packed, crc32(scratch[start : start + _CHECKED_BYTES])) != crc:
                raise RemoteProtocolError("checksum", f"prelude and meta of a {kind_name(kind)} are damaged")
            head_bytes = position - start
            start = position
            if flags >= CHECKED:
                packed = self._open_checked(packed, payload_length)
            if kind <= _LAST_WITH_META:
                unpacked = _unpack(packed)
                if not payload_length and not flags and not unpacked[2]:
                    message = Message(type=unpacked[0], meta=unpacked[1])
                    frames.append(_make_frame((kind, request_id, message, 0, head_bytes)))
                    continue
                frame, arrival = self._message(
                    kind, flags, request_id, unpacked, head_bytes, payload_length, start, end
                )
            elif kind == CHUNK:
                frame, arrival = None, self._chunk(flags, payload_length, head_bytes)
            else:
                frame, arrival = _make_frame((kind, request_id, None, 0, head_bytes)), None
            moved = min(end - start, payload_length)
            if self._expected is not None:
                self._computed = checksum((view[start : start + moved],))
                if moved == payload_length:
                    self._compare()
            if frame is not None:
                start += payload_length
                frames.append(frame)
                continue
            assert arrival is not None
            arrival.scatter.fill(view[start : start + moved])
            self.bytes_moved += moved
            start += moved
            if moved < payload_length:
                self._current = arrival
                self._need = payload_length - moved
                break
            frames += self._finished(arrival)
        if start < end and start:
            # bytes() first: the two ranges may overlap.
            view[: end - start] = bytes(view[start:end])
            self.bytes_moved += end - start
        self._end = end - start
        return frames

    def _check_prelude(self, first: int, meta_length: int, payload_length: int) -> tuple[int, int]:
        """Return the kind and flags of a prelude, if it keeps the rules."""
        magic, version, kind, flags = _DECODE_START(first.to_bytes(8, "little"))
        if magic != MAGIC:
            raise RemoteProtocolError("magic", f"a frame begins with {magic!r}, not {MAGIC!r}")
        if version != VERSION:
            raise RemoteProtocolError("version", f"a frame of version {version}; this side speaks {VERSION}")
        if not 0 < kind < len(_NAMES):
            raise RemoteProtocolError("kind", f"frame kind {kind} is unknown here")
        carries = kind <= _LAST_WITH_PAYLOAD or kind == CHUNK
        if flags > (_FLAGS if carries else MORE):
            raise RemoteProtocolError("flags", f"a {kind_name(kind)} has flags {flags:#x}, unknown here")
        most = self._max_meta_bytes if kind <= _LAST_WITH_META else 0
        if meta_length > most + (CHECKSUM_BYTES if flags & CHECKED else 0):
            raise RemoteProtocolError("meta-length", f"{kind_name(kind)} claims {meta_length}, over {most}")
        if payload_length > (MAX_CHUNK_BYTES if carries else 0):
            raise RemoteProtocolError(
                "payload-length",
                f"a frame of kind {kind_name(kind)} claims {payload_length} payload bytes; "
                f"{MAX_CHUNK_BYTES if carries else 0} are allowed",
            )
        return kind, flags

    def _open_checked(self, packed: bytearray, payload_length: int) -> bytearray:
        """Store the checksum at the end of a meta for the coming payload; return the meta without it."""
        if len(packed) < CHECKSUM_BYTES or not payload_length:
            raise RemoteProtocolError("flags", "a frame is flagged to have a checksum and has none")
        self._expected = int.from_bytes(packed[-CHECKSUM_BYTES:], "little")
        return packed[:-CHECKSUM_BYTES]

    def _compare(self) -> None:
        """Compare the checksum of a complete payload."""
        expected, self._expected = self._expected, None
        if self._computed != expected:
            raise RemoteProtocolError(
                "payload-checksum",
                f"a payload is damaged: CRC-32C {self._computed:08x}, its frame says {expected:08x}",
            )

    def _chunk(self, flags: int, payload_length: int, head_bytes: int) -> _Arrival:
        arrival = self._large
        if arrival is None:
            raise RemoteProtocolError("chunk", "a chunk without a message it belongs to")
        rest = arrival.lacking - payload_length
        if payload_length == 0 or rest < 0 or (rest > 0) != (flags & MORE):
            raise RemoteProtocolError(
                "chunk",
                f"a chunk of {payload_length} bytes, flags {flags}, where {arrival.lacking} are lacking",
            )
        arrival.lacking = rest
        arrival.frame_bytes += head_bytes
        return arrival

    def _message(
        self,
        kind: int,
        flags: int,
        request_id: int,
        unpacked: tuple[str, dict[str, Any], bytes],
        head_bytes: int,
        payload_length: int,
        start: int,
        end: int,
    ) -> tuple[Frame | None, _Arrival | None]:
        """Begin a message; its payload is at ``start`` of the scratch, as far as it came before ``end``.

        Returns it whole if its payload is there entirely, else what is to be filled.
        """
        name, meta, described = unpacked
        more = flags & MORE
        layout = read_layout(described, self._max_message_bytes)
        _, specs, total, tensor_bytes, _ = layout
        if more:
            self._check_first(name, payload_length, total)
        elif payload_length != total:
            raise RemoteProtocolError(
                "payload-length",
                f"the tensors of {name!r} take {total} bytes, its frame has {payload_length}",
            )
        registered = self.registered.get(request_id) if kind == REPLY and self.registered else None
        if registered is not None and registered.layout != layout:
            registered = None
        if not total:
            if registered is not None:
                empty = registered.tensors
            else:
                empty = tuple([np.empty(spec.shape, spec.dtype) for spec in specs])
            message = Message(type=name, meta=meta, tensors=empty)
            return _make_frame((kind, request_id, message, 0, head_bytes)), None

        frame_bytes = head_bytes + total - tensor_bytes
        tensors: tuple[Tensor, ...]
        scatter: _Scatter
        if self._discards:
            tensors, scatter = (), _Discard()
        elif registered is None:
            if len(specs) == 1:
                tensor, memory = self._memory.lend(total, specs[0].dtype, specs[0].shape)
                tensors = (tensor,)
            else:
                whole, memory = self._memory.lend(total, _UINT8, (total,))
                tensors = tuple(
                    [np.ndarray(shape, dtype, whole, offset) for dtype, shape, offset, _ in specs]
                )
            if not more and start + total <= end:
                memory[:total] = self._view[start : start + total]
                self.bytes_moved += total
                message = Message(type=name, meta=meta, tensors=tensors)
                return _make_frame((kind, request_id, message, tensor_bytes, frame_bytes)), None
            scatter = _Scatter([memory[:total]])
        else:
            tensors = registered.tensors
            if not flags and len(tensors) == 1 and start + total <= end:
                raw_bytes(tensors[0])[:] = self._view[start : start + total]
                self.bytes_moved += total
                message = Message(type=name, meta=meta, tensors=tensors)
                return _make_frame((kind, request_id, message, tensor_bytes, frame_bytes)), None
            scatter = _Scatter(_pieces(layout, tensors))
        arrival = _Arrival(kind, request_id, name, meta, tensors, scatter, tensor_bytes, frame_bytes)
        arrival.total = total
        if more:
            arrival.lacking = total - payload_length
            self._large = arrival
            # Between chunks, read only the head of a chunk, so that its payload needs no copy.
            self._prelude = self._view[: PRELUDE_BYTES + (CHECKSUM_BYTES if flags & CHECKED else 0)]
        return None, arrival

    def _check_first(self, name: str, payload_length: int, total: int) -> None:
        """Check the first of several frames of a large message."""
        if self._large is not None:
            raise RemoteProtocolError("chunk", f"{name!r} begins before the large message in progress ended")
        if not 0 < payload_length < total:
            raise RemoteProtocolError(
                "payload-length", f"the first of several frames of {name!r} has {payload_length} of {total}"
            )
