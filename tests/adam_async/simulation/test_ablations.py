"""The simulator finds bugs: a few seeds fail after the removal of a safeguard from shipped code."""

import logging
from functools import partial

import pytest

from adam_async.controller.client import Membership
from adam_async.controller.failure_detector import Suspicion
from adam_async.parameter_server.session import Session
from adam_async.simulation.nodes import simulate
from tests.ablations.patches import apply_pushes_again, keep_groups_of_lost_replicas, replaces
from tests.adam_async.simulation.test_shipped import ROUGH as ROUGH_LINKS
from tests.adam_async.simulation.test_shipped import crash_and_cut
from tests.adam_async.simulation.test_shipped_training import (
    ROUGH,
    count_under_faults,
    train_and_lose_a_worker,
)

SEEDS = 10


@replaces(Session, "to_send_again")
def send_pushes_once(*_):
    """Send no push again."""
    return []


@replaces(Membership, "_join")
async def join_once(join, self):
    """Join only while the map is new."""
    if self.map.version < 4:
        await join(self)


@replaces(Suspicion, "link_lost")
def suspect_nobody(*_, **__):
    """Suspect no node with a broken link."""


COUNTING = partial(simulate, count_under_faults, conditions=ROUGH, limit_s=200.0)
MEMBERS = partial(simulate, crash_and_cut, conditions=ROUGH_LINKS, limit_s=200.0)
LOSING = partial(simulate, partial(train_and_lose_a_worker, how="crash"), conditions=ROUGH, limit_s=200.0)

SAFEGUARDS = {
    "a repeated push is applied once": (COUNTING, apply_pushes_again),
    "an unanswered push is sent again": (COUNTING, send_pushes_once),
    "a lost member joins again": (MEMBERS, join_once),
    "a node with a broken link is lost after the grace period": (MEMBERS, suspect_nobody),
    "other replicas get the groups of a lost one": (LOSING, keep_groups_of_lost_replicas),
}


def fails(run):
    """Whether a run fails on one of the seeds."""
    for seed in range(SEEDS):
        try:
            run(seed=seed, shuffled=seed % 2 == 1)
        except Exception:
            return True
    return False


@pytest.mark.thorough
@pytest.mark.parametrize(("run", "patch"), SAFEGUARDS.values(), ids=SAFEGUARDS)
def test_a_seed_fails_after_the_removal_of_a_safeguard(run, patch, monkeypatch):
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    patch(monkeypatch.setattr)

    assert fails(run)
