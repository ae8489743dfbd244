"""Sample images are the first ones and the most confident mistakes, small enough for a page."""

import numpy as np
import pytest

from adam_async.cluster.local import LocalCluster
from adam_async.driver.evaluator import MOST_SIDE, SHOWN, sample_images
from adam_async.report.stream import Callback
from adam_async.run.config import Config
from adam_async.run.events import AnyEvent, Predicted
from tests.adam_async.runs import tiny_dataset


def scores_of(guesses: list[int], sureness: list[float]) -> np.ndarray:
    scores = np.zeros((len(guesses), 3), np.float32)
    for row, (guess, sure) in enumerate(zip(guesses, sureness, strict=True)):
        scores[row, guess] = sure
    return scores


def test_mistakes_come_with_the_most_confident_first() -> None:
    images = np.arange(4 * 4, dtype=np.uint8).reshape(4, 1, 2, 2)
    labels = np.array([0, 1, 2, 0])
    found = sample_images(3, images, labels, scores_of([0, 2, 1, 1], [9.0, 1.0, 5.0, 2.0]))
    assert found is not None
    assert (found.epoch, found.height, found.width, found.channels) == (3, 2, 2, 1)
    assert [each.label for each in found.first] == [0, 1, 2, 0]
    assert [(each.label, each.predicted) for each in found.mistakes] == [(2, 1), (0, 1), (1, 2)]
    assert found.mistakes[0].confidence == pytest.approx(np.exp(5) / (np.exp(5) + 2), abs=1e-4)
    assert found.mistakes[0].pixels == bytes([8, 9, 10, 11])


def test_images_beyond_the_scores_are_not_shown() -> None:
    images = np.zeros((4, 1, 2, 2), np.uint8)
    found = sample_images(1, images, np.ones(4, np.int64), scores_of([0, 1], [9.0, 1.0]))
    assert found is not None
    assert (len(found.first), len(found.mistakes)) == (2, 1)


def test_large_images_lose_pixels_and_many_ones_are_few() -> None:
    images = np.zeros((40, 3, 227, 100), np.uint8)
    found = sample_images(1, images, np.ones(40, np.int64), scores_of([0] * 40, [1.0] * 40))
    assert found is not None
    assert found.height <= MOST_SIDE
    assert len(found.first) == len(found.mistakes) == SHOWN
    assert {len(each.pixels) for each in found.first} == {found.height * found.width * 3}


@pytest.mark.parametrize("shape", [(0, 1, 2, 2), (2, 2, 2, 2), (2, 5, 2, 2)])
def test_images_that_a_page_cannot_show_give_none(shape: tuple[int, ...]) -> None:
    scores = np.zeros((shape[0], 3), np.float32)
    assert sample_images(1, np.zeros(shape, np.uint8), np.zeros(shape[0], np.int64), scores) is None


def test_scores_that_are_not_finite_do_not_reach_a_page() -> None:
    scores = np.full((1, 3), np.nan, np.float32)
    found = sample_images(1, np.zeros((1, 1, 2, 2), np.uint8), np.zeros(1, np.int64), scores)
    assert found is not None
    assert found.first[0].confidence == 0.0


class Kept(Callback):
    def __init__(self) -> None:
        self.found: list[Predicted] = []

    def on_event(self, event: AnyEvent) -> None:
        if isinstance(event, Predicted):
            self.found.append(event)


@pytest.mark.parametrize("shows", [False, True])
async def test_a_driver_predicts_samples_only_for_a_stream_that_shows_them(shows: bool) -> None:
    kept = Kept()
    config = Config(model="digits", threads=1, images_per_group=4, epochs=2)
    async with LocalCluster(config, dataset=tiny_dataset(), callbacks=[kept]) as cluster:
        cluster.driver.events.shows_images = shows
        await cluster.train()
    assert [each.epoch for each in kept.found] == ([1, 2] if shows else [])
    assert all(len(each.first) == SHOWN for each in kept.found)
