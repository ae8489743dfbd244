"""The deal of an evaluation: order, turns, backups and lost workers, on virtual time."""

import heapq
from itertools import count
from math import isnan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.lbfgs.deal import MOST_KEPT, Deal


def simulate(speeds, pieces, *, backups=True, lost=()):
    """Evaluate with workers of some speeds, in pieces per second; return the seconds, and the deal.

    Args:
        lost: Workers that end while they compute their second piece.
    """
    deal, ticks, now = Deal(1, pieces, backups=backups), count(), 0.0
    events: list[tuple[float, int, int, int]] = []
    waiting = dict.fromkeys(range(len(speeds)))
    begun = dict.fromkeys(waiting, 0)
    while True:
        moved = True
        while moved:
            moved = False
            for worker in range(len(speeds)):
                turn = deal.turn(worker)
                if len(turn):
                    deal.pushed(worker, turn.stop)
                    moved = True
        if deal.is_over:
            return now, deal
        for worker in [*waiting]:
            for piece in deal.take(worker):
                del waiting[worker]
                begun[worker] += 1
                heapq.heappush(events, (now + 1 / speeds[worker], next(ticks), worker, piece))
        now, _, worker, piece = heapq.heappop(events)
        if worker in lost and begun[worker] == 2:
            deal.lost(worker)
            continue
        deal.computed(worker, piece, 1.0)
        waiting[worker] = None


@given(
    speeds=st.lists(st.floats(0.1, 10), min_size=1, max_size=6),
    pieces=st.integers(1, 60),
    backups=st.booleans(),
    data=st.data(),
)
def test_every_evaluation_ends_with_each_piece_counted_once(speeds, pieces, backups, data):
    lost = data.draw(st.sets(st.integers(0, len(speeds) - 1), max_size=len(speeds) - 1))

    _, deal = simulate(speeds, pieces, backups=backups, lost=lost)

    assert deal.is_over
    assert deal.value == pieces
    assert deal.computations >= pieces


EQUAL, SLOW = [0.2] * 8, [0.2] * 7 + [0.04]


def test_a_slow_worker_costs_little_with_backups():
    equal, _ = simulate(EQUAL, 256)
    slow, deal = simulate(SLOW, 256)
    alone, _ = simulate(SLOW, 256, backups=False)

    assert slow <= 1.25 * equal
    assert slow <= alone
    assert deal.computations <= 1.05 * 256


@pytest.mark.parametrize(("each", "ratio"), [(2, 2.5), (8, 1.25), (32, 1.25)])
def test_without_backups_a_slow_worker_costs_its_last_piece(each, ratio):
    equal, _ = simulate(EQUAL, 8 * each, backups=False)
    slow, _ = simulate(SLOW, 8 * each, backups=False)

    assert slow / equal == pytest.approx(ratio, rel=0.05)


def test_pieces_are_pushed_in_their_order_and_a_few_of_one_worker_at_a_time():
    deal = Deal(1, 4)
    assert [*deal.take("a"), *deal.take("b")] == [0, 1]
    deal.computed("b", 1, 1.0)
    assert [*deal.take("b")] == [2]
    deal.computed("b", 2, 1.0)
    assert not deal.turn("b")

    deal.computed("a", 0, 1.0)

    assert deal.turn("a") == range(1)
    assert not deal.turn("b")
    deal.pushed("a", 1)
    assert deal.turn("b") == range(1, 3)


def test_the_first_result_of_a_piece_with_a_backup_counts():
    deal = Deal(1, 1)
    assert [*deal.take("a")] == [0]
    assert [*deal.take("b")] == [0]
    assert not deal.take("c")
    deal.computed("b", 0, 2.0)
    deal.computed("a", 0, 3.0)
    assert not deal.turn("c")

    assert deal.turn("b") == range(1)
    deal.pushed("b", 1)

    assert deal.is_over
    assert deal.value == 2.0


def test_a_worker_that_is_lost_in_its_turn_gives_it_to_another():
    deal = Deal(1, 1)
    deal.take("a")
    deal.computed("a", 0, 1.0)
    assert deal.turn("a")

    deal.lost("a")

    assert [*deal.take("b")] == [0]
    deal.computed("b", 0, 1.0)
    assert deal.turn("b") == range(1)
    deal.pushed("c", 1)
    assert not deal.is_over
    deal.pushed("b", 1)
    assert deal.is_over


def test_a_late_push_of_a_worker_that_lost_its_turn_counts_and_the_next_turn_begins_behind_it():
    deal = Deal(1, 3)
    for _ in range(3):
        deal.computed("late", deal.take("late").start, 1.0)
    assert deal.turn("late") == range(3)
    deal.lost("late")
    deal.computed("other", deal.take("other").start, 1.0)
    assert deal.turn("other") == range(1)

    deal.pushed("late", 3)
    assert deal.is_over
    deal.pushed("other", 1)
    assert deal.counted == 3


def test_a_worker_with_many_gradients_waits_for_the_oldest_piece():
    deal = Deal(1, 100, backups=False)
    assert [*deal.take("slow")] == [0]
    for piece in range(1, MOST_KEPT + 1):
        assert [*deal.take("fast")] == [piece]
        deal.computed("fast", piece, 1.0)

    assert not deal.take("fast")

    deal.lost("slow")
    assert [*deal.take("fast")] == [0]


def test_a_loss_that_is_not_finite_makes_the_value_so():
    deal = Deal(1, 2)
    for piece, loss in enumerate((float("inf"), float("-inf"))):
        deal.take("a")
        deal.computed("a", piece, loss)

    assert isnan(deal.value)
