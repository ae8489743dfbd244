"""Pure: frames, the unit of the files that servers and controllers append to.

A frame, integers little-endian:

    magic      4 bytes
    size       4 bytes, of the payload
    durable    8 bytes: position up to which the file was on disk when the frame was made
    crc        4 bytes, of the payload
    head crc   4 bytes, of the file's salt, the position of the frame in the file, and all before it
    payload    bytes, to which the file's owner gives a meaning

Theory of operation
-------------------
After a crash each unsynced frame may be whole, absent or torn, and recovery may drop it. Recovery must not
drop a durable frame, because the owner has confirmed it. The position `durable` separates the two cases. If a
whole frame after the first bad one has a durable position beyond it, then the bad frame was durable, and the
file is damaged. Otherwise all frames from the bad one on were in flight, and recovery cuts them off.

Damage to the last frames stays undetected if no later frame proves that they were durable: they look like a
torn tail. The checksum of the head covers the size, so recovery never uses a wrong size. The checksum covers
the position and the salt too, so a frame from another position, or from a file with another salt, is not
read.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from struct import Struct
from zlib import crc32

Part = bytes | bytearray | memoryview
"""Contiguous bytes. An array is passed as ``memoryview(array.reshape(-1)).cast("B")``, or as ``array.data``
if it is flat and not empty."""

MAGIC = b"\xabCL1"
_HEAD = Struct("<4sIQI")
_CRC = Struct("<I")
_POSITION = Struct("<Q")

MOST_CHECKED = 4
"""Maximum total size of the damaged payloads that are checked in a file, as a multiple of the file's size.
Frames do not overlap, so a file exceeds it only if its contents imitate frame heads."""

HEAD_BYTES = _HEAD.size + _CRC.size
"""Size of a frame's head, in bytes."""


class ImitatedHeadsError(ValueError):
    """A file imitates so many heads that the search for whole frames would take too long."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A whole frame in the bytes of a file."""

    position: int
    """First byte of its head."""
    size: int
    """Size of its payload, in bytes."""
    durable: int
    """Position up to which the file was on disk when the frame was made."""

    @property
    def begin(self) -> int:
        """First byte of the payload."""
        return self.position + HEAD_BYTES

    @property
    def end(self) -> int:
        """Position after the frame."""
        return self.begin + self.size


def frame_head(payload: Iterable[Part], *, position: int, durable: int, salt: bytes = b"") -> bytes:
    """Return the head of a frame.

    Args:
        payload: The payload, in parts.
        position: Position of the frame in its file.
        durable: Position up to which the file is on disk.
        salt: Bytes that distinguish the file from others.
    """
    size = crc = 0
    for part in payload:
        size += memoryview(part).nbytes
        crc = crc32(part, crc)
    head = _HEAD.pack(MAGIC, size, durable, crc)
    return head + _CRC.pack(_head_crc(head, position, salt))


def frame_at(data: bytes, position: int, salt: bytes = b"", *, offset: int = 0) -> Frame | None:
    """Return the frame at a position of a file; None if no whole frame begins there.

    Args:
        data: Bytes of the file.
        offset: Position of the first byte of `data` in the file.
    """
    head = _head_at(data, position, salt, offset=offset)
    return head and _whole(data, *head, offset=offset)


def _head_at(data: bytes, position: int, salt: bytes = b"", *, offset: int = 0) -> tuple[Frame, int] | None:
    """Return the frame of an intact head, whose payload may be absent, and the checksum of the payload."""
    at = position - offset
    if len(data) < at + HEAD_BYTES:
        return None
    magic, size, durable, crc = _HEAD.unpack_from(data, at)
    (head_crc,) = _CRC.unpack_from(data, at + _HEAD.size)
    if magic != MAGIC or _head_crc(data[at : at + _HEAD.size], position, salt) != head_crc:
        return None
    return Frame(position, size, durable), crc


def _whole(data: bytes, frame: Frame, crc: int, *, offset: int = 0) -> Frame | None:
    payload = memoryview(data)[frame.begin - offset : frame.end - offset]
    return frame if is_whole(payload, frame.size, crc) else None


def frames_from(data: bytes, position: int, salt: bytes = b"") -> Iterator[Frame]:
    """Yield the whole frames that follow one another from a position on."""
    while (frame := frame_at(data, position, salt)) is not None:
        yield frame
        position = frame.end


def frames_beyond(data: bytes, position: int, salt: bytes = b"") -> Iterator[Frame]:
    """Yield the whole frames after a position at which none begins.

    Raises:
        ImitatedHeadsError: `MOST_CHECKED` is exceeded.
    """
    left = MOST_CHECKED * len(data)
    at = data.find(MAGIC, position)
    while at >= 0:
        head = _head_at(data, at, salt)
        frame = head and _whole(data, *head)
        if frame is not None:
            yield frame
        elif head is not None:
            left -= min(head[0].size, len(data) - at)
            if left < 0:
                raise ImitatedHeadsError(f"at byte {at}")
        at = data.find(MAGIC, at + 1 if frame is None else frame.end)


def confirming_frame(data: bytes, end: int, salt: bytes = b"") -> Frame | None:
    """Return a frame that proves damage after the last whole frame; None if the tail is torn.

    Raises:
        ImitatedHeadsError: See `frames_beyond`.
    """
    return next((frame for frame in frames_beyond(data, end, salt) if frame.durable > end), None)


def is_whole(payload: Part, size: int, crc: int) -> bool:
    """Return whether a payload is complete and unchanged."""
    return len(payload) == size and crc32(payload) == crc


def _head_crc(head: bytes, position: int, salt: bytes) -> int:
    return crc32(salt + _POSITION.pack(position) + head)
