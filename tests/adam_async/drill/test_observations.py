"""The audit sees each lost, doubled and altered push."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from adam_async.drill.observations import SLOTS, Audit, audit_of, count_push, gradient_of


def applied(numbers: Iterable[int]) -> NDArray[np.float64]:
    """Return the values (2, SLOTS) of a counter after these pushes."""
    values = np.zeros((2, SLOTS))
    for number in numbers:
        values -= gradient_of(number)
    return values


def test_pushes_that_were_applied_once_leave_no_difference() -> None:
    assert audit_of(applied(range(1, 1300)), 1299, unanswered=False) == Audit(acknowledged=1299)


def test_a_lost_push_and_a_doubled_one_do_not_cancel_each_other() -> None:
    found = audit_of(applied([1, 2, 2, 4]), 4, unanswered=False)

    assert (found.lost, found.twice, found.altered) == (1, 1, 0)


def test_a_push_in_the_place_of_another_of_its_slot_is_altered() -> None:
    numbers = [*range(1, 5 + SLOTS)]
    numbers[4 + SLOTS - 1] = 4  # which has the slot of the last number

    found = audit_of(applied(numbers), 4 + SLOTS, unanswered=False)

    assert (found.lost, found.twice, found.altered) == (0, 0, 1)


def test_a_push_without_an_answer_may_be_applied_or_not() -> None:
    for count in (6, 7):
        found = audit_of(applied(range(1, count + 1)), 6, unanswered=True)

        assert found == Audit(acknowledged=6, unanswered=1)


def test_an_acknowledged_push_may_not_be_lost_beside_an_unanswered_one() -> None:
    assert audit_of(applied(range(1, 6)), 6, unanswered=True).lost == 1


def test_audits_add_up() -> None:
    total = Audit(acknowledged=3, lost=1).plus(Audit(acknowledged=4, twice=2, unanswered=1))

    assert total == Audit(acknowledged=7, lost=1, twice=2, unanswered=1)


def test_pushes_are_counted_in_tenths_of_a_second_with_their_gaps() -> None:
    pushes: list[int] = []
    for at_s in (0.01, 0.05, 0.31, 0.39):
        count_push(pushes, at_s)

    assert pushes == [2, 0, 0, 2]
