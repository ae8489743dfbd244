"""An operator sees predictions of a run that another driver drives."""

import asyncio

import numpy as np

from adam_async.cluster.local import LocalCluster
from adam_async.controller.client import joined_as
from adam_async.driver.evaluator import Evaluator
from adam_async.driver.predictions import Predictions
from adam_async.report.stream import EventStream
from adam_async.run.config import Config
from adam_async.run.events import Noted, Predicted
from adam_async.runtime.channel import Endpoint
from dataflow import ComputePool
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
    assert first.is_later, "the run has gone on since the evaluation"


async def test_images_that_do_not_fit_the_model_cost_the_predictions_and_not_the_page() -> None:
    stream = EventStream()
    async with LocalCluster(CONFIG, dataset=tiny_dataset()) as cluster:
        network = cluster.network
        async with joined_as("driver", network, cluster.controller.address, PATIENT) as (member, identity):
            predictions = Predictions(Endpoint(network, identity), member, stream, waits=PATIENT)
            with stream.reader() as reader:
                async with ComputePool(threads=1) as pool, asyncio.TaskGroup() as group:
                    training = group.create_task(cluster.train())
                    await member.wait_for(lambda newest: newest.run is not None, "a run", 30)
                    assert member.map.run is not None
                    lying = Evaluator(Endpoint(network, identity), waits=PATIENT, pool=pool, threads=1)
                    lying._sets[False] = np.zeros((2, 3, 5, 7), np.uint8), np.zeros(2, np.int64)
                    predictions._evaluators[member.map.run.id] = lying
                    showing = group.create_task(predictions.run())
                    await reader.news.wait()
                    assert not showing.done()
                    showing.cancel()
                    cluster.driver.stop()
                    await training
                (noted,) = reader.take()
    assert isinstance(noted, Noted)
    assert noted.text.startswith("no predictions: ")
