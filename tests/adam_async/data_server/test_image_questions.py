"""Questions for the images of groups: any worker of the run, at the right time, within the granted memory."""

import asyncio
import threading
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest

from adam_async.data_server import questions as room
from adam_async.data_server.epoch import EpochOrders
from adam_async.data_server.questions import ImageQuestions, check_test_part
from adam_async.messages import Groups, ReadGroups, ReadTest, pack, unpack, unpack_any
from adam_async.model.keyed_random import Dice
from tests.adam_async.data_server.test_group_producer import (
    GROUP,
    GROUPS,
    IMAGE_BYTES,
    IMAGES,
    SHAPE,
    STEPS,
    dataset_of,
    expected,
    order_of,
    producer_of,
)
from tests.adam_async.runs import NETWORKS, address_of, turns, until
from transport import Identity, LinkClosed, RemoteError, RemoteProtocolError

WORKER = Identity(role="worker", node="worker-0", incarnation=7)
TAKERS = {(0, 1, 0): (WORKER.node, WORKER.incarnation)}
ASKED = ReadGroups(run="run", epoch=1, numbers=(3, 4, 5, 6), least=4)


class Party:
    """A data server's questions for images, and a worker's link to them."""

    def __init__(self, questions, producer, link, connect):
        self.questions, self.producer, self.link = questions, producer, link
        self.connect = connect
        """Makes another link."""

    def ask(self, **change):
        """Ask; returns the future of the answer."""
        return self.link.call_nowait(pack(msgspec.structs.replace(ASKED, **change)), timeout_s=20.0)

    async def read(self, **change):
        """Ask; returns the number of groups, their images and labels."""
        answer = await self.ask(**change)
        *images, labels = answer.tensors
        count = unpack(answer, Groups).count
        return (
            count,
            np.concatenate([np.array(each) for each in images]) if images else None,
            np.array(labels),
        )

    async def refusal(self, **change):
        """Ask; returns the code of the refusal."""
        with pytest.raises(RemoteError) as failure:
            await self.ask(**change)
        return failure.value.code


@asynccontextmanager
async def party_of(*, transforms=(), takers=TAKERS):
    network, dataset = NETWORKS["local"](), dataset_of(cache=None)
    async with producer_of(dataset, transforms=transforms) as (producer, failures):
        questions = ImageQuestions(dataset, producer)
        questions.take_up("run", EpochOrders(Dice(1), num_images=IMAGES, images_per_group=GROUP))
        questions.map_changed(takers)

        async def on_link(link):
            link.serve(lambda request: questions.read_groups(request, unpack_any(request.message)))
            await link.wait_closed()
            questions.link_closed()

        data = Identity(role="data", node="data-0", incarnation=1)
        async with (
            network.listen(address_of(network), data, on_link) as listener,
            network.connect(listener.address, WORKER) as link,
        ):
            yield Party(questions, producer, link, lambda: network.connect(listener.address, WORKER))
    assert failures == []


def images_of(numbers, transforms=()):
    return np.concatenate([expected(number, 1, transforms) for number in numbers])


@pytest.mark.parametrize("transforms", [(), STEPS])
async def test_the_images_are_those_of_the_order_of_the_epoch_however_often_they_are_read(transforms):
    async with party_of(transforms=transforms) as party:
        for _ in range(3):
            count, images, labels = await party.read()
            assert count == 4
            assert np.array_equal(images, images_of(ASKED.numbers, transforms))
            assert np.array_equal(labels, np.concatenate([order_of(1).group(n) for n in ASKED.numbers]) % 5)


async def test_a_worker_gets_the_rows_that_it_asks_for():
    async with party_of() as party:
        _, images, _ = await party.read(rows=(8, 16))
        assert np.array_equal(images, images_of(ASKED.numbers)[:, :, 8:16])
        assert (await party.read(rows=(0, 0)))[1] is None
        assert (await party.read(rows=(0, SHAPE[1])))[1].shape == (4 * GROUP, *SHAPE)


async def test_an_answer_waits_for_the_least_groups_and_the_others_are_made_ahead():
    async with party_of(transforms=STEPS) as party:
        numbers = tuple(GROUPS)
        count, images, _ = await party.read(numbers=numbers, least=3)
        assert 3 <= count < len(numbers)
        assert np.array_equal(images, images_of(numbers[:count], STEPS))
        rest = numbers[count:]
        await until(lambda: party.producer.ready(rest) == rest)
        assert (await party.read(numbers=rest, least=1))[0] == len(rest)


async def test_an_answer_is_bounded_in_bytes_and_has_a_group_at_least(monkeypatch):
    for most, groups in ((2 * GROUP * IMAGE_BYTES, 2), (1, 1)):
        monkeypatch.setattr(room, "ANSWER_BYTES", most)
        async with party_of() as party:
            assert (await party.read())[0] == groups


async def test_the_next_epoch_is_waited_for_and_an_ended_one_is_refused():
    async with party_of() as party:
        early = party.ask(epoch=2)
        await turns(20)
        assert not early.done()
        party.producer.begin_epoch(order_of(2), takers=1)
        party.questions.map_changed(TAKERS)
        assert unpack(await early, Groups).count == 4
        assert await party.refusal(epoch=1) == "epoch-over"
        assert (await party.read(epoch=2))[0] == 4


async def test_a_question_is_refused_if_its_epoch_ends_before_memory_is_free():
    async with party_of() as party:
        charged = []
        original = party.questions._make
        party.questions._make = lambda *asked: charged.append(asked)
        answer = party.ask()
        await until(lambda: bool(charged))
        party.producer.begin_epoch(order_of(2), takers=1)
        original(*charged[0])
        with pytest.raises(RemoteError, match="epoch-over"):
            await answer


async def test_a_worker_that_the_map_does_not_name_waits_for_the_map():
    async with party_of(takers={}) as party:
        early = party.ask()
        await turns(20)
        assert not early.done()
        party.questions.map_changed(TAKERS)
        assert unpack(await early, Groups).count == 4


async def test_the_questions_of_closed_links_are_dropped_with_the_blocks_that_only_they_need():
    async with party_of(transforms=STEPS) as party:
        gate, make = threading.Event(), party.producer._group_cache.make

        def make_later(block):
            assert gate.wait(20.0)
            return make(block)

        party.producer._group_cache.make = make_later
        answer = party.ask(numbers=(0, 18))
        async with party.connect() as ended, party.connect() as early:
            asked = pack(msgspec.structs.replace(ASKED, numbers=(8, 10, 12, 14, 18), least=5))
            gone = [ended.call_nowait(asked, timeout_s=20.0)]
            gone.append(early.call_nowait(pack(msgspec.structs.replace(ASKED, epoch=99)), timeout_s=20.0))
            await until(lambda: len(party.producer._wanted) == 2 and bool(party.questions._early))
        await asyncio.wait(gone)
        await until(lambda: len(party.producer._wanted) == 1 and not party.questions._early)
        assert all(isinstance(each.exception(), LinkClosed) for each in gone)
        assert set(party.producer._urgent) <= {0, 9}
        gate.set()
        assert unpack(await answer, Groups).count == 2
        assert (await party.read(numbers=(8, 10, 12), least=3))[0] == 3


async def test_a_link_has_one_question_open():
    async with party_of() as party:
        early = party.ask(epoch=2)
        assert await party.refusal() == "busy"
        party.questions.leave("the run is over")
        with pytest.raises(RemoteError, match="the run is over"):
            await early
        assert await party.refusal() == "wrong-run"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"run": "other"}, "wrong-run"),
        ({"numbers": (0, len(GROUPS))}, "no-groups"),
        ({"numbers": ((1 << 32) - 1,)}, "no-groups"),
        ({"numbers": (2, 2)}, "no-groups"),
        ({"rows": (0, SHAPE[1] + 1)}, "no-rows"),
        ({"rows": (2, 1)}, "no-rows"),
    ],
)
async def test_an_impossible_question_is_refused_and_the_next_one_is_answered(change, code):
    async with party_of() as party:
        assert await party.refusal(**change) == code
        assert (await party.read())[0] == 4


@pytest.mark.parametrize("numbers", [(), tuple(range(65))])
def test_a_question_names_a_group_at_least_and_64_at_most(numbers):
    with pytest.raises(RemoteProtocolError, match="malformed ReadGroups"):
        unpack(pack(msgspec.structs.replace(ASKED, numbers=numbers)), ReadGroups)


def test_test_images_are_in_order_and_fit_into_a_message():
    assert check_test_part(ReadTest(start=0, stop=1 << 30), 10, image_bytes=28, most_bytes=1000) == ""
    assert check_test_part(ReadTest(start=50, stop=60), 10, image_bytes=28, most_bytes=1000) == ""
    assert "ask for fewer" in check_test_part(ReadTest(start=0, stop=11), 99, image_bytes=28, most_bytes=1000)
    with pytest.raises(RemoteProtocolError, match="none from 4 to 3"):
        check_test_part(ReadTest(start=4, stop=3), 10, image_bytes=28, most_bytes=1000)
