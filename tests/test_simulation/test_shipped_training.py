"""A whole run of shipped roles in a simulated cluster: it trains, and is the same again."""

import numpy as np

from adam_async.cluster.local import LocalCluster
from adam_async.model.named import digits
from adam_async.run.config import Config, Waits
from adam_async.runtime.machine import ProcessMemory
from tests.adam_async.runs import tiny_dataset
from tests.simulation.pool import SimulatedPool
from tests.simulation.scenario import simulate
from tests.test_simulation.test_shipped import network_of


def process_memory():
    """Of a simulated process."""
    return ProcessMemory(host="", pid=1, peak_rss_mb=1.0)


TRAINING = Config(
    epochs=2,
    replicas=2,
    servers=2,
    images_per_group=2,
    in_flight=2,
    shard_bytes=16 << 10,
    threads=1,
    epoch_fraction=1.0,
    waits=Waits(dial_s=20.0, call_s=5.0, answer_s=0.5, patience_s=60.0, grace_s=1.0),
)
IMAGES = 60


async def train_on_one_machine(world):
    """A whole cluster as the embedding call makes it, each role over TCP."""

    async def program(node):
        cluster = LocalCluster(
            TRAINING,
            dataset=tiny_dataset(IMAGES),
            spec=digits(),
            network=network_of(node),
            address="tcp://127.0.0.1:0",
            entropy=node.entropy,
            make_pool=SimulatedPool,
            process_memory=process_memory,
            available_bytes=lambda: 1 << 30,
        )
        async with cluster:
            return await cluster.train()

    node = world.node("laptop")
    node.start(program)
    return await node.task


def test_a_whole_run_trains_in_the_simulator_and_is_the_same_again():
    outcomes = [simulate(train_on_one_machine, seed=seed, shuffled=True) for seed in (1, 1, 2)]

    assert outcomes[0].replay_hash == outcomes[1].replay_hash != outcomes[2].replay_hash
    for outcome in outcomes:
        assert [epoch.images for epoch in outcome.result.epochs] == [IMAGES] * 2
    first, again, _ = outcomes
    for name, values in first.result.weights.items():
        np.testing.assert_array_equal(values, again.result.weights[name])
