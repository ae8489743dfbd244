"""Blocks between two workers: none is lost, none is taken twice; their memory comes back once, not early."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.messages import Block
from adam_async.worker.reliable_stream import Parcel, ReceivingStream, SendingStream
from transport import RemoteProtocolError

PLENTY = 1 << 30


def parcel_of(number, given_back, *, values=1):
    """A block whose tensor holds its number, and where its memory goes back to."""
    return Parcel(Block(0, 1, number, 1), np.full(values, float(number)), given_back.append)


class Stream:
    """One stream between two workers, over links that break; a message is on its way until it is taken."""

    def __init__(self):
        self.sending, self.receiving = SendingStream(), ReceivingStream()
        self.made = []
        self.given_back = []
        self.under_way = deque()
        """First number and parcels of each message; the link holds each parcel."""
        self.late = deque()
        """The same of a link that is over for the sender: it may still be read, or lost."""
        self.taken = []

    def add(self, values):
        parcel = parcel_of(len(self.made), self.given_back, values=values)
        self.made.append(parcel)
        self.sending.add(parcel)

    def send(self, blocks, num_bytes):
        first, parcels = self.sending.take(blocks, num_bytes)
        for parcel in parcels:
            parcel.hold()
        if parcels:
            self.under_way.append((first, parcels))

    def refuse(self, blocks, num_bytes):
        """The link takes nothing now."""
        _, parcels = self.sending.take(blocks, num_bytes)
        for parcel in parcels:
            parcel.hold()
            parcel.let_go()
        self.sending.put_back(parcels)

    def arrive(self):
        if self.under_way:
            self._read(*self.under_way.popleft())

    def arrive_late(self):
        if self.late:
            self._read(*self.late.popleft())

    def _read(self, first, parcels):
        known = self.receiving.accept(first, len(parcels))
        for parcel in parcels:
            self.check_held(parcel)
        self.taken += [int(parcel.tensor[0]) for parcel in parcels[known:]]
        self._lose(parcels)

    def confirm(self):
        self.sending.confirm(self.receiving.received)

    def reconnect(self):
        """Messages on their way may still be read if the receiver has greeted; later ones are lost."""
        for _, parcels in self.late:
            self._lose(parcels)
        self.late, self.under_way = self.under_way, deque()
        self.sending.resume(self.receiving.received)

    def _lose(self, parcels):
        for parcel in parcels:
            parcel.let_go()

    def check_held(self, parcel):
        assert not any(tensor is parcel.tensor for tensor in self.given_back)

    def check(self):
        assert self.taken == list(range(len(self.taken)))
        assert self.receiving.received == len(self.taken)
        assert self.sending.unconfirmed <= len(self.made)
        for parcel in self.made[len(self.made) - self.sending.unconfirmed :]:
            self.check_held(parcel)
        assert len({id(tensor) for tensor in self.given_back}) == len(self.given_back)


AMOUNT = st.integers(1, 5)
BYTES = st.sampled_from([0, 8, 24, PLENTY])
STEPS = st.one_of(
    st.tuples(st.just("add"), AMOUNT),
    st.tuples(st.sampled_from(["send", "refuse"]), AMOUNT, BYTES),
    st.tuples(st.sampled_from(["arrive", "arrive", "arrive_late", "confirm", "reconnect"])),
)


@given(steps=st.lists(STEPS, max_size=60))
def test_over_any_links_each_block_is_taken_once_and_its_memory_comes_back_once(steps):
    stream = Stream()
    for name, *options in steps:
        getattr(stream, name)(*options)
        stream.check()
    for _ in range(2):
        stream.reconnect()
    while stream.sending.waiting:
        stream.send(3, PLENTY)
        stream.arrive()
        stream.check()
    stream.confirm()
    assert stream.taken == list(range(len(stream.made)))
    assert stream.sending.unconfirmed == 0
    assert {id(tensor) for tensor in stream.given_back} == {id(parcel.tensor) for parcel in stream.made}


def sent(sending, blocks=64, num_bytes=PLENTY):
    first, parcels = sending.take(blocks, num_bytes)
    return first, [parcel.block.number for parcel in parcels]


def stream_of(count, *, values=1):
    sending, given_back = SendingStream(), []
    for number in range(count):
        sending.add(parcel_of(number, given_back, values=values))
    return sending, given_back


def test_a_message_has_bounded_blocks_and_bytes_but_always_one_block():
    sending, _ = stream_of(6, values=4)
    assert sent(sending, 2) == (1, [0, 1])
    assert sent(sending, num_bytes=2 * 32) == (3, [2, 3])
    assert sent(sending, num_bytes=2 * 32 - 1) == (5, [4])
    assert sent(sending, num_bytes=1) == (6, [5])
    assert not sending.waiting
    assert sent(sending) == (7, [])


def test_blocks_that_a_link_did_not_take_are_sent_next():
    sending, _ = stream_of(3)
    _, parcels = sending.take(2, PLENTY)
    sending.put_back(parcels)
    assert sending.resent == 0
    assert sent(sending) == (1, [0, 1, 2])


def test_on_a_new_link_sending_goes_on_behind_what_the_other_side_has():
    sending, given_back = stream_of(5)
    sent(sending, 4)
    sending.resume(1)
    assert [values[0] for values in given_back] == [0]
    assert (sending.resent, sending.unconfirmed) == (3, 4)
    assert sent(sending) == (2, [1, 2, 3, 4])


def test_blocks_that_arrived_by_the_old_link_after_the_greeting_are_not_sent_again():
    sending, _ = stream_of(5)
    sent(sending, 4)
    sending.resume(1)
    sending.confirm(3)  # the other side has read on meanwhile
    assert sent(sending) == (4, [3, 4])


def test_confirming_blocks_that_were_never_sent_breaks_a_rule():
    sending, _ = stream_of(5)
    sent(sending, 2)
    with pytest.raises(RemoteProtocolError, match="3 blocks confirmed, and only 2 sent"):
        sending.confirm(3)
    with pytest.raises(RemoteProtocolError, match="3 blocks confirmed, and only 2 sent"):
        sending.resume(3)


def test_forgetting_confirmed_blocks_breaks_a_rule():
    sending, _ = stream_of(5)
    sent(sending)
    sending.confirm(4)
    with pytest.raises(RemoteProtocolError, match="a worker has 3 blocks, and has confirmed 4"):
        sending.resume(3)


def test_blocks_that_were_put_back_were_not_sent():
    sending, _ = stream_of(2)
    _, parcels = sending.take(2, PLENTY)
    sending.put_back(parcels)
    with pytest.raises(RemoteProtocolError, match="1 blocks confirmed, and only 0 sent"):
        sending.resume(1)


def test_a_gap_breaks_a_rule():
    receiving = ReceivingStream()
    assert receiving.accept(1, 2) == 0
    with pytest.raises(RemoteProtocolError, match="block 4 arrived when 3 was next"):
        receiving.accept(4, 1)
    assert receiving.received == 2


def test_blocks_that_come_again_are_counted_and_left_out():
    receiving = ReceivingStream()
    receiving.accept(1, 4)
    assert receiving.accept(3, 4) == 2
    assert receiving.accept(1, 2) == 2
    assert (receiving.received, receiving.duplicates) == (6, 4)


@given(order=st.permutations(["stream", "link", "reader"]))
def test_memory_is_given_back_by_its_last_holder(order):
    given_back = []
    parcel = parcel_of(1, given_back)
    for _ in order[1:]:
        parcel.hold()
    for _ in order:
        assert not given_back
        parcel.let_go()
    assert len(given_back) == 1
    assert given_back[0] is parcel.tensor
