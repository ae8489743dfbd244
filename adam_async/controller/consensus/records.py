"""Pure: a node's durable records as bytes, and recovery from them.

The file is append-only. Each `Persist` of the core becomes one frame (`adam_async/persistence/frames.py`),
whose payload is the records, as MessagePack. Recovery may drop frames in flight at a crash. Recovery must not
drop a durable frame, whose votes and entries this node promised to others, so the node does not start on a
damaged file.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from adam_async.controller.consensus.log import Log
from adam_async.controller.consensus.membership import Members
from adam_async.controller.consensus.messages import Entry, Snapshot
from adam_async.errors import ConfigError, DataError
from adam_async.persistence.frames import ImitatedHeadsError, confirming_frame, frame_head, frames_from

FORMAT = "adam-async/controller-log/3"
"""Name and version of the file format, which includes the state and the entries."""

WHAT_TO_DO = (
    "empty its folder and start it again: the others take in a controller with an empty disk, a single one "
    "begins anew"
)


class DamagedLog(DataError):
    """A node's durable records are damaged. The node must not use the records."""


class Born(msgspec.Struct, frozen=True, tag="born"):
    """The first record: the identity of the file's node."""

    me: str
    format: str = FORMAT


class Ballot(msgspec.Struct, frozen=True, tag="ballot"):
    """The node's term, and the identity, if any, that the node voted for in this term."""

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
        position: Position of the next frame: 0 in a new file, else the end that `recover` returned. Byte
            position before which all bytes are durable.
    """

    def __init__(self, position: int = 0) -> None:
        self.position = position
        self._durable = position

    def frame(self, records: tuple[LogFileRecord, ...]) -> bytes:
        """Return the bytes to append to the file."""
        payload = _ENCODER.encode(records)
        frame = frame_head([payload], position=self.position, durable=self._durable) + payload
        self.position += len(frame)
        return frame

    def durable(self, position: int) -> None:
        """Record that the file is on disk up to `position`, its end when the sync began."""
        self._durable = max(self._durable, position)


def recover(data: bytes, *, origin: str) -> tuple[Saved | None, int]:
    """Read a file back.

    Args:
        origin: Name of the file in errors, such as its path.

    Returns:
        The saved state, None if the file has none; and the position after the last good frame. Cut the file
            off there.

    Raises:
        DamagedLog: A durable record is damaged or missing, or this version cannot read it.
        ConfigError: The file has the format of another version.
    """
    saved: Saved | None = None
    log = Log(Snapshot())
    end = whole = 0
    for frame in frames_from(data, 0):
        payload = memoryview(data)[frame.begin : frame.end]
        if not whole:
            _check_format(payload, origin)
        try:
            records = _DECODER.decode(payload)
        except msgspec.DecodeError as error:
            raise DamagedLog(
                f"{origin}: byte {end} begins what this version does not read: {error}"
            ) from None
        for record in records:
            saved = _replay(saved, log, record, f"{origin}: byte {end}")
        end = frame.end
        whole += 1
    _refuse_damage(data, end, f"{origin} is damaged at byte {end}, in record {whole + 1}")
    if saved is None:
        return None, end
    return Saved(
        me=saved.me, term=saved.term, vote=saved.vote, snapshot=log.snapshot, entries=log.entries
    ), end


def _check_format(payload: memoryview, origin: str) -> None:
    """Check the first frame's format before its records, whose fields another version may have changed.

    Raises:
        ConfigError: The file has the format of another version.
    """
    try:
        (born, *_) = msgspec.msgpack.decode(payload)
        found = born.get("format", "none") if born["type"] == "born" else FORMAT
    except (msgspec.DecodeError, AttributeError, KeyError, TypeError, ValueError):
        return  # a file that does not begin with its node's identity; the caller names the fault
    if found != FORMAT:
        raise ConfigError(
            f"{origin} has the format {str(found)[:80]!r}; this version reads {FORMAT!r}: go on with the "
            f"version that wrote it, or {WHAT_TO_DO}"
        )


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


def _refuse_damage(data: bytes, end: int, what: str) -> None:
    try:
        frame = confirming_frame(data, end)
    except ImitatedHeadsError as error:
        raise DamagedLog(f"{what}: {error}, too many heads lack their content; {WHAT_TO_DO}") from None
    if frame is not None:
        raise DamagedLog(
            f"{what}: byte {frame.position} shows that all before byte {frame.durable} was durable; "
            f"{WHAT_TO_DO}"
        )
