"""Whole runs in which epochs end early because one replica is slow."""

import pytest

from adam_async.driver.replay.decode import read_recording
from adam_async.driver.replay.run import Replay
from tests.adam_async.checkpoint.test_resume import stopped_from
from tests.adam_async.cluster.test_local import config_of
from tests.adam_async.runs import Uneven, cluster_of, local_network, tiny_dataset
from tests.transport.testing import Faults

IMAGES = 240


def uneven():
    """Every message from and to the fourth worker takes its time."""
    return Uneven(local_network(), {"worker-3": Faults(delay=1.0, delay_s=0.01)})


def one_slow(**options):
    """Four replicas, of which one can hardly train its share before the others have."""
    plain = {"epochs": 4, "replicas": 4, "weights": "copy", "in_flight": 1, "read_ahead": 2}
    return config_of(**{**plain, "images_per_group": 2, **options})


@pytest.mark.thorough
@pytest.mark.parametrize("rule", ["replicas", pytest.param("images", marks=pytest.mark.thorough)])
async def test_skipped_groups_are_trained_in_the_next_epoch_and_counted_in_both(rule):
    config = one_slow(epoch_rule=rule)
    async with cluster_of(config, uneven(), dataset=tiny_dataset(train=IMAGES)) as cluster:
        result = await cluster.train()
        results = cluster.controller.map.results
        cluster.data.state.check_invariants()
    for epoch, counts in zip(result.epochs, results, strict=True):
        assert epoch.images + epoch.skipped == IMAGES
        assert epoch.skipped == sum(stop - start for start, stop in counts.skipped_groups) * 2
        assert counts.behind == ((3,) if rule == "replicas" and epoch.skipped else ())
    assert result.epochs[0].skipped > 0
    assert all(epoch.skipped <= IMAGES / 4 for epoch in result.epochs)


async def test_all_is_trained_where_all_is_wanted():
    config = one_slow(epoch_fraction=1.0, epochs=1)
    async with cluster_of(config, uneven(), dataset=tiny_dataset(train=IMAGES)) as cluster:
        (epoch,) = (await cluster.train()).epochs
    assert (epoch.images, epoch.skipped) == (IMAGES, 0)


@pytest.mark.thorough
async def test_a_resumed_run_begins_with_the_groups_skipped_before(tmp_path):
    config, data = one_slow(), tiny_dataset(train=IMAGES)
    found = await stopped_from(config, tmp_path, (1, IMAGES // 2), network=uneven(), dataset=data)
    resumed = found.manifest.resume
    skipped = resumed.results[-1].skipped
    assert (resumed.epoch, skipped > 0) == (2, True)
    async with cluster_of(config, uneven(), dataset=data, resume=tmp_path) as cluster:
        result = await cluster.train()
    assert result.epochs[0].skipped == skipped
    assert [epoch.images + epoch.skipped for epoch in result.epochs] == [IMAGES] * 4


@pytest.mark.thorough
async def test_a_replay_finds_the_images_of_epochs_that_skipped_some():
    data = tiny_dataset(train=IMAGES)
    async with cluster_of(one_slow(record=True), uneven(), dataset=data) as cluster:
        result = await cluster.train()
    assert any(epoch.skipped for epoch in result.epochs[:-1])
    assert isinstance(result.record, bytes)
    replay = Replay(read_recording(result.record, origin="it"), data)
    for _ in replay.steps():
        pass
    replay.check()
