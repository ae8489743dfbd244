"""The baseline trains the same way as a serial loop, on as many threads as asked, and can be cancelled."""

import asyncio
import time

import numpy as np
import pytest

from adam_async.model import Network, Sgd, mlp
from adam_async.model.keyed_random import Dice
from adam_async.report.baseline import BareLoop, Baseline, measure

NETWORK = Network(mlp((16, 8, 3), input_shape=(1, 4, 4)))
LABELS = Dice(1).permutation("labels", 40) % 3
IMAGES = (LABELS[:, None] * np.ones((40, 16)) * 100).astype(np.uint8).reshape(40, 1, 4, 4)


def bare_loop(group_images: int = 16) -> BareLoop:
    return BareLoop(NETWORK, Sgd(), rate=0.1, images=IMAGES, labels=LABELS, group_images=group_images)


def measuring(**changes):
    options = {
        "rate": 0.1,
        "images": IMAGES,
        "labels": LABELS,
        "group_images": 16,
        "threads": 2,
        "seconds": 0.1,
        "warm_up_s": 0.02,
    }
    return measure(NETWORK, Sgd(), **{**options, **changes})


def plain_rate() -> float:
    """Images per second of a loop that nothing surrounds."""
    loop, begin, trained = bare_loop(), time.perf_counter(), 0
    while (spent_s := time.perf_counter() - begin) < 0.05:
        trained += loop.train(50)
    return trained / spent_s


def test_a_loop_counts_the_images_it_trains() -> None:
    assert bare_loop().train(5) == 5 * 16
    assert bare_loop(group_images=1).train(3) == 3


def test_groups_larger_than_the_data_shrink_to_it() -> None:
    assert bare_loop(group_images=100).train(2) == 2 * 40


def test_a_loop_learns() -> None:
    loop = bare_loop()
    loop.train(400)

    named = NETWORK.predict(loop._trained.values, IMAGES)
    assert np.mean(named == LABELS) > 0.9


@pytest.mark.thorough
@pytest.mark.parametrize("threads", [1, 3])
async def test_the_rate_is_near_that_of_a_plain_loop(threads: int) -> None:
    """Within a factor of ten: it catches a wrong unit or a forgotten factor on a busy machine."""
    ratios: list[float] = []
    while len(ratios) < 5 and not any(0.1 < ratio < 10 for ratio in ratios):
        # A short stall of the machine spoils one comparison; a fault spoils all of them.
        ratios.append(await measuring(threads=threads) / plain_rate())
    assert 0.1 < ratios[-1] < 10


async def test_without_images_there_is_no_baseline() -> None:
    with pytest.raises(ValueError, match="needs training images"):
        await measuring(images=IMAGES[:0], labels=LABELS[:0])


async def test_cancelling_ends_it_long_before_its_time() -> None:
    loop = asyncio.get_running_loop()
    begin = loop.time()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await measuring(seconds=3600.0)

    assert loop.time() - begin < 50.0


def test_the_mean_of_both_measurements_counts() -> None:
    assert Baseline(threads=2, before=100.0, after=300.0, sgemm=1e9).images_per_s == 200.0
