"""Pulls that wait for clocks: their number, their cost to other events, and their end."""

from types import SimpleNamespace

import numpy as np
import pytest

from adam_async.parameter_server import waiting_requests
from adam_async.parameter_server.events import QueuedPull, Refuse, SendValues
from adam_async.parameter_server.shard import Shard
from adam_async.parameter_server.waiting_requests import WaitingRequests
from adam_async.run.ids import BucketId, Replica, ShardId
from adam_async.run.shard_table import ShardSpec

ZERO = Replica(0)


def shard_of(number, clock=0):
    spec = ShardSpec(id=ShardId(number), tensor="t", start=0, stop=2, row_size=1, bucket=BucketId(0))
    shard = Shard(spec=spec, values=np.zeros(2), rule_state={})
    shard.clocks = {ZERO: clock}
    return shard


def advance(shard, clock):
    shard.separate().clocks[ZERO] = clock


def pull(request, shards, clock, *, deadline=1.0, link="a"):
    return QueuedPull(request, tuple(shards), clock, deadline, link)


def requests(effects):
    return [effect.request for effect in effects]


def test_ready_pulls_are_answered_in_the_order_of_their_arrival():
    one, two = shard_of(1), shard_of(2)
    waiting = WaitingRequests()
    for number, (shards, clock) in enumerate([((two,), 1), ((one, two), 2), ((one,), 1), ((one,), 3)]):
        assert waiting.take(pull(number, shards, clock)) == []
    advance(one, 2)
    advance(two, 1)
    assert requests(waiting.answer()) == [0, 2]
    advance(two, 2)
    assert requests(waiting.answer()) == [1]
    assert waiting.answer() == []
    advance(one, 3)
    (answer,) = waiting.answer()
    assert isinstance(answer, SendValues)
    assert len(waiting) == 0
    assert waiting.next_deadline() is None


@pytest.mark.parametrize(("of_link", "in_all"), [(3, 100), (100, 3)])
def test_pulls_that_wait_are_bounded_and_room_returns(of_link, in_all, monkeypatch):
    monkeypatch.setattr(waiting_requests, "MOST_OF_LINK", of_link)
    monkeypatch.setattr(waiting_requests, "MOST_PULLS", in_all)
    shard, waiting = shard_of(1), WaitingRequests()
    for number in range(3):
        assert waiting.take(pull(number, [shard], 1)) == []
    (refusal,) = waiting.take(pull(3, [shard], 1))
    assert isinstance(refusal, Refuse)
    assert (refusal.request, refusal.code) == (3, "busy")
    other = waiting.take(pull(4, [shard], 1, link="b"))
    assert bool(other) == (in_all == 3)
    advance(shard, 1)
    waiting.answer()
    assert waiting.take(pull(5, [shard], 2)) == []


def test_pulls_for_a_clock_that_no_replica_reaches_cost_other_events_nothing(monkeypatch):
    shard, waiting = shard_of(1), WaitingRequests()
    for number in range(1000):
        waiting.take(pull(number, [shard], 1 << 40))
    looked_at = []
    real = waiting_requests._answer
    monkeypatch.setattr(waiting_requests, "_answer", lambda each: looked_at.append(each) or real(each))
    for clock in range(1, 100):
        advance(shard, clock)
        assert waiting.answer() == []
    assert looked_at == []


def test_pulls_are_given_up_at_their_deadline_some_at_a_time_and_leave_nothing(monkeypatch):
    monkeypatch.setattr(waiting_requests, "GIVEN_UP_TOGETHER", 10)
    monkeypatch.setattr(waiting_requests, "MOST_STALE", 20)
    shard, waiting = shard_of(1), WaitingRequests()
    for again in range(4):
        for number in range(25):
            waiting.take(pull(number, [shard], 1 << 40, deadline=again + number / 100))
        found = []
        while (deadline := waiting.next_deadline()) is not None and deadline <= again + 1:
            late = waiting.give_up(again + 1)
            assert 0 < len(late) <= 10
            found += late
        assert requests(found) == list(range(25))
        assert all(each.body.behind == (ZERO,) for each in found)
        assert sum(map(len, waiting._by_shard.values())) <= 21 + 25


def test_pulls_of_closed_links_leave():
    shard, waiting = shard_of(1), WaitingRequests()
    first, second = SimpleNamespace(is_open=False), SimpleNamespace(is_open=True)
    for request in (first, second):
        waiting.take(pull(request, [shard], 1))
    waiting.keep(lambda request: request.is_open)
    advance(shard, 1)
    assert requests(waiting.answer()) == [second]
