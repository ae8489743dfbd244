"""The file of a record is read as it was written; a damaged one is refused with the damage."""

import struct
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adam_async.driver.replay.decode import MAGIC, Log, dump_record, load_record
from adam_async.driver.replay.recording import Header, RecordedEpoch
from adam_async.errors import RecordError

HEADER = Header(
    config={"epochs": 1, "rate": 0.25, "waits": {"dial_s": 1.0}},
    spec={"name": "m"},
    data={"name": "digits", "shape": [1, 8, 8]},
    buckets=("ps-0", "ps-1"),
    kernels="numba",
    machine={"numpy": "2.0"},
    epochs=(RecordedEpoch(epoch=1, images=60, train_loss=None, test_accuracy=0.5, versions=(4, 4)),),
    weights="0123",
)
LOGS = [Log(home="ps-0", data=b"orders"), Log(home="ps-1", data=b"read" * 9)]


def written() -> bytes:
    return b"".join(dump_record(HEADER, LOGS))


def with_header(data: bytes, old: bytes, new: bytes) -> bytes:
    """Another header under a right checksum."""
    begin = len(MAGIC) + 8
    size = int.from_bytes(data[len(MAGIC) : len(MAGIC) + 4], "little")
    text = data[begin : begin + size].replace(old, new)
    return MAGIC + struct.pack("<II", len(text), crc32(text)) + text + data[begin + size :]


def test_a_record_is_read_as_it_was_written() -> None:
    assert load_record(written(), origin="run.record") == (HEADER, LOGS)


def test_the_same_record_is_the_same_bytes() -> None:
    assert written() == written()


@settings(max_examples=300)
@given(at=st.integers(0, len(written()) - 1), bit=st.integers(0, 7))
def test_every_changed_bit_of_a_record_is_noticed(at: int, bit: int) -> None:
    data = bytearray(written())
    data[at] ^= 1 << bit

    try:
        header, logs = load_record(bytes(data), origin="run.record")
    except RecordError:
        return
    assert header == HEADER
    assert logs == LOGS


@pytest.mark.parametrize(
    ("data", "claim"),
    [
        (b"", "run.record is not a record of a run"),
        (b"safetensors or so", "is not a record of a run"),
        (MAGIC.replace(b"/2", b"/9") + b"x", r"has the format 'adam-async/record/9'; this version reads"),
        (
            MAGIC.replace(b"/2", b"/1"),
            r"run.record has the format 'adam-async/record/1'.*: repeat the run with",
        ),
        (written()[: len(MAGIC) + 3], "truncated in its header"),
        (written()[:60], "truncated in its header"),
        (written()[:-1], "bytes, but its header lists"),
        (written() + b"x", "bytes, but its header lists"),
        (written()[:-1] + b"x", "damaged in the log of ps-1"),
        (written().replace(b'"numba"', b'"numpy"'), "damaged header: its checksum"),
        (with_header(written(), b'"spec":{"name":"m"}', b'"spec":7'), "a header that this version does not"),
    ],
)
def test_the_error_of_a_file_names_its_damage(data: bytes, claim: str) -> None:
    with pytest.raises(RecordError, match=claim):
        load_record(data, origin="run.record")


def test_no_section_begins_within_another_one() -> None:
    """Each section would be a copy of the same bytes, so a small file would fill the memory."""
    first = b'"sections":[{"home":"ps-0","size":6,'
    back = b'"sections":[{"home":"ps-0","size":6,"crc":%d},{"home":"ps-0","size":-6,"crc":0},' % crc32(
        b"orders"
    )
    data = with_header(written(), first, back + first.partition(b"[")[2])

    with pytest.raises(RecordError, match=r"does not read: .*>= 0 - at `\$.sections\[1\].size`"):
        load_record(data, origin="run.record")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"versions":[4,4]', b'"versions":[4,-1]'),
        (b'"versions":[4,4]', b'"versions":[4,18446744073709551616]'),
        (b'"skipped_groups":[]', b'"skipped_groups":[[-1,2]]'),
        (b'"epoch":1', b'"epoch":-1'),
    ],
)
def test_a_header_has_no_numbers_that_a_replay_cannot_calculate_with(old: bytes, new: bytes) -> None:
    data = with_header(written(), old, new)

    assert new in data
    with pytest.raises(RecordError, match="has a header that this version does not read"):
        load_record(data, origin="run.record")
