"""Every message with every bad field, sent to a parameter server, costs its sender a link at most."""

import asyncio

import numpy as np
import pytest

from adam_async.messages import Pushed, pack, unpack
from tests.adam_async.bad_clients import bad_client, refusable
from tests.adam_async.parameter_server.test_service import push_of, shard_named
from tests.adam_async.runs import NETWORKS, servers_of
from tests.simulation.scenarios.valid_messages import Facts
from transport import Identity

ROLES = ("worker", "driver")


def facts_of(servers):
    shards = list(servers.shards().values())[:2]
    return Facts(
        run="run",
        generation=servers.map.generation,
        shards=tuple(int(shard.spec.id) for shard in shards),
        sizes=tuple(shard.spec.size for shard in shards),
        session=99,
        replica=99,
        epoch=0,
    )


@pytest.mark.thorough
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("role", ROLES)
async def test_a_bad_message_changes_no_value_and_a_correct_client_goes_on(network, role):
    async with asyncio.timeout(120), servers_of(NETWORKS[network]()) as servers:
        before = {number: shard.values.copy() for number, shard in servers.shards().items()}
        address = servers.map.nodes["ps-0"].address
        known = Identity(role=role, node="hostile", incarnation=3)
        async with bad_client(servers.network, address, known) as bad:
            await bad.expect_refusals(refusable((role, "ps"), facts_of(servers)))
            assert bad.sent > 20
        for number, shard in servers.shards().items():
            np.testing.assert_array_equal(shard.values, before[number])
            assert (shard.version, shard.last_number, shard.clocks) == (0, {}, {})
        bias = shard_named(servers, "fc2.bias")
        identity = servers.identity("worker", 5)
        async with servers.network.connect(address, identity, timeout_s=20.0) as honest:
            push = pack(push_of(servers, [bias.id]), [np.ones(bias.size, np.float32)])
            assert unpack(await honest.call(push, timeout_s=20.0), Pushed).versions == 1
