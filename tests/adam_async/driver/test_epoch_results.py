"""The results of a run's epochs, as its driver gathers them."""

import numpy as np
import pytest

from adam_async.data_server.order import EpochOrders
from adam_async.driver.epoch_results import EpochResults, without_old_results
from adam_async.errors import RunFailed
from adam_async.model.keyed_random import Dice
from adam_async.run.cluster_map import RESULTS_KEPT, ClusterMap, must_train_all, skipped_groups
from adam_async.run.training_program import ProgramRecord, ResumeRecord


def cluster(*, run="run", ended=0, kept=2):
    """A map with some ended epochs of a run."""
    results = tuple({"epoch": epoch} for epoch in range(ended - kept + 1, ended + 1) if epoch > 0)
    record = ProgramRecord(id=run, driver="driver", incarnation=1)
    return ClusterMap(run=record, ended=ended, results=results)


def test_all_results_are_kept_though_the_map_holds_the_last_ones():
    results = EpochResults()
    results.begin("run", [{"epoch": 1}, {"epoch": 2}])
    for ended in (0, 2, 2, 3, 5, 5, 6):
        results.observe(cluster(ended=ended))
    results.observe(cluster(run="another", ended=9))
    results.observe(ClusterMap(ended=9))
    assert results.before(7) == tuple({"epoch": epoch} for epoch in range(1, 7))
    assert (results.of(4), results.before(3), results.ended) == ({"epoch": 4}, results.before(7)[:2], 6)


def test_missed_epochs_are_an_error_and_not_passed_over():
    results = EpochResults()
    results.begin("run", [])
    results.observe(cluster(ended=1))
    with pytest.raises(RunFailed, match=r"3 epochs ended while .* the last 2 only: resume from the newest"):
        results.observe(cluster(ended=4))


def test_runs_that_go_on_with_each_other_find_the_order_of_each_epoch_from_few_results():
    def orders():
        return EpochOrders(Dice(4), num_images=50, images_per_group=4)

    whole, kept, before, in_map = orders(), (), (), ()
    for epoch in range(1, 4 * RESULTS_KEPT):
        resumed = without_old_results(ResumeRecord(epoch=epoch, clock=0, results=kept))
        assert min(epoch - 1, 1) <= len(resumed.results) <= RESULTS_KEPT
        order = whole.order(epoch, skipped_groups(kept))
        first = epoch - len(resumed.results)
        made = orders().order(epoch, skipped_groups(resumed.results), first=first)
        np.testing.assert_array_equal(made.indices, order.indices)
        assert made.carried == order.carried
        if epoch % 20 == 0:  # another run goes on here, and the map begins anew
            before, in_map = resumed.results, ()
        trains_all = must_train_all((*before, *in_map))
        result = {"skipped_groups": () if trains_all else ((epoch % 5, epoch % 5 + 2),)}
        kept, in_map = (*kept, result), (*in_map, result)[-RESULTS_KEPT:]
    trained_all = [number for number, result in enumerate(kept, 1) if not result["skipped_groups"]]
    assert trained_all == [RESULTS_KEPT, 2 * RESULTS_KEPT, 3 * RESULTS_KEPT]
