"""The results of a run's epochs, as its driver gathers them."""

import pytest

from adam_async.driver.epoch_results import EpochResults
from adam_async.errors import RunFailed
from adam_async.run.cluster_map import ClusterMap, RunRecord


def cluster(*, run="run", ended=0, kept=2):
    """A map with some ended epochs of a run."""
    results = tuple({"epoch": epoch} for epoch in range(ended - kept + 1, ended + 1) if epoch > 0)
    record = RunRecord(id=run, driver="driver", config={}, spec={})
    return ClusterMap(run=record, ended=ended, results=results)


def test_all_results_are_kept_though_the_map_holds_the_last_ones():
    results = EpochResults()
    results.begin("run", [{"epoch": 1}, {"epoch": 2}])
    for ended in (0, 2, 2, 3, 5, 5, 6):
        results.look(cluster(ended=ended))
    results.look(cluster(run="another", ended=9))
    results.look(ClusterMap(ended=9))
    assert results.before(7) == tuple({"epoch": epoch} for epoch in range(1, 7))
    assert (results.of(4), results.before(3), len(results)) == ({"epoch": 4}, results.before(7)[:2], 6)


def test_epochs_that_were_missed_are_named_and_not_passed_over():
    results = EpochResults()
    results.begin("run", [])
    results.look(cluster(ended=1))
    with pytest.raises(RunFailed, match=r"3 epochs ended while .* the last 2 only: resume from the newest"):
        results.look(cluster(ended=4))
