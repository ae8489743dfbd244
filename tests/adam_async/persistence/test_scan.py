"""Names of segment files, and what the bytes of one prove."""

import pytest

from adam_async.persistence.frames import frame_head
from adam_async.persistence.records import (
    ENTRIES,
    STATES,
    Identity,
    SyncedRecord,
    encode_record,
    encode_start,
)
from adam_async.persistence.scan import SegmentName, salt_of, scan, segment_name

NAME = "states-00000003.segment"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("states-00000003.segment", SegmentName(STATES, 3)),
        ("entries-123456789.damaged", SegmentName(ENTRIES, 123456789, True)),
        ("states-3.segment", None),
        ("states-00000003.segment.aside", None),
        ("other-00000003.segment", None),
        ("lock", None),
    ],
)
def test_names_of_segment_files_are_read_and_all_others_left_alone(name, expected):
    assert segment_name(name) == expected
    assert expected is None or str(expected) == name


def file_of(durables, *, name: str = NAME, number: int = 3) -> tuple[bytes, list[int]]:
    """Return a file with empty records of these durable positions, and the ends of its frames."""
    start = encode_start(STATES, number, Identity(run="run-1"))
    data = frame_head([start], position=0, durable=0) + start
    ends = [len(data)]
    for durable in durables:
        payload = encode_record(SyncedRecord())
        salt = salt_of("run-1", name)
        head = frame_head(payload, position=len(data), durable=durable, salt=salt)
        data += head + b"".join(payload)
        ends.append(len(data))
    return data, ends


def test_a_whole_file_is_read_to_its_end():
    data, ends = file_of([0, 0, 90])
    found = scan(NAME, data, None)
    assert found.start.identity == Identity(run="run-1")
    assert [each.frame.end for each in found.records] == ends[1:]
    assert (found.end, found.nbytes, found.durable, found.beyond) == (len(data), len(data), 90, ())


def test_a_frame_behind_a_bad_byte_is_kept_apart():
    data, ends = file_of([0, 0, 200])
    damaged = bytearray(data)
    damaged[ends[0] + 3] ^= 1
    found = scan(NAME, bytes(damaged), "run-1")
    assert (found.records, found.end, found.durable) == ((), ends[0], 200)
    assert [each.frame.end for each in found.beyond] == ends[2:]


def test_a_file_without_its_start_is_read_with_the_expected_run_only():
    data, ends = file_of([0, 0])
    damaged = b"\0" + data[1:]
    assert [each.frame.end for each in scan(NAME, damaged, "run-1").beyond] == ends[1:]
    assert scan(NAME, damaged, "run-2").beyond == ()
    assert scan(NAME, damaged, None).beyond == ()


def test_a_file_under_another_name_counts_as_on_disk_so_that_nothing_cuts_it_off():
    data, ends = file_of([0, 0], number=4, name="states-00000004.segment")
    found = scan(NAME, data, "run-1")
    assert (found.records, found.end, found.durable) == ((), ends[0], len(data))


def test_a_record_of_a_newer_release_is_named():
    data, _ = file_of([])
    payload = [b"\x09\0\0\0\x91\xa7unknown"]
    head = frame_head(payload, position=len(data), durable=0, salt=salt_of("run-1", NAME))
    found = scan(NAME, data + head + payload[0], "run-1")
    assert found.unknown.startswith(f"at byte {len(data)}, its record: ")


def test_a_file_that_imitates_heads_counts_as_on_disk_so_that_nothing_cuts_it_off():
    data, ends = file_of([0])
    salt, imitated = salt_of("run-1", NAME), bytearray(data)
    while len(imitated) < 1 << 14:
        imitated += frame_head([bytes(1 << 13)], position=len(imitated), durable=0, salt=salt)
    found = scan(NAME, bytes(imitated), "run-1")
    assert (found.end, found.durable) == (ends[-1], len(imitated))
