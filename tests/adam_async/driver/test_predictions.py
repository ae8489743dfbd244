"""An operator sees predictions of a run that another driver drives."""

import asyncio

from adam_async.cluster.local import LocalCluster
from adam_async.controller.client import joined_as
from adam_async.driver.predictions import Predictions
from adam_async.report.stream import EventStream
from adam_async.run.config import Config
from adam_async.run.events import Predicted
from adam_async.runtime.channel import Endpoint
from tests.adam_async.runs import PATIENT, tiny_dataset

CONFIG = Config(model="digits", threads=1, images_per_group=4, epochs=100_000)


async def predicted_of(cluster: LocalCluster, *, most: int = 1) -> list[Predicted]:
    """Train until an operator has shown predictions, and return them."""
    stream, network = EventStream(), cluster.network
    with stream.reader() as reader:
        async with joined_as("driver", network, cluster.controller.address, PATIENT) as (member, identity):
            predictions = Predictions(Endpoint(network, identity), member, stream, waits=PATIENT)
            async with asyncio.TaskGroup() as group:
                training = group.create_task(cluster.train())
                showing = group.create_task(predictions.run())
                found: list[Predicted] = []
                async for batch in reader.batches():
                    found += [event for event in batch if isinstance(event, Predicted)]
                    if len(found) >= most:
                        break
                showing.cancel()
                cluster.driver.stop()
                await training
    return found


async def test_an_operator_gets_the_first_images_and_their_predictions_after_each_epoch() -> None:
    dataset = tiny_dataset()
    async with LocalCluster(CONFIG, dataset=dataset) as cluster:
        first, second = (await predicted_of(cluster, most=2))[:2]
    assert first.epoch < second.epoch
    assert [each.label for each in first.first] == dataset.test_labels[: len(first.first)].tolist()
    assert first.first[0].pixels == dataset.test_images[0].tobytes()
    assert all(0 < each.confidence <= 1 for each in second.first)
