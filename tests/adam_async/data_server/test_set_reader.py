"""The answers of several bundles, merged: what all shards have, and what others lack."""

from adam_async.data_server.set_reader import merged
from adam_async.messages import BundleSets


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
