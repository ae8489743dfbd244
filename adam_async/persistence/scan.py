"""Pure: one segment file's content: its whole frames, and the durable positions that they prove."""

import re
from dataclasses import dataclass
from typing import NamedTuple

from adam_async.persistence.frames import Frame, ImitatedHeadsError, frame_at, frames_beyond, frames_from
from adam_async.persistence.records import (
    ENTRIES,
    STATES,
    SegmentRecord,
    Start,
    UnknownRecordError,
    decode_record,
    decode_start,
)

SUFFIX = ".segment"
"""End of the name of a segment file."""

DAMAGED = ".damaged"
"""End of the name of a segment file in quarantine."""

_NAME = re.compile(rf"({STATES}|{ENTRIES})-([0-9]{{8,18}})({re.escape(SUFFIX)}|{re.escape(DAMAGED)})")


class SegmentName(NamedTuple):
    """Name of a segment file. Names of one kind sort in the order in which the files were made."""

    kind: str
    number: int
    is_quarantined: bool = False

    def __str__(self) -> str:
        return f"{self.kind}-{self.number:08d}{DAMAGED if self.is_quarantined else SUFFIX}"


def segment_name(name: str) -> SegmentName | None:
    """Read a file's name; None if it is not a segment file."""
    found = _NAME.fullmatch(name)
    return found and SegmentName(found[1], int(found[2]), found[3] == DAMAGED)


def salt_of(run: str, name: str) -> bytes:
    """Return the salt of the frames after the first one. The salt keeps other files' frames unread."""
    return f"{run}/{name}".encode()


@dataclass(frozen=True, slots=True)
class Found:
    """A record in a file."""

    segment: str
    frame: Frame
    record: SegmentRecord
    content: int
    """Position of the content in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """The content of one file.

    Attributes:
        start: The first record; None if incomplete.
        records: Records of the frames that follow one another from the first one on.
        beyond: Records of the whole frames after the first bad one.
        end: Position after the last frame of `records`.
        nbytes: Size of the file.
        durable: Position up to which whole frames prove that the file was on disk.
        unknown: Text on a whole frame that this release cannot read; empty if there is none.
    """

    segment: str
    start: Start | None
    records: tuple[Found, ...] = ()
    beyond: tuple[Found, ...] = ()
    end: int
    nbytes: int
    durable: int
    unknown: str = ""


def scan(segment: str, data: bytes, run: str | None) -> Scan:
    """Read the bytes of a file.

    Args:
        segment: Name of the file.
        run: Run of the file, used if the start of the file is damaged; None to stop at a damaged start.
    """
    unknown: list[str] = []
    first = frame_at(data, 0)
    start = None
    if first is not None:
        try:
            start = decode_start(memoryview(data)[first.begin : first.end])
        except UnknownRecordError as error:
            unknown.append(str(error))
    run = start.run if start is not None else run
    if unknown or run is None:
        return Scan(
            segment=segment, start=start, end=0, nbytes=len(data), durable=0, unknown="".join(unknown)
        )
    salt = salt_of(run, segment)

    def found(frame: Frame) -> list[Found]:
        """Return the record of a frame, or note that this version does not know its kind."""
        try:
            record, content = decode_record(data, frame)
        except UnknownRecordError as error:
            unknown.append(f"at byte {frame.position}, {error}")
            return []
        return [Found(segment, frame, record, content)]

    end = first.end if first is not None and start is not None else 0
    records: list[Found] = []
    # A file under another name has frames that are not read, and must not be cut off.
    is_misnamed = start is not None and str(SegmentName(start.kind, start.number)) != segment
    durable = len(data) if is_misnamed else 0
    if end:
        for frame in frames_from(data, end, salt):
            records += found(frame)
            end, durable = frame.end, max(durable, frame.durable)
    beyond: list[Found] = []
    try:
        for frame in frames_beyond(data, end, salt):
            beyond += found(frame)
            durable = max(durable, frame.durable)
    except ImitatedHeadsError:
        durable = len(data)  # the rest may have confirmed frames, so it must not be cut off
    return Scan(
        segment=segment,
        start=start,
        records=tuple(records),
        beyond=tuple(beyond),
        end=end,
        nbytes=len(data),
        durable=durable,
        unknown=unknown[0] if unknown else "",
    )
