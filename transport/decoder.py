"""Pure: decodes frames into messages; `frames` has their format.

The decoder returns the memory for the next bytes. For a header it returns a scratch of 72 KiB, so a small
frame arrives in one read; payload bytes that arrive with the header are moved once. Further bytes go directly
to their destination: memory registered for this reply, or one pooled buffer for the whole message. Between a
message's chunks the decoder requests only the next head, 32 bytes or 36 with a checksum, so no byte of a
chunk is moved.

Memory: the decoder checks a claimed size against the limit before it reserves memory. The decoder allocates
up to 1 MiB and maps more, and a mapped page exists only once bytes are written to it. So a peer can make this
side hold only the bytes that it sent, plus 1 MiB. A link assembles one large message at a time, so its
address space is bounded as well.

The decoder raises only `ProtocolError`, after which it must be discarded.
"""

from collections.abc import Sequence
from functools import partial
from struct import Struct
from typing import Any, Final, Protocol
from zlib import crc32

import msgspec
import numpy as np

from transport.config import LinkConfig
from transport.errors import RemoteProtocolError
from transport.frames import (
    CHECKED,
    CHECKSUM_BYTES,
    CHUNK,
    CLOSE,
    DROPPED,
    FREED,
    KIND_NAMES,
    MAGIC,
    MAX_CHUNK_BYTES,
    MESSAGE,
    MORE,
    PLACE,
    PLACE_UNIT,
    PLACED,
    PRELUDE_BYTES,
    REPLY,
    REQUEST,
    VERSION,
    Frame,
    checksum,
    kind_name,
)
from transport.messages import Message, Placed
from transport.tensors import REMEMBERED_BYTES, Tensor, TensorSpec, raw_bytes, read_layout, remembered_layout

_CHECKED_BYTES: Final = 28
_UINT8 = np.dtype(np.uint8)
_DECODE = Struct("<QQIQI").unpack_from
"""Decodes a prelude: magic, version, kind and flags as one number, request id, both lengths, checksum."""
_DECODE_START = Struct("<4sBBH").unpack
_UNPACK = msgspec.msgpack.Decoder(tuple[str, bytes, bytes]).decode
"""Decodes a frame's meta: type, meta of the message, and the undecoded descriptions of its tensors."""
_LAST_WITH_PAYLOAD: Final = REPLY
_LAST_WITH_META: Final = CLOSE
_OF_BLOCKS: Final = (FREED, DROPPED)
"""Kinds whose meta is numbers of blocks."""

_FLAGS: Final = MORE | CHECKED

# The first 8 bytes of a prelude as one number: one look-up replaces four comparisons per frame.
_STARTS: Final = {
    int.from_bytes(Struct("<4sBBH").pack(MAGIC, VERSION, kind, flags), "little"): (kind, flags)
    for kind in (MESSAGE, REQUEST, REPLY)
    for flags in (*range(_FLAGS + 1), PLACED)
}
"""By the first 8 bytes of their prelude, kind and flags of messages that may have a payload."""

_make_frame = partial(tuple.__new__, Frame)
"""Constructor of a Frame from a tuple, in half the time: a named tuple's ``__new__`` is interpreted."""


class Memory(Protocol):
    """Source of memory for received payloads: the part of a buffer pool that a decoder uses."""

    def lend(
        self, size_bytes: int, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> tuple[Tensor, memoryview]:
        """Lend an array in 64-byte aligned memory, and a view of at least its bytes to fill it."""


class Blocks(Protocol):
    """The shared memory of the peer: the part of an `Inbox` that a decoder uses."""

    def take(self, number: int, start: int, total: int, *, is_reply: bool = True) -> memoryview:
        """Return the bytes of a region that a frame names."""

    def give_back(self, number: int, total: int, start: int = 0) -> None:
        """Return a block or loan of which this side has a copy."""

    def lend(self, number: int, start: int, specs: Sequence[TensorSpec], total: int) -> tuple[Tensor, ...]:
        """Return read-only views of taken memory."""


class Registered(msgspec.Struct, frozen=True, eq=False):
    """Writable arrays of the caller that receive one reply's tensors, and their `Layout.packed`."""

    tensors: tuple[Tensor, ...]
    described: bytes


class _Scatter:
    """Destinations of the coming payload bytes, in order."""

    __slots__ = ("_pieces", "piece")

    def __init__(self, pieces: list[memoryview]) -> None:
        self._pieces = pieces[::-1]  # reversed, so taking the next piece is a pop from the end
        self.piece = self._pieces.pop()

    def room(self, limit: int) -> memoryview:
        """Return memory for the next bytes, at most `limit` of them."""
        return self.piece if len(self.piece) <= limit else self.piece[:limit]

    def advance(self, count: int) -> None:
        """Advance past `count` bytes that were written to `room`."""
        if count < len(self.piece):
            self.piece = self.piece[count:]
        elif self._pieces:  # after the last byte no piece is needed
            self.piece = self._pieces.pop()

    def fill(self, source: memoryview) -> None:
        """Copy bytes to their destinations."""
        while source:
            room = self.room(len(source))
            room[:] = source[: len(room)]
            source = source[len(room) :]
            self.advance(len(room))


class _Discard(_Scatter):
    """Destination of bytes without a receiver; each write overwrites the last."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__([memoryview(bytearray(64 << 10))])

    def advance(self, count: int) -> None:
        """Stay at the start: the next bytes overwrite these."""


class _Arrival:
    """A message whose payload is still arriving.

    Attributes:
        scatter: Destinations of the message's next bytes.
        lacking: Payload bytes in the message's coming CHUNK frames; those of the current frame do not count.
        total: Payload bytes of the whole message, padding included.
    """

    __slots__ = (
        "frame_bytes", "kind", "lacking", "meta", "name", "payload_bytes", "request_id", "scatter", "tensors",
        "total",
    )  # fmt: skip

    def __init__(
        self,
        kind: int,
        request_id: int,
        name: str,
        meta: bytes,
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
        """Release the tensors, and drop all further bytes of the message."""
        # The rest of the payload still has to be read, to find the next frame behind it.
        self.scatter = _Discard()
        self.tensors = ()

    def frame(self) -> Frame:
        """Return the frame of the whole message."""
        message = Message(type=self.name, meta=self.meta, tensors=self.tensors)
        return _make_frame((self.kind, self.request_id, message, self.payload_bytes, self.frame_bytes))


def _pieces(specs: Sequence[TensorSpec], tensors: tuple[Tensor, ...]) -> list[memoryview]:
    """List the memory of registered arrays, with scratch memory for the padding between them."""
    pieces: list[memoryview] = []
    end = 0
    for spec, tensor in zip(specs, tensors, strict=True):
        if spec.offset > end:
            pieces.append(memoryview(bytearray(spec.offset - end)))
        # `raw_bytes` takes no empty array, and an empty piece would be an empty buffer for the loop.
        if spec.nbytes:
            pieces.append(raw_bytes(tensor))
        end = spec.offset + spec.nbytes
    return pieces


class FrameDecoder:
    """Decodes one direction of a conversation, in place.

    Write received bytes to `get_buffer`, then pass their number to `updated`.

    Attributes:
        registered: Destinations of replies, by request id; the owner adds and removes them.
        bytes_moved: Bytes copied after their arrival.
        inbox: The shared memory of the peer; None on other links.
    """

    def __init__(self, config: LinkConfig, memory: Memory) -> None:
        self.registered: dict[int, Registered] = {}
        self.bytes_moved = 0
        self.inbox: Blocks | None = None
        self._max_meta_bytes = config.max_meta_bytes
        self._max_message_bytes = config.max_message_bytes
        self._scratch_bytes = config.scratch_bytes
        self._memory = memory
        # Room behind the largest unfinished head for one more read of the full scratch size.
        self._scratch = bytearray(
            PRELUDE_BYTES + config.max_meta_bytes + CHECKSUM_BYTES + config.scratch_bytes
        )
        self._view = memoryview(self._scratch)
        # Made once: `get_buffer` runs before every read, and a slice costs an object.
        self._offer = self._view[: config.scratch_bytes]
        self._prelude = self._view[:PRELUDE_BYTES]
        self._end = 0
        self._current: _Arrival | None = None
        self._large: _Arrival | None = None
        self._need = 0
        self._expected: int | None = None  # checksum of the arriving payload, if any
        self._computed = 0  # checksum of the arrived part
        self._discards = False

    def get_buffer(self, sizehint: int = -1) -> memoryview:
        """Return the memory for the next received bytes, never empty. The decoder ignores the loop's hint."""
        if self._need:
            assert self._current is not None
            return self._current.scatter.room(self._need)
        if self._end:
            return self._view[self._end : self._end + self._scratch_bytes]
        # Between chunks a longer read would put payload bytes into the scratch and cost a copy.
        return self._offer if self._large is None else self._prelude

    def updated(self, count: int) -> list[Frame]:
        """Decode ``count`` bytes written to `get_buffer`; return the frames that they complete.

        Raises:
            RemoteProtocolError: The bytes break a rule; frames completed by the same bytes are lost.
        """
        if self._need:
            return self._filled(count)
        frames: list[Frame] = []
        scratch, view = self._scratch, self._view
        start, end = 0, self._end + count
        while end - start >= PRELUDE_BYTES:
            first, request_id, meta_length, payload_length, crc = _DECODE(scratch, start)
            # One test passes the common case; `_check_prelude` names the fault or passes the unusual case.
            known = _STARTS.get(first)
            if known is None or meta_length > self._max_meta_bytes or payload_length > MAX_CHUNK_BYTES:
                known = self._check_prelude(first, meta_length, payload_length)
            kind, flags = known
            payload = start + PRELUDE_BYTES + meta_length
            if payload > end:
                break  # the rest of the meta arrives with the next read
            packed = scratch[start + PRELUDE_BYTES : payload]
            # Check the CRC first: the decoder of metas gets no byte of a damaged head.
            if crc32(packed, crc32(scratch[start : start + _CHECKED_BYTES])) != crc:
                raise RemoteProtocolError("checksum", f"prelude and meta of a {kind_name(kind)} are damaged")
            head_bytes = PRELUDE_BYTES + meta_length
            # A header's read may contain part of the payload, all of it, or further frames after it.
            start = min(end, payload + payload_length)
            arrived = view[payload:start]
            if flags >= CHECKED:
                if flags >= PLACED:
                    frames.append(self._placed(kind, request_id, packed, head_bytes, payload_length))
                    continue
                packed = self._open_checked(packed, payload_length, arrived)
            if kind <= _LAST_WITH_META:
                made = self._message(kind, flags, request_id, packed, head_bytes, payload_length, arrived)
            elif kind == CHUNK:
                made = self._chunk(flags, payload_length, head_bytes)
            else:
                numbers = Message(type="blocks", meta=bytes(packed)) if kind in _OF_BLOCKS else None
                made = _make_frame((kind, request_id, numbers, 0, head_bytes))
            if not isinstance(made, _Arrival):
                frames.append(made)
                continue
            made.scatter.fill(arrived)
            self.bytes_moved += len(arrived)
            # The next bytes are payload: `get_buffer` returns their destination, not the scratch.
            if len(arrived) < payload_length:
                self._current = made
                self._need = payload_length - len(arrived)
                break
            frames += self._finished(made)
        if start < end and start:
            # Move an incomplete head to the front, so that the scratch cannot overflow.
            # bytes() first, because the two ranges may overlap.
            view[: end - start] = bytes(view[start:end])
            self.bytes_moved += end - start
        self._end = end - start
        return frames

    def _filled(self, count: int) -> list[Frame]:
        """Take ``count`` payload bytes, written to the destination of the message in progress."""
        arrival = self._current
        assert arrival is not None
        if self._expected is not None:
            # Before `advance`: the bytes are in the cache now, and the piece still begins with them.
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
        # This side asked for each reply; the peer alone decides about all other messages.
        found = 0
        large, current = self._large, self._current
        if large is not None and large.kind != REPLY:
            found = large.total - large.lacking - (self._need if current is large else 0)
        if current is not None and current is not large and current.kind != REPLY:
            found += current.total - self._need
        return found

    def drop(self) -> None:
        """Release messages in progress, because the connection has ended."""
        self._current = self._large = None
        self._need = 0

    def discard(self) -> None:
        """The conversation is over: store no further bytes, and decode only to find the peer's CLOSE."""
        self._discards = True
        for arrival in (self._current, self._large):
            if arrival is not None:
                arrival.discard()

    def forget(self, request_id: int) -> None:
        """Stop writing to the memory registered for a reply, even if the reply is half received."""
        self.registered.pop(request_id, None)
        for arrival in filter(None, (self._current, self._large)):
            if arrival.kind == REPLY and arrival.request_id == request_id:
                arrival.discard()

    def _finished(self, arrival: _Arrival) -> list[Frame]:
        # The rest follows in CHUNK frames, with frames of other messages between them.
        if arrival.lacking:
            return []
        if arrival is self._large:
            self._large = None
        return [arrival.frame()]

    def _check_prelude(self, first: int, meta_length: int, payload_length: int) -> tuple[int, int]:
        """Return the kind and flags of a valid prelude."""
        magic, version, kind, flags = _DECODE_START(first.to_bytes(8, "little"))
        if magic != MAGIC:
            raise RemoteProtocolError("magic", f"a frame begins with {magic!r}, not {MAGIC!r}")
        if version != VERSION:
            raise RemoteProtocolError("version", f"a frame of version {version}, not {VERSION}")
        if not 0 < kind < len(KIND_NAMES):
            raise RemoteProtocolError("kind", f"unknown frame kind {kind}")
        carries = kind <= _LAST_WITH_PAYLOAD or kind == CHUNK
        if flags > (_FLAGS if carries else MORE) and not (flags == PLACED and kind <= _LAST_WITH_PAYLOAD):
            raise RemoteProtocolError("flags", f"a {kind_name(kind)} has unknown flags {flags:#x}")
        # The limit of a meta applies to its content; a checksum or place at its end is additional.
        most = self._max_meta_bytes if kind <= _LAST_WITH_META or kind in _OF_BLOCKS else 0
        if meta_length > most + (PLACE.size if flags & PLACED else CHECKSUM_BYTES if flags & CHECKED else 0):
            raise RemoteProtocolError("meta-length", f"{kind_name(kind)} claims {meta_length}, over {most}")
        if payload_length > (MAX_CHUNK_BYTES if carries else 0):
            raise RemoteProtocolError(
                "payload-length",
                f"a frame of kind {kind_name(kind)} claims {payload_length} payload bytes; "
                f"{MAX_CHUNK_BYTES if carries else 0} are allowed",
            )
        return kind, flags

    def _open_checked(self, packed: bytearray, payload_length: int, arrived: memoryview) -> bytearray:
        """Compare the checksum at the end of a meta with a whole payload, or store it until the payload is
        whole.

        Returns:
            The meta without the checksum.
        """
        # Without a payload no byte would be compared with the checksum.
        if len(packed) < CHECKSUM_BYTES or not payload_length:
            raise RemoteProtocolError("flags", "a frame is flagged CHECKED and has no checksum or no payload")
        self._expected = int.from_bytes(packed[-CHECKSUM_BYTES:], "little")
        self._computed = checksum((arrived,))
        if len(arrived) == payload_length:
            self._compare()
        return packed[:-CHECKSUM_BYTES]

    def _compare(self) -> None:
        """Compare the checksum of a complete payload."""
        expected, self._expected = self._expected, None
        if self._computed != expected:
            raise RemoteProtocolError(
                "payload-checksum",
                f"a payload is damaged: CRC-32C {self._computed:08x}, its frame has {expected:08x}",
            )

    def _chunk(self, flags: int, payload_length: int, head_bytes: int) -> _Arrival:
        """Add a chunk to the large message in progress, and return that message.

        Raises:
            RemoteProtocolError: No large message is in progress, or the chunk is empty or too long for it.
        """
        arrival = self._large
        if arrival is None:
            raise RemoteProtocolError("chunk", "a chunk without a message in progress")
        rest = arrival.lacking - payload_length
        # Length and MORE must agree, and an empty chunk would be a frame without progress.
        if payload_length == 0 or rest < 0 or (rest > 0) != (flags & MORE):
            raise RemoteProtocolError(
                "chunk",
                f"a chunk of {payload_length} bytes, flags {flags}, while {arrival.lacking} are lacking",
            )
        arrival.lacking = rest
        arrival.frame_bytes += head_bytes
        return arrival

    def _message(
        self,
        kind: int,
        flags: int,
        request_id: int,
        packed: bytearray,
        head_bytes: int,
        payload_length: int,
        arrived: memoryview,
    ) -> Frame | _Arrival:
        """Begin a message; ``arrived`` is the part of its payload that has arrived.

        Returns the message's frame if the method has copied the whole payload, otherwise an arrival to fill.
        """
        try:
            name, meta, described = _UNPACK(packed)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RemoteProtocolError("meta", f"not type, meta, descriptions: {error}") from None
        # Messages without tensors are the most frequent: they skip the layout and the arrival.
        if not described and not payload_length and not flags:
            return _make_frame((kind, request_id, Message(type=name, meta=meta), 0, head_bytes))
        # The cached function is compiled, so the usual message takes no call of Python here.
        read = remembered_layout if len(described) <= REMEMBERED_BYTES else read_layout
        _, specs, total, tensor_bytes, _ = read(described, self._max_message_bytes)
        if payload_length != total or flags & MORE:
            self._check_length(name, flags & MORE, payload_length, total)
        # Only for replies: a request of the peer may have the same id, because each side counts its own.
        registered = self.registered.get(request_id) if kind == REPLY else None
        tensors: tuple[Tensor, ...] = ()
        memory: memoryview | None = None
        frame_bytes = head_bytes + total - tensor_bytes
        if self._discards:
            # An ended link has released its account, and must reserve nothing for a peer that continues to
            # send.
            tensors = ()
        elif registered is not None and registered.described == described:
            tensors = registered.tensors
            memory = raw_bytes(tensors[0]) if len(tensors) == 1 and total else None
        # A reply of other arrays comes in other memory, and `Link._on_reply` reports the mismatch.
        elif not total:
            # Empty arrays have no payload, so they need no pooled memory.
            tensors = tuple([np.empty(spec.shape, spec.dtype) for spec in specs])
        elif len(specs) == 1:
            tensor, memory = self._memory.lend(total, specs[0].dtype, specs[0].shape)
            tensors = (tensor,)
        else:
            # Several tensors are views of one buffer, which the pool takes back after the last of them.
            whole, memory = self._memory.lend(total, _UINT8, (total,))
            tensors = tuple([np.ndarray(shape, dtype, whole, offset) for dtype, shape, offset, _ in specs])
        # A small payload arrived whole with its head: copy it, and skip the arrival.
        if memory is not None and len(arrived) == total:
            memory[:total] = arrived
            self.bytes_moved += total
        elif total:
            if self._discards:
                scatter: _Scatter = _Discard()
            else:
                scatter = _Scatter(_pieces(specs, tensors) if memory is None else [memory[:total]])
            arrival = _Arrival(kind, request_id, name, meta, tensors, scatter, tensor_bytes, frame_bytes)
            arrival.total = total
            if flags & MORE:
                self._begin_large(arrival, payload_length, flags)
            return arrival
        message = Message(type=name, meta=meta, tensors=tensors)
        return _make_frame((kind, request_id, message, tensor_bytes, frame_bytes))

    def _placed(
        self, kind: int, request_id: int, packed: bytearray, head_bytes: int, payload_length: int
    ) -> Frame:
        """Read a message whose payload is in shared memory.

        A reply without registered memory has read-only views of the peer's memory. Other messages are
        `Placed`: one read can have many of them, and their copies take memory that must be charged first.
        """
        if self.inbox is None or payload_length or len(packed) < PLACE.size:
            raise RemoteProtocolError("flags", f"a {kind_name(kind)} is flagged PLACED: nothing is shared")
        region, units = PLACE.unpack(packed[-PLACE.size :])
        try:
            name, meta, described = _UNPACK(packed[: -PLACE.size])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RemoteProtocolError("meta", f"not type, meta, descriptions: {error}") from None
        read = remembered_layout if len(described) <= REMEMBERED_BYTES else read_layout
        _, specs, total, tensor_bytes, _ = read(described, self._max_message_bytes)
        start = units * PLACE_UNIT
        if any(start % spec.dtype.itemsize for spec in specs):
            raise RemoteProtocolError("region", f"values at {start} in a region are not aligned")
        payload = self.inbox.take(region, start, total, is_reply=kind == REPLY)
        registered = self.registered.get(request_id) if kind == REPLY else None
        tensors: tuple[Tensor, ...] = ()
        if self._discards:
            self.inbox.give_back(region, total, start)
        elif kind != REPLY:
            placed = Placed(type=name, meta=meta, region=region, start=start, specs=specs, payload=payload)
            return _make_frame((kind, request_id, placed, tensor_bytes, head_bytes))
        elif registered is not None and registered.described == described:
            tensors = registered.tensors
            _Scatter(_pieces(specs, tensors)).fill(payload)
            self.bytes_moved += total
            self.inbox.give_back(region, total, start)
        else:
            tensors = self.inbox.lend(region, start, specs, total)
        message = Message(type=name, meta=meta, tensors=tensors)
        return _make_frame((kind, request_id, message, tensor_bytes, head_bytes))

    def copied(self, placed: Placed) -> Message:
        """Copy a message out of memory that its sender can change."""
        total = len(placed.payload)
        whole, memory = self._memory.lend(total, _UINT8, (total,))
        memory[:total] = placed.payload
        self.bytes_moved += total
        tensors = [np.ndarray(shape, dtype, whole, offset) for dtype, shape, offset, _ in placed.specs]
        return Message(type=placed.type, meta=placed.meta, tensors=tuple(tensors))

    def _begin_large(self, arrival: _Arrival, payload_length: int, flags: int) -> None:
        """Begin a message of several frames, of which the first has ``payload_length`` bytes."""
        arrival.lacking = arrival.total - payload_length
        self._large = arrival
        # Between chunks, request only the head of a chunk, so that its payload needs no copy.
        self._prelude = self._view[: PRELUDE_BYTES + (CHECKSUM_BYTES if flags & CHECKED else 0)]

    def _check_length(self, name: str, more: int, payload_length: int, total: int) -> None:
        """Check the payload of a message's first frame: all bytes of its tensors, or fewer with MORE."""
        if not more and payload_length != total:
            raise RemoteProtocolError(
                "payload-length",
                f"the tensors of {name!r} take {total} bytes, its frame has {payload_length}",
            )
        # One at a time: otherwise a peer could reserve address space for any number of messages.
        if self._large is not None:
            raise RemoteProtocolError(
                "chunk", f"{name!r} begins before the large message in progress has ended"
            )
        if not 0 < payload_length < total:
            raise RemoteProtocolError(
                "payload-length", f"the first of several frames of {name!r} has {payload_length} of {total}"
            )
