"""Pure: keys of states and entries, a store's settings, and the payloads of frames in segment files.

A file's first frame is its *start*: magic text, the number of the format, and then, as MessagePack, the
file's kind, number and owner. The payload of each later frame begins with the size of its *record*, 4 bytes,
and the record, as MessagePack. The content of a state or entry follows; only the owner reads it.

    StateRecord     one state of a shard
    EntryRecord     one entry of a bundle's log
    RoundRecord     end of a round of states: the states in it, and the files that belong to the folder
    SyncedRecord    nothing; its head is the proof that the file was on disk up to it
"""

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct, error
from typing import Annotated, NamedTuple

import msgspec

from adam_async.errors import ConfigError
from adam_async.persistence.frames import Frame, Part

Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
ShardNumber = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Home = Annotated[str, msgspec.Meta(max_length=200)]
WallTime = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
"""Finite time, in seconds since 1970."""


Order = tuple[int, int]
"""Generation and position of the last log entry in a state: of two states, the one with the greater order is
newer."""


LEADING = ""
"""Home of the owner's own states. A round writes a changed one before each state that it copies later. So on
the disk it is never older than the shards' states."""


class StateName(NamedTuple):
    """Name of a state: its bundle's home, and its shard's number.

    A parameter server writes pieces, and uses the number of a piece as the number of a shard.
    """

    home: str
    shard: int


class StateKey(msgspec.Struct, frozen=True, array_like=True):
    """Key of one state of a shard. If two have one name, the one with the greater `order` is newer."""

    home: Home
    shard: ShardNumber
    generation: Number
    """Generation of the primary that formed the last log entry in the state."""
    position: Number
    """Position of the last log entry in the state: a later entry is not in it."""
    version: Number
    """Number of pushes applied to the shard."""

    @property
    def name(self) -> StateName:
        return StateName(self.home, self.shard)

    @property
    def order(self) -> Order:
        """Generation and position."""
        return self.generation, self.position


class EntryKey(msgspec.Struct, frozen=True, array_like=True):
    """Key of one entry in a bundle's log."""

    home: Home
    position: Number
    generation: Number
    """Generation of the primary that formed the entry."""


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """A state for the disk: its key, and its content in parts. A reader gets back the same parts.

    The parts must not change until they are written: hand over copies.
    """

    key: StateKey
    parts: Sequence[Part]

    @property
    def nbytes(self) -> int:
        """Size of the content, in bytes."""
        return sum([memoryview(part).nbytes for part in self.parts])


FORMAT = 2
"""Number of the format of segment files; a reader refuses others."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Owner of a folder of segment files.

    Attributes:
        run: Id of the run or store whose states the folder has.
        contents: Version of the owner's encoding of states and entries, from 1.
    """

    run: str
    contents: int = 1


class OtherRun(ConfigError):
    """The folder has the states of another run. The message has both runs and the remedy."""


class OtherContents(ConfigError):
    """The folder has states in another encoding than this release's. The message has the remedy."""


class OtherFormat(ConfigError):
    """The folder has segment files of another release. The message has the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushSettings:
    """Settings of a segment store.

    Attributes:
        flush_s: Time in seconds from a shard's first update to the round that writes it.
        dirty_bytes: Size of dirty states at which a round begins after half of `flush_s`, in bytes.
        segment_bytes: Size at which a segment file ends and the next one begins, in bytes.
        batch_bytes: Size at which copied states are handed to the disk's thread, in bytes. Only one batch is
            in memory at a time, and at most one further state.
    """

    flush_s: float = 1.0
    dirty_bytes: int = 64 << 20
    segment_bytes: int = 64 << 20
    batch_bytes: int = 4 << 20


_START = Struct("<8sI")
_START_MAGIC = b"segments"
_SIZE = Struct("<I")

STATES = "states"
"""Kind of the files with states and rounds."""

ENTRIES = "entries"
"""Kind of the files with entries."""


class UnknownRecordError(ValueError):
    """A whole frame has a payload that this release cannot read."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The first record of a file."""

    kind: str
    number: Number
    run: str
    contents: Number

    @property
    def identity(self) -> Identity:
        """Owner of the file."""
        return Identity(run=self.run, contents=self.contents)


class StateRecord(msgspec.Struct, frozen=True, array_like=True, tag="state"):
    """A state."""

    number: Number
    """Number of the record in the folder, from 1, over all kinds."""
    key: StateKey
    sizes: tuple[Number, ...]
    """Sizes of the parts of the content, in bytes."""


class EntryRecord(msgspec.Struct, frozen=True, array_like=True, tag="entry"):
    """An entry of a log."""

    number: Number
    key: EntryKey
    sizes: tuple[Number, ...]


class RoundRecord(msgspec.Struct, frozen=True, array_like=True, tag="round"):
    """End of a round of states; with `is_directory`, the list of all states, in a new file.

    The last directory in the last state file has the facts of the whole folder.
    """

    number: Number
    as_of: WallTime | None
    """Wall-clock time up to which all updates are in the files, in seconds since 1970; None if unknown."""
    states: tuple[StateKey, ...]
    """Keys of the states in this round and the previous one; in a directory the newest key of every state."""
    floors: dict[Home, Number]
    """By home, position up to which the files need no entries, because the states have them."""
    forgotten: dict[Home, Number]
    """Number up to which records do not count, by the home of each forgotten bundle."""
    files: dict[str, Number]
    """Size that each file of the folder has on disk at least, by name, without superfluous files."""
    is_directory: bool = False
    previous: tuple[Number, Number] = (0, 0)
    """Numbers of the previous two rounds, the older first; 0 for none. A reader thus notices hidden rounds.
    In the first round after an opening both are the number of the last record of any kind; after a repair,
    the number of its list of all states."""


class SyncedRecord(msgspec.Struct, frozen=True, array_like=True, tag="synced"):
    """A record without content; its head proves that the file was on disk up to it."""


SegmentRecord = StateRecord | EntryRecord | RoundRecord | SyncedRecord

_encoder = msgspec.msgpack.Encoder()
_start_decoder = msgspec.msgpack.Decoder(Start)
_decoder: msgspec.msgpack.Decoder[SegmentRecord] = msgspec.msgpack.Decoder(SegmentRecord)


def encode_start(kind: str, number: int, identity: Identity) -> bytes:
    """Return the payload of the first frame of a file."""
    start = Start(kind=kind, number=number, run=identity.run, contents=identity.contents)
    return _START.pack(_START_MAGIC, FORMAT) + _encoder.encode(start)


def decode_start(payload: Part) -> Start | None:
    """Return a file's first record; None if the payload does not begin a segment file.

    Raises:
        UnknownRecordError: The format is another one than this release's.
    """
    try:
        magic, number = _START.unpack_from(payload)
        if magic != _START_MAGIC:
            return None
        if number != FORMAT:
            raise UnknownRecordError(f"its format is {number}, and this release reads {FORMAT}")
        return _start_decoder.decode(memoryview(payload)[_START.size :])
    except (error, msgspec.DecodeError, UnicodeDecodeError):
        return None


def encode_record(record: SegmentRecord, content: Sequence[Part] = ()) -> list[Part]:
    """Return the parts of a payload; they share the content's memory."""
    encoded = _encoder.encode(record)
    return [_SIZE.pack(len(encoded)) + encoded, *content]


def decode_record(data: bytes, frame: Frame) -> tuple[SegmentRecord, int]:
    """Return a frame's record, and the position of its content in the file.

    Raises:
        UnknownRecordError: This release does not know the record, or it does not fit its frame.
    """
    view = memoryview(data)
    begin = frame.begin + _SIZE.size
    if frame.size < _SIZE.size:
        raise UnknownRecordError(f"its payload has {frame.size} bytes")
    (size,) = _SIZE.unpack_from(data, frame.begin)
    content = begin + size
    if content > frame.end:
        raise UnknownRecordError(f"its record has {size} bytes, and its payload {frame.size}")
    try:
        record = _decoder.decode(view[begin:content])
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise UnknownRecordError(f"its record: {problem}") from None
    nbytes = sum(record.sizes) if isinstance(record, StateRecord | EntryRecord) else 0
    if nbytes != frame.end - content:
        raise UnknownRecordError(f"its content has {frame.end - content} bytes instead of {nbytes}")
    return record, content


def split_content(data: bytes | memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """Return the parts of a content, with which `data` begins."""
    view, parts, begin = memoryview(data), [], 0
    for size in sizes:
        parts.append(view[begin : begin + size])
        begin += size
    return parts
