"""Downpour's terms: cadences of pushes and pulls, warm start of one replica, rates of pushes."""

import pytest

from adam_async.driver.replay.decode import load_record, make_recording
from adam_async.run.config import Config
from tests.adam_async.runs import NETWORKS, SHARDED, train

pytestmark = pytest.mark.thorough

GROUPS = 60
"""Of one image each: as many steps as 1, 2, 3 and 5 divide."""

ITEM = 4
"""Bytes of a value."""

MODES = {"asp": {}, "ssp": {"consistency": "ssp:2"}, "bsp": {"consistency": "bsp"}}


def config_of(**options):
    return Config(
        **{"epochs": 1, "threads": 1, "rate": 0.01, "images_per_group": 1, "weights": "copy", **options}
    )


def sent(result, *kinds):
    """Payload bytes of all messages of these kinds."""
    rows = [row for told in result.statistics.values() for row in told.traffic]
    return sum(row.payload_bytes for row in rows if row.type in kinds)


@pytest.mark.parametrize("sharding", [{}, SHARDED], ids=["whole", "sharded"])
@pytest.mark.parametrize("push_every", [1, 2, 3, 5])
@pytest.mark.parametrize("mode", MODES)
async def test_bytes_of_deltas_fall_as_one_over_push_every(mode, push_every, sharding):
    result = await train(config_of(protocol="delta", push_every=push_every, **MODES[mode], **sharding))
    assert sent(result, "Push") * push_every == GROUPS * result.model.num_parameters * ITEM


@pytest.mark.parametrize("sharding", [{}, SHARDED], ids=["whole", "sharded"])
@pytest.mark.parametrize("pull_every", [1, 2, 3, 5])
@pytest.mark.parametrize("network", NETWORKS)
async def test_bytes_of_values_fall_as_one_over_pull_every(network, pull_every, sharding):
    result = await train(config_of(pull_every=pull_every, **sharding), NETWORKS[network]())
    model = result.model.num_parameters * ITEM
    # One pull to prepare, and the driver's own for the evaluation.
    pulled = sent(result, "Pushed", "Values") - 2 * model
    assert pulled * pull_every == GROUPS * model


@pytest.mark.parametrize("push_every", [1, 3])
@pytest.mark.parametrize("mode", MODES)
async def test_the_groups_of_the_warm_start_are_one_replicas_alone(mode, push_every):
    warm = 20
    config = config_of(
        replicas=3, warm_start=warm, push_every=push_every, record=True, **MODES[mode], **SHARDED
    )
    result = await train(config)
    header, logs = load_record(result.record, origin="the run")
    recording = make_recording(header, logs, result.model)
    if mode != "asp":
        warm = -(-warm // push_every) * push_every
    first, *others = (recording.reads[replica] for replica in range(3))
    assert first.numbers[:warm].tolist() == list(range(warm))
    for other in others:
        assert other.numbers.min() >= warm
        # Their first reads contain all of its pushes.
        assert other.versions.min() >= -(-warm // push_every)


@pytest.mark.parametrize("mode", MODES)
async def test_a_worker_connects_only_to_servers_with_shards(mode):
    result = await train(config_of(servers=9, **MODES[mode]))
    servers = {node: told for node, told in result.statistics.items() if node.startswith("ps-")}
    holding = {node for node, told in servers.items() if told.versions}
    talked_to = {row.receiver for row in result.statistics["worker-0"].traffic if row.receiver in servers}
    assert talked_to == holding
    assert len(holding) < len(servers) == 9
