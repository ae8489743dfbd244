"""Payloads of segment files come back as written, and others are refused by name."""

import pytest

from adam_async.persistence.frames import Frame, frame_at, frame_head
from adam_async.persistence.records import (
    STATES,
    EntryKey,
    EntryRecord,
    Identity,
    RoundRecord,
    StateKey,
    StateRecord,
    SyncedRecord,
    UnknownRecordError,
    decode_record,
    decode_start,
    encode_record,
    encode_start,
    split_content,
)

KEY = StateKey("ps-0", 5, 2, 1 << 40, 7)
RECORDS = [
    (StateRecord(1, KEY, (3, 0, 5)), [b"abc", b"", b"defgh"]),
    (EntryRecord(2, EntryKey("ps-1", 9, 3), ()), []),
    (RoundRecord(3, 1.5, (KEY,), {"ps-0": 4}, {"ps-1": 2}, {"states-00000001.segment": 99}), []),
    (RoundRecord(4, None, (), {}, {}, {}, True), []),
    (SyncedRecord(), []),
]


def framed(parts) -> tuple[bytes, Frame]:
    data = frame_head(parts, position=0, durable=0) + b"".join(parts)
    return data, frame_at(data, 0)


@pytest.mark.parametrize(("record", "content"), RECORDS)
def test_a_record_comes_back_with_the_parts_of_its_content(record, content):
    data, frame = framed(encode_record(record, content))
    found, begin = decode_record(data, frame)
    assert found == record
    assert [bytes(part) for part in split_content(data[begin:], getattr(found, "sizes", ()))] == content


def test_the_start_of_a_file_has_its_owner():
    start = decode_start(encode_start(STATES, 12, Identity(run="run-1", contents=4)))
    assert (start.kind, start.number, start.identity) == (STATES, 12, Identity(run="run-1", contents=4))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"segments",
        b"segmentz\1\0\0\0",
        b"segments\2\0\0\0\x80",
        b"segments\2\0\0\0\x81\xa1\xff\x00",
        b"x" * 99,
    ],
)
def test_other_bytes_are_no_start(payload):
    assert decode_start(payload) is None


def test_a_start_of_another_format_is_refused_with_its_number():
    with pytest.raises(UnknownRecordError, match="its format is 9, and this release reads 2"):
        decode_start(b"segments\x09\0\0\0anything")


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (b"", "its payload has 0 bytes"),
        (b"\xff\0\0\0abc", "its record has 255 bytes, and its payload 7"),
        (b"\x01\0\0\0\xc1", "its record: "),
        (b"\x09\0\0\0\x91\xa7unknown", "its record: "),
        (b"\x03\0\0\0\x91\xa1\xff", "its record: "),
        (b"".join(encode_record(RoundRecord(1, float("nan"), (), {}, {}, {}))), "its record: "),
        (b"".join(encode_record(RoundRecord(1, float("inf"), (), {}, {}, {}))), "its record: "),
        (
            b"".join(encode_record(StateRecord(1, KEY, (3,)), [b"four"])),
            "its content has 4 bytes instead of 3",
        ),
        (b"".join(encode_record(SyncedRecord(), [b"x"])), "its content has 1 bytes instead of 0"),
        (b"".join(encode_record(StateRecord(1, StateKey("ps-0", -1, 1, 1, 1), ()))), "its record: "),
        (b"".join(encode_record(StateRecord(1, StateKey("ps-0", 0, 1, -1, 1), ()))), "its record: "),
    ],
)
def test_a_payload_that_this_release_cannot_read_is_refused_with_the_reason(payload, text):
    data, frame = framed([payload])
    with pytest.raises(UnknownRecordError, match=text):
        decode_record(data, frame)
