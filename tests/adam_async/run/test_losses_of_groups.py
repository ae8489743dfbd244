"""Sums of losses: equal in any order, also of terms that are not finite."""

from math import fsum, inf, isnan, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.messages.group_sets import MOST_IMAGES, MOST_LOSS, LossSum
from adam_async.run.group_ranges import with_losses, without_losses

terms = st.floats(-MOST_LOSS, MOST_LOSS) | st.floats(0, 10)


def sum_of(losses):
    sums = {}
    for loss in losses:
        sums = with_losses(sums, 1, 2, loss)
    return sums.get(1, LossSum())


@given(st.lists(terms, max_size=40), st.randoms())
def test_a_sum_depends_on_no_order_and_is_that_of_its_terms(losses, dice):
    found = sum_of(losses)
    assert found.images == 2 * len(losses)
    assert found.total == pytest.approx(fsum(losses), rel=1e-15, abs=len(losses) * 2.0**-65)
    assert LossSum.read(found.images, found.packed) == found
    assert not found.fault
    dice.shuffle(losses)
    assert sum_of(losses) == found
    assert without_losses({1: sum_of([*losses, 7.5])}, 1, 2, 7.5) == {1: found}


@pytest.mark.parametrize("loss", [nan, inf, -inf, 1e39])
def test_a_term_that_is_not_finite_leaves_no_number_and_counts_its_images(loss):
    found = sum_of([1.0, loss, 2.0])
    assert found == LossSum(6, None) == LossSum.read(6, found.packed)
    assert isnan(found.total)


def test_the_losses_of_the_newest_epochs_are_kept():
    sums = {}
    for epoch in (1, 2, 3, 4, 2, 1):
        sums = with_losses(sums, epoch, 1, float(epoch))
    assert {epoch: (each.images, each.total) for epoch, each in sums.items()} == {
        2: (2, 4.0),
        3: (1, 3.0),
        4: (1, 4.0),
    }


def test_a_sum_has_no_more_images_than_an_answer_may_name():
    sums = with_losses({}, 1, MOST_IMAGES, 0.0)
    assert with_losses(sums, 1, 1 << 32, 1.0)[1].images == MOST_IMAGES


@pytest.mark.parametrize("loss", [nan, inf, 2.0**200])
def test_a_contribution_that_is_no_loss_leaves_an_unknown_sum_behind(loss):
    claimed = {1: LossSum(1, 0)}
    assert without_losses(claimed, 1, 4, loss) == {1: LossSum(0, None)}
