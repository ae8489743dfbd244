"""The shipped code in simulated clusters: members of a controller that crash and are cut off, and calls over
links that are reset. Nothing of it knows that it is simulated."""

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from adam_async.controller.client import Membership
from adam_async.controller.consensus_node import ConsensusSetup
from adam_async.controller.role import RoleSettings
from adam_async.controller.service import Controller
from adam_async.messages import role_table
from adam_async.run.cluster_map import NodeRecord
from adam_async.run.config import Waits
from adam_async.runtime.traffic import Traffic
from adam_async.simulation.nodes import simulate
from adam_async.simulation.wire import Conditions
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

ROOT = Path(__file__).resolve().parents[3]
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


async def crash_and_cut(world):
    """All nodes join; one crashes and is missed after the grace; one is cut off for less and one for more
    than it may be; the crashed one returns as a new process; the controller freezes and goes on."""
    cluster = Cluster(world, WORKERS)
    network = world.network
    await cluster.until(lambda: cluster.controller is not None and cluster.live == WORKERS, 10.0)

    world.node("worker-0").crash()
    missed_s = await cluster.until(lambda: "worker-0" not in cluster.live, 10.0)
    network.cut("worker-1", "controller")
    await asyncio.sleep(world.dice.between(0.1, 1.5))
    network.heal("worker-1", "controller", reset=world.dice.chance(0.5))
    network.cut("worker-2", "controller", both=world.dice.chance(0.5))
    await cluster.until(lambda: cluster.live == ["worker-1", "worker-3"], 10.0)
    network.heal_all()
    await cluster.until(lambda: cluster.live == ["worker-1", "worker-2", "worker-3"], 20.0)

    world.node("worker-0").restart()
    await cluster.until(lambda: cluster.live == WORKERS, 10.0)
    world.node("controller").freeze()
    await asyncio.sleep(10.0)
    world.node("controller").thaw()
    await asyncio.sleep(6.0)
    await cluster.until(lambda: cluster.live == WORKERS, 20.0)
    for membership in cluster.memberships.values():
        await cluster.until(
            lambda membership=membership: membership.map.version == cluster.controller.map.version, 10.0
        )
    assert cluster.controller.map.nodes["worker-0"].incarnation == 2
    return missed_s


@pytest.mark.thorough
@pytest.mark.parametrize(
    "shuffled", [pytest.param(False, marks=pytest.mark.thorough), True], ids=["in order", "shuffled"]
)
def test_members_that_crash_or_are_cut_off_are_missed_and_return(shuffled):
    for seed in SEEDS:
        outcome = simulate(crash_and_cut, seed=seed, shuffled=shuffled, conditions=ROUGH, limit_s=300.0)

        # Silence is noticed after `dead_after_s`, or a ping later; then the grace begins.
        silent_s = SHORT.dead_after_s + SHORT.ping_every_s
        assert SHORT.dead_after_s - SHORT.ping_every_s + WAITS.grace_s - 0.1 < outcome.result
        assert outcome.result < silent_s + WAITS.grace_s + 0.1


def test_a_killed_member_is_missed_after_the_grace_alone():
    async def scenario(world):
        cluster = Cluster(world, WORKERS)
        await cluster.until(lambda: cluster.controller is not None and cluster.live == WORKERS, 10.0)
        world.node("worker-3").kill()
        return await cluster.until(lambda: cluster.live == WORKERS[:3], 10.0)

    for seed in range(5):
        missed_s = simulate(scenario, seed=seed, conditions=ROUGH).result
        assert WAITS.grace_s <= missed_s < WAITS.grace_s + 0.1


def test_a_run_of_shipped_code_is_the_same_again_and_unlike_that_of_other_seeds():
    def replay_hash(seed):
        return simulate(crash_and_cut, seed=seed, shuffled=True, conditions=ROUGH, limit_s=300.0).replay_hash

    hashes = [replay_hash(seed) for seed in range(3)]

    assert [replay_hash(seed) for seed in range(3)] == hashes
    assert len(set(hashes)) == 3


IN_A_PROCESS = """
from tests.adam_async.simulation.test_shipped import ROUGH, crash_and_cut, simulate
print(simulate(crash_and_cut, seed=5, shuffled=True, conditions=ROUGH, limit_s=300.0).replay_hash)
"""


@pytest.mark.thorough
def test_a_run_of_shipped_code_is_that_of_every_process():
    def replay_hash(hash_seed):
        command = [sys.executable, "-c", IN_A_PROCESS]
        environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
        return subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout

    assert replay_hash("0") == replay_hash("4242") != ""


# --- calls over links that are reset and cut ----------------------------------------------------------------

CALLS = RoleTable({"add": [("client", "server")], "added": [("server", "client")]})


async def calls_under_faults(world):
    """A client adds numbered arrays, each until it is answered, while its links are reset and cut. The server
    keeps what it was asked, so that an answer can be compared with it."""
    asked, answers = {}, {}
    links = 0

    def answer(request):
        number = request.message.meta["number"]
        total = float(request.message.tensors[0].sum())
        asked.setdefault(number, set()).add(total)
        request.reply(Message(type="added", meta={"number": number}, tensors=[np.array([total])]))

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
                    question = Message(type="add", meta={"number": number}, tensors=[values])
                    try:
                        reply = await link.call(question, timeout_s=4.0)
                    except RemoteError:
                        raise
                    except TransportError:
                        break
                    assert reply.meta["number"] == number
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
