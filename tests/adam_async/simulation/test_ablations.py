"""The simulator finds bugs: a safeguard that is taken out of shipped code is missed within a few seeds."""

import inspect
import logging
import sys
import textwrap
from functools import partial

import pytest

from adam_async.controller.client import Membership
from adam_async.controller.failure_detector import Suspicion
from adam_async.data_server.state import DataState
from adam_async.parameter_server.session import Session
from adam_async.parameter_server.state import ServerState
from adam_async.simulation.nodes import simulate
from tests.adam_async.simulation.test_shipped import ROUGH as ROUGH_LINKS
from tests.adam_async.simulation.test_shipped import crash_and_cut
from tests.adam_async.simulation.test_shipped_training import (
    ROUGH,
    count_under_faults,
    train_and_lose_a_worker,
)

SEEDS = 10


def rewrite(monkeypatch, owner, method, old, new):
    """Replace a piece of a shipped method's source."""
    source = textwrap.dedent(inspect.getsource(getattr(owner, method)))
    assert source.count(old) == 1
    namespace = dict(vars(sys.modules[owner.__module__]))
    exec(source.replace(old, new), namespace)
    monkeypatch.setattr(owner, method, namespace[method])


COUNTING = partial(simulate, count_under_faults, conditions=ROUGH, limit_s=200.0)
MEMBERS = partial(simulate, crash_and_cut, conditions=ROUGH_LINKS, limit_s=200.0)
LOSING = partial(simulate, partial(train_and_lose_a_worker, how="crash"), conditions=ROUGH, limit_s=200.0)

SAFEGUARDS = {
    "a push that comes again is not applied again": (
        COUNTING, ServerState, "_order", "number == last + 1", "number <= last + 1",
    ),
    "what was not answered is said again": (
        COUNTING, Session, "to_send_again", "return list(self.open)", "return []",
    ),
    "a member that was missed takes its seat again": (
        MEMBERS, Membership, "_attend", "not self.seated and", "self.map.version < 4 and not self.seated and",
    ),
    "a node whose link broke is lost after the grace": (
        MEMBERS, Suspicion, "link_lost",
        "self._until[node, incarnation] = max(now + self._grace_s, self._found_by)", "pass",
    ),
    "what a lost replica held goes to the others": (
        LOSING, DataState, "_replicas_changed", "self._epoch is not None", "False",
    ),
}  # fmt: skip


def is_missed(run):
    """Whether a run fails on one of the seeds."""
    for seed in range(SEEDS):
        try:
            run(seed=seed, shuffled=seed % 2 == 1)
        except Exception:
            return True
    return False


@pytest.mark.thorough
@pytest.mark.parametrize("safeguard", SAFEGUARDS)
def test_a_safeguard_that_is_taken_out_is_missed(safeguard, monkeypatch):
    run, owner, method, old, new = SAFEGUARDS[safeguard]
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    rewrite(monkeypatch, owner, method, old, new)

    assert is_missed(run)
