"""Checkpoints within the epochs of a run, beside a parameter server with wrong clocks."""

import asyncio

from adam_async.driver import epoch_checkpoints
from adam_async.parameter_server.bundle import Bundle
from adam_async.run.config import Config
from tests.adam_async.runs import cluster_of, until


async def test_checkpoints_go_on_after_a_server_has_sent_a_clock_that_no_replica_reached(
    tmp_path, monkeypatch
):
    keep_clock, lies = Bundle.keep_clock, [1 << 40]
    monkeypatch.setattr(
        Bundle, "keep_clock", lambda *asked, **named: lies.pop() if lies else keep_clock(*asked, **named)
    )
    monkeypatch.setattr(epoch_checkpoints, "POLL_S", 0.01)
    config = Config(
        epochs=1000, threads=1, rate=0.05, images_per_group=1, consistency="bsp", checkpoint_every=20
    )
    async with cluster_of(config, checkpoint=tmp_path) as cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        latest = tmp_path / "latest"
        # Each epoch has 60 groups, so this checkpoint is within an epoch.
        await until(lambda: training.done() or (latest.exists() and "-000060" not in latest.read_text()))
        assert not training.done()
        assert cluster.driver.progress.epochs == []
        training.cancel()
