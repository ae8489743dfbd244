"""A bundle in worlds where anything may fail keeps its promises, whatever the seed."""

import os
from collections import Counter

import pytest

from tests.adam_async.parameter_server.replication.fuzzed_bundle import FuzzedBundle, run_seed

FAST_SEEDS = 40
THOROUGH_SEEDS = 140
SLOW_SEEDS = int(os.environ.get("ADAM_REPLICATION_SEEDS", "3000"))

MARKS = (
    "anew",
    "conflict",
    "copied under load",
    "failover",
    "finished",
    "handover",
    "joined",
    "kill",
    "laggard",
    "outcome unknown",
    "takeover",
    "two losses",
)
"""Events that must happen in some worlds, or the worlds prove nothing about them."""


def test_all_promises_are_kept_and_all_that_is_hard_happens():
    marks = Counter()
    for seed in range(FAST_SEEDS):
        marks += run_seed(seed)
    assert [name for name in MARKS if not marks[name]] == []


def test_a_seed_is_the_same_world_again():
    def outcome(seed):
        world = FuzzedBundle(seed)
        return world.run(), world.now, world.digests, world.acked

    assert outcome(3) == outcome(3)


@pytest.mark.thorough
def test_all_promises_are_kept_in_more_worlds():
    for seed in range(FAST_SEEDS, THOROUGH_SEEDS):
        run_seed(seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_promises_are_kept_in_many_more_worlds():
    for seed in range(THOROUGH_SEEDS, THOROUGH_SEEDS + SLOW_SEEDS):
        run_seed(seed)
