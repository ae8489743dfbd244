"""The worlds and the fixed runs can fail: each safeguard that is removed is missed by one of them."""

import pytest

from tests.adam_async.controller.consensus.ablations import seeds_until_found, without
from tests.adam_async.parameter_server.replication.ablations import ABLATIONS
from tests.adam_async.parameter_server.replication.fuzzed_bundle import run_seed

LIMIT = 300


@pytest.mark.thorough
@pytest.mark.parametrize("ablation", [a for a in ABLATIONS if a.story is None], ids=lambda a: a.name)
def test_a_random_run_without_a_safeguard_fails(ablation):
    taken, found = seeds_until_found(ablation, run_seed, LIMIT)
    assert taken, found


@pytest.mark.parametrize("ablation", [a for a in ABLATIONS if a.story is not None], ids=lambda a: a.name)
def test_a_fixed_run_without_its_safeguard_fails(ablation):
    with without(ablation), pytest.raises(AssertionError):
        ablation.story()
