"""The results of a run's epochs, as its driver gathers them."""

import msgspec
import numpy as np
import pytest

from adam_async.data_server.order import EpochOrders
from adam_async.driver.epoch_results import EpochResults, bounded_results
from adam_async.errors import RunFailed
from adam_async.model.keyed_random import Dice
from adam_async.run.cluster_map import RESULTS_KEPT, ClusterMap, skipped_groups
from adam_async.run.config import Config
from adam_async.run.program_record import ProgramRecord
from adam_async.run.training_program import ResumeRecord
from tests.adam_async.checkpoint.checkpoints import manifest_of

IMAGES, SIZE = 400, 4


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


@pytest.mark.parametrize("epochs", [0, 1, 5, RESULTS_KEPT, RESULTS_KEPT + 1, 300])
@pytest.mark.parametrize("whole", [0, 3], ids=["all-skip", "some-skip-nothing"])
def test_a_bounded_record_gives_the_order_of_the_next_epoch_like_all_results(epochs, whole):
    results = tuple(
        {"images": 1, "skipped_groups": () if whole and epoch % whole == 0 else ((epoch % 90, 95),)}
        for epoch in range(1, epochs + 1)
    )
    record = ResumeRecord(epoch=epochs + 1, finished=(), clock=0, results=results)
    manifest = msgspec.structs.replace(
        manifest_of(), resume=record, data={**manifest_of().data, "train_images": IMAGES}
    )
    config = Config(seed=4, images_per_group=SIZE)
    short, carried = bounded_results(manifest, config)
    assert min(epochs, 1) <= len(short.results) <= RESULTS_KEPT
    assert len(msgspec.json.encode((short, carried))) < 4000

    def orders():
        return EpochOrders(Dice(4), num_images=IMAGES, images_per_group=SIZE)

    first = short.epoch - len(short.results)
    made = orders().order(short.epoch, skipped_groups(short.results), first=first, carried=carried)
    expected = orders().order(short.epoch, skipped_groups(results))
    np.testing.assert_array_equal(made.indices, expected.indices)
    assert made.carried == expected.carried
