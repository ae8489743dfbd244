"""Numbers, open exchanges and repetitions, without a link."""

import pytest

from adam_async.messages import DUPLICATE, GAP, NOT_PRIMARY, REFUSED, Problem, Pushed, Tick, pack
from adam_async.parameter_server.session import Exchange, Session
from adam_async.run.ids import ShardId
from transport import Message

A, B, C = ShardId(0), ShardId(1), ShardId(2)
QUESTION = pack(Tick(store="run", session=1, incarnation=1, replica=0, clock=1, generation=1, shards=(0,)))


def exchange(settles=True, **options):
    return Exchange(message=QUESTION, on_answer=lambda _: settles, **options)


def test_numbers_begin_at_one_and_leave_no_gap_on_any_shard():
    session = Session()
    assert session.next_numbers((A, B)) == (1, 1)
    assert session.numbers() == {A: 1, B: 1}
    assert session.next_numbers((B, C)) == (2, 1)
    assert session.next_numbers((A, B, C)) == (2, 3, 2)
    assert session.numbers() == {A: 2, B: 3, C: 2}
    assert session.next_numbers((A, B, C)) == (3, 4, 3)
    assert session.numbers() == {A: 3, B: 4, C: 3}


def test_several_steps_take_as_many_numbers_on_each_of_their_shards():
    session = Session()
    assert session.next_steps((A, B), 3) == 1
    assert session.next_steps((A, B), 1) == 4
    assert session.next_steps((C,), 2) == 1
    assert session.next_numbers((A, B, C)) == (5, 5, 3)


def test_open_exchanges_are_sent_again_in_the_order_of_their_first_sending():
    session = Session()
    said = [exchange() for _ in range(4)]
    for one in said:
        session.opened(one)
    for one in said[:3]:
        one.sending()
    assert session.answered(said[1], QUESTION)
    assert session.to_send_again() == [said[0], said[2], said[3]]
    assert session.counts.resent == 2, "what was never sent is not sent again"


def test_a_push_is_sent_again_under_its_numbers():
    session = Session()
    meta = {"shards": (A, B), "numbers": session.next_numbers((A, B))}
    push = Exchange(message=Message(type="Push", meta=meta, tensors=[]), on_answer=lambda _: True)
    session.opened(push)
    push.sending()

    assert [each.message.meta["numbers"] for each in session.to_send_again()] == [(1, 1)]


def test_an_answer_that_settles_nothing_keeps_the_exchange_open_and_asks_for_the_cure():
    session = Session()
    one = exchange(settles=False)
    session.opened(one)
    assert not session.answered(one, QUESTION)
    assert session.to_send_again() == [one]


def test_a_second_answer_to_the_same_question_is_not_looked_at():
    answers = []
    one = Exchange(message=QUESTION, on_answer=lambda answer: answers.append(answer) or True)
    session = Session()
    session.opened(one)
    assert session.answered(one, QUESTION)
    assert session.answered(one, QUESTION)
    assert answers == [QUESTION]


def test_only_pushes_count_against_the_limit_and_each_answer_makes_room():
    session = Session(limit=2)
    pushes = [exchange(is_push=True) for _ in range(2)]
    for one in (exchange(), *pushes):
        assert session.may_push
        session.opened(one)
    assert not session.may_push
    session.answered(pushes[0], QUESTION)
    assert session.may_push


def release(sending):
    assert sending is not None
    sending()


@pytest.mark.parametrize("first", ["settled", "released"])
def test_memory_is_free_once_when_it_is_both_settled_and_released(first):
    freed = []
    one = exchange(on_free=lambda: freed.append(1))
    sending = one.sending()
    steps = [one.settle, lambda: release(sending)]
    if first == "released":
        steps.reverse()
    steps[0]()
    assert freed == []
    steps[1]()
    assert freed == [1]


def test_memory_is_not_free_while_any_of_its_sendings_still_reads_it():
    freed = []
    one = exchange(on_free=lambda: freed.append(1))
    first, second = one.sending(), one.sending()
    one.settle()
    release(second)
    assert freed == []
    release(first)
    assert freed == [1]
    assert one.sent == 2


def test_a_sending_that_did_not_take_place_is_not_waited_for():
    freed = []
    one = exchange(on_free=lambda: freed.append(1))
    one.sending()
    one.not_sent()
    assert (one.sent, freed) == (0, [])
    one.settle()
    assert freed == [1]


def test_an_exchange_without_memory_needs_no_release():
    assert exchange().sending() is None


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
    session = Session()
    assert session.settle_push(Pushed(versions=(1, 1, 1), problems=problems), 3) == settled
    told = session.counts
    assert (told.acknowledged, told.duplicates, told.refused) == counts
