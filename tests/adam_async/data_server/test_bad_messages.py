"""Every message with every bad field, sent to data servers that lease groups: it costs a link at most."""

import asyncio

import pytest

from adam_async.simulation.scenarios.valid_messages import Facts
from tests.adam_async.bad_clients import bad_client, refusable
from tests.adam_async.data_server.test_ledger_service import RUN, party_of
from tests.adam_async.runs import NETWORKS, until
from transport import Identity

pytestmark = pytest.mark.thorough

ROLES = ("worker", "driver", "data")


def facts_of(party):
    """Facts of a replica that trains: a bad field is the only reason for a refusal."""
    return Facts(
        run=RUN,
        replica=0,
        replica_generation=party.map.replica_generation(0),
        epoch=1,
        ledger_term=party.map.ledger_record.term,
        node="hostile",
    )


def sender(party, role, target):
    """The other replica of the ledger, which alone enters and copies; else a client that no map names."""
    if role == "data":
        return next(server._identity for name, server in party.servers.items() if name != target)
    return Identity(role=role, node="hostile", incarnation=3)


def ledgers(party):
    """Progress, leases and terms, as each data server has them."""
    return {
        name: (server.state.statistics(), server.statistics().ledger)
        for name, server in party.servers.items()
    }


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("role", ROLES)
async def test_a_bad_message_changes_no_lease_and_every_image_is_counted_once(network, role):
    async with asyncio.timeout(120), party_of(NETWORKS[network]()) as party:
        await party.train(waiting=True)
        await until(lambda: all(each.leased == 8 for each, _ in ledgers(party).values()))
        before = ledgers(party)
        for target, server in party.servers.items():
            known = sender(party, role, target)
            async with bad_client(party.network, server.address, known) as bad:
                await bad.expect_refusals(refusable((role, "data"), facts_of(party)))
                assert bad.sent > 20
        assert ledgers(party) == before
        for worker in party.workers:
            worker.gate.set()
        assert (await party.result())["trained_again"] == 0
        await until(lambda: all(worker.settled for worker in party.workers))
