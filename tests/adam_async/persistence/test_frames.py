"""Frames: a reader returns whole ones in their own place, and knows a torn tail from damage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.persistence.frames import (
    HEAD_BYTES,
    ImitatedHeadsError,
    confirming_frame,
    frame_at,
    frame_head,
    frames_beyond,
    frames_from,
)

SALT = b"run/file"
PAYLOADS = (b"", b"one", b"\xabCL1" * 9, bytes(700), b"last")


def written(*, durable: bool, salt: bytes = SALT) -> tuple[bytes, list[int]]:
    """Return the frames of `PAYLOADS`, and their positions with the end."""
    data, positions = b"", []
    for payload in PAYLOADS:
        positions.append(len(data))
        parts = [payload[:1], payload[1:]]
        data += frame_head(
            parts, position=len(data), durable=len(data) if durable else 0, salt=salt
        ) + b"".join(parts)
    return data, [*positions, len(data)]


def test_frames_are_read_where_they_were_written():
    data, positions = written(durable=True)
    frames = list(frames_from(data, 0, SALT))
    assert [frame.position for frame in frames] == positions[:-1]
    assert [data[frame.begin : frame.end] for frame in frames] == list(PAYLOADS)
    assert [frame.durable for frame in frames] == positions[:-1]
    assert frames[-1].end == len(data)


def test_a_part_of_a_file_is_read_by_its_offset():
    data, positions = written(durable=True)
    part = data[positions[2] :]
    assert frame_at(part, positions[2], SALT, offset=positions[2]) == frame_at(data, positions[2], SALT)
    assert frame_at(part, positions[2], SALT) is None


@pytest.mark.parametrize("salt", [b"", b"run/other", b"other/file"])
def test_frames_of_another_file_are_not_read(salt):
    data, _ = written(durable=True)
    assert list(frames_from(data, 0, salt)) == []
    assert list(frames_beyond(data, 0, salt)) == []


@given(st.data())
def test_a_changed_byte_ends_the_frames_and_later_ones_prove_the_damage(data):
    whole, positions = written(durable=True)
    at = data.draw(st.integers(0, positions[-2] - 1))
    damaged = bytearray(whole)
    damaged[at] ^= data.draw(st.integers(1, 255))
    end = max(position for position in positions if position <= at)
    frames = list(frames_from(bytes(damaged), 0, SALT))
    assert (frames[-1].end if frames else 0) == end
    confirming = confirming_frame(bytes(damaged), end, SALT)
    assert confirming is not None
    assert confirming.position > at


@given(st.integers(0, 5000))
def test_unsynced_frames_behind_a_bad_one_prove_nothing(cut):
    whole, positions = written(durable=False)
    at = cut % positions[-1]
    damaged = bytearray(whole)
    damaged[at] ^= 1
    end = max(position for position in positions if position <= at)
    assert confirming_frame(bytes(damaged), end, SALT) is None


def test_a_head_of_a_frame_that_is_cut_short_is_no_frame():
    data, positions = written(durable=True)
    for size in range(positions[1], positions[2]):
        assert frame_at(data[:size], positions[1], SALT) is None
    assert frame_at(data, len(data) - HEAD_BYTES + 1, SALT) is None


def test_a_content_that_imitates_heads_ends_the_search_after_a_linear_time():
    size = 1 << 16
    data = bytearray()
    while len(data) < size:
        data += frame_head([bytes(size)], position=len(data), durable=0, salt=SALT)
    with pytest.raises(ImitatedHeadsError):
        list(frames_beyond(bytes(data), 0, SALT))
