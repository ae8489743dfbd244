"""Every message with every bad field, sent to data servers that lease groups: it costs a link at most."""

import asyncio

import pytest

from adam_async.messages import ReadGroups, pack
from tests.adam_async.bad_clients import bad_client, refusable
from tests.adam_async.data_server.test_dealer import RUN, party_of
from tests.adam_async.runs import NETWORKS, until
from tests.simulation.scenarios.valid_messages import Facts
from transport import Identity, LinkClosed

pytestmark = pytest.mark.thorough

ROLES = ("worker", "driver", "data")


def facts_of(party):
    """Facts of a replica that trains: a bad field is the only reason for a refusal."""
    return Facts(
        run=RUN, replica=0, replica_generation=party.map.replica_generation(0), epoch=1, node="hostile"
    )


def leases(party):
    """Progress, leases and terms, as each data server has them."""
    return {
        name: (server.state.statistics(), server.statistics().term) for name, server in party.servers.items()
    }


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("role", ROLES)
async def test_a_bad_message_changes_no_lease_and_every_image_is_counted_once(network, role):
    async with asyncio.timeout(120), party_of(NETWORKS[network]()) as party:
        await party.train(waiting=True)
        await until(lambda: party.servers[party.dealer].state.leased == 8)
        before = leases(party)
        for server in party.servers.values():
            known = Identity(role=role, node="hostile", incarnation=3)
            async with bad_client(party.network, server.address, known) as bad:
                await bad.expect_refusals(refusable((role, "data"), facts_of(party)))
                assert bad.sent > 20
        assert leases(party) == before
        for worker in party.workers:
            worker.gate.set()
        await party.result()


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_question_for_images_ends_with_its_link(network):
    async with asyncio.timeout(60), party_of(NETWORKS[network]()) as party:
        await party.train(waiting=True)
        server = party.servers[party.dealer]
        known = Identity(role="worker", node="hostile", incarnation=3)
        for _ in range(20):
            async with party.network.connect(server.address, known, timeout_s=20.0) as link:
                asked = link.call_nowait(
                    pack(ReadGroups(run=RUN, epoch=1 << 31, numbers=(0,))), timeout_s=20.0
                )
                await until(lambda: len(server._images._early) == 1)
            with pytest.raises(LinkClosed):
                await asked
        await until(lambda: not server._images._early)
