"""Every group is in one share, whoever is there and whatever was trained before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.run.epoch_shares import POOL, assign, assign_pool, covers, groups_left, share_out, warm_groups
from adam_async.run.ids import Replica


def of(shares):
    return {Replica(int(replica)): share for replica, share in shares.items()}


@given(
    replicas=st.sets(st.integers(0, 9), min_size=1, max_size=5),
    groups=st.integers(1, 60),
    round_groups=st.integers(0, 4),
    warm_start=st.integers(0, 80),
    epoch=st.integers(1, 2),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    carried=st.integers(0, 60),
    behind=st.sets(st.integers(0, 9)),
)
def test_every_group_that_is_left_is_assigned_once(
    replicas, groups, round_groups, warm_start, epoch, cuts, carried, behind
):
    carried = min(carried, groups)
    cuts = sorted(min(cut, groups) for cut in cuts)
    finished = tuple(zip(cuts[::2], cuts[1::2], strict=False))
    warm = warm_groups(warm_start, epoch=epoch, groups=groups, round_groups=round_groups)
    shares = share_out(
        tuple(replicas),
        groups=groups,
        round_groups=round_groups,
        warm=warm,
        finished=finished,
        carried=carried,
    )
    assert covers(shares.values(), groups=groups, round_groups=round_groups)
    assigned = assign(
        of(shares),
        groups=groups,
        round_groups=round_groups,
        warm=warm,
        finished=finished,
        carried=carried,
        behind=frozenset(map(Replica, behind)),
    )
    left = list(groups_left(groups, finished))
    queues = [list(queue) for queue in assigned.queues.values()]
    assert sorted([*assigned.warm, *(number for queue in queues for number in queue)]) == left
    assert assigned.progress.keys() == set(left)
    assert all(0 <= value < 1 for value in assigned.progress.values())
    shared = [[number for number in queue if round_groups or number >= carried] for queue in queues]
    assert max(map(len, shared)) - min(map(len, shared)) <= (round_groups or 1)
    for replica, queue in assigned.queues.items():
        if not round_groups and replica in behind and replicas - behind:
            assert all(number >= carried for number in queue)
    for queue in queues:
        along = [assigned.progress[number] for number in queue]
        assert along == sorted(along)


def test_the_rounds_of_a_step_are_one_piece_of_the_order():
    assigned = assign(of(share_out((0, 1), groups=10, round_groups=2)), groups=10, round_groups=2)
    assert assigned.queues == {0: [0, 1, 4, 5, 8, 9], 1: [2, 3, 6, 7]}


def test_after_whole_steps_rounds_go_on_as_in_an_undivided_epoch():
    whole = assign(of(share_out((0, 1, 2), groups=20, round_groups=2)), groups=20, round_groups=2)
    finished = ((0, 12),)
    later = assign(
        of(share_out((0, 1, 2), groups=20, round_groups=2, finished=finished)),
        groups=20,
        round_groups=2,
        finished=finished,
    )
    for replica, queue in later.queues.items():
        assert queue == [number for number in whole.queues[replica] if number >= 12]
        assert all(later.progress[number] == whole.progress[number] for number in queue)


def test_the_groups_left_of_a_resumed_epoch_are_spread_evenly():
    finished = ((0, 30), (50, 80))
    shares = share_out((0, 1, 2, 3), groups=100, round_groups=0, finished=finished)
    assigned = assign(of(shares), groups=100, round_groups=0, finished=finished)
    assert [len(queue) for queue in assigned.queues.values()] == [10, 10, 10, 10]
    assert assigned.progress[30] == pytest.approx(0.6)


def test_the_lowest_replica_has_the_warm_groups_beside_its_part_of_the_rest():
    assert share_out((1, 2), groups=10, round_groups=0, warm=4) == {"1": (0, 7), "2": (7, 10)}
    assigned = assign(of({"1": (0, 7), "2": (7, 10)}), groups=10, round_groups=0, warm=4)
    assert list(assigned.warm) == [0, 1, 2, 3]
    assert {replica: list(queue) for replica, queue in assigned.queues.items()} == {
        1: [4, 5, 6],
        2: [7, 8, 9],
    }


def test_carried_groups_come_first_and_to_those_who_were_not_behind():
    shares = share_out((0, 1, 2), groups=15, round_groups=0, carried=6)
    assert shares == {"0": (0, 9), "1": (9, 12), "2": (12, 15)}
    assigned = assign(of(shares), groups=15, round_groups=0, carried=6, behind=[Replica(1)])
    assert {replica: list(queue) for replica, queue in assigned.queues.items()} == {
        0: [0, 1, 2, 6, 7, 8],
        1: [9, 10, 11],
        2: [3, 4, 5, 12, 13, 14],
    }
    assert [assigned.progress[number] for number in (0, 6, 9, 3, 12)] == [0.0, 0.5, 0.0, 0.0, 0.5]


def test_a_pool_is_one_queue_behind_the_warm_start():
    assigned = assign_pool(10, warm=5, finished=((0, 3), (5, 6)))
    assert list(assigned.warm) == [3, 4]
    assert {whose: list(queue) for whose, queue in assigned.queues.items()} == {POOL: [6, 7, 8, 9]}
    assert assigned.progress[6] == 0.6


@pytest.mark.parametrize(
    ("start", "epoch", "round_groups", "warm"),
    [(7, 1, 0, 7), (7, 1, 3, 9), (7, 2, 0, 0), (25, 1, 0, 10), (25, 3, 0, 5)],
)
def test_a_warm_start_counts_the_groups_of_the_whole_run(start, epoch, round_groups, warm):
    assert warm_groups(start, epoch=epoch, groups=10, round_groups=round_groups) == warm


@pytest.mark.parametrize(
    ("shares", "round_groups"),
    [(((0, 4), (5, 10)), 0), (((0, 6), (5, 10)), 0), (((0, 2), (0, 2)), 1), (((1, 2),), 1)],
)
def test_gaps_and_overlaps_are_seen(shares, round_groups):
    assert not covers(shares, groups=10, round_groups=round_groups)
