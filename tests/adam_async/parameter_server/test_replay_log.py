"""The order log of a server is read back as it was written, and damage is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.parameter_server.replay_log import (
    ENTRY,
    JOINED,
    NOT_APPLIED,
    SUMMED,
    OrderLog,
    read_order_log,
)

big = st.integers(0, 2**64 - 1)
replica_generations = st.lists(
    st.tuples(st.integers(-1, 1023), big, big), min_size=1, max_size=4, unique=True
)
notes = st.tuples(
    st.sampled_from([3, 5, 90]), st.integers(0, 2**32 - 1), st.integers(0, 3), st.integers(0, 7)
)


@given(replica_generations=replica_generations, notes=st.lists(notes, max_size=30))
def test_a_log_is_read_as_it_was_noted(replica_generations, notes):
    log, expected = OrderLog([3, 5, 90]), {3: [], 5: [], 90: []}
    for shard, clock, who, flags in notes:
        replica_generation = log.replica_generation(*replica_generations[who % len(replica_generations)])
        log.note(shard, clock, replica_generation, flags)
        expected[shard].append((clock, replica_generations[who % len(replica_generations)], flags))
    data = log.packed()
    known, entries = read_order_log(data)
    assert {
        shard: [
            (
                int(each["clock"]),
                (known[each["life"]].replica, known[each["life"]].session, known[each["life"]].incarnation),
                int(each["flags"]),
            )
            for each in found
        ]
        for shard, found in entries.items()
    } == expected
    assert log.packed() is data


def test_an_entry_takes_eight_bytes_and_its_flags_are_bits_of_their_own():
    assert ENTRY.itemsize == 8
    assert JOINED | NOT_APPLIED | SUMMED == JOINED + NOT_APPLIED + SUMMED
    log = OrderLog([1])
    before = len(log.packed())
    log.note(1, 7, log.replica_generation(0, 1, 1), JOINED | NOT_APPLIED)
    assert len(log.packed()) == before + 24 + 8


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda data: b"adamord9" + data[8:], "begins with b'adamord1', not b'adamord9'"),
        (lambda data: data[:10], "of 10 bytes has no counts"),
        (lambda data: data[:30], "of 30 bytes ends in its tables, which take 56"),
        (lambda data: data[:-1], "should have 64 bytes by its tables, but has 63"),
        (lambda data: data + b"x", "should have 64 bytes by its tables, but has 65"),
    ],
)
def test_a_damaged_log_is_refused_with_what_is_wrong(damage, text):
    log = OrderLog([1])
    log.note(1, 7, log.replica_generation(0, 1, 1), 0)
    with pytest.raises(ValueError, match=text):
        read_order_log(damage(log.packed()))
