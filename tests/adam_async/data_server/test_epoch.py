"""Epoch order, groups and shares."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.data_server.epoch import EpochOrders, count_groups
from adam_async.model.keyed_random import Dice
from adam_async.run.cluster_map import must_train_all
from adam_async.run.counts import RESULTS_KEPT, EpochCounts, skipped_groups

counts = st.integers(1, 300)


@given(st.integers(), st.integers(0, 100), counts, st.integers(1, 40))
def test_the_groups_of_an_epoch_hold_every_image_once(seed: int, epoch: int, images: int, size: int) -> None:
    order = EpochOrders(Dice(seed), num_images=images, images_per_group=size).order(epoch)
    groups = [order.group(number) for number in range(order.num_groups)]

    assert sorted(np.concatenate(groups).tolist()) == list(range(images))
    assert all(len(group) == size for group in groups[:-1])
    assert 1 <= len(groups[-1]) <= size


def test_the_order_depends_on_seed_and_epoch_and_nothing_else() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        made = EpochOrders(Dice(seed), num_images=100, images_per_group=16).order(epoch)
        return [int(index) for index in made.indices]

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


def test_the_order_does_not_depend_on_the_group_size() -> None:
    orders = [EpochOrders(Dice(5), num_images=50, images_per_group=size).order(2) for size in (1, 16)]

    np.testing.assert_array_equal(orders[0].indices, orders[1].indices)


def test_a_group_that_is_not_there_is_named() -> None:
    order = EpochOrders(Dice(1), num_images=20, images_per_group=16).order(3)

    assert repr(order) == "<EpochOrder 3 20 images 2 groups>"
    for number in (-1, 2):
        with pytest.raises(IndexError, match=f"epoch 3 has groups 0 to 1, not {number}"):
            order.group(number)


def test_counts_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="not 0 and 16"):
        EpochOrders(Dice(1), num_images=0, images_per_group=16).order(0)
    assert count_groups(33, 16) == 3


ranges_of_groups = st.lists(st.integers(0, 12), max_size=6, unique=True).map(
    lambda cuts: tuple(zip(sorted(cuts)[::2], sorted(cuts)[1::2], strict=False))
)


@given(st.integers(0, 99), st.lists(ranges_of_groups, max_size=6))
def test_skipped_images_come_first_in_the_next_epoch_in_the_order_of_its_permutation(seed, skipped) -> None:
    images, size = 49, 4
    orders = EpochOrders(Dice(seed), num_images=images, images_per_group=size)
    carried: list[int] = []
    for epoch in range(1, len(skipped) + 2):
        order = orders.order(epoch, skipped[: epoch - 1])
        plain = (
            EpochOrders(Dice(seed), num_images=images, images_per_group=size).order(epoch).indices.tolist()
        )
        first = set(carried)
        expected = [image for image in plain if image in first] + [i for i in plain if i not in first]
        assert order.indices.tolist() == expected
        assert order.carried == len(first)
        if epoch <= len(skipped):
            groups = [group for start, stop in skipped[epoch - 1] for group in range(start, stop)]
            carried = [image for group in groups for image in order.group(group).tolist()]


@given(st.lists(ranges_of_groups, min_size=1, max_size=6))
def test_a_server_that_begins_in_the_middle_of_a_run_finds_the_same_order(skipped) -> None:
    def new() -> EpochOrders:
        return EpochOrders(Dice(3), num_images=50, images_per_group=4)

    there = new()
    for epoch in range(1, len(skipped) + 2):
        order = there.order(epoch, skipped[: epoch - 1])
        again = there.order(epoch, skipped)
        np.testing.assert_array_equal(order.indices, again.indices)
        np.testing.assert_array_equal(order.indices, new().order(epoch, skipped).indices)
        known = new().order(epoch, first=epoch, carried=order.carried_images)
        np.testing.assert_array_equal(order.indices, known.indices)
        for first in range(1, epoch):
            carried = there.order(first, skipped).carried_images
            late = new().order(epoch, skipped[first - 1 :], first=first, carried=carried)
            np.testing.assert_array_equal(order.indices, late.indices)


def test_a_server_that_joins_late_finds_the_order_from_the_results_that_the_map_keeps() -> None:
    def new() -> EpochOrders:
        return EpochOrders(Dice(3), num_images=50, images_per_group=4)

    whole, results = new(), list[dict[str, list[tuple[int, int]]]]()
    for epoch in range(1, 3 * RESULTS_KEPT):
        order = whole.order(epoch, skipped_groups(results))
        kept = results[-RESULTS_KEPT:]
        first = epoch - len(kept)
        np.testing.assert_array_equal(
            new().order(epoch, skipped_groups(kept), first=first).indices, order.indices
        )
        ranges = () if must_train_all(kept) else ((epoch % 5, epoch % 5 + 2),)
        results.append(EpochCounts(skipped_groups=ranges))
    trained_all = [number for number, result in enumerate(results, 1) if not result.skipped_groups]
    assert trained_all == [RESULTS_KEPT, 2 * RESULTS_KEPT]
