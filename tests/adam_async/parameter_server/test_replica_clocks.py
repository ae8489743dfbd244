"""Ended generations of replicas are remembered in bounded memory, whichever replicas they are of."""

import pytest

from adam_async.parameter_server import replica_clocks
from adam_async.parameter_server.replica_clocks import REMEMBERED, EndedGenerations
from adam_async.run.ids import Replica


@pytest.fixture(autouse=True)
def few_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_clocks, "OVER_KEPT", 20)


def test_replicas_that_leave_for_good_take_bounded_memory() -> None:
    ended = EndedGenerations()
    dropped = [number for number in range(100) for number in ended.end(Replica(number), number)]
    over, newest = ended.state()
    assert dropped == list(range(80))
    assert over == [(number, number) for number in range(80, 100)]
    assert newest == {number: [number] for number in range(80, 100)}
    assert ended.forgotten == 80


def test_each_generation_is_dropped_once() -> None:
    ended = EndedGenerations()
    dropped: list[int] = []
    for number in range(200):
        dropped += ended.end(Replica(number % 3 if number < 100 else number), number)
        over, newest = ended.state()
        kept = {each for numbers in newest.values() for each in numbers}
        assert len(over) <= 20
        assert kept <= {each for _, each in over}
        assert all(len(numbers) <= REMEMBERED for numbers in newest.values())
        assert sorted([*dropped, *kept]) == list(range(number + 1))
        assert all(ended.is_forgotten(Replica(replica), each) == (each not in kept) for replica, each in over)


def test_a_generation_that_is_live_again_is_not_ended_and_may_end_again() -> None:
    ended = EndedGenerations()
    assert ended.end(Replica(1), 5) == []
    ended.begin({Replica(1): 5, Replica(2): 7})
    assert (Replica(1), 5) not in ended
    for number in range(30):
        ended.end(Replica(2), 100 + number)
    assert ended.end(Replica(1), 5) == []
    assert (Replica(1), 5) in ended
