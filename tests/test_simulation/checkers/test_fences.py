"""Answers of bundles that are not final for ended generations are found by the push that shows it."""

import pytest

from adam_async.run.ids import ShardId
from tests.adam_async.parameter_server.timelines import shard_of
from tests.simulation.checkers.fences import INVARIANT, Fence
from tests.simulation.scenario import Violation

ENDED, LIVE = (7, 1), (7, 2)
"""Sessions of an ended generation and of a live one."""


def shards_with(**pushes):
    """Two shards, and the number of the last counted and ordered push of each session on shard 1."""
    shards = {ShardId(number): shard_of(number) for number in (0, 1)}
    tables = shards[ShardId(1)].tables
    for session, (counted, ordered) in {ENDED: pushes["ended"], LIVE: pushes.get("live", (0, 0))}.items():
        tables.last_number[session], tables.ordered[session] = counted, ordered
    return shards


def found(action):
    with pytest.raises(Violation) as raised:
        action()
    assert raised.value.invariant == INVARIANT
    return raised.value.text


def test_later_pushes_of_live_generations_pass():
    fence = Fence("bundle ps-0", {1}, shards_with(ended=(3, 3), live=(1, 2)))
    fence.check(shards_with(ended=(3, 3), live=(4, 5)))
    fence.check(shards_with(ended=(0, 0), live=(4, 5)))


def test_an_answer_before_a_push_of_an_ended_generation_is_counted_is_found():
    text = found(lambda: Fence("bundle ps-0", {1}, shards_with(ended=(3, 4))))
    assert text == "bundle ps-0 answered while push 4 of ended generation 1 waits on shard 1"


@pytest.mark.parametrize("later", [(3, 4), (4, 4), (4, 0)])
def test_a_push_of_an_ended_generation_after_the_answer_is_found_also_at_a_new_primary(later):
    fence = Fence("bundle ps-0", {1}, shards_with(ended=(3, 3)))
    assert "of ended generation 1 on shard 1, after 3" in found(lambda: fence.check(shards_with(ended=later)))


def test_the_first_push_of_an_ended_generation_after_the_answer_is_found():
    fence = Fence("bundle ps-0", {1}, {ShardId(0): shard_of(0)})
    assert "after 0" in found(lambda: fence.check(shards_with(ended=(1, 1))))
