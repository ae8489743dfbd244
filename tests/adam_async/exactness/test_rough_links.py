"""A link that delays or breaks has the same effect on a run over local links as over TCP."""

import msgspec
import pytest

from adam_async.errors import ShardUnavailable
from adam_async.run.config import Config, Waits
from tests.adam_async.runs import IMPATIENT, NETWORKS, SHARDED, Rough, cluster_of
from tests.transport.testing import Faults

pytestmark = pytest.mark.thorough

STEPS, SHARDS = 30, 9
PLENTY = Waits(dial_s=50.0, call_s=50.0, answer_s=50.0, patience_s=50.0)


def config_of(waits, **options):
    return Config(
        epochs=1,
        images_per_group=2,
        rate=0.01,
        **{"threads": 1, "in_flight": 4, "waits": waits, **SHARDED, **options},
    )


async def run_under(network, faults, **options):
    """Train; return the pushes applied, their mean staleness and the seconds of training."""
    async with cluster_of(config_of(PLENTY, **options), Rough(NETWORKS[network](), faults)) as cluster:
        result = await cluster.train()
    rows = [
        (int(staleness), count)
        for node, counted in result.statistics.items()
        if node.startswith("ps-")
        for staleness, count in counted.staleness.items()
    ]
    total = sum(count for _, count in rows)
    mean = sum(staleness * count for staleness, count in rows) / total
    return total, mean, result.epochs[0].train_s


@pytest.mark.parametrize("network", NETWORKS)
async def test_with_one_group_in_flight_every_step_waits_for_a_delaying_link(network):
    pushes, mean, train_s = await run_under(network, Faults(delay=1.0, delay_s=0.01), in_flight=1)
    assert (pushes, mean) == (STEPS * SHARDS, 0.0)
    assert train_s >= 0.99 * STEPS * 0.01  # a loop's clock may be a coarse one


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_link_that_is_cut_now_and_then_costs_reconnects_and_no_update(network):
    rough = Rough(NETWORKS[network](), Faults(cut=0.03, drop_reply=0.03))
    async with cluster_of(config_of(IMPATIENT), rough) as cluster:
        result = await cluster.train()
    told = result.statistics["worker-0"].parameters
    assert told.reconnects > 0
    assert told.acknowledged == STEPS * SHARDS
    for node, counted in result.statistics.items():
        if node.startswith("ps-"):
            assert set(counted.versions.values()) == {STEPS}


@pytest.mark.parametrize("network", NETWORKS)
async def test_one_worker_whose_links_are_cut_still_trains_as_serial_sgd_does(network):
    serial = {"threads": 1, "in_flight": 1, "dtype": "float64"}
    async with cluster_of(config_of(IMPATIENT, **serial), NETWORKS[network]()) as cluster:
        expected = (await cluster.train()).weights
    rough = Rough(NETWORKS[network](), Faults(cut=0.03, drop_reply=0.05))
    async with cluster_of(config_of(IMPATIENT, **serial), rough) as cluster:
        result = await cluster.train()
    assert result.statistics["worker-0"].parameters.duplicates > 0
    for name, values in expected.items():
        assert abs(result.weights[name] - values).max() < 1e-12


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_link_that_is_always_cut_ends_the_run_with_the_server_named(network):
    waits = Waits(answer_s=0.05, patience_s=0.5)
    rough = Rough(NETWORKS[network](), Faults())

    async def train():
        async with cluster_of(config_of(waits), rough) as cluster:
            rough.faults = Faults(cut=1.0)
            await cluster.train()

    with pytest.raises(ShardUnavailable, match=r"waited 0.5 s for .*ps-\d"):
        await train()


@pytest.mark.parametrize("network", NETWORKS)
async def test_cut_links_to_the_data_server_train_every_image_once(network):
    rough = Rough(NETWORKS[network](), Faults(cut=0.1, drop_reply=0.05), towards="data")
    async with cluster_of(config_of(PLENTY), rough) as cluster:
        # Waits for lost answers are short, and waits for the controller are long.
        cluster.workers[0]._waits = msgspec.structs.replace(PLENTY, call_s=0.2)
        result = await cluster.train()
    assert result.epochs[0].images == 60
    assert len(rough.links) > 1
