"""The record of earlier epochs in a run that continues another run."""

import msgspec
import numpy as np
import pytest

from adam_async.data_server.order import EpochOrders
from adam_async.driver.resumption import bounded
from adam_async.model.keyed_random import Dice
from adam_async.run.cluster_map import RESULTS_KEPT, ResumeRecord, skipped_groups
from adam_async.run.config import Config
from tests.adam_async.checkpoint.checkpoints import manifest_of

IMAGES, SIZE = 400, 4


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
    short, carried = bounded(manifest, config)
    assert min(epochs, 1) <= len(short.results) <= RESULTS_KEPT
    assert len(msgspec.json.encode((short, carried))) < 4000

    def orders():
        return EpochOrders(Dice(4), num_images=IMAGES, images_per_group=SIZE)

    first = short.epoch - len(short.results)
    made = orders().order(short.epoch, skipped_groups(short.results), first=first, carried=carried)
    expected = orders().order(short.epoch, skipped_groups(results))
    np.testing.assert_array_equal(made.indices, expected.indices)
    assert made.carried == expected.carried
