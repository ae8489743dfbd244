"""An evaluation asks for no more test images than a message holds, and checks the answers."""

import numpy as np
import pytest

from adam_async.data_server.questions import check_test_part
from adam_async.driver.evaluator import Evaluator, pull_snapshot
from adam_async.errors import RunFailed
from adam_async.messages import ReadTest, TestImages, pack, role_table, unpack
from adam_async.model.keyed_random import Dice
from adam_async.runtime.channel import Endpoint
from dataflow import ComputePool
from tests.adam_async.runs import NETWORKS, PATIENT, SHARDED, servers_of
from transport import Identity, LinkConfig, LocalNetwork, RemoteProtocolError

MOST_BYTES = 100_000
AVAILABLE = 1_000_000


@pytest.mark.parametrize("side", [2, 90, 170], ids=["small", "some-in-a-message", "one-in-a-message"])
async def test_test_images_of_any_size_are_read_in_messages_that_hold_them(side):
    network = LocalNetwork(rules=role_table(), config=LinkConfig(max_message_bytes=MOST_BYTES))
    images = np.arange(5, dtype=np.uint8).reshape(5, 1, 1, 1) * np.ones((5, 3, side, side), np.uint8)

    def answer(request):
        body = unpack(request.message, ReadTest)
        refused = check_test_part(body, 5, image_bytes=3 * side * side, most_bytes=MOST_BYTES)
        part = slice(body.start, body.stop)
        if refused:
            request.fail("too-large", refused)
        else:
            request.reply(pack(TestImages(total=5), [images[part], np.arange(5)[part]]))

    read, labels = await read_from(network, answer)
    np.testing.assert_array_equal(read, images)
    assert labels.tolist() == [0, 1, 2, 3, 4]


async def read_from(network, answer, *, most=None, **options):
    """Read images from a data server with these answers."""

    async def serve(link):
        link.serve(answer, receives=False)
        await link.wait_closed()

    async with network.listen(
        "local://", Identity(role="data", node="data-0", incarnation=1), serve
    ) as listener:
        evaluator = Evaluator(
            Endpoint(network, Identity(role="driver", node="driver", incarnation=1)),
            waits=PATIENT,
            pool=ComputePool(threads=1, name="evaluate"),
            threads=1,
            available_bytes=lambda: AVAILABLE,
            most=most,
        )
        return await evaluator._read(listener.address, **options)


ONE, LABEL = np.zeros((1, 1, 2, 2), np.uint8), np.zeros(1, np.int64)


@pytest.mark.parametrize(
    ("total", "tensors"),
    [
        (2, [ONE[:0], LABEL[:0]]),
        (2, [np.zeros((2, 1, 2, 2), np.uint8), np.zeros(2, np.int64)]),
        (2, [ONE, np.zeros(2, np.int64)]),
        (2, [ONE.astype(np.float32), LABEL]),
        (2, [ONE[0], LABEL]),
        (2, [ONE]),
        (2, []),
        (0, [ONE, LABEL]),
    ],
    ids=[
        "none",
        "more-than-asked",
        "more-labels",
        "floats",
        "flat",
        "no-labels",
        "nothing",
        "beyond-the-end",
    ],
)
async def test_an_answer_without_the_images_asked_for_is_refused(total, tensors):
    network = LocalNetwork(rules=role_table())
    with pytest.raises(RemoteProtocolError, match=r"test images are .*asked for"):
        await read_from(network, lambda request: request.reply(pack(TestImages(total=total), tensors)))


async def test_images_of_another_shape_than_those_before_are_refused():
    def answer(request):
        start = unpack(request.message, ReadTest).start
        request.reply(pack(TestImages(total=2), [np.zeros((1, 1, 2, 2 + start), np.uint8), LABEL]))

    with pytest.raises(RemoteProtocolError, match=r"test images are uint8\[1, 1, 2, 3\]"):
        await read_from(LocalNetwork(rules=role_table()), answer)


async def test_a_sample_of_more_images_than_the_step_takes_is_refused_at_the_first_answer():
    asked = []

    def answer(request):
        asked.append(unpack(request.message, ReadTest))
        request.reply(pack(TestImages(total=1 << 31), [ONE, LABEL]))

    with pytest.raises(RemoteProtocolError, match="a sample has 2147483648 images, and the step takes 16"):
        await read_from(LocalNetwork(rules=role_table()), answer, sample=16)
    assert [each.sample for each in asked] == [True]


@pytest.mark.parametrize("total", [AVAILABLE // 12 + 1, (1 << 32) - 1])
@pytest.mark.parametrize("validation", [False, True])
async def test_more_images_than_fit_into_memory_are_refused_at_the_first_answer(total, validation):
    asked = []

    def answer(request):
        asked.append(unpack(request.message, ReadTest))
        request.reply(pack(TestImages(total=total), [ONE, LABEL]))

    with pytest.raises(
        RunFailed,
        match=rf"the data server at \S+ has {total} images of \[1, 2, 2\] .*of memory are available",
    ):
        await read_from(LocalNetwork(rules=role_table()), answer, validation=validation)
    assert [each.validation for each in asked] == [validation]


@pytest.mark.parametrize(("first", "later"), [(3, 1000), (1000, 1), (1000, 0)])
async def test_a_total_that_changes_between_answers_is_refused(first, later):
    def answer(request):
        start = unpack(request.message, ReadTest).start
        tensors = [ONE, LABEL] if not start or later else [ONE[:0], LABEL[:0]]
        request.reply(pack(TestImages(total=later if start else first), tensors))

    with pytest.raises(RemoteProtocolError, match=f"of {later}, after an answer with a total of {first}"):
        await read_from(LocalNetwork(rules=role_table()), answer)


async def test_an_answer_beyond_the_end_of_the_set_is_refused():
    def answer(request):
        body = unpack(request.message, ReadTest)
        images = body.stop - body.start
        request.reply(pack(TestImages(total=3), [np.repeat(ONE, images, 0), np.repeat(LABEL, images)]))

    with pytest.raises(RemoteProtocolError, match="test images 1 to 1001 of 3"):
        await read_from(LocalNetwork(rules=role_table()), answer)


@pytest.mark.parametrize("sharding", [{}, SHARDED], ids=["whole", "sharded"])
@pytest.mark.parametrize("network", NETWORKS)
async def test_a_snapshot_has_the_keyed_initial_values_then_the_pushed_ones(network, sharding):
    async with servers_of(NETWORKS[network](), seed=11, **sharding) as servers:
        client = servers.client()
        initial = servers.model.initial_weights(Dice(11))
        first = await pull_snapshot(servers.model, servers.table, servers.map, client.client)
        assert first.weights.keys() == initial.keys()
        assert first.versions == (0,) * len(servers.table.shards)
        for name, values in initial.items():
            assert first.weights[name].shape == values.shape
            np.testing.assert_array_equal(first.weights[name], values)
        client.push(0.25)
        second = await pull_snapshot(servers.model, servers.table, servers.map, client.client)
        assert second.versions == (1,) * len(servers.table.shards)
        for name, values in initial.items():
            # A copy: later steps do not change it.
            np.testing.assert_array_equal(first.weights[name], values)
            np.testing.assert_array_equal(second.weights[name], values - np.float32(0.25))


@pytest.mark.parametrize("most", [1, 3, 5, 9])
async def test_an_evaluator_of_few_images_reads_the_first_ones_alone(most):
    network = LocalNetwork(rules=role_table(), config=LinkConfig(max_message_bytes=MOST_BYTES))
    images = np.arange(5, dtype=np.uint8).reshape(5, 1, 1, 1) * np.ones((5, 1, 2, 2), np.uint8)

    def answer(request):
        body = unpack(request.message, ReadTest)
        assert body.stop <= max(most, 1)
        part = slice(body.start, body.stop)
        request.reply(pack(TestImages(total=5), [images[part], np.arange(5)[part]]))

    read, labels = await read_from(network, answer, most=most)
    np.testing.assert_array_equal(read, images[:most])
    assert labels.tolist() == list(range(min(most, 5)))
