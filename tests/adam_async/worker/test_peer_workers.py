"""Two workers of a replica talk: blocks leave together, come once, and whoever breaks a rule is told."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import numpy as np
import pytest

from adam_async.errors import DeadlineExceeded, RoleDied, first_cause
from adam_async.messages import Block, Blocks, Greet, pack, unpack
from adam_async.model.named import digits
from adam_async.model.network import Network
from adam_async.model.partition.network import Partition
from adam_async.model.partition.planner import layers_plan
from adam_async.run.cluster_map import ClusterMap, NodeRecord
from adam_async.run.config import Waits
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.traffic import Traffic
from adam_async.worker.peer_workers import BLOCKS, CONFIRM_BLOCKS, PeerWorkers
from adam_async.worker.reliable_stream import Parcel
from tests.adam_async.runs import NETWORKS, Rough, address_of, turns, until
from tests.transport.testing import Faults
from transport import Identity, LinkBroken, LinkClosed, RemoteProtocolError

WAITS = Waits(dial_s=30.0, call_s=30.0, patience_s=30.0)
GREET = Greet(run="run", replica=0, replica_generation=7, partition=0, received=0, begun=0)
MODEL = Network(digits(), dtype="float32")
PLAN = layers_plan(MODEL, 2)
SHAPE = (16, 4, 4)
"""Of what crosses forward, as crossing 0, and back, as crossing 1."""
LEAD = 8
GROUPS = 1000


def identity(part):
    return Identity(role="worker", node=f"worker-{part}", incarnation=part + 1)


class ReadsWhenTold:
    """A link whose owner does not always read."""

    def __init__(self, link, reads):
        self._link, self._reads = link, reads

    async def receive(self):
        await self._reads.wait()
        return await self._link.receive()

    def __getattr__(self, name):
        return getattr(self._link, name)


class Worker:
    """One worker of two: takes blocks, and has memory that comes back."""

    def __init__(self, part, network, waits, replica_generation):
        self.part, self.network, self.waits = part, network, waits
        self.greet = msgspec.structs.replace(GREET, partition=part, replica_generation=replica_generation)
        self.taken, self.given_back = [], []
        self.made = 0
        self.refused = 0
        self.images = 2
        self.reads = asyncio.Event()
        self.reads.set()

    async def begin(self, cluster):
        self.others = PeerWorkers(
            Endpoint(self.network, identity(self.part), Traffic(f"worker-{self.part}")),
            greet=self.greet,
            cluster=cluster,
            partition=Partition(MODEL, PLAN, self.part),
            group_images=lambda number: self.images if number < GROUPS else 0,
            lead=LEAD,
            on_blocks=lambda arrived: self.taken.extend((block, tensor.copy()) for block, tensor in arrived),
            waits=self.waits,
        )
        self.other = self.others._others[1 - self.part]

    async def on_link(self, link):
        """Handle a link from another worker, as a worker does."""
        try:
            greet = unpack(await link.receive(), Greet)
            if self.others.knows(greet, link.peer):
                await self.others.welcome(ReadsWhenTold(link, self.reads), greet)
            else:
                self.refused += 1
        except (LinkBroken, LinkClosed):
            pass
        finally:
            link.abort()

    def put(self, number=None, *, crossing=None, shape=None):
        """Send the block of one group; its values are the group's number."""
        number = self.made if number is None else number
        self.made += 1
        tensor = np.full((*SHAPE, self.images) if shape is None else shape, float(number), np.float32)
        block = Block(self.part if crossing is None else crossing, 1, number, 1)
        self.others.put(1 - self.part, Parcel(block, tensor, self.given_back.append))

    @property
    def numbers(self):
        """Groups whose blocks came, in the order in which they did."""
        for block, tensor in self.taken:
            assert (tensor == block.number).all()
        return [block.number for block, _ in self.taken]

    @property
    def told(self):
        (told,) = self.others.statistics().values()
        return told


@asynccontextmanager
async def two_workers(network, *, replica_generations=(7, 7), waits=WAITS, listens=identity):
    """Both workers, as soon as they know each other's addresses; `listens` may give another identity."""
    workers = [Worker(part, network, waits, replica_generations[part]) for part in (0, 1)]
    try:
        async with AsyncExitStack() as stack:
            listeners = [
                await stack.enter_async_context(
                    network.listen(address_of(network), listens(worker.part), worker.on_link)
                )
                for worker in workers
            ]
            nodes = {
                f"worker-{part}": NodeRecord(
                    role="worker", address=listener.address, incarnation=part + 1, replica=0, partition=part
                )
                for part, listener in enumerate(listeners)
            }
            group = await stack.enter_async_context(asyncio.TaskGroup())
            for worker in workers:
                await worker.begin(ClusterMap(nodes=nodes))
                stack.callback(group.create_task(worker.others.run(), name=f"worker-{worker.part}").cancel)
            yield workers
    except ExceptionGroup as errors:
        raise first_cause(errors) from None


def linked(*workers):
    return all(worker.other._link is not None for worker in workers)


@pytest.mark.parametrize("network", NETWORKS)
async def test_blocks_that_become_ready_in_one_turn_leave_in_one_message(network):
    async with two_workers(NETWORKS[network]()) as (one, two):
        await until(lambda: linked(one, two))
        for number in range(5):
            one.put(number)
        two.put(9)
        assert one.told.messages == 0, "what becomes ready later in this turn goes with them"
        await until(lambda: len(two.taken) == 5 and len(one.taken) == 1)
        assert (one.told.messages, two.told.messages) == (1, 1)
        one.put(5)
        await turns()
        one.put(6)
        await until(lambda: len(two.taken) == 7)
        assert one.told.messages == 3
        assert two.numbers == list(range(7))
        assert one.numbers == [9]


@pytest.mark.parametrize("network", NETWORKS)
async def test_more_blocks_than_a_message_holds_leave_in_several(network):
    async with two_workers(NETWORKS[network]()) as (one, two):
        await until(lambda: linked(one, two))
        for _ in range(2 * BLOCKS + 1):
            one.put()
        await until(lambda: len(two.taken) == 2 * BLOCKS + 1)
        assert one.told.messages == 3
        assert two.numbers == list(range(2 * BLOCKS + 1))


@pytest.mark.parametrize("network", NETWORKS)
async def test_blocks_put_before_there_is_a_link_leave_on_the_first_one(network):
    async with two_workers(NETWORKS[network]()) as (one, two):
        for worker in (one, two):
            for _ in range(3):
                worker.put()
        await until(lambda: len(two.taken) == len(one.taken) == 3)
        assert (one.told.links, one.told.messages) == (1, 1)


@pytest.mark.parametrize("network", NETWORKS)
async def test_where_nothing_goes_back_blocks_are_confirmed_all_the_same(network):
    async with two_workers(NETWORKS[network]()) as (one, two):
        await until(lambda: linked(one, two))
        for _ in range(CONFIRM_BLOCKS - 1):
            one.put()
        await until(lambda: len(two.taken) == CONFIRM_BLOCKS - 1)
        await turns(50)
        assert (two.told.messages, len(one.given_back)) == (0, 0)
        one.put()
        await until(lambda: len(one.given_back) == CONFIRM_BLOCKS)
        assert (two.told.messages, two.made) == (1, 0)
        assert one.told.blocks_unconfirmed == 0


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_link_that_is_cut_again_and_again_loses_nothing_and_repeats_nothing(network):
    async with two_workers(NETWORKS[network]()) as (one, two):
        for number in range(60):
            await until(lambda: linked(one, two))
            for _ in range(5):
                one.put()
                two.put()
            await turns(number % 7)
            for worker in (one, two):
                if number % 4 != worker.part and worker.other._link is not None:
                    worker.other._link.abort()
        await until(lambda: len(two.taken) == len(one.taken) == 300)
        assert one.numbers == two.numbers == list(range(300))
        assert one.told.links > 20
        assert one.told.blocks_resent + two.told.blocks_resent > 0
        for _ in range(CONFIRM_BLOCKS):
            one.put()
            two.put()
        await until(lambda: len(one.given_back) >= 300 and len(two.given_back) >= 300)
        for worker in (one, two):
            assert len({id(tensor) for tensor in worker.given_back}) == len(worker.given_back)


async def test_a_link_that_takes_the_place_of_another_ends_that_one():
    async with two_workers(NETWORKS["local"]()) as (one, two):
        await until(lambda: linked(one, two))
        old = two.other._link
        address = one.other.address
        async with one.network.connect(address, identity(0)) as link:
            link.send_nowait(pack(one.greet))
            assert unpack(await link.receive(), Greet).partition == 1
            await until(lambda: old.closed)
        await until(lambda: linked(one, two))
        one.put()
        await until(lambda: two.numbers == [0])


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_worker_whose_address_is_that_of_another_role_is_an_unreachable_one(network):
    waits = msgspec.structs.replace(WAITS, patience_s=0.2)

    def listens(part):
        return Identity(role="data", node=f"worker-{part}", incarnation=part + 1)

    with pytest.raises(RoleDied, match=r"worker-1.*it did not answer for 0.2 s|cannot reach"):
        async with two_workers(NETWORKS[network](), waits=waits, listens=listens):
            await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_worker_of_another_replica_generation_gets_no_answer(network):
    waits = msgspec.structs.replace(WAITS, patience_s=0.2)
    seen = []
    with pytest.raises(RoleDied, match=r"worker-1.*it did not answer for 0.2 s"):
        async with two_workers(NETWORKS[network](), replica_generations=(7, 8), waits=waits) as workers:
            seen += workers
            workers[0].put()
            await asyncio.get_running_loop().create_future()
    one, two = seen
    assert two.refused > 0
    assert (two.taken, one.told.links, two.told.links) == ([], 0, 0)


@pytest.mark.parametrize(
    "stranger",
    [{"run": "other"}, {"replica": 1}, {"replica_generation": 8}, {"partition": 1}, {"partition": 2}],
    ids=str,
)
async def test_only_a_worker_of_this_replica_generation_with_another_part_is_known(stranger):
    async with two_workers(NETWORKS["local"]()) as (_, two):
        assert two.others.knows(GREET, identity(0))
        assert not two.others.knows(msgspec.structs.replace(GREET, **stranger), identity(0))
        assert not two.others.knows(GREET, identity(7))


WRONG = {
    "a crossing that leads elsewhere": ({"crossing": 1}, "crossing 1 does not lead here from worker-0"),
    "a shape that is not the crossing's": (
        {"shape": (16, 4, 5, 2)},
        r"crossing 0: expected float32\(16, 4, 4, 2\)",
    ),
    "no axes": ({"shape": ()}, r"crossing 0: expected float32\(16, 4, 4, 2\)"),
    "more images than the group has": (
        {"shape": (*SHAPE, 3)},
        r"crossing 0: expected float32\(16, 4, 4, 2\)",
    ),
    "a group that no epoch has": ({"number": GROUPS}, f"no epoch has a group {GROUPS}"),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_block_that_is_not_as_planned_is_refused_and_none_of_its_message_is_taken(wrong):
    options, said = WRONG[wrong]
    async with two_workers(NETWORKS["local"]()) as (one, two):
        await until(lambda: linked(one, two))
        one.put()
        one.put(**options)
        await until(lambda: not linked(two))
        assert (two.taken, two.told.blocks_received) == ([], 0)
    with pytest.raises(RemoteProtocolError, match=said):
        two.other._take(message_of(one, options))


def message_of(worker, options):
    """Return the message of a worker with one block."""
    shape = options.get("shape", (*SHAPE, 2))
    block = Block(options.get("crossing", 0), 1, options.get("number", 0), 1)
    return pack(Blocks(first=1, blocks=(block,), received=0, begun=0), [np.zeros(shape, np.float32)])


async def test_blocks_and_tensors_are_as_many():
    async with two_workers(NETWORKS["local"]()) as (_, two):
        message = pack(Blocks(first=1, blocks=(Block(0, 1, 0, 1),), received=0, begun=0))
        with pytest.raises(RemoteProtocolError, match="1 blocks with 0 tensors"):
            two.other._take(message)


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_worker_that_does_not_read_is_sent_the_rest_when_it_does(network):
    images, blocks = 200, 300  # sixty megabytes: more than a link and its sockets hold
    async with two_workers(NETWORKS[network]()) as (one, two):
        await until(lambda: linked(one, two))
        two.reads.clear()
        one.images = two.images = images
        one.put()  # it waits for one message already
        await until(lambda: len(two.taken) == 1)
        for _ in range(1, blocks):
            one.put()
        await turns(300)
        held = one.told.messages
        assert held < blocks // BLOCKS, "the rest waits in the memory that it was computed in"
        assert len(two.taken) == 1
        assert one.told.blocks_unconfirmed == blocks
        two.reads.set()
        await until(lambda: len(two.taken) == blocks)
        assert two.numbers == list(range(blocks))
        assert one.told.links == 1


async def test_a_worker_begins_no_group_far_ahead_of_one_that_it_sends_to():
    async with two_workers(NETWORKS["local"]()) as (one, two):
        await until(lambda: linked(one, two))
        for _ in range(LEAD):
            assert one.others.keep_up
            one.others.begin()
        assert not one.others.keep_up
        waiting = asyncio.create_task(one.others.wait_progress(), name="wait")
        await turns(20)
        assert not waiting.done()
        for _ in range(LEAD // 4):
            two.others.begin()
        await waiting
        assert one.others.keep_up
        assert two.told.messages == 1


async def test_how_far_a_worker_is_goes_with_its_blocks_and_greetings():
    rough = Rough(NETWORKS["local"](), Faults(), towards="worker")
    async with two_workers(rough) as (one, two):
        await until(lambda: linked(one, two))
        one.others.begin()
        two.others.begin()
        two.put()
        await until(lambda: one.taken)
        assert one.other._has_begun == 1
        two.others.begin()
        rough.cut_all()
        await until(lambda: not linked(two))
        await until(lambda: linked(one, two))
        assert one.other._has_begun == 2


async def test_a_worker_that_does_not_keep_up_at_all_is_named():
    waits = msgspec.structs.replace(WAITS, clock_s=0.05)
    async with two_workers(NETWORKS["local"](), waits=waits) as (one, _):
        for _ in range(LEAD):
            one.others.begin()
        with pytest.raises(DeadlineExceeded, match=r"waited 0.05 s for worker-1 to begin another group"):
            await one.others.wait_progress()
