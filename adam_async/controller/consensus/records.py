"""Pure: what a node keeps on disk, as bytes, and how it finds its way back from them.

The file is append-only. Each `Persist` of the core becomes one *frame*, integers little-endian:

    magic      4 bytes
    size       4 bytes, of the payload
    durable    8 bytes: the file was known to be on disk up to here when the frame was made
    crc        4 bytes, of the payload
    head crc   4 bytes, of all before it and of the position of the frame in the file
    payload    the records, as MessagePack

Theory of operation
-------------------
After a crash the frames that nobody was told of yet may be there, not there, or torn, each on its own: they
may be dropped. A frame that was durable may not: votes and entries in it were promised to others. `durable`
tells the two apart. The first bad frame stands at some position; if a whole frame after it knows of a durable
position beyond that, then the bad one was durable once, the file is damaged, and the node must not start with
it. Otherwise all from there on was in flight, and is cut off.

What this cannot see is damage to the last frames, after which nothing durable was written: they look like a
torn tail. Sizes are not believed before the checksum over them has been, and a frame of another place or file
has the wrong checksum."""

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
    "empty its folder and start it again: the others take in who comes with an empty disk, one that is alone "
    "begins anew"
)


class DamagedLog(DataError):
    """What a node keeps on disk was damaged after it was written. It must not take part with it."""


class Born(msgspec.Struct, frozen=True, tag="born"):
    """The first record: whose file this is."""

    me: str


class Ballot(msgspec.Struct, frozen=True, tag="ballot"):
    """The node is in this term, and voted for this identity in it, or for none yet."""

    term: int
    vote: str | None


class Entries(msgspec.Struct, frozen=True, tag="entries"):
    """Entries, put over what was there from the first of them on."""

    entries: tuple[Entry, ...]


Record = Born | Ballot | Entries | Snapshot

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(tuple[Record, ...])


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """All that a node must not forget."""

    me: str
    term: int = 0
    vote: str | None = None
    snapshot: Snapshot = field(default_factory=Snapshot)
    entries: tuple[Entry, ...] = ()

    def records(self) -> tuple[Record, ...]:
        """Say it as records: the beginning of a new file."""
        first: tuple[Record, ...] = (Born(self.me), Ballot(self.term, self.vote), self.snapshot)
        return (*first, Entries(self.entries)) if self.entries else first


def found(me: str, voters: Iterable[str], state: bytes = b"") -> Saved:
    """What a founder of a group begins with. All founders must be given the same voters and state.

    The group begins with a snapshot, as if one entry had been committed in term 1; so a node that joins has
    nothing, and is sent the state.
    """
    members = Members(tuple(sorted(voters)))
    if me not in members.voters:
        raise ValueError(f"{me} founds a group of {', '.join(members.voters)}, but is not one of them")
    return Saved(me=me, term=1, snapshot=Snapshot(index=1, term=1, members=members, state=state))


class Writer:
    """Makes the frames of one file.

    Args:
        position: Where the next frame goes: 0 in a new file, else where `recover` says that the old ones end.
            All before it is durable.
    """

    def __init__(self, position: int = 0) -> None:
        self.position = position
        self._durable = position

    def frame(self, records: tuple[Record, ...]) -> bytes:
        """Make the bytes to append to the file."""
        payload = _ENCODER.encode(records)
        head = _HEAD.pack(MAGIC, len(payload), self._durable, crc32(payload))
        frame = head + _CRC.pack(crc32(_PLACE.pack(self.position) + head)) + payload
        self.position += len(frame)
        return frame

    def durable(self, position: int) -> None:
        """The file is on disk up to here: what `position` was when that was asked for."""
        self._durable = max(self._durable, position)


def recover(data: bytes, *, origin: str) -> tuple[Saved | None, int]:
    """Read a file back.

    Args:
        data: The whole file.
        origin: What to call it in an error, such as its path.

    Returns:
        What was saved, None if nothing was; and where the file ends: cut off what is behind.

    Raises:
        DamagedLog: A record that was durable is damaged.
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


def _replay(saved: Saved | None, log: Log, record: Record, where: str) -> Saved:
    if isinstance(record, Born):
        return Saved(me=record.me)
    if saved is None:
        raise DamagedLog(f"{where}: the file does not begin with whose it is; {WHAT_TO_DO}")
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
    """The payload of the frame that begins here, and what it knew to be durable; None if it is not whole."""
    begin = at + HEAD_BYTES
    if len(data) < begin:
        return None
    magic, size, durable, crc = _HEAD.unpack_from(data, at)
    (head_crc,) = _CRC.unpack_from(data, at + _HEAD.size)
    if magic != MAGIC or crc32(_PLACE.pack(at) + data[at : at + _HEAD.size]) != head_crc:
        return None
    payload = data[begin : begin + size]
    return (payload, durable) if len(payload) == size and crc32(payload) == crc else None


def _refuse_damage(data: bytes, end: int, what: str) -> None:
    at = data.find(MAGIC, end)
    while at >= 0:
        frame = _frame_at(data, at)
        if frame is not None and frame[1] > end:
            raise DamagedLog(f"{what}: all up to byte {frame[1]} was on disk, says byte {at}; {WHAT_TO_DO}")
        at = data.find(MAGIC, at + 1)
