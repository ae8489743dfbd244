"""A run with repeatedly replaced workers stays correct, and its roles keep bounded state of them."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from tests.adam_async.cluster.test_elastic import joiner
from tests.adam_async.cluster.test_local import QUICK, config_of
from tests.adam_async.runs import cluster_of, until

REPLACED = 6


@pytest.mark.slow
async def test_each_epoch_is_checkpointed_however_often_the_worker_was_replaced(tmp_path):
    """Size of 138 shards with the push numbers of seven generations each, in bytes."""
    config = config_of(epochs=REPLACED + 2, replicas=1, weights="copy", shard_bytes=512, waits=QUICK)
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(cluster_of(config, checkpoint=tmp_path))
        group = await stack.enter_async_context(asyncio.TaskGroup())
        training = group.create_task(cluster.train(), name="train")
        worker = cluster.workers[0]
        for number in range(1, REPLACED + 1):
            await until(lambda number=number: cluster.driver.progress.epoch >= number)
            await worker.__aexit__(None, None, None)
            worker = await stack.enter_async_context(joiner(cluster, f"worker-{number}"))
        result = await training
        shards = cluster.servers[0].state.shards.values()
    assert len(shards) > 100
    assert [each.epoch for each in result.checkpoints] == list(range(1, config.epochs + 1))
