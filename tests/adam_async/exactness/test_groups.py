"""Every shard that takes gradients has counted every group of each epoch once, in each mode of training."""

import msgspec
import pytest

from adam_async.model.named import digits
from adam_async.run.config import Config
from tests.adam_async.runs import NETWORKS, PATIENT, SHARDED, cluster_of, tiny_dataset, with_frozen

PLAIN = {
    "images_per_group": 4,
    "epochs": 2,
    "epoch_fraction": 1.0,
    "kernels": "numpy",
    "waits": msgspec.structs.replace(PATIENT, clock_s=20.0),
    **SHARDED,
}
COPY = {"weights": "copy", "replicas": 2, "threads": 2}


def groups_of(config):
    return -(-len(tiny_dataset().train_labels) // config.images_per_group)


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "aliased", "threads": 3},
        {"weights": "aliased", "replicas": 2},
        {**COPY},
        {**COPY, "push_every": 3},
        {**COPY, "push_every": 3, "pull_every": 2, "warm_start": 3},
        {**COPY, "consistency": "ssp:1", "push_every": 2},
        {**COPY, "consistency": "bsp", "push_every": 3},
        {**COPY, "protocol": "factors", "clip": 1.0},
        {"partitions": 2, "plan": "layers"},
        {"partitions": 2, "plan": "vertical", "consistency": "bsp"},
    ],
    ids=str,
)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
async def test_every_shard_has_every_group_once_and_frozen_shards_have_none(options, frozen):
    config = Config(**PLAIN, **options)
    spec = with_frozen(digits(), "dense") if frozen else digits()
    async with cluster_of(config, NETWORKS["local"](), spec=spec) as cluster:
        result = await cluster.train()
        shards = [shard for server in cluster.servers for shard in server.state.shards.values()]
    whole = (0, groups_of(config))
    for shard in shards:
        is_frozen = shard.spec.tensor in result.model.frozen
        assert shard.spec.frozen == is_frozen, "a server counts on it when it answers with its groups"
        assert shard.tables.groups == ({} if is_frozen else {1: whole, 2: whole}), shard
    assert any(shard.spec.tensor in result.model.frozen for shard in shards) == frozen
