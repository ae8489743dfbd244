"""An evaluation asks for no more test images than a message holds."""

import numpy as np
import pytest

from adam_async.data_server.question_checks import check_test_part
from adam_async.driver.evaluator import Evaluator
from adam_async.messages import ReadTest, TestImages, pack, role_table, unpack
from adam_async.runtime.traffic import Traffic
from dataflow import ComputePool
from tests.adam_async.runs import PATIENT
from transport import Identity, LinkConfig, LocalNetwork

MOST_BYTES = 100_000


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

    async def serve(link):
        link.serve(answer, receives=False)
        await link.wait_closed()

    async with network.listen(
        "local://", Identity(role="data", node="data-0", incarnation=1), serve
    ) as listener:
        evaluator = Evaluator(
            network=network,
            identity=Identity(role="driver", node="driver", incarnation=1),
            waits=PATIENT,
            traffic=Traffic("driver"),
            pool=ComputePool(threads=1, name="evaluate"),
            threads=1,
        )
        read, labels = await evaluator._read(listener.address)
    np.testing.assert_array_equal(read, images)
    assert labels.tolist() == [0, 1, 2, 3, 4]
