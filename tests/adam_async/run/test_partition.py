"""How a run's model is cut follows from its configuration, and its shards from that, for everybody alike."""

import pytest

from adam_async.errors import ConfigError
from adam_async.model.named import digits
from adam_async.model.network import Network
from adam_async.model.partition.network import Partition
from adam_async.model.partition.plan import PartitionPlan
from adam_async.model.partition.planner import layers_plan, vertical_plan
from adam_async.run.config import Config
from adam_async.run.partition import check_crossings, plan_run, table_of
from adam_async.run.shard_table import part_table
from adam_async.run.training_program import TrainingProgram
from tests.adam_async.runs import with_frozen

NETWORK = Network(digits())


def run_of(config):
    plan = plan_run(NETWORK, config)
    plain = None if plan is None else plan.to_dict()
    return TrainingProgram(config=config, spec=digits().to_dict(), plan=plain)


def test_a_run_of_one_worker_per_replica_is_not_cut():
    run = run_of(Config(plan="layers", replicas=3))
    assert run.plan is None


@pytest.mark.parametrize("halo", ["auto", "exchange", "recompute"])
def test_a_vertical_plan_is_asked_for_with_its_halo(halo):
    assert plan_run(NETWORK, Config(partitions=3, halo=halo)) == vertical_plan(NETWORK, 3, halo=halo)


def test_a_plan_of_layers_is_asked_for_by_name():
    assert plan_run(NETWORK, Config(partitions=2, plan="layers")) == layers_plan(NETWORK, 2)


def test_more_workers_than_there_is_work_for_are_refused_with_their_number():
    with pytest.raises(ConfigError, match=r"partitions=9: .* (workers|layers|partitions)"):
        plan_run(NETWORK, Config(partitions=9, plan="layers"))


@pytest.mark.parametrize("partitions", [1, 2])
def test_the_shards_of_frozen_arrays_are_marked(partitions):
    network = Network(with_frozen(digits(), "dense"))
    plan = plan_run(network, Config(partitions=partitions))
    table = table_of(network, plan=plan.to_dict() if plan is not None else None)
    assert network.frozen
    assert {spec.tensor for spec in table.shards if spec.frozen} == network.frozen


@pytest.mark.parametrize("shard_bytes", [100, 16 << 10, 1 << 20])
@pytest.mark.parametrize("partitions", [2, 3, 4])
@pytest.mark.parametrize("plan", ["vertical", "layers"])
def test_every_shard_of_a_run_is_owned_by_one_worker_of_a_replica(plan, partitions, shard_bytes):
    run = run_of(Config(partitions=partitions, plan=plan, shard_bytes=shard_bytes))
    table = table_of(NETWORK, shard_bytes=shard_bytes, plan=run.plan)
    owned = []
    for worker in range(partitions):
        part = Partition(NETWORK, PartitionPlan.from_dict(run.plan), worker)
        mine = part_table(table, part.network.parameters)
        for parameter in part.network.parameters:
            assert sum(spec.size for spec in mine.by_tensor[parameter.name]) == parameter.size
        owned += [spec.id for spec in mine.shards if spec.tensor in part.owned]
    assert sorted(owned) == [spec.id for spec in table.shards]


@pytest.mark.parametrize("plan", ["vertical", "layers"])
def test_tensors_larger_than_a_message_are_refused_with_a_number_of_images_that_fits(plan):
    network = Network(digits())
    config = Config(partitions=2, plan=plan, images_per_group=64)
    chosen = plan_run(network, config).to_dict()
    check_crossings(network, chosen, config, most_bytes=64 << 20)
    with pytest.raises(ConfigError, match="set images_per_group to at most") as refused:
        check_crossings(network, chosen, config, most_bytes=4 << 10)
    most = int(str(refused.value).rpartition(" ")[2])
    assert 1 <= most < 64
    with pytest.raises(ConfigError, match="cut it with the other plan, or not at all"):
        check_crossings(network, chosen, config, most_bytes=8)
