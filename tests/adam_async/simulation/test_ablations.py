"""The simulator finds bugs: a few seeds fail after the removal of a safeguard from shipped code."""

import logging
from functools import partial

import pytest

from adam_async.controller.client import Membership
from adam_async.controller.failure_detector import Suspicion
from adam_async.data_server.state import DataState
from adam_async.parameter_server.session import Session
from adam_async.parameter_server.state import ServerState
from adam_async.run.ids import ShardId
from adam_async.simulation.nodes import simulate
from tests.ablations.patches import returns
from tests.adam_async.simulation.test_shipped import ROUGH as ROUGH_LINKS
from tests.adam_async.simulation.test_shipped import crash_and_cut
from tests.adam_async.simulation.test_shipped_training import (
    ROUGH,
    count_under_faults,
    train_and_lose_a_worker,
)

SEEDS = 10


def push_again(order):
    """Count the last push of a session as not pushed yet, so that it is applied again."""

    def patched(self, event):
        push = event.push
        session = push.session, push.incarnation
        for number, shard_id in zip(push.numbers, push.shards, strict=True):
            shard = self.shards.get(ShardId(shard_id))
            if shard is not None and shard.last_number.get(session) == number:
                shard.last_number[session] = number - 1
        return order(self, event)

    return patched


def join_once(join):
    """Join only while the map is new."""

    async def patched(self):
        if self.map.version < 4:
            await join(self)

    return patched


def keep_groups_of_lost_replicas(replicas_changed):
    """Leave the epoch as it is."""

    def patched(self, event):
        epoch, self._epoch = self._epoch, None
        try:
            replicas_changed(self, event)
        finally:
            self._epoch = epoch

    return patched


COUNTING = partial(simulate, count_under_faults, conditions=ROUGH, limit_s=200.0)
MEMBERS = partial(simulate, crash_and_cut, conditions=ROUGH_LINKS, limit_s=200.0)
LOSING = partial(simulate, partial(train_and_lose_a_worker, how="crash"), conditions=ROUGH, limit_s=200.0)

SAFEGUARDS = {
    "a repeated push is applied once": (COUNTING, ServerState, "_order", push_again),
    "an unanswered push is sent again": (COUNTING, Session, "to_send_again", returns([])),
    "a lost member joins again": (MEMBERS, Membership, "_join", join_once),
    "a node with a broken link is lost after the grace period": (
        MEMBERS,
        Suspicion,
        "link_lost",
        returns(None),
    ),
    "other replicas get the groups of a lost one": (
        LOSING,
        DataState,
        "_replicas_changed",
        keep_groups_of_lost_replicas,
    ),
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
@pytest.mark.parametrize("safeguard", SAFEGUARDS)
def test_a_seed_fails_after_the_removal_of_a_safeguard(safeguard, monkeypatch):
    run, owner, method, make = SAFEGUARDS[safeguard]
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    monkeypatch.setattr(owner, method, make(getattr(owner, method)))

    assert fails(run)
