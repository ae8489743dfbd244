"""Helpers for tests of roles: small data, networks, a few servers without the rest of a cluster."""

import asyncio
import hashlib
import random
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import numpy as np

from adam_async.checkpoint.shard_transfer import ShardCopies
from adam_async.checkpoint.tensors import WholeTensors
from adam_async.client.parameter_client import ParameterClient, SessionIdentity
from adam_async.cluster.local import LocalCluster
from adam_async.controller.client import Membership
from adam_async.controller.role import RoleSettings
from adam_async.controller.service import Controller
from adam_async.data_server.dataset import Dataset, make_dataset
from adam_async.driver.preparation import fill_from, store_of
from adam_async.driver.replay.decode import read_recording
from adam_async.driver.replay.run import Replay
from adam_async.driver.takeover import submit
from adam_async.errors import first_cause
from adam_async.messages import role_table
from adam_async.model.layer import Layer, Slots, Weights
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.model.named import digits
from adam_async.model.network import Network as NeuralNetwork
from adam_async.model.spec import LayerSpec, ModelSpec
from adam_async.parameter_server.events import ReplicasChanged
from adam_async.parameter_server.service import ParameterServer
from adam_async.run.cluster_map import ClusterMap, NodeRecord
from adam_async.run.config import Config, Waits
from adam_async.run.ids import Replica
from adam_async.run.partition import arrays_of, table_of
from adam_async.run.result import RunResult
from adam_async.run.training_program import TrainingProgram
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.traffic import Traffic
from adam_async.worker.puller import Puller, WorkerWeights
from adam_async.worker.push_plan import plan_pushes
from dataflow import ComputePool
from tests.transport.testing import Faults, FaultyNetwork
from transport import BufferPool, Identity, Link, LocalNetwork, Network, TcpNetwork

SHARDED = {"servers": 3, "shard_bytes": 16 << 10}
"""Sharding that is real for models as small as those of the tests."""

IMPATIENT = Waits(
    dial_s=20.0, call_s=20.0, answer_s=0.05, patience_s=50.0, prepare_s=50.0, grace_s=0.2, drain_s=20.0
)
"""For tests in which answers are lost: what is missing is soon asked for again."""

PATIENT = msgspec.structs.replace(IMPATIENT, answer_s=50.0)
"""For tests that count what is asked again: nothing is because an answer is late."""


def entropy_of(seed: str) -> Callable[[int], bytes]:
    """Dice for incarnations and session ids, the same in every run."""
    drawn = 0

    def entropy(count: int) -> bytes:
        nonlocal drawn
        drawn += 1
        return hashlib.shake_128(f"{seed}/{drawn}".encode()).digest(count)

    return entropy


def tiny_dataset(train: int = 60, test: int = 40, *, shape=(1, 8, 8), classes: int = 10) -> Dataset:
    """Images in which the rows of the class are bright, so that something can be learnt."""
    dice = np.random.default_rng(3)
    labels = dice.integers(0, classes, train + test)
    images = dice.integers(0, 100, (train + test, *shape), dtype=np.uint8)
    for number, label in enumerate(labels):
        images[number].reshape(-1)[label::classes] += 150
    return make_dataset(
        name="tiny",
        source="made by a test",
        train=(images[:train], labels[:train]),
        test=(images[train:], labels[train:]),
        origins=("a", "b", "c", "d"),
    )


TRAP = 255
"""First pixel of an image that has no finite gradient in the model `TRAPPED`; no tiny image has it."""


class Trap(Layer):
    """Passes images on, but for those with a first pixel as bright as can be: these are not numbers."""

    def forward(self, weights: Weights, slots: Slots) -> None:
        """Copy, and spoil."""
        pixels = slots.inputs[0]
        np.copyto(slots.output, pixels)
        slots.output[..., pixels.reshape(-1, slots.images)[0] == pixels.dtype.type(1)] = np.nan

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Do nothing: the gradient of images is not needed."""


TRAP_LAYERS = {**BUILTIN_LAYERS, "trap": Trap}
TRAPPED = ModelSpec(
    name="trapped",
    input_shape=(1, 8, 8),
    layers=(
        LayerSpec.of("trap", "trap"),
        LayerSpec.of("flat", "flatten"),
        LayerSpec.of("fc1", "dense", outputs=64),
        LayerSpec.of("tanh", "tanh"),
        LayerSpec.of("fc2", "dense", outputs=10),
        LayerSpec.of("loss", "softmax_cross_entropy"),
    ),
)


class Tally(Layer):
    """Passes images on; a step of rate 1 adds 1 to the count of each image, whose number is in two pixels."""

    def __init__(self, spec: LayerSpec, input_shapes) -> None:
        super().__init__(spec, input_shapes)
        self.parameters = tuple(self.tensor(kind, (TALLY_SIZE,)) for kind in TALLIES)

    def forward(self, weights: Weights, slots: Slots) -> None:
        """Copy."""
        np.copyto(slots.output, slots.inputs[0])

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Do nothing: the gradient of images is not needed."""

    def delta(self, slots: Slots, kind: str, out) -> None:
        """Count the images."""
        high, low = np.rint(slots.inputs[0].reshape(-1, slots.images)[:2] * 255).astype(np.int64)
        numbers = high * 256 + low - TALLIES.index(kind) * TALLY_SIZE
        out[:] = 0
        np.subtract.at(out, numbers[(numbers >= 0) & (numbers < TALLY_SIZE)], 1)


TALLY_SIZE = 400
"""Number of counts of a tensor. numpy adds to so few under the interpreter's lock, so no step is lost."""

TALLIES = ("first", "second", "third", "fourth")
TALLIED_IMAGES = TALLY_SIZE * len(TALLIES)
TALLY_LAYERS = {**BUILTIN_LAYERS, "tally": Tally}
TALLIED = ModelSpec(
    name="tallied",
    input_shape=(1, 8, 8),
    layers=(
        LayerSpec.of("tally", "tally"),
        LayerSpec.of("flat", "flatten"),
        LayerSpec.of("fc", "dense", outputs=10, frozen=True),
        LayerSpec.of("loss", "softmax_cross_entropy"),
    ),
)
"""A model whose only trained values are the counts of its images."""

TALLY_OPTIONS = {
    "rate": 1.0,
    "schedule": "constant",
    "rule": "sgd",
    "kernels": "numpy",
    "images_per_group": 1,
}
"""Options with which the counts are exact."""


def tally_of(weights: Weights) -> list[float]:
    """How often each image has counted."""
    return [count for kind in TALLIES for count in weights[f"tally.{kind}"].tolist()]


def tallied_dataset() -> Dataset:
    """Images whose first two pixels have their number."""
    dice = np.random.default_rng(4)
    labels = dice.integers(0, 10, TALLIED_IMAGES + 10)
    images = dice.integers(0, 100, (TALLIED_IMAGES + 10, 1, 8, 8), dtype=np.uint8)
    numbers = np.arange(TALLIED_IMAGES + 10) % TALLIED_IMAGES
    images[:, 0, 0, 0], images[:, 0, 0, 1] = numbers // 256, numbers % 256
    return make_dataset(
        name="tallied",
        source="made by a test",
        train=(images[:TALLIED_IMAGES], labels[:TALLIED_IMAGES]),
        test=(images[TALLIED_IMAGES:], labels[TALLIED_IMAGES:]),
        origins=("a", "b", "c", "d"),
    )


def with_frozen(spec: ModelSpec, kind: str) -> ModelSpec:
    """The same model, with all layers of a kind frozen."""
    layers = tuple(
        LayerSpec.of(layer.name, layer.kind, **{**dict(layer.options), "frozen": True})
        if layer.kind == kind
        else layer
        for layer in spec.layers
    )
    return ModelSpec(name=f"frozen {kind}", input_shape=spec.input_shape, layers=layers)


def local_network() -> Network:
    """Links by reference."""
    return LocalNetwork(rules=role_table())


def tcp_network() -> Network:
    """Real sockets in one loop."""
    return TcpNetwork(token=b"a token of tests", entropy=entropy_of("tcp"), rules=role_table())


NETWORKS = {"local": local_network, "tcp": tcp_network}


class Rough(FaultyNetwork):
    """A network that is faulty for those links only whose dialler has the role, and towards the role."""

    def __init__(
        self, inner: Network, faults: Faults, *, seed: int = 7, dialler="worker", towards="ps"
    ) -> None:
        super().__init__(inner, random.Random(seed), faults)
        self.dialler, self.towards = dialler, towards

    async def dial(self, address, identity, **options) -> Link:
        link = await super().dial(address, identity, **options)
        if (identity.role, link.peer.role) != (self.dialler, self.towards):
            self.links.remove(link)
            return link.inner
        return link


class Uneven(FaultyNetwork):
    """A network on which each worker's links to servers have faults of their own, or none."""

    def __init__(self, inner: Network, faults: Mapping[str, Faults], *, seed: int = 7) -> None:
        super().__init__(inner, random.Random(seed))
        self._of_node = {
            node: FaultyNetwork(inner, random.Random(f"{seed} {node}"), faulty)
            for node, faulty in faults.items()
        }

    async def dial(self, address, identity, **options) -> Link:
        faulty = self._of_node.get(identity.node)
        if faulty is None:
            return await self.inner.dial(address, identity, **options)
        link = await faulty.dial(address, identity, **options)
        return link if link.peer.role == "ps" else link.inner


def address_of(network: Network) -> str:
    """Where to listen on a network, so that it chooses."""
    inner = network.inner if isinstance(network, FaultyNetwork) else network
    return "local://" if isinstance(inner, LocalNetwork) else "tcp://127.0.0.1:0"


def cluster_of(
    config: Config, network: Network | None = None, *, dataset=None, spec=None, **options
) -> LocalCluster:
    """A whole cluster in this loop."""
    network = network or local_network()
    return LocalCluster(
        config,
        dataset=dataset or tiny_dataset(),
        spec=None if options.get("step") else spec or digits(),
        network=network,
        address=address_of(network),
        entropy=entropy_of("cluster that resumes" if options.get("resume") else "cluster"),
        **options,
    )


async def train(config: Config, network: Network | None = None, **options) -> RunResult:
    """Train all epochs on a cluster of `cluster_of`."""
    async with cluster_of(config, network, **options) as cluster:
        result = await cluster.train()
        cluster.data.state.check_invariants()
    return result


def check_replay(record: bytes, dataset: Dataset, step=None) -> Replay:
    """Repeat a recorded run to its last bit, with the accuracy of each epoch."""
    replay = Replay(read_recording(record, origin="it", step=step), dataset, step=step)
    for epoch in replay.header.epochs:
        for _ in replay.steps(epoch):
            pass
        assert replay.accuracy(epoch) == epoch.test_accuracy
    for _ in replay.steps():
        pass
    replay.check()
    return replay


async def turns(count: int = 1) -> None:
    """Let everybody else run that many times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """Take turns until something has happened; the test's own deadline bounds it."""
    while not condition():
        await turns()


class Servers:
    """A controller and parameter servers with a run placed on them, and clients that push by hand."""

    def __init__(self, network: Network, config: Config, group, spec) -> None:
        self.network, self.config, self.waits = network, config, config.waits
        self.spec, self._group = spec, group
        self.entropy = entropy_of("servers")
        self.model = NeuralNetwork(spec, dtype=config.dtype)
        self.table = table_of(self.model, shard_bytes=config.shard_bytes)
        self.servers: list[ParameterServer] = []
        self._live: dict[Replica, int] = {}
        self.tasks = []

    async def start(self, stack: AsyncExitStack) -> None:
        address = address_of(self.network)
        self.controller = await stack.enter_async_context(
            Controller(
                RoleSettings(
                    network=self.network,
                    address=address,
                    identity=self.identity("controller"),
                    waits=self.waits,
                )
            )
        )
        for number in range(self.config.servers):
            server = ParameterServer(
                RoleSettings(
                    network=self.network,
                    address=address,
                    identity=self.identity("ps", number),
                    waits=self.waits,
                    controller=self.controller.address,
                ),
                make_pool=ComputePool,
                buffers=BufferPool(),
            )
            self.servers.append(await stack.enter_async_context(server))
        driver = self.identity("driver")
        member = self.member = Membership(
            network=self.network,
            controller=self.controller.address,
            identity=driver,
            record=NodeRecord(role="driver", address="", incarnation=driver.incarnation),
            waits=self.waits,
            traffic=Traffic(driver.node),
        )
        self.tasks.append(self._group.create_task(member.run(), name="driver"))
        await member.wait_for(lambda m: "driver-0" in m.nodes, "the driver to join", 30.0)
        program = TrainingProgram(config=self.config, spec=self.spec.to_dict())
        run = program.record("run", member.member)
        await submit(member, run)
        arrays = arrays_of(self.model, None)
        await member.create_store(run.id, store_of(run, program, arrays), arrays)
        placed = await member.wait_for(lambda m: bool(m.buckets), "the shards to be placed", 30.0)
        await self._load(placed, member, driver)
        self.map = await member.wait_for(
            lambda m: m.run_store is not None and m.run_store.phase == "open", "the servers to be ready", 30.0
        )

    async def _load(self, placed: ClusterMap, member: Membership, driver: Identity) -> None:
        """Load the first values, as a driver does."""
        tensors = WholeTensors(arrays_of(self.model, None), self.table)
        fill_from(tensors, self.model, None, seed=self.config.seed)
        endpoint = Endpoint(self.network, driver, Traffic(driver.node))
        copies = ShardCopies(endpoint, changes=member.changes, waits=self.waits)
        await copies.load(placed.run_store, tensors)

    def identity(self, role: str, number: int = 0) -> Identity:
        incarnation = int.from_bytes(self.entropy(7), "little")
        return Identity(role=role, node=f"{role}-{number}", incarnation=incarnation)

    def shards(self):
        """Every shard, by its number, wherever it lives."""
        return dict(
            sorted(item for server in self.servers if server.state for item in server.state.shards.items())
        )

    def client(
        self,
        replica: int = 0,
        *,
        waits: Waits | None = None,
        identity: Identity | None = None,
        replica_generation: int = 0,
        is_live: bool = False,
    ) -> "HandClient":
        """A client that says what the test wants it to say.

        Pushes that name groups need a generation that the map has, or that the servers take as live.
        """
        identity = identity or self.identity("worker", replica)
        client = ParameterClient(
            Endpoint(self.network, identity, Traffic(identity.node)),
            SessionIdentity(
                store="run",
                session=replica + 100,
                incarnation=replica_generation or identity.incarnation,
                replica=replica,
                generation=self.map.generation,
            ),
            homes=sorted(set(self.map.buckets)),
            cluster=self.map,
            waits=waits or self.waits,
        )
        self.tasks.append(self._group.create_task(client.run(), name=f"client-{replica}"))
        if is_live:
            self._live[Replica(replica)] = replica_generation or identity.incarnation
            for served in (served for server in self.servers for served in server.served.values()):
                served._follow_up(served.state.handle(ReplicasChanged(dict(self._live))))
        return HandClient(self, client)


class Call:
    """A call of one message, whose answers and end go to functions; see `Receiver`."""

    def __init__(self, taken=lambda *_: None, *, freed=lambda: None, behind=lambda _: None):
        self.taken, self.freed, self._behind = taken, freed, behind

    def pushed(self, number, answer, values):
        self.taken(answer, values)

    def pulled(self, number, answer, values):
        self.taken(answer, values)

    def behind(self, number, answer):
        self._behind(answer)
        return True


class HandClient:
    """Pushes one gradient to all servers and pulls everything, when it is told to."""

    def __init__(self, servers: Servers, client: ParameterClient) -> None:
        self.client = client
        self.clock = 0
        self.freed = 0
        self.plan = plan_pushes(servers.model, servers.table, servers.map.buckets, images=1, wanted="delta")
        self.weights = WorkerWeights()
        self._dtype = servers.model.dtype
        self.puller = Puller(
            network=servers.model,
            table=servers.table,
            buckets=servers.map.buckets,
            client=client,
            weights=self.weights,
            buffers=BufferPool(),
        )

    def push(self, value: float, *, read: int = 0, own_applied: int = 0, rate: float = 1.0) -> None:
        """Push one step in which every gradient is `value`, as deltas."""
        self.clock += 1

        def free() -> None:
            self.freed += 1

        for message in self.plan.messages:
            tensors = [
                np.full(sum(shard.size for shard in part.shards), value, self._dtype)
                for part in message.parts
            ]
            self.client.connections[message.server].push(
                tensors,
                Call(freed=free),
                parts=message.wire_parts,
                shards=message.shards,
                versions=read,
                own_applied=own_applied,
                clock=self.clock,
                weight=1,
                rate=rate,
            )

    async def pull(self) -> dict:
        """Pull everything and return the arrays."""
        landed = asyncio.Event()
        self.puller.pull(landed.set)
        await self.client.flush()
        await landed.wait()
        return self.weights.snapshot().arrays


@asynccontextmanager
async def servers_of(network: Network, *, spec=None, **options):
    """Run servers for a block. Everything is over when it ends; errors leave without their groups."""
    config = Config(**{"rate": 1.0, **options})
    try:
        async with AsyncExitStack() as stack:
            group = await stack.enter_async_context(asyncio.TaskGroup())
            servers = Servers(network, config, group, spec or digits())
            stack.callback(lambda: [task.cancel() for task in servers.tasks])
            await servers.start(stack)
            yield servers
    except ExceptionGroup as errors:
        raise first_cause(errors) from None
