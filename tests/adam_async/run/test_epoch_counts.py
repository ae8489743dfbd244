"""The counts and evaluations of ended epochs, and the order that follows from them."""

import numpy as np

from adam_async.data_server.order import EpochOrders
from adam_async.model.keyed_random import Dice
from adam_async.run.cluster_map import must_train_all
from adam_async.run.epoch_counts import (
    RESULTS_KEPT,
    EpochCounts,
    Evaluation,
    newest_and_best,
    skipped_groups,
)
from adam_async.run.training_program import ResumeRecord


def test_the_map_keeps_the_newest_evaluations_and_the_best_one_before():
    evaluations = tuple(Evaluation(number, 0.5, 0.9 if number == 3 else 0.1) for number in range(1, 101))
    kept = newest_and_best(evaluations)
    assert [each.epoch for each in kept] == [3, *range(101 - RESULTS_KEPT, 101)]
    assert newest_and_best(kept) == kept
    without = tuple(Evaluation(number, 0.5) for number in range(1, 101))
    assert newest_and_best(without) == without[-RESULTS_KEPT:]


def test_runs_that_go_on_with_each_other_find_the_order_of_each_epoch_from_few_results():
    def orders():
        return EpochOrders(Dice(4), num_images=50, images_per_group=4)

    whole, kept, before, in_map = orders(), (), (), ()
    for epoch in range(1, 4 * RESULTS_KEPT):
        resumed = ResumeRecord(epoch=epoch, clock=0, results=kept).without_old_results()
        assert min(epoch - 1, 1) <= len(resumed.results) <= RESULTS_KEPT
        order = whole.order(epoch, skipped_groups(kept))
        first = epoch - len(resumed.results)
        made = orders().order(epoch, skipped_groups(resumed.results), first=first)
        np.testing.assert_array_equal(made.indices, order.indices)
        assert made.carried == order.carried
        if epoch % 20 == 0:  # another run goes on here, and the map begins anew
            before, in_map = resumed.results, ()
        trains_all = must_train_all((*before, *in_map))
        result = EpochCounts(skipped_groups=() if trains_all else ((epoch % 5, epoch % 5 + 2),))
        kept, in_map = (*kept, result), (*in_map, result)[-RESULTS_KEPT:]
    trained_all = [number for number, result in enumerate(kept, 1) if not result.skipped_groups]
    assert trained_all == [RESULTS_KEPT, 2 * RESULTS_KEPT, 3 * RESULTS_KEPT]
