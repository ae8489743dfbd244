"""Every message with every bad field, sent to workers over real links: it costs a link at most."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from adam_async.messages import Blocks, pack
from adam_async.runtime.timeline import Timeline
from tests.adam_async.bad_clients import bad_client, refusable
from tests.adam_async.cluster.test_local import QUICK, config_of
from tests.adam_async.runs import NETWORKS, cluster_of, until
from tests.adam_async.worker.test_peer_workers import GREET, SHAPE, identity, linked, two_workers
from tests.simulation.scenarios.valid_messages import Facts, valid_messages
from transport import Identity

pytestmark = pytest.mark.thorough


def right_blocks(facts):
    """Valid messages, of which the one with blocks has a tensor of the right shape."""
    tensor = np.zeros((*SHAPE, 2), np.float32)
    return [
        replace(each, tensors=(tensor,)) if isinstance(each.body, Blocks) else each
        for each in valid_messages(facts)
    ]


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_bad_block_costs_its_link_and_the_two_workers_talk_again(network):
    facts = Facts(run="run", replica=0, replica_generation=7, partition=0)
    found = [
        each
        for each in refusable(("worker", "worker"), facts, right_blocks(facts))
        if each.message.type == "Blocks"
    ]
    async with asyncio.timeout(50), two_workers(NETWORKS[network]()) as (one, two):
        await until(lambda: linked(one, two))
        greeted = bad_client(one.network, one.other.address, identity(0), first=pack(GREET))
        async with greeted as bad:
            await bad.expect_refusals(found)
            assert bad.sent > 15
        assert (two.taken, two.told.blocks_received) == ([], 0)
        await until(lambda: linked(one, two))
        one.put()
        await until(lambda: two.numbers == [0])


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("role", ["worker", "driver"])
async def test_a_bad_message_to_a_worker_that_trains_leaves_its_run_as_it_is(network, role):
    config = config_of(weights="copy", record=True, epochs=1000, waits=QUICK)
    cluster = cluster_of(config, NETWORKS[network](), timeline=Timeline())
    async with asyncio.timeout(50), cluster:
        training = asyncio.create_task(cluster.train(), name="train")
        await until(lambda: bool(cluster.controller.map.results))
        facts = Facts(
            run=cluster.controller.map.run.id,
            replica=0,
            replica_generation=cluster.controller.map.replica_generation(0),
        )
        known = Identity(role=role, node="hostile", incarnation=3)
        async with bad_client(cluster.network, cluster.workers[0].address, known) as bad:
            await bad.expect_refusals(refusable((role, "worker"), facts))
            assert bad.sent > 15
        ended = cluster.controller.map.ended
        await until(lambda: cluster.controller.map.ended > ended + 1)
        assert not training.done()
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
