"""A push that is missing or applied twice, a wrong version and a value of a later step are refused."""

import numpy as np
import pytest

from tests.simulation.checkers.store_pushes import Pulled, StorePushes
from tests.simulation.scenario import Violation

ROWS, COLUMNS = 2, 4


def pushes_of(*clocks, summed=False, weights=None):
    pushes = StorePushes("s", rows=ROWS, columns=COLUMNS, summed=summed)
    for number, clock in enumerate(clocks):
        pushes.begin(f"c{number}", clock=clock, weight=weights[number] if weights else 1)
    return pushes


def pulled(*columns, versions=None, **fields):
    """Values whose rows are equal; each row's version is its number of pushes."""
    row = [*columns, *(COLUMNS - len(columns)) * [0.0]]
    counts = [round(sum(row))] * ROWS if versions is None else versions
    return Pulled(rows=np.array([row] * ROWS), versions=counts, **fields)


def test_values_may_have_pushes_without_an_answer_and_must_have_acknowledged_ones():
    pushes = pushes_of(0, 0)
    early = pushes.before()
    pushes.acknowledged(0, ())
    pushes.pulled("c", early, pulled(0, 1))
    pushes.pulled("c", pushes.before(), pulled(1, 1))
    with pytest.raises(Violation, match="I1: c pulled s without push 0, acknowledged before"):
        pushes.pulled("c", pushes_before_versions(pushes), pulled(0, 1))


def pushes_before_versions(pushes):
    """Bounds of later pulls, as if no client had received a version."""
    before = pushes.before()
    before.versions[:] = 0
    return before


@pytest.mark.parametrize(
    ("values", "claim"),
    [
        (pulled(2, 0), "I2: row 0 of s has push 0 2 times"),
        (pulled(0.5, 0), "I2: row 0 of s has push 0 0.5 times"),
        (pulled(1, 0, 1), "I2: s has values of pushes that no client made"),
        (pulled(1, 0, versions=[1, 2]), "I4: rows of s have versions"),
        (pulled(1, 0, bound=3, others=[("d", 2)]), "staleness: c pulled step 3 of s, and d is at 2"),
    ],
)
def test_a_value_that_no_order_of_pushes_gives_is_refused(values, claim):
    pushes = pushes_of(0, 0)
    with pytest.raises(Violation, match=claim):
        pushes.pulled("c", pushes.before(), values)


def test_versions_that_a_client_receives_never_fall_for_later_pulls():
    pushes = pushes_of(0, 0)
    early = pushes.before()
    pushes.pulled("c", early, pulled(1, 1))
    pushes.pulled("d", early, pulled(1, 0))
    with pytest.raises(Violation, match="I4: d found versions"):
        pushes.pulled("d", pushes.before(), pulled(1, 0))


def test_without_sums_no_push_is_refused():
    with pytest.raises(Violation, match="I1: s refused push 0 of c0"):
        pushes_of(0).acknowledged(0, [1])


def test_a_sum_is_the_weighted_mean_of_a_step_and_one_version():
    pushes = pushes_of(1, 1, 2, summed=True, weights=[1, 3, 2])
    for column in range(3):
        pushes.acknowledged(column, ())
    pushes.pulled("c", pushes.before(), pulled(0.25, 0.75, versions=[1, 1], bound=1, at=1))
    pushes.pulled("c", pushes.before(), pulled(0.25, 0.75, 1, versions=[2, 2], bound=2, at=2))


@pytest.mark.parametrize("refused", [(0, 1), ()])
def test_only_a_client_whose_push_came_after_its_sum_may_find_later_steps(refused):
    pushes = pushes_of(1, 1, 2, summed=True)
    pushes.acknowledged(1, refused)
    values = pulled(1, 0, 1, versions=[2, 2], at=1) if refused else pulled(0.5, 0.5, 1, versions=[2, 2], at=1)
    if refused:
        pushes.pulled("c1", pushes.before(), values)
    else:
        with pytest.raises(Violation, match="staleness: c1 at step 1 of s pulled pushes of step 2"):
            pushes.pulled("c1", pushes.before(), values)


@pytest.mark.parametrize(
    ("values", "claim"),
    [
        (pulled(0.5, 0.5, versions=[1, 1]), "I2: step 1 of s has the shares"),
        (pulled(1, 0, versions=[1, 1], bound=1), "I1: c pulled step 1 of s without push 1 of step 1 in rows"),
        (pulled(0.25, 0.75, 1, versions=[2, 2], at=1), "staleness: c at step 1 of s pulled pushes of step 2"),
        (pulled(0.25, 0.75, versions=[2, 2]), "I4: rows of s have versions"),
    ],
)
def test_a_sum_that_differs_from_its_step_is_refused(values, claim):
    pushes = pushes_of(1, 1, 2, summed=True, weights=[1, 3, 2])
    pushes.acknowledged(1, ())
    with pytest.raises(Violation, match=claim):
        pushes.pulled("c", pushes.before(), values)


def test_a_store_has_room_for_one_push_per_column():
    assert pushes_of(0, 0, 0).room == 1
    assert pushes_of(0, 0, 0, 0).full
