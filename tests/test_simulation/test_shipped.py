"""Shipped code in simulated clusters: members that crash and return, and calls over links that are reset."""

import asyncio

import numpy as np
import pytest
from msgspec.msgpack import decode, encode

from adam_async.controller.client import Membership
from adam_async.controller.consensus_node import ConsensusSetup
from adam_async.controller.role import RoleSettings
from adam_async.controller.service import Controller
from adam_async.messages import role_table
from adam_async.run.cluster_map import NodeRecord
from adam_async.run.config import Waits
from adam_async.runtime.traffic import Traffic
from tests.simulation.scenario import simulate
from tests.simulation.wire import Conditions
from transport import (
    BufferPool,
    Identity,
    LinkConfig,
    Message,
    RemoteError,
    RoleTable,
    TcpNetwork,
    TransportError,
)

TOKEN = b"a token of the simulated cluster"
ADDRESS = "tcp://controller:7000"
SEEDS = range(20)

WAITS = Waits(dial_s=5.0, call_s=5.0, patience_s=120.0, grace_s=2.0)
SHORT = LinkConfig(ping_every_s=0.5, dead_after_s=2.0, stalled_after_s=2.0, handshake_s=2.0, close_s=1.0)

ROUGH = Conditions(delay_s=0.001, jitter_s=0.02, ragged=True, duplicate=0.05)


def network_of(node, rules=None):
    return TcpNetwork(
        token=TOKEN, entropy=node.entropy, rules=rules or role_table(), config=SHORT, pool=BufferPool()
    )


class Cluster:
    """A controller and workers, each on a machine, running shipped code."""

    def __init__(self, world, workers):
        self.world = world
        self.controller = None
        self.memberships = {}
        world.node("controller").start(self._serve)
        for worker in workers:
            world.node(worker).start(self._stay)

    async def _serve(self, node):
        identity = Identity(role="controller", node="controller", incarnation=node.incarnation)
        controller = Controller(
            RoleSettings(network=network_of(node), address=ADDRESS, identity=identity, waits=WAITS),
            ConsensusSetup(entropy=node.entropy),
        )
        async with controller:
            self.controller = controller
            await asyncio.Event().wait()

    async def _stay(self, node):
        identity = Identity(role="worker", node=node.name, incarnation=node.incarnation)
        record = NodeRecord(role="worker", address=f"tcp://{node.name}:1", incarnation=node.incarnation)
        self.memberships[node.name] = membership = Membership(
            network=network_of(node),
            controller=ADDRESS,
            identity=identity,
            record=record,
            waits=WAITS,
            traffic=Traffic(node.name),
        )
        await membership.run()

    @property
    def live(self):
        return self.controller.map.live("worker")

    async def until(self, predicate, timeout_s):
        """Look every so often; returns how long it took."""
        begun = self.world.now
        for _ in range(round(timeout_s / 0.01)):
            if predicate():
                return self.world.now - begun
            await asyncio.sleep(0.01)
        raise AssertionError(f"not within {timeout_s} s: {self.live}, {self.world.loop.waiting()}")


WORKERS = [f"worker-{number}" for number in range(4)]


@pytest.mark.parametrize(
    ("end", "least_s", "most_s"),
    [
        ("kill", 0.0, 0.0),
        # The controller notices silence after `dead_after_s`, or a ping later.
        ("crash", SHORT.dead_after_s - SHORT.ping_every_s - 0.1, SHORT.dead_after_s + SHORT.ping_every_s),
    ],
)
def test_an_ended_member_is_missed_after_the_grace_and_a_silent_one_after_its_silence_too(
    end, least_s, most_s
):
    async def scenario(world):
        cluster = Cluster(world, WORKERS)
        await cluster.until(lambda: cluster.controller is not None and cluster.live == WORKERS, 10.0)
        getattr(world.node("worker-3"), end)()
        return await cluster.until(lambda: cluster.live == WORKERS[:3], 10.0)

    for seed in range(5):
        missed_s = simulate(scenario, seed=seed, conditions=ROUGH).result
        assert WAITS.grace_s + least_s <= missed_s < WAITS.grace_s + most_s + 0.1


@pytest.mark.parametrize(
    "down_s",
    [
        pytest.param(6.0, id="after its loss"),
        *(pytest.param(down_s, id=f"after {down_s} s") for down_s in (0.01, 0.1, 0.3, 1.0, 1.9)),
    ],
)
def test_a_member_that_returns_joins_again_even_before_the_end_of_its_old_link(down_s):
    async def scenario(world):
        cluster, worker = Cluster(world, ["worker-0"]), world.node("worker-0")
        await asyncio.sleep(5.0 + world.dice.between(0.0, 0.5))
        assert cluster.memberships["worker-0"].joined
        worker.crash()
        del cluster.memberships["worker-0"]
        await asyncio.sleep(down_s)
        worker.restart()
        await cluster.until(
            lambda: "worker-0" in cluster.memberships and cluster.memberships["worker-0"].joined, 10.0
        )
        return cluster.controller.map.nodes["worker-0"].incarnation

    for seed in range(5):
        assert simulate(scenario, seed=seed).result == 2


# --- calls over links that are reset and cut ----------------------------------------------------------------

CALLS = RoleTable({"add": [("client", "server")], "added": [("server", "client")]})


async def calls_under_faults(world):
    """A client adds numbered arrays, each until it is answered, while its links are reset and cut. The server
    keeps what it was asked, so that an answer can be compared with it."""
    asked, answers = {}, {}
    links = 0

    def answer(request):
        number = decode(request.message.meta)
        total = float(request.message.tensors[0].sum())
        asked.setdefault(number, set()).add(total)
        request.reply(Message(type="added", meta=encode(number), tensors=[np.array([total])]))

    async def serve(node):
        identity = Identity(role="server", node="server", incarnation=node.incarnation)

        async def on_link(link):
            link.serve(answer)
            await link.wait_closed()

        async with network_of(node, CALLS).listen("tcp://server:1", identity, on_link):
            await asyncio.Event().wait()

    async def call(node):
        nonlocal links
        identity = Identity(role="client", node="client", incarnation=node.incarnation)
        network = network_of(node, CALLS)
        number = 0
        while number < 40:
            async with network.connect("tcp://server:1", identity, timeout_s=60.0) as link:
                links += 1
                while number < 40:
                    values = np.full(1 + 997 * number, number, np.float32)
                    question = Message(type="add", meta=encode(number), tensors=[values])
                    try:
                        reply = await link.call(question, timeout_s=4.0)
                    except RemoteError:
                        raise
                    except TransportError:
                        break
                    assert decode(reply.meta) == number
                    answers[number] = float(reply.tensors[0][0])
                    number += 1
                    await asyncio.sleep(0.2)

    async def harm():
        network, dice = world.network, world.dice
        for _ in range(15):
            await asyncio.sleep(dice.around(1.0))
            match dice.below(4):
                case 0:
                    network.reset("client", "server")
                case 1:
                    network.cut("client", "server", both=False)
                case 2:
                    network.cut("server", "client", both=False)
                case 3:
                    network.cut("server", "client")
            await asyncio.sleep(dice.around(1.0))
            network.heal_all(reset=dice.chance(0.3))

    world.node("server").start(serve)
    client = world.node("client")
    client.start(call)
    await harm()
    await asyncio.wait_for(asyncio.shield(client.task), 120.0)
    assert sorted(answers) == list(range(40))
    for number, total in answers.items():
        assert total == number * (1 + 997 * number)
        assert asked[number] == {total}
    return links


def test_calls_are_answered_rightly_over_links_that_are_reset_and_cut():
    links = [
        simulate(calls_under_faults, seed=seed, conditions=ROUGH, shuffled=seed % 2 == 1).result
        for seed in SEEDS
    ]

    assert sum(links) > 3 * len(links)  # or nothing was ever broken
