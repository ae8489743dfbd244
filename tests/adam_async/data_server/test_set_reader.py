"""The answers of several bundles, merged: what all shards have, and what others lack."""

import random

import pytest

from adam_async.data_server.set_reader import merged
from adam_async.messages import BundleSets
from adam_async.run.group_ranges import name_groups


def answer(every=(), some=(), *, trainable=True, clock=0):
    return BundleSets(trainable=trainable, clock=clock), tuple(every), tuple(some)


def test_a_group_is_on_every_shard_or_on_some_or_on_none():
    found = merged([answer((0, 4, 6, 8), (4, 5)), answer((0, 2, 6, 7), (2, 3))], 10)
    assert found == ({0, 1, 6}, {2, 3, 4, 7}, 0)


def test_a_bundle_without_trainable_shards_restricts_nothing_and_has_a_clock():
    assert merged([answer((0, 2), clock=3), answer(trainable=False, clock=7)], 4) == ({0, 1}, set(), 7)


def test_without_any_trainable_shard_no_group_counts_as_trained():
    assert merged([answer(trainable=False), answer(trainable=False)], 4) == (set(), set(), 0)


def test_groups_that_the_epoch_does_not_have_are_left_out():
    assert merged([answer((2, 1 << 32), (0, 1))], 4) == ({2, 3}, {0}, 0)


@pytest.mark.parametrize("seed", range(5))
def test_ranges_are_merged_as_sets_of_numbers_are(seed):
    dice = random.Random(seed)
    for groups in (1, 7, 30):
        every, some = ([*dice.sample(range(40), dice.randrange(12))] for _ in range(2))
        some = [number for number in some if not {number - 1, number, number + 1} & {*every}]
        found = merged([answer(name_groups(1, every)[1:], name_groups(1, some)[1:])], groups)
        assert found[:2] == tuple({n for n in numbers if n < groups} for numbers in (every, some))
