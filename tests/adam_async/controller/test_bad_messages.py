"""Every message with every bad field, sent to controllers over real links: it costs a link at most."""

import asyncio

import pytest

from adam_async.controller.client import Membership
from adam_async.messages import OpenSession, SessionOpened, pack, unpack
from adam_async.run.cluster_map import NodeRecord
from adam_async.runtime.traffic import Traffic
from tests.adam_async.bad_clients import ANSWER_S, bad_client, refusable
from tests.adam_async.controller.test_consensus_node import Three
from tests.adam_async.runs import NETWORKS, PATIENT, servers_of
from tests.simulation.scenarios.valid_messages import Facts
from transport import Identity

pytestmark = pytest.mark.thorough

MEMBERS = ("worker", "driver", "data", "ps")

IGNORED = [f"tensor.{name}" for name in ("replica", "partition", "placed", "changed", "store")]
"""Fields of a record that the controllers set, and the id of a store, which a driver chooses."""


async def session_of(network, address, identity):
    """Open a session of numbered questions."""
    async with network.connect(address, identity, timeout_s=ANSWER_S) as link:
        return unpack(await link.call(pack(OpenSession()), timeout_s=ANSWER_S), SessionOpened).session


async def join(network, addresses, identity):
    """Join the cluster as an honest member, and leave."""
    member = Membership(
        network=network,
        controller=addresses,
        identity=identity,
        record=NodeRecord(
            role=identity.role, address=f"local://{identity.node}", incarnation=identity.incarnation
        ),
        waits=PATIENT,
        traffic=Traffic(identity.node),
    )
    async with asyncio.TaskGroup() as group:
        running = group.create_task(member.run(), name=identity.node)
        await member.wait_for(lambda m: identity.node in m.nodes, "a seat", ANSWER_S)
        running.cancel()


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("role", MEMBERS)
async def test_a_bad_message_of_a_member_changes_no_record_and_an_honest_one_joins(network, role):
    async with asyncio.timeout(120), servers_of(NETWORKS[network]()) as servers:
        controller, known = servers.controller, Identity(role=role, node="hostile", incarnation=3)
        before = controller.map
        facts = Facts(
            run="run",
            generation=before.generation,
            incarnation=3,
            group=controller.replicated_state.group,
            version=before.version,
            node="hostile",
            map_session=await session_of(servers.network, controller.address, known),
        )
        async with bad_client(servers.network, controller.address, known) as bad:
            found = refusable((role, "controller"), facts)
            await bad.expect_refusals(each for each in found if each.field not in IGNORED)
            assert bad.sent > 20
        assert controller.map is before
        await join(servers.network, controller.address, servers.identity("worker", 5))
        assert controller.map.version > before.version


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_bad_message_of_a_controller_changes_no_record_and_ends_none_of_three(network):
    async with asyncio.timeout(120), Three(NETWORKS[network]()) as three:
        leader = three.controllers[await three.leader()]
        target = next(each for each in (leader, *three.controllers) if each is not three.controllers[1])
        known = Identity(role="controller", node="controller-2", incarnation=2)
        told, voters = target.group.statistics(), target.group.introduce().members
        facts = Facts(
            group=target.replicated_state.group,
            core_term=told.term,
            core_index=told.commit,
            sender_identity=next(name for name in voters if name.startswith("controller-2")),
            receiver_identity=target.group.introduce().identity,
            node="controller-2",
            version=target.map.version,
        )
        async with bad_client(three.network, target.address, known) as bad:
            await bad.expect_refusals(refusable(("controller", "controller"), facts))
            assert bad.sent > 100
        assert target.map.nodes == {}
        addresses = ",".join(each.address for each in three.controllers)
        await join(three.network, addresses, Identity(role="worker", node="worker-0", incarnation=1))
        await three.leader()
