"""The log of a bundle is read back as it was written, and damage is named."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.parameter_server import replay_log
from adam_async.parameter_server.replay_log import (
    ENTRY,
    JOINED,
    MOST_CLOCK,
    NOT_APPLIED,
    SKIPPED,
    SUMMED,
    OrderLog,
    ReplicaGeneration,
    read_order_log,
)

big = st.integers(0, 2**64 - 1)
clients = st.lists(st.tuples(st.integers(-1, 1023), big, big), min_size=1, max_size=4, unique=True)
notes = st.tuples(
    st.sampled_from([3, 5, 90]), st.integers(0, 2**32 - 1), st.integers(0, 3), st.integers(0, 15)
)


def bytes_of(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


@given(clients=clients, notes=st.lists(notes, max_size=30))
def test_a_log_is_read_as_it_was_noted(clients, notes):
    log, expected, steps = OrderLog([3, 5, 90]), {3: [], 5: [], 90: []}, {}
    for shard, clock, which, flags in notes:
        client = clients[which % len(clients)]
        log.note(shard, clock, log.client(*client), flags)
        log.note_reads(clock, log.client(*client), bytes_of(b"r" * flags))
        expected[shard].append((clock, client, flags))
        known = steps.setdefault(client, [])
        if not known or clock > known[-1][0]:
            known.append((clock, b"r" * flags))
    data = log.packed()
    found = read_order_log(data)
    known = [(each.replica, each.session, each.incarnation) for each in found.clients]
    assert {
        shard: [(int(each["clock"]), known[each["client"]], int(each["flags"])) for each in entries]
        for shard, entries in found.entries.items()
    } == expected
    read = {client: [] for client in steps}
    for step in found.steps:
        read[known[step.client]].append((step.clock, step.reads))
    assert read == steps
    assert log.packed() is data


def test_an_entry_takes_eight_bytes_and_its_flags_are_bits_of_their_own():
    assert ENTRY.itemsize == 8
    assert JOINED | NOT_APPLIED | SUMMED | SKIPPED == JOINED + NOT_APPLIED + SUMMED + SKIPPED
    log = OrderLog([1])
    before = len(log.packed())
    log.note(1, 7, log.client(0, 1, 1), JOINED | NOT_APPLIED)
    assert len(log.packed()) == before + 24 + 8


def test_the_reads_of_a_step_are_noted_once_however_many_messages_it_has():
    log = OrderLog([1])
    for clock in (1, 2, 1, 2, 3):
        log.note_reads(clock, log.client(0, 1, 1), bytes_of(b"%d" % clock))

    assert [step.reads for step in read_order_log(log.packed()).steps] == [b"1", b"2", b"3"]


def test_a_log_that_is_full_gives_up_and_frees_its_memory(monkeypatch):
    monkeypatch.setattr(replay_log, "MOST_LOG_BYTES", 100 << 20)
    log = OrderLog([1])
    log.note_reads(1, log.client(0, 1, 1), np.zeros(60 << 20, np.uint8))
    assert not log.fault
    log.note_reads(2, log.client(0, 1, 1), np.zeros(60 << 20, np.uint8))
    log.note(1, 1, log.client(0, 1, 1), 0)

    assert log.fault == "it would exceed 100 MiB: record fewer epochs, or larger groups"
    assert not log._steps
    assert not log._entries[1]


def test_a_log_ends_with_what_it_cannot_hold(monkeypatch):
    log = OrderLog([1])
    log.note(1, MOST_CLOCK + 1, log.client(0, 1, 1), 0)
    assert log.fault == f"a push has clock {MOST_CLOCK + 1}, {MOST_CLOCK} is the highest"

    monkeypatch.setattr(replay_log, "MOST_CLIENTS", 2)
    log = OrderLog([1])
    for number in range(3):
        log.note(1, 1, log.client(0, 1, number), 0)
    assert log.fault == "more than 2 replica generations pushed"


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda data: b"adamord9" + data[8:], "begins with b'adamord2', not b'adamord9'"),
        (lambda data: data[:10], "of 10 bytes has no counts"),
        (lambda data: data[:8] + b"\1\0\1" + data[11:], "has 65537 clients, and 65536 are the most"),
        (lambda data: data[:40], "of 40 bytes ends in its tables, which take 64"),
        (lambda data: data[:-1], "should have 87 bytes by its tables, but has 86"),
        (lambda data: data + b"x", "should have 87 bytes by its tables, but has 88"),
        (lambda data: data[:68] + b"\1" + data[69:], "of shard 1 are of a client that an order log does not"),
        (lambda data: data[:76] + b"\1" + data[77:], "the step of client 1 with clock 7 does not fit"),
        (lambda data: data[:80] + b"\4" + data[81:], "the step of client 0 with clock 7 does not fit"),
        (lambda data: data[:80] + b"\2" + data[81:], "of 87 bytes ends in the head of a step"),
    ],
)
def test_a_damaged_log_is_refused_with_what_is_wrong(damage, text):
    log = OrderLog([1])
    client = log.client(0, 1, 1)
    log.note(1, 7, client, 0)
    log.note_reads(7, client, bytes_of(b"abc"))
    assert read_order_log(log.packed()).clients == (ReplicaGeneration(0, 1, 1),)
    with pytest.raises(ValueError, match=text):
        read_order_log(damage(log.packed()))
