"""Pure: a recorded run as one file: a header in JSON, then the log of each bundle.

Layout, integers little-endian:

    magic      20 bytes, `MAGIC`: name and version of the format
    size, crc  4 bytes each, of the header
    header     JSON: `Header` of the run, and a `Section` for each bundle
    sections   the bytes of each, one after the other, in the format of `parameter_server/replay_log.py`

The reader checks the sizes, and the checksum of each part, before it uses the part.
"""

from collections.abc import Sequence
from struct import Struct
from zlib import crc32

import msgspec

from adam_async.driver.replay.record_head import MAGIC, check_magic
from adam_async.driver.replay.recording import Header
from adam_async.errors import RecordError
from adam_async.messages.bounds import Count

_FRONT = Struct("<II")


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """The log of one bundle in the file."""

    home: str
    """Name of the bundle."""
    size: Count
    crc: Count


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    header: Header
    sections: tuple[Section, ...]


class Log(msgspec.Struct, frozen=True, kw_only=True):
    """The log of one bundle."""

    home: str
    data: bytes


def dump_record(header: Header, logs: Sequence[Log]) -> list[bytes]:
    """Write a record as the parts of its file."""
    head = _Head(
        header=header,
        sections=tuple(Section(home=log.home, size=len(log.data), crc=crc32(log.data)) for log in logs),
    )
    text = msgspec.json.encode(head)
    return [MAGIC, _FRONT.pack(len(text), crc32(text)), text, *(log.data for log in logs)]


def load_record(data: bytes, *, origin: str) -> tuple[Header, list[Log]]:
    """Read the bytes of a record's file.

    Raises:
        RecordError: The file is no record, of another version, truncated or damaged.
    """
    check_magic(data, origin)
    begin = len(MAGIC) + _FRONT.size
    size, crc = _FRONT.unpack_from(data, len(MAGIC)) if len(data) >= begin else (0, 0)
    if len(data) < begin + size:
        raise RecordError(f"{origin} is truncated in its header: it has {len(data)} bytes; record again")
    text = data[begin : begin + size]
    if crc32(text) != crc:
        raise RecordError(f"{origin} has a damaged header: its checksum is wrong; record again")
    try:
        head = msgspec.json.decode(text, type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(f"{origin} has a header that this version does not read: {error}") from None
    return head.header, _logs(data, begin + size, head.sections, origin)


def _logs(data: bytes, at: int, sections: Sequence[Section], origin: str) -> list[Log]:
    expected = at + sum(section.size for section in sections)
    if len(data) != expected:
        raise RecordError(f"{origin} has {len(data)} bytes, but its header lists {expected}")
    logs = []
    for section in sections:
        part = data[at : at + section.size]
        at += section.size
        if crc32(part) != section.crc:
            raise RecordError(f"{origin} is damaged in the log of {section.home}: its checksum is wrong")
        logs.append(Log(home=section.home, data=part))
    return logs
