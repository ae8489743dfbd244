"""Groups in worlds where anything may fail keep their promises, whatever the seed."""

import os
from collections import Counter

import pytest

from tests.adam_async.controller.consensus.fuzzed_group import FuzzedGroup, run_seed

FAST_SEEDS = 60
SLOW_SEEDS = int(os.environ.get("ADAM_CONSENSUS_SEEDS", "2000"))

MARKS = (
    "crash",
    "cut off",
    "disk lost",
    "election",
    "link cut",
    "majority only",
    "membership",
    "read",
    "snapshot",
    "snapshot received",
    "torn tail",
    "transfer",
    "write",
)
"""Events that must happen in some worlds, or the worlds prove nothing about them."""


@pytest.mark.thorough
def test_all_promises_are_kept_and_all_that_is_hard_happens():
    marks = Counter()
    for seed in range(FAST_SEEDS):
        marks += run_seed(seed)
    assert [name for name in MARKS if not marks[name]] == []


def test_a_seed_is_the_same_world_again():
    def story(seed):
        group = FuzzedGroup(seed)
        return group.run(), group.now, group.completed, group.digests

    assert story(3) == story(3)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_promises_are_kept_in_many_more_worlds():
    for seed in range(FAST_SEEDS, FAST_SEEDS + SLOW_SEEDS):
        run_seed(seed)
