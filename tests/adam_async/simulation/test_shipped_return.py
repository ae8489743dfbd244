"""A machine that crashes and returns within the grace period joins again."""

import asyncio

from adam_async.controller.client import Membership
from adam_async.controller.consensus_node import ConsensusSetup
from adam_async.controller.role import RoleSettings
from adam_async.controller.service import Controller
from adam_async.messages import role_table
from adam_async.run.cluster_map import NodeRecord
from adam_async.run.config import Waits
from adam_async.runtime.traffic import Traffic
from adam_async.simulation.nodes import simulate
from transport import BufferPool, Identity, LinkConfig, TcpNetwork

CONTROLLER = "tcp://controller:7000"
LINKS = LinkConfig(ping_every_s=0.5, dead_after_s=2.0, stalled_after_s=2.0, handshake_s=2.0, close_s=1.0)
WAITS = Waits(dial_s=10.0, call_s=10.0, grace_s=1.0)


def network_of(node):
    return TcpNetwork(
        token=b"a token of the simulated cluster",
        entropy=node.entropy,
        rules=role_table(),
        config=LINKS,
        pool=BufferPool(),
    )


async def control(node):
    identity = Identity(role="controller", node=node.name, incarnation=node.incarnation)
    async with Controller(
        RoleSettings(network=network_of(node), address=CONTROLLER, identity=identity, waits=WAITS),
        ConsensusSetup(entropy=node.entropy),
    ):
        await asyncio.Event().wait()


async def join(node, joined):
    """Be a member; `joined` receives each incarnation that joins."""
    identity = Identity(role="worker", node=node.name, incarnation=node.incarnation)
    membership = Membership(
        network=network_of(node),
        controller=CONTROLLER,
        identity=identity,
        record=NodeRecord(role="worker", address="tcp://worker:1", incarnation=node.incarnation),
        waits=WAITS,
        traffic=Traffic(node.name),
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(membership.run(), name="membership")
        await membership.wait_for(lambda _: membership.joined, "its membership", WAITS.dial_s)
        joined.append(node.incarnation)


def joined_incarnations(down_s, *, seed):
    """Crash a member for `down_s`; return the incarnations that joined, half a minute later."""
    joined = []

    async def scenario(world):
        world.node("controller").start(control)
        worker = world.node("worker")
        worker.start(lambda node: join(node, joined), may_fail=True)
        await asyncio.sleep(5.0 + world.dice.between(0.0, 0.5))
        worker.crash()
        await asyncio.sleep(down_s)
        worker.restart()
        await asyncio.wait([worker.task], timeout=30.0)
        if worker.task.done():
            await worker.task  # what it ended with
        return joined

    return simulate(scenario, seed=seed).result


def test_a_lost_member_joins_again():
    for seed in range(5):
        assert joined_incarnations(4.0, seed=seed) == [1, 2]


def test_a_member_back_before_the_end_of_its_old_link_joins_again():
    for seed in range(5):
        for down_s in (0.01, 0.1, 0.3, 1.0, 1.9):
            assert joined_incarnations(down_s, seed=seed) == [1, 2]
