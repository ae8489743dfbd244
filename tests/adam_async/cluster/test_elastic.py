"""Replicas join and leave a running training, in every mode; no image is lost or trained twice."""

import asyncio

import pytest

from adam_async.controller.role import Role, RoleSettings
from adam_async.worker.run_session import ComputeSettings
from adam_async.worker.service import ModelWorker
from tests.adam_async.cluster.test_local import QUICK, config_of
from tests.adam_async.runs import NETWORKS, address_of, cluster_of, entropy_of, tiny_dataset, until
from tests.transport.testing import Faults, FaultyNetwork
from transport import Identity

pytestmark = pytest.mark.thorough

MODES = {
    "asp": {},
    "asp-in-place": {"weights": "aliased"},
    "asp-local-steps": {"pull_every": 3},
    "ssp": {"consistency": "ssp:2", "push_every": 2},
    "bsp": {"consistency": "bsp"},
    "bsp-lag": {"consistency": "bsp", "lag": 1, "push_every": 3},
}

IMAGES = 120


class FixedDice:
    def random(self):
        return 0.5


def elastic(network="local", *, checkpoint=None, **options):
    """A cluster with small groups and slow links, so that workers can join and leave within an epoch."""
    config = config_of(**{"weights": "copy", "waits": QUICK, "images_per_group": 2, **options})
    slow = None
    if config.weights == "copy":
        slow = FaultyNetwork(NETWORKS[network](), FixedDice(), Faults(delay=1.0, delay_s=0.001))
    return cluster_of(config, slow, dataset=tiny_dataset(train=IMAGES), checkpoint=checkpoint)


def joiner(cluster, name):
    """One more worker for a cluster that runs."""
    entropy = entropy_of(name)
    return ModelWorker(
        RoleSettings(
            network=cluster.network,
            address=address_of(cluster.network),
            identity=Identity(role="worker", node=name, incarnation=int.from_bytes(entropy(7), "little")),
            waits=cluster.config.waits,
            controller=cluster.controller.address,
        ),
        ComputeSettings(threads=1, in_flight=0),
        buffers=cluster.buffers,
        entropy=entropy,
        storage_pool=cluster._storage_pool,
    )


def in_the_middle(cluster, epoch=1):
    """Whether some groups of an epoch are trained."""

    def reached():
        counts = cluster.data.state.statistics()
        return (counts.epoch, counts.finished) >= (epoch, 10)

    return reached


@pytest.mark.parametrize("mode", MODES)
async def test_a_worker_joins_in_the_middle_of_an_epoch_and_trains_groups(mode):
    cluster = elastic(epochs=60 if mode == "asp-in-place" else 3, **MODES[mode])
    async with cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        await until(in_the_middle(cluster))
        async with joiner(cluster, "worker-9") as worker:
            await until(lambda: training.done() or trained(worker) > 3)
            joined = trained(worker)
            epoch = cluster.data.state.statistics().epoch
            assert cluster.controller.map.nodes["worker-9"].replica == 1
            await until(lambda: training.done() or cluster.data.state.statistics().epoch > epoch)
        result = await training
        cluster.data.state.check_invariants()
        cluster.controller.replicated_state.state.check_invariants()
    assert joined > 3
    assert [epoch.images for epoch in result.epochs] == [IMAGES] * len(result.epochs)
    assert [event["event"] for event in result.events] in ([], ["worker-9 left"])


def trained(worker):
    """Groups that a worker has taken."""
    data = worker.statistics().data
    return data.groups if data is not None else 0


@pytest.mark.parametrize("goodbye", [True, False], ids=["leaves", "dies"])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("mode", ["asp", "ssp", "bsp", "bsp-lag"])
async def test_the_other_workers_train_the_groups_of_a_worker_that_leaves(
    mode, network, goodbye, monkeypatch
):
    if not goodbye:
        monkeypatch.setattr(ModelWorker, "_goodbye", Role._goodbye)
    cluster = elastic(network, replicas=2, read_ahead=4, **MODES[mode])
    async with cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        await until(in_the_middle(cluster))
        await cluster.workers[1].__aexit__(None, None, None)
        result = await training
        cluster.data.state.check_invariants()
    assert [epoch.images for epoch in result.epochs] == [IMAGES] * 2
    how = "left" if goodbye else "died"
    assert [event["event"] for event in result.events] == [f"worker-1 {how}"]
    assert result.statistics["data-0"].returned > 0
    assert "worker-1" not in result.statistics


async def test_a_worker_of_the_same_name_takes_part_again_after_its_goodbye():
    cluster = elastic(epochs=4, replicas=2, consistency="ssp:1")
    async with cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        await until(in_the_middle(cluster))
        await cluster.workers[1].__aexit__(None, None, None)
        async with joiner(cluster, "worker-1") as worker:
            await until(lambda: training.done() or trained(worker) > 3)
            joined = trained(worker)
            result = await training
    assert joined > 3
    assert [event["event"] for event in result.events] == [
        "worker-1 left",
        "worker-1 came back as a new incarnation",
    ]
