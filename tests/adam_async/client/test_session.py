"""Numbers, open exchanges and repetitions, without a link."""

import numpy as np
import pytest

from adam_async.client.session import Session, SessionIdentity, ShardNumbers
from adam_async.messages import (
    DUPLICATE,
    GAP,
    NOT_PRIMARY,
    REFUSED,
    Part,
    Problem,
    Push,
    Pushed,
    pack,
    unpack,
)
from adam_async.run.ids import ShardId
from transport import RemoteProtocolError

A, B, C = ShardId(0), ShardId(1), ShardId(2)
IDENTITY = SessionIdentity(store="run", session=1, incarnation=1, replica=0, generation=1)


class Collecting(Session):
    """A session whose exchanges are collected instead of sent, and its only call."""

    def __init__(self, limit=8, copies=False):
        options = {"answer_s": 1.0, "copies": copies, "on_progress": int, "running_loop": str}
        super().__init__(IDENTITY, limit=limit, **options)
        self.sent, self.answers, self.frees, self.again = [], [], 0, []

    def push_to(self, *shards, tensors=None):
        self.push(
            tensors or (np.ones(len(shards), np.float32),),
            self,
            7,
            parts=(Part(False, len(shards)),),
            shards=shards,
            versions=0,
            own_applied=0,
            clock=1,
            weight=1,
            rate=1.0,
        )
        return self.sent[-1]

    def send_now(self, exchange):
        exchange.sent += 1
        exchange.reading += 1

    def _send(self, exchange):
        self.sent.append(exchange)

    def refused(self, exchange, error):
        self.again.append((exchange, error))

    def free(self, call):
        assert call is self
        self.frees += 1

    def pushed(self, number, answer, values):
        self.answers.append((number, answer.versions, values))


def answer(*problems, shards=1):
    return pack(Pushed(versions=1, problems=problems))


def test_numbers_begin_at_one_and_leave_no_gap_on_any_shard():
    session = ShardNumbers()
    assert session.next((A, B)) == 1
    assert session.all() == {A: 1, B: 1}
    assert session.next((B, C)) == (2, 1)
    assert session.next((A, B, C)) == (2, 3, 2)
    assert session.all() == {A: 2, B: 3, C: 2}
    assert session.next((A, B, C)) == (3, 4, 3)
    assert session.all() == {A: 3, B: 4, C: 3}


def test_several_steps_take_as_many_numbers_on_each_of_their_shards():
    session = ShardNumbers()
    assert session.next_steps((A, B), 3) == 1
    assert session.next_steps((A, B), 1) == 4
    assert session.next_steps((C,), 2) == 1
    assert session.next((A, B, C)) == (5, 5, 3)


def test_a_push_that_has_no_memory_for_its_copies_uses_no_number():
    class Large:
        def copy(self):
            raise MemoryError

    session = Collecting(copies=True)
    with pytest.raises(MemoryError):
        session.push_to(A, B, tensors=(Large(),))
    assert (session.numbers.all(), session.open, session.open_pushes) == ({}, {}, 0)


def test_open_pushes_are_sent_again_in_order_and_under_their_numbers():
    session = Collecting()
    pushes = [session.push_to(A) for _ in range(4)]
    for push in pushes[:3]:
        session.send_now(push)
    pushes[1].arrived(answer())
    assert session.to_send_again() == [pushes[0], pushes[2], pushes[3]]
    assert session.counts.resent == 2, "what was never sent is not sent again"
    assert [unpack(each.message, Push).numbers for each in session.to_send_again()] == [1, 3, 4]


def test_an_answer_that_settles_nothing_keeps_the_push_open_and_asks_for_the_cure():
    session = Collecting()
    push = session.push_to(A)
    push.arrived(answer(Problem(0, GAP, 4)))
    assert session.again == [(push, None)]
    assert session.to_send_again() == [push]


def test_a_second_answer_to_the_same_question_is_not_looked_at():
    session = Collecting()
    push = session.push_to(A)
    push.arrived(answer())
    push.arrived(answer())
    assert session.answers == [(7, 1, None)]


def test_each_answer_makes_room_for_a_push():
    session = Collecting(limit=2)
    pushes = [session.push_to(A) for _ in range(2)]
    session.tick((A,), 1, 0)
    assert session.open_pushes == session.limit
    pushes[0].arrived(answer())
    assert session.open_pushes == 1


@pytest.mark.parametrize("first", ["settled", "released"])
def test_memory_is_free_once_when_it_is_both_settled_and_released(first):
    session = Collecting()
    push = session.push_to(A)
    session.send_now(push)
    steps = [push.settle, push.released]
    if first == "released":
        steps.reverse()
    steps[0]()
    assert session.frees == 0
    steps[1]()
    assert session.frees == 1


def test_memory_is_not_free_while_any_of_its_sendings_still_reads_it():
    session = Collecting()
    push = session.push_to(A)
    session.send_now(push)
    session.send_now(push)
    push.settle()
    push.released()
    assert session.frees == 0
    push.released()
    assert session.frees == 1


@pytest.mark.parametrize(
    ("problems", "settled", "counts"),
    [
        ((), True, (3, 0, 0)),
        ((Problem(0, DUPLICATE), Problem(2, REFUSED)), True, (3, 1, 1)),
        ((Problem(0, REFUSED), Problem(1, GAP, 4)), False, (0, 0, 1)),
        ((Problem(1, NOT_PRIMARY),), False, (0, 0, 0)),
    ],
)
def test_a_push_is_settled_unless_a_shard_has_a_gap_or_another_primary(problems, settled, counts):
    session = Collecting()
    session.push_to(A, B, C).arrived(answer(*problems, shards=3))
    assert (not session.open) == settled
    told = session.counts
    assert (told.acknowledged, told.duplicates, told.refused) == counts


def test_an_answer_that_its_call_refuses_counts_no_push():
    session = Collecting()
    exchange = session.push_to(A)

    def pushed(number, answer, values):
        raise RemoteProtocolError("versions", "they do not fit")

    session.pushed = pushed
    exchange.arrived(answer())
    del session.pushed
    assert session.counts.acknowledged == 0
    exchange.arrived(answer())
    assert session.counts.acknowledged == 1
