"""Images of leased groups from any data server: one is kept to, and a lost or slow one loses no group."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import numpy as np
import pytest

from adam_async.data_server import group_reader
from adam_async.data_server.group_reader import GroupLimits, GroupReader
from adam_async.errors import RoleDied
from adam_async.messages import Groups, Lease, pack, unpack_any
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.traffic import Traffic
from tests.adam_async.data_server.test_client import pictures
from tests.adam_async.runs import NETWORKS, PATIENT, address_of, until
from transport import Identity

LIMITS = GroupLimits(images=2, shape=(1, 3, 3), classes=1000, epochs=1, train_images=999)
LEASES = [Lease(1, number, 1, 2) for number in range(4)]
SOON_S = 0.01
"""Time after which a reader of these tests asks another server, too."""


class Server:
    """A data server that sends images at once, or keeps each question until the test answers it."""

    def __init__(self):
        self.links, self.asked, self.holds, self.gives = [], [], False, None
        self.wrong = None
        """Tensors of the next answer; None: the right ones."""

    async def on_link(self, link):
        self.links.append(link)
        link.serve(self.on_request)
        await link.wait_closed()

    def on_request(self, request):
        body = unpack_any(request.message)
        self.asked.append((body, request))
        if not self.holds:
            self.answer()

    def answer(self):
        """Answer the newest question."""
        body, request = self.asked[-1]
        count = len(body.numbers) if self.gives is None else self.gives
        wrong, self.wrong = self.wrong, None
        tensors = pictures(msgspec.structs.replace(body, numbers=body.numbers[:count]))
        request.reply(pack(Groups(count=count), tensors if wrong is None else wrong))


class Scene:
    def __init__(self, network, stack):
        self.network, self._stack = network, stack
        self.servers, self.addresses = [], []

    async def start(self):
        """Start a data server; return it."""
        server = Server()
        far = Identity(role="data", node=f"data-{len(self.servers)}", incarnation=1)
        listening = self.network.listen(address_of(self.network), far, server.on_link)
        listener = await self._stack.enter_async_context(listening)
        self.servers.append(server)
        self.addresses.append(listener.address)
        return server

    def reader(self, *, waits=PATIENT, rows=None, owed_s=20.0):
        identity = Identity(role="worker", node="worker-0", incarnation=7)
        reader = GroupReader(
            Endpoint(self.network, identity, Traffic("worker-0")),
            run="run",
            servers=lambda: self.addresses,
            rows=rows,
            limits=LIMITS,
            waits=waits,
            owed_s=owed_s,
        )
        self._stack.callback(reader.close)
        return reader


@asynccontextmanager
async def scene_of(network, servers=2):
    async with asyncio.timeout(30), AsyncExitStack() as stack:
        scene = Scene(network, stack)
        for _ in range(servers):
            await scene.start()
        yield scene


@pytest.fixture(params=NETWORKS)
def network(request):
    return NETWORKS[request.param]()


async def numbers(reader, leases=LEASES):
    """Read groups; return their numbers, as the images tell them."""
    found = await reader.read(leases, least=1)
    assert all((images == labels[0]).all() for images, labels in found)
    return [int(labels[0]) for _, labels in found]


async def test_one_server_is_kept_to_on_one_link(network):
    async with scene_of(network) as scene:
        reader = scene.reader()
        for _ in range(3):
            assert await numbers(reader) == [0, 1, 2, 3]
        assert [len(server.asked) for server in scene.servers] == [3, 0]
        assert len(scene.servers[0].links) == 1


async def test_an_answer_may_have_the_first_groups_only(network):
    async with scene_of(network, 1) as scene:
        scene.servers[0].gives = 2
        assert await numbers(scene.reader()) == [0, 1]
        assert scene.servers[0].asked[0][0].numbers == (0, 1, 2, 3)


@pytest.mark.parametrize("rows", [(0, 2), (0, 0)])
async def test_a_worker_reads_the_rows_that_it_needs_and_labels_alone_if_it_needs_none(network, rows):
    async with scene_of(network, 1) as scene:
        found = await scene.reader(rows=rows).read(LEASES, least=1)
        assert scene.servers[0].asked[0][0].rows == rows
        assert [(images is None, len(labels)) for images, labels in found] == [(rows == (0, 0), 2)] * 4


async def test_a_server_that_owes_an_answer_is_left_for_the_one_that_answers_first(network):
    async with scene_of(network) as scene:
        first, second = scene.servers
        first.holds = True
        reader = scene.reader(owed_s=SOON_S)
        assert await numbers(reader) == [0, 1, 2, 3]
        assert await numbers(reader) == [0, 1, 2, 3]
        assert (len(first.asked), len(second.asked)) == (1, 2)
        await until(lambda: first.links[0].closed)


async def test_a_slow_server_that_answers_first_after_all_is_kept_to(network):
    async with scene_of(network) as scene:
        first, second = scene.servers
        first.holds = second.holds = True
        reader = scene.reader(owed_s=SOON_S)
        reading = asyncio.create_task(numbers(reader), name="read")
        await until(lambda: bool(second.asked))
        first.answer()
        assert await reading == [0, 1, 2, 3]
        first.holds = False
        assert await numbers(reader) == [0, 1, 2, 3]
        assert (len(first.asked), len(second.asked)) == (2, 1)


async def test_no_other_server_is_asked_within_four_times_the_usual_answer(network):
    async with scene_of(network) as scene:
        first, second = scene.servers
        first.holds = True
        reader = scene.reader(owed_s=SOON_S)
        reader._usual_s = 100.0
        reading = asyncio.create_task(numbers(reader), name="read")
        await until(lambda: bool(first.asked))
        await asyncio.wait([reading], timeout=3 * SOON_S)
        first.answer()
        assert await reading == [0, 1, 2, 3]
        assert not second.asked


async def test_a_server_that_fails_while_another_is_asked_ends_nothing(network):
    async with scene_of(network) as scene:
        first, second = scene.servers
        first.holds = second.holds = True
        reading = asyncio.create_task(numbers(scene.reader(owed_s=SOON_S)), name="read")
        await until(lambda: bool(second.asked))
        second.links[0].abort()
        await until(lambda: second.links[0].closed)
        first.answer()
        assert await reading == [0, 1, 2, 3]


async def test_a_lost_server_is_followed_by_the_next(network):
    async with scene_of(network) as scene:
        first, second = scene.servers
        reader = scene.reader()
        await numbers(reader)
        first.holds = second.holds = True
        reading = asyncio.create_task(numbers(reader), name="read")
        await until(lambda: len(first.asked) == 2)
        first.links[0].abort()
        await until(lambda: bool(second.asked))
        second.answer()
        assert await reading == [0, 1, 2, 3]


async def test_a_server_that_the_map_no_longer_names_is_left_at_once(network):
    async with scene_of(network, 1) as scene:
        first = scene.servers[0]
        first.holds = True
        reader = scene.reader()
        reading = asyncio.create_task(numbers(reader), name="read")
        await until(lambda: bool(first.asked))
        await scene.start()
        del scene.addresses[0]
        reader.map_changed()
        assert await reading == [0, 1, 2, 3]


async def test_a_reader_waits_while_the_run_has_no_data_server(network):
    waits = msgspec.structs.replace(PATIENT, patience_s=SOON_S)
    async with scene_of(network, 0) as scene:
        reader = scene.reader(waits=waits)
        reading = asyncio.create_task(numbers(reader), name="read")
        await asyncio.wait([reading], timeout=3 * SOON_S)
        assert not reading.done()
        await scene.start()
        reader.map_changed()
        assert await reading == [0, 1, 2, 3]


async def test_servers_without_an_answer_are_given_up_by_name(network, monkeypatch):
    monkeypatch.setattr(group_reader, "DIAL_S", SOON_S)
    async with scene_of(network) as scene:
        for server in scene.servers:
            server.holds = True
        waits = msgspec.structs.replace(PATIENT, call_s=SOON_S, patience_s=5 * SOON_S)
        with pytest.raises(RoleDied, match=r"the data server.* did not give an answer for 0\.05 s"):
            await numbers(scene.reader(waits=waits))


PIXELS, LABELS = np.zeros((8, 1, 3, 3), np.uint8), np.zeros(8, np.int64)


@pytest.mark.parametrize(
    "tensors",
    [
        (PIXELS.astype(np.float32), LABELS),
        (PIXELS[:, :, :, :2], LABELS),
        (PIXELS.reshape(8, 9), LABELS),
        (PIXELS.reshape(8, 9, 1, 1), LABELS),
        (PIXELS.reshape(8, 3, 3, 1), LABELS),
        (PIXELS[0, 0, 0, 0], LABELS),
        (PIXELS, LABELS - 1),
        (PIXELS, LABELS + LIMITS.classes),
        (PIXELS, LABELS.astype(np.float64)),
        (PIXELS, np.int64(0)),
        (PIXELS[:6], LABELS[:6]),
        (PIXELS[:7], PIXELS[7:], LABELS),
        (PIXELS, PIXELS, LABELS),
        (LABELS,),
        (),
    ],
)
async def test_images_that_the_run_cannot_have_end_their_link_and_the_next_server_is_asked(tensors):
    async with scene_of(NETWORKS["local"]()) as scene:
        first, second = scene.servers
        first.wrong = [np.ascontiguousarray(tensor) for tensor in tensors]
        assert await numbers(scene.reader()) == [0, 1, 2, 3]
        assert (len(first.asked), len(second.asked)) == (1, 1)


@pytest.mark.parametrize("count", [0, 5])
async def test_an_answer_with_groups_that_were_not_asked_for_is_refused(count):
    async with scene_of(NETWORKS["local"](), 1) as scene:
        server = scene.servers[0]
        server.holds = True
        reading = asyncio.create_task(numbers(scene.reader()), name="read")
        await until(lambda: bool(server.asked))
        server.asked[0][1].reply(pack(Groups(count=count), [PIXELS, LABELS]))
        await until(lambda: len(server.asked) == 2)
        server.answer()
        assert await reading == [0, 1, 2, 3]
