"""A node reads its records back from disk; a torn end is cut off, and damage before it is refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.controller.consensus import (
    DamagedLog,
    Entry,
    Members,
    Saved,
    Snapshot,
    Writer,
    bootstrapped,
    recover,
)
from adam_async.controller.consensus.records import Ballot, Born, Entries
from adam_async.errors import ConfigError
from adam_async.persistence.frames import frame_head


def entries(*indices, term=2):
    return tuple(Entry(index, term, b"command") for index in indices)


FRAMES = (
    bootstrapped("a", "abc").records(),
    (Ballot(2, "b"),),
    (Entries(entries(2, 3, 4)),),
    (Ballot(3, None), Entries(entries(4, 5, term=3))),
    (Snapshot(3, 2, Members(("a", "b")), b"state"),),
    (Entries(entries(6, term=3)),),
)
END = Saved(
    me="a", term=3, snapshot=Snapshot(3, 2, Members(("a", "b")), b"state"), entries=entries(4, 5, 6, term=3)
)


def written(frames=FRAMES, *, synced=True):
    """A file, and where its frames begin."""
    writer, data, begins = Writer(), b"", []
    for records in frames:
        begins.append(writer.position)
        data += writer.frame(records)
        if synced:
            writer.durable(writer.position)
    return data, [*begins, len(data)]


def test_a_saved_state_is_recovered():
    data, _ = written()
    assert recover(data, origin="file") == (END, len(data))


def test_a_new_file_of_the_same_state_is_read_as_the_same():
    data, _ = written([END.records()])
    assert recover(data, origin="file") == (END, len(data))


def test_an_empty_file_holds_nothing():
    assert recover(b"", origin="file") == (None, 0)


@given(st.data())
def test_a_file_that_ends_anywhere_holds_all_whole_frames_and_ends_after_them(data):
    whole, begins = written()
    cut = data.draw(st.integers(0, len(whole)))
    saved, end = recover(whole[:cut], origin="file")
    assert end == max(begin for begin in begins if begin <= cut)
    assert (saved is None) == (end == 0)


@given(st.data())
def test_any_damage_before_the_last_synced_frame_is_refused(data):
    """A change of any one byte makes the reader neither skip a record nor read a wrong one."""
    whole, begins = written()
    at = data.draw(st.integers(0, begins[-2] - 1))
    damaged = bytearray(whole)
    damaged[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DamagedLog, match=f"file is damaged at byte {max(b for b in begins if b <= at)}"):
        recover(bytes(damaged), origin="file")


@given(st.data())
def test_damage_to_what_was_not_synced_is_a_torn_end_though_whole_frames_follow(data):
    whole, begins = written(synced=False)
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytearray(whole)
    damaged[at] ^= data.draw(st.integers(1, 255))
    _, end = recover(bytes(damaged), origin="file")
    assert end == max(begin for begin in begins if begin <= at)


def test_a_frame_that_lies_elsewhere_is_not_read():
    data, begins = written()
    missing = data[: begins[1]] + data[begins[2] :]
    assert recover(missing, origin="file")[1] == begins[1]
    swapped = (
        data[: begins[2]] + data[begins[1] : begins[2]].ljust(begins[3] - begins[2], b"-") + data[begins[3] :]
    )
    with pytest.raises(DamagedLog, match=f"file is damaged at byte {begins[2]}"):
        recover(swapped, origin="file")


def test_zeros_after_the_end_are_no_frame():
    data, _ = written()
    assert recover(data + bytes(4096), origin="file") == (END, len(data))


def test_the_writer_goes_on_where_the_frames_end():
    data, begins = written(FRAMES[:3])
    saved, end = recover(data[: begins[2] + 5], origin="file")
    assert saved.entries == ()
    more = Writer(end).frame((Entries(entries(2)),))
    saved, _ = recover(data[:end] + more, origin="file")
    assert saved.entries == entries(2)


def test_entries_that_leave_a_gap_are_refused():
    data, begins = written([bootstrapped("a", "abc").records(), (Entries(entries(5)),)])
    with pytest.raises(DamagedLog, match=f"byte {begins[1]}: entry 5 comes after 1; some are missing"):
        recover(data, origin="file")


def test_a_file_that_does_not_say_whose_it_is_is_refused():
    data, _ = written([(Ballot(2, "b"),)])
    with pytest.raises(DamagedLog, match="does not begin with its node's identity"):
        recover(data, origin="file")


def test_a_record_of_another_version_is_refused():
    class Later(msgspec.Struct, tag="later"):
        pass

    data = Writer().frame((Born("a"), Later()))
    with pytest.raises(DamagedLog, match="begins what this version does not read: Invalid value 'later'"):
        recover(data, origin="file")


def test_the_first_node_of_a_group_is_one_of_its_voters():
    with pytest.raises(ValueError, match="d begins a group of a, b, c, but is not one of them"):
        bootstrapped("d", "abc")


@pytest.mark.parametrize(
    ("head", "found"),
    [
        ({"format": "adam-async/controller-log/9", "me": 7}, "'adam-async/controller-log/9'"),
        ({"format": 2, "other": "fields"}, "'2'"),
        ({"me": "a"}, "'none'"),
    ],
)
def test_a_file_of_another_format_is_named_with_format_and_cure_whatever_its_fields(head, found):
    payload = msgspec.msgpack.encode([{"type": "born", **head}, {"type": "later"}])
    data = frame_head([payload], position=0, durable=0) + payload

    with pytest.raises(ConfigError, match=f"^here has the format {found}; this version reads .*: go on with"):
        recover(data, origin="here")
