"""The groups that shards have counted, compared with the ledger: each difference is found by name."""

from collections import Counter

import pytest

from adam_async.data_server.epoch import EpochBegan
from adam_async.data_server.state import DataState, GroupsReported, LeaseAsked, ReplicasChanged
from adam_async.messages import Finished
from adam_async.run.group_ranges import GroupSet
from adam_async.run.ids import Replica
from adam_async.simulation.checkers.group_sets import (
    BEHIND,
    COMPARED,
    RAGGED,
    RETURNED,
    TWICE,
    EpochGroups,
    check_groups,
    epoch_groups,
)
from adam_async.simulation.scenario import Violation

LEDGER = EpochGroups(trained=(0, 6, 8, 10), skipped=(6, 8), returned=(2, 4))
WHOLE = GroupSet((0, 6, 8, 10))


def check(*sets):
    counts = Counter()
    check_groups("run/1", LEDGER, {f"shard {n}": found for n, found in enumerate(sets)}, counts)
    return counts


def test_equal_sets_pass_and_returned_groups_may_be_there_twice():
    found = check(WHOLE, GroupSet(WHOLE.groups, (3, 4)), GroupSet(WHOLE.groups, (2, 3)))
    assert found == {COMPARED: 1, TWICE: 2, RETURNED: 2, BEHIND: 0, RAGGED: 0}


def test_skipped_groups_that_some_shards_have_are_counted():
    found = check(GroupSet((0, 10)), GroupSet((0, 7, 8, 10)), GroupSet((0, 10), (7, 8)))
    assert (found[BEHIND], found[RAGGED], found[TWICE]) == (2, 1, 1)


@pytest.mark.parametrize(
    ("found", "invariant", "groups"),
    [
        (GroupSet(), "every group on every shard", "(0, 6, 8, 10)"),
        (GroupSet((0, 5, 8, 10)), "every group on every shard", "(5, 6)"),
        (GroupSet((0, 6, 8, 12)), "no other group", "(10, 12)"),
        (GroupSet((0, 6, 8, 10), (1, 3)), "trained again", "(1, 2)"),
        (GroupSet((0, 6, 8, 10), (9, 10)), "trained again", "(9, 10)"),
    ],
)
def test_a_difference_is_found_by_its_groups(found, invariant, groups):
    with pytest.raises(Violation, match="shard 1 differs from the ledger of run/1") as raised:
        check(WHOLE, found)
    assert raised.value.invariant == invariant
    assert raised.value.text.endswith(groups)


def leases_of(replicas, **began):
    state = DataState()
    state.handle(ReplicasChanged({Replica(r): 1 for r in range(replicas)}), now=0.0)
    shares = {Replica(r): (3 * r, 3 * r + 3) for r in range(replicas)}
    state.handle(EpochBegan(number=2, groups=3 * replicas, shares=shares, **began), now=0.0)
    return state


def train(state, replica, *groups, attempt=1, position=0):
    asked = LeaseAsked(
        request=None,
        replica=Replica(replica),
        replica_generation=1,
        partition=0,
        position=position,
        heard=0 if position else -1,
        count=9,
        wait_s=1.0,
    )
    state.handle(asked, now=0.0)
    finished = tuple(Finished(2, number, attempt, 4, 1.0) for number in groups)
    state.handle(GroupsReported(Replica(replica), 1, 0, finished), now=1.0)


def test_a_ledger_has_its_groups_once_the_epoch_is_over():
    state = leases_of(2, finished=((0, 2),))
    train(state, 0, 2)
    assert epoch_groups(state, before=((0, 2),)) is None
    train(state, 1, 3)
    state.handle(ReplicasChanged({Replica(0): 1}), now=2.0)
    train(state, 0, 4, 5, attempt=2, position=1)
    found = epoch_groups(state, before=((0, 2),))
    assert found == EpochGroups(trained=(2, 6), skipped=(), returned=(4, 6))
