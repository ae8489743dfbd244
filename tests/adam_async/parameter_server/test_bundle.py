"""A bundle is a function of its log: all copies have the same bits, numbers, versions and clocks."""

import pytest

from adam_async.model.rules import Adam, Sgd
from adam_async.run.user_rules import record_of
from tests.adam_async.parameter_server.copies import WEIGHT, Copy, Joiner, RandomPrimary
from tests.adam_async.rules import Picky

MODES = {
    "asp": {},
    "scaled": {"scales": True},
    "ssp": {"clocked": True},
    "bsp": {"clocked": True, "summed_weight": WEIGHT},
}
PICKY = record_of(Picky(most=1.5))
"""A rule of the user that refuses about one push in three."""

RULES = {"sgd": Sgd(), "momentum": Sgd(momentum=0.9), "adam": Adam(), "user": PICKY}
STEPS = 150


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", MODES)
def test_a_copy_that_applies_the_same_entries_has_the_same_bits_after_each(mode, rule, seed):
    primary = RandomPrimary(Copy(RULES[rule], **MODES[mode]), seed)
    member = Copy(RULES[rule], **MODES[mode])
    digests = {0: member.digest()}
    primary.live()

    def follow():
        while member.position < len(primary.log):
            member.take(primary.log[member.position])
            digests[member.position] = member.digest()
        if primary.copy.bundle.idle:
            assert primary.copy.digest() == digests[primary.copy.position]

    for _ in range(STEPS):
        primary.step()
        follow()
    primary.settle()
    follow()
    assert primary.copy.position == member.position == len(primary.log) > 10


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", MODES)
def test_a_copy_that_joins_by_pieces_amid_entries_ends_with_the_same_bits(mode, rule, seed):
    primary = RandomPrimary(Copy(RULES[rule], **MODES[mode]), 100 + seed)
    joiner = Joiner(Copy(RULES[rule], **MODES[mode]))
    dice = primary.random
    primary.live()
    for _ in range(STEPS // 3):
        primary.step()
    while not joiner.is_whole:
        for _ in range(dice.randrange(20)):
            primary.step()
        if primary.copy.bundle.idle:
            joiner.load(primary.copy)
        for _ in range(dice.randrange(6)):
            if joiner.applied < primary.copy.position:
                joiner.take(primary.log[joiner.applied])
    for _ in range(STEPS // 3):
        primary.step()
    primary.settle()
    while joiner.applied < primary.copy.position:
        joiner.take(primary.log[joiner.applied])
    assert joiner.copy.digest() == primary.copy.digest()


@pytest.mark.parametrize("mode", MODES)
def test_all_copies_refuse_the_same_pushes_of_a_rule_of_the_user_and_count_them(mode):
    primary = RandomPrimary(Copy(PICKY, **MODES[mode]), 7)
    member = Copy(PICKY, **MODES[mode])
    primary.live()
    for _ in range(STEPS):
        primary.step()
    primary.settle()
    for parts in primary.log:
        member.take(parts)
    assert member.refusals == primary.copy.refusals
    assert any("step raised ValueError('too large')" in text for text in member.refusals)
    assert any("not finite" in text for text in member.refusals)
    refused = sum(shard.tables.refused for shard in member.bundle.shards.values())
    assert refused >= len(member.refusals) > 2
