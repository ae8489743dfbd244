"""Shipped servers, data servers and workers in simulated clusters: pushes are applied once, and runs end."""

import asyncio
from functools import partial

import msgspec
import numpy as np
import pytest

from adam_async.cluster.local import LocalCluster
from adam_async.controller.client import Membership
from adam_async.controller.consensus_node import ConsensusSetup
from adam_async.controller.role import RoleSettings
from adam_async.controller.service import Controller
from adam_async.data_server.service import DataServer
from adam_async.driver.driver import Driver
from adam_async.driver.settings import DriverSettings, RunInputs
from adam_async.messages import role_table
from adam_async.model.named import digits
from adam_async.model.network import Network as Model
from adam_async.parameter_server.client import ParameterClient, SessionIdentity
from adam_async.parameter_server.service import ParameterServer
from adam_async.run.cluster_map import NodeRecord, RunRecord
from adam_async.run.config import Config, Waits
from adam_async.run.shard_table import shard_table
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.machine import ProcessMemory
from adam_async.runtime.traffic import Traffic
from adam_async.simulation.nodes import simulate
from adam_async.simulation.pool import SimulatedPool
from adam_async.simulation.wire import Conditions
from adam_async.worker.run_session import ComputeSettings
from adam_async.worker.service import ModelWorker
from tests.adam_async.runs import HandClient, tiny_dataset
from transport import BufferPool, Identity, LinkConfig, TcpNetwork

TOKEN = b"a token of the simulated cluster"
CONTROLLER = "tcp://controller:7000"
SHORT = LinkConfig(ping_every_s=0.5, dead_after_s=2.0, stalled_after_s=2.0, handshake_s=2.0, close_s=1.0)
ROUGH = Conditions(delay_s=0.001, jitter_s=0.01, ragged=True, segment_bytes=8 << 10, duplicate=0.02)
WAITS = Waits(dial_s=20.0, call_s=20.0, answer_s=0.5, patience_s=100.0, grace_s=20.0)


def network_of(node):
    return TcpNetwork(token=TOKEN, entropy=node.entropy, rules=role_table(), config=SHORT, pool=BufferPool())


def identity_of(role, node):
    return Identity(role=role, node=node.name, incarnation=int.from_bytes(node.entropy(7), "little"))


class Counting:
    """A controller, servers and clients that push ones: each push adds one to every value."""

    PUSHES = 25

    def __init__(self, world, *, servers=3, clients=2):
        self.world = world
        self.config = Config(rate=1.0, dtype="float64", servers=servers, shard_bytes=16 << 10, waits=WAITS)
        self.spec = digits()
        self.model = Model(self.spec, dtype="float64")
        self.table = shard_table(self.model.parameters, shard_bytes=16 << 10, item_bytes=8)
        self.map, self.placed = None, asyncio.Event()
        self.clients = {}
        self.servers = {}
        world.node("controller").start(self._control)
        for number in range(servers):
            world.node(f"ps-{number}").start(self._serve)
        world.node("driver-0").start(self._drive)
        self.pushing = [world.node(f"worker-{number}") for number in range(clients)]
        for node in self.pushing:
            node.start(self._push)

    async def _control(self, node):
        async with Controller(
            RoleSettings(
                network=network_of(node),
                address=CONTROLLER,
                identity=identity_of("controller", node),
                waits=WAITS,
            ),
            ConsensusSetup(entropy=node.entropy),
        ):
            await asyncio.Event().wait()

    async def _serve(self, node):
        async with ParameterServer(
            RoleSettings(
                network=network_of(node),
                address=f"tcp://{node.name}:1",
                identity=identity_of("ps", node),
                waits=WAITS,
                controller=CONTROLLER,
            ),
            buffers=BufferPool(),
        ) as self.servers[node.name]:
            await asyncio.Event().wait()

    async def _drive(self, node):
        identity = identity_of("driver", node)
        record = NodeRecord(role="driver", address="", incarnation=identity.incarnation)
        membership = Membership(
            network=network_of(node),
            controller=CONTROLLER,
            identity=identity,
            record=record,
            waits=WAITS,
            traffic=Traffic(node.name),
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(membership.run(), name="membership")
            await membership.wait_for(lambda m: len(m.live("ps")) == len(self.servers) == 3, "servers", 30.0)
            config = msgspec.to_builtins(self.config)
            await membership.submit_run(
                RunRecord(id="run", driver=node.name, config=config, spec=self.spec.to_dict())
            )
            self.map = await membership.wait_for(
                lambda m: bool(m.buckets) and all(m.nodes[name].ready == "run" for name in set(m.buckets)),
                "the servers to be ready",
                60.0,
            )
            self.before = {number: shard.values.copy() for number, shard in self.shards().items()}
            self.placed.set()

    async def _push(self, node):
        await self.placed.wait()
        identity = identity_of("worker", node)
        replica = self.pushing.index(node)
        client = ParameterClient(
            Endpoint(network_of(node), identity, Traffic(node.name)),
            SessionIdentity(
                run="run",
                session=replica + 100,
                incarnation=identity.incarnation,
                replica=replica,
                generation=self.map.generation,
            ),
            addresses={name: self.map.nodes[name].address for name in sorted(set(self.map.buckets))},
            waits=WAITS,
        )
        async with asyncio.TaskGroup() as group:
            running = group.create_task(client.run(), name="client")
            hand = self.clients[node.name] = HandClient(self, client)
            for _ in range(self.PUSHES):
                await client.admit()
                hand.push(-1.0)
                await asyncio.sleep(0.1)
            await client.flush()
            running.cancel()

    def shards(self):
        return dict(sorted(item for server in self.servers.values() for item in server.state.shards.items()))


async def count_under_faults(world):
    """Two clients push while links to servers are reset, cut and healed, and servers freeze."""
    counting = Counting(world)
    network, dice = world.network, world.dice
    await counting.placed.wait()
    while not all(node.task.done() for node in counting.pushing):
        await asyncio.sleep(dice.around(0.5))
        worker, server = f"worker-{dice.below(2)}", f"ps-{dice.below(3)}"
        match dice.below(4):
            case 0:
                network.reset(worker, server)
            case 1:
                network.cut(worker, server, both=False)
            case 2:
                network.cut(server, worker, both=False)
            case 3:
                world.node(server).freeze()
        await asyncio.sleep(dice.around(0.5))
        network.heal_all(reset=dice.chance(0.3))
        world.node(server).thaw()
    pushes = 2 * counting.PUSHES
    for number, shard in counting.shards().items():
        shard.check_invariants()
        assert shard.version == pushes
        assert sorted(shard.last_number.values()) == [counting.PUSHES] * 2
        np.testing.assert_allclose(shard.values, counting.before[number] + pushes, rtol=0, atol=1e-9)
    told = [hand.client.statistics() for hand in counting.clients.values()]
    return sum(one.resent for one in told), sum(one.duplicates for one in told)


@pytest.mark.thorough
def test_every_push_is_applied_exactly_once_while_links_break_and_servers_freeze():
    told = [
        simulate(count_under_faults, seed=seed, conditions=ROUGH, shuffled=seed % 2 == 1).result
        for seed in range(12)
    ]

    assert sum(resent for resent, _ in told) > 20  # or the test has shown nothing
    assert sum(duplicates for _, duplicates in told) > 20


def test_counting_is_the_same_again():
    hashes = [simulate(count_under_faults, seed=4, conditions=ROUGH).replay_hash for _ in range(2)]

    assert hashes[0] == hashes[1]


def process_memory():
    """Of a simulated process."""
    return ProcessMemory(host="", pid=1, peak_rss_mb=1.0)


TRAINING = Config(
    epochs=2,
    replicas=2,
    servers=2,
    images_per_group=2,
    in_flight=2,
    shard_bytes=16 << 10,
    threads=1,
    epoch_fraction=1.0,
    waits=Waits(dial_s=20.0, call_s=5.0, answer_s=0.5, patience_s=60.0, grace_s=1.0),
)
IMAGES = 60


async def train_on_one_machine(world):
    """A whole cluster as the embedding call makes it, each role over TCP."""

    async def program(node):
        cluster = LocalCluster(
            TRAINING,
            dataset=tiny_dataset(IMAGES),
            spec=digits(),
            network=network_of(node),
            address="tcp://127.0.0.1:0",
            entropy=node.entropy,
            make_pool=SimulatedPool,
            process_memory=process_memory,
            available_bytes=lambda: 1 << 30,
        )
        async with cluster:
            return await cluster.train()

    node = world.node("laptop")
    node.start(program)
    return await node.task


def test_a_whole_run_trains_in_the_simulator_and_is_the_same_again():
    outcomes = [simulate(train_on_one_machine, seed=seed, shuffled=True) for seed in (1, 1, 2)]

    assert outcomes[0].replay_hash == outcomes[1].replay_hash != outcomes[2].replay_hash
    for outcome in outcomes:
        assert [epoch.images for epoch in outcome.result.epochs] == [IMAGES] * 2
    first, again, _ = outcomes
    for name, values in first.result.weights.items():
        np.testing.assert_array_equal(values, again.result.weights[name])


class Training:
    """Every role of a run on a machine of its own."""

    def __init__(self, world):
        self.world = world
        world.node("controller").start(self._control)
        world.node("data-0").start(self._data)
        for number in range(TRAINING.servers):
            world.node(f"ps-{number}").start(self._serve)
        self.workers = [world.node(f"worker-{number}") for number in range(TRAINING.replicas)]
        for worker in self.workers:
            worker.start(self._work)
        self.driver = world.node("driver")
        self.driver.start(self._drive)

    def _settings(self, role, node):
        return RoleSettings(
            network=network_of(node),
            address=CONTROLLER if role == "controller" else f"tcp://{node.name}:1",
            identity=identity_of(role, node),
            waits=TRAINING.waits,
            controller="" if role == "controller" else CONTROLLER,
            process_memory=process_memory,
        )

    async def _control(self, node):
        async with Controller(self._settings("controller", node), ConsensusSetup(entropy=node.entropy)):
            await asyncio.Event().wait()

    async def _data(self, node):
        async with DataServer(
            self._settings("data", node),
            tiny_dataset(IMAGES),
            make_pool=SimulatedPool,
            available_bytes=lambda: 1 << 30,
        ) as self.data:
            await asyncio.Event().wait()

    async def _serve(self, node):
        async with ParameterServer(self._settings("ps", node), buffers=BufferPool()):
            await asyncio.Event().wait()

    async def _work(self, node):
        async with ModelWorker(
            self._settings("worker", node),
            ComputeSettings(threads=1, in_flight=2, make_pool=SimulatedPool),
            buffers=BufferPool(),
            entropy=node.entropy,
        ):
            await asyncio.Event().wait()

    async def _drive(self, node):
        settings = DriverSettings(
            network=network_of(node),
            controller=CONTROLLER,
            identity=identity_of("driver", node),
            threads=1,
            make_pool=SimulatedPool,
            process_memory=process_memory,
        )
        async with Driver(TRAINING, settings, RunInputs(spec=digits())) as driver:
            return await driver.train()

    def in_the_middle(self):
        if not hasattr(self, "data") or not self.data.state:
            return False
        counts = self.data.state.statistics()
        return counts.epoch == 1 and counts.finished >= 10


async def train_and_lose_a_worker(world, how):
    training = Training(world)
    await looked_for(training.in_the_middle)
    victim = training.workers[world.dice.below(2)]
    if how == "cut":
        for other in [name for name in world.nodes if name != victim.name]:
            world.network.cut(victim.name, other)
    else:
        getattr(victim, how)()
    result = await asyncio.wait_for(asyncio.shield(training.driver.task), 120.0)
    training.data.state.check_invariants()
    return sum(epoch.trained_again for epoch in result.epochs), [epoch.images for epoch in result.epochs]


async def looked_for(condition):
    """Look every millisecond until something is so."""
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came to be")


@pytest.mark.parametrize(
    "how", ["crash", *(pytest.param(how, marks=pytest.mark.thorough) for how in ("kill", "cut"))]
)
def test_a_run_that_loses_a_worker_trains_every_image_all_the_same(how):
    scenario = partial(train_and_lose_a_worker, how=how)
    told = [
        simulate(scenario, seed=seed, shuffled=seed % 2 == 1, conditions=ROUGH).result for seed in range(2)
    ]

    assert [images for _, images in told] == [[IMAGES] * 2] * 2
    assert sum(trained_again for trained_again, _ in told) > 0
