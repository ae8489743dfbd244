"""Pure: a node's durable records as bytes, and recovery from them.

The file is append-only. Each `Persist` of the core becomes one *frame*, integers little-endian:

    magic      4 bytes
    size       4 bytes, of the payload
    durable    8 bytes: position up to which the file was on disk when the frame was made
    crc        4 bytes, of the payload
    head crc   4 bytes, of all before it and of the position of the frame in the file
    payload    the records, as MessagePack

Theory of operation
-------------------
After a crash each unsynced frame may be whole, absent or torn, and recovery may drop it. It must not drop a
durable frame, whose votes and entries this node promised to others. `durable` separates the two. If a whole
frame after the first bad one has a durable position beyond the bad one, then the bad one was durable, the
file is damaged, and the node must not start. Otherwise all frames from the bad one on were in flight, and
recovery cuts them off.

Damage to the last frames, before any later durable one, stays undetected: they look like a torn tail. The
checksum of the head covers the size, so recovery never uses a wrong size; a frame from another position or
file has the wrong checksum."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from struct import Struct
from zlib import crc32

import msgspec

from adam_async.controller.consensus.log import Log
from adam_async.controller.consensus.membership import Members
from adam_async.controller.consensus.messages import Entry, Snapshot
from adam_async.errors import DataError

MAGIC = b"\xabCL1"
_HEAD = Struct("<4sIQI")
_CRC = Struct("<I")
_PLACE = Struct("<Q")
HEAD_BYTES = _HEAD.size + _CRC.size

WHAT_TO_DO = (
    "empty its folder and start it again: the others take in a controller with an empty disk, a single one "
    "begins anew"
)


class DamagedLog(DataError):
    """A node's durable records are damaged. The node must not use them."""


class Born(msgspec.Struct, frozen=True, tag="born"):
    """The first record: the identity of the file's node."""

    me: str


class Ballot(msgspec.Struct, frozen=True, tag="ballot"):
    """The node's term, and the identity that it voted for in it, if any."""

    term: int
    vote: str | None


class Entries(msgspec.Struct, frozen=True, tag="entries"):
    """Entries that replace all entries from the first one's index on."""

    entries: tuple[Entry, ...]


LogFileRecord = Born | Ballot | Entries | Snapshot

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(tuple[LogFileRecord, ...])


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The durable state of a node."""

    me: str
    term: int = 0
    vote: str | None = None
    snapshot: Snapshot = field(default_factory=Snapshot)
    entries: tuple[Entry, ...] = ()

    def records(self) -> tuple[LogFileRecord, ...]:
        """Return the state as the first records of a new file."""
        first: tuple[LogFileRecord, ...] = (Born(self.me), Ballot(self.term, self.vote), self.snapshot)
        return (*first, Entries(self.entries)) if self.entries else first


def bootstrapped(me: str, voters: Iterable[str], state: bytes = b"") -> Saved:
    """Return the first durable state of a group's first node. All first nodes need the same voters and state.

    The group begins with a snapshot, as if one entry had been committed in term 1. So a joining node, which
    has nothing, gets the state.
    """
    members = Members(tuple(sorted(voters)))
    if me not in members.voters:
        raise ValueError(f"{me} begins a group of {', '.join(members.voters)}, but is not one of them")
    return Saved(me=me, term=1, snapshot=Snapshot(index=1, term=1, members=members, state=state))


class Writer:
    """Makes the frames of one file.

    Args:
        position: Position of the next frame: 0 in a new file, else the end that `recover` returned. All
            bytes before it are durable.
    """

    def __init__(self, position: int = 0) -> None:
        self.position = position
        self._durable = position

    def frame(self, records: tuple[LogFileRecord, ...]) -> bytes:
        """Return the bytes to append to the file."""
        payload = _ENCODER.encode(records)
        head = _HEAD.pack(MAGIC, len(payload), self._durable, crc32(payload))
        frame = head + _CRC.pack(crc32(_PLACE.pack(self.position) + head)) + payload
        self.position += len(frame)
        return frame

    def durable(self, position: int) -> None:
        """Note that the file is on disk up to `position`, its end when the sync began."""
        self._durable = max(self._durable, position)


def recover(data: bytes, *, origin: str) -> tuple[Saved | None, int]:
    """Read a file back.

    Args:
        origin: Name of the file in errors, such as its path.

    Returns:
        The saved state, None if there is none; and the end of the good frames. Cut the file off there.

    Raises:
        DamagedLog: A durable record is damaged.
    """
    saved: Saved | None = None
    log = Log(Snapshot())
    end = whole = 0
    while (frame := _frame_at(data, end)) is not None:
        payload, _ = frame
        try:
            records = _DECODER.decode(payload)
        except msgspec.DecodeError as error:
            raise DamagedLog(
                f"{origin}: byte {end} begins what this version does not read: {error}"
            ) from None
        for record in records:
            saved = _replay(saved, log, record, f"{origin}: byte {end}")
        end += HEAD_BYTES + len(payload)
        whole += 1
    _refuse_damage(data, end, f"{origin} is damaged at byte {end}, in record {whole + 1}")
    if saved is None:
        return None, end
    return Saved(
        me=saved.me, term=saved.term, vote=saved.vote, snapshot=log.snapshot, entries=log.entries
    ), end


def _replay(saved: Saved | None, log: Log, record: LogFileRecord, where: str) -> Saved:
    if isinstance(record, Born):
        return Saved(me=record.me)
    if saved is None:
        raise DamagedLog(f"{where}: the file does not begin with its node's identity; {WHAT_TO_DO}")
    match record:
        case Ballot():
            return Saved(me=saved.me, term=record.term, vote=record.vote)
        case Entries():
            first = record.entries[0].index
            if not log.snapshot.index < first <= log.last_index + 1:
                raise DamagedLog(f"{where}: entry {first} comes after {log.last_index}; some are missing")
            log.put(record.entries)
        case Snapshot():
            log.install(record)
    return saved


def _frame_at(data: bytes, at: int) -> tuple[bytes, int] | None:
    """Return the payload of the frame at `at`, and its durable position; None if the frame is not whole."""
    begin = at + HEAD_BYTES
    if len(data) < begin:
        return None
    magic, size, durable, crc = _HEAD.unpack_from(data, at)
    (head_crc,) = _CRC.unpack_from(data, at + _HEAD.size)
    if magic != MAGIC or crc32(_PLACE.pack(at) + data[at : at + _HEAD.size]) != head_crc:
        return None
    payload = data[begin : begin + size]
    return (payload, durable) if _is_whole(payload, size, crc) else None


def _is_whole(payload: bytes, size: int, crc: int) -> bool:
    """Whether a payload is complete and unchanged."""
    return len(payload) == size and crc32(payload) == crc


def _refuse_damage(data: bytes, end: int, what: str) -> None:
    at = data.find(MAGIC, end)
    while at >= 0:
        frame = _frame_at(data, at)
        if frame is not None and frame[1] > end:
            raise DamagedLog(
                f"{what}: byte {at} shows that all before byte {frame[1]} was durable; {WHAT_TO_DO}"
            )
        at = data.find(MAGIC, at + 1)
