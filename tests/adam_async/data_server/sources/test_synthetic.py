"""Synthetic images: the same from the same seed, different from others, and learnable."""

from math import prod

import numpy as np
import pytest

from adam_async import Config, Dataset, LocalCluster, synthetic
from adam_async.data_server.sources import synthetic as drawing
from adam_async.data_server.sources.synthetic import IMAGES, parse_synthetic
from adam_async.errors import DataError


def guessed_by_means(dataset: Dataset) -> float:
    """Return the accuracy of whoever takes the class whose mean training image is nearest."""
    train, test = (
        images.reshape(len(images), -1).astype(np.float64)
        for images in (dataset.train_images, dataset.test_images)
    )
    means = np.stack(
        [train[dataset.train_labels == label].mean(axis=0) for label in range(dataset.num_classes)]
    )
    nearest = ((test[:, np.newaxis] - means) ** 2).sum(axis=2).argmin(axis=1)
    return float((nearest == dataset.test_labels).mean())


def test_images_are_a_function_of_the_seed() -> None:
    first, again, other = (synthetic(60, (3, 8, 6), 4, seed) for seed in (1, 1, 2))

    assert repr(first) == "<Dataset synthetic 60 train 12 test (3, 8, 6) 4 classes>"
    assert first.source == "60 synthetic images of (3, 8, 6) in 4 classes, drawn with seed 1"
    np.testing.assert_array_equal(first.train_images, again.train_images)
    np.testing.assert_array_equal(first.test_images, again.test_images)
    assert (first.train_images != other.train_images).mean() > 0.9
    assert (first.train_images[:12] != first.test_images).mean() > 0.9


def test_an_image_is_the_same_however_many_there_are_and_are_drawn_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = synthetic(500, (1, 7, 9), 3, 5)
    monkeypatch.setattr(drawing, "AT_ONCE_BYTES", 1000)
    few = synthetic(40, (1, 7, 9), 3, 5)

    np.testing.assert_array_equal(many.train_images[:40], few.train_images)
    np.testing.assert_array_equal(many.test_images[:8], few.test_images)


@pytest.mark.thorough
@pytest.mark.parametrize("classes", [2, 10, 40])
@pytest.mark.parametrize("shape", [(1, 4, 4), (1, 28, 28), (3, 32, 32)])
def test_classes_are_equally_frequent_and_can_be_told_apart(
    shape: tuple[int, int, int], classes: int
) -> None:
    dataset = synthetic(800, shape, classes)

    assert dataset.image_shape == shape
    assert np.ptp(np.bincount(dataset.train_labels, minlength=classes)) <= 1
    assert set(dataset.test_labels.tolist()) == set(range(classes))
    assert guessed_by_means(dataset) > 0.95
    # Images of one class are not copies of each other.
    same = dataset.train_images[dataset.train_labels == 0].reshape(-1, prod(shape))
    assert len(np.unique(same, axis=0)) == len(same)


@pytest.mark.thorough
async def test_a_small_network_learns_them() -> None:
    config = Config(epochs=3, threads=1, servers=1, replicas=1)
    async with LocalCluster(config, dataset=synthetic(600, (1, 8, 8), 10)) as cluster:
        result = await cluster.train()

    assert result.epochs[-1].test_accuracy > 0.9


@pytest.mark.parametrize(
    ("arguments", "claim"),
    [
        ((9, (1, 8, 8), 10), "9 synthetic images are too few: at least one for each of 10 classes"),
        ((9, (1, 8, 8), 1), "have 2 to 1000 classes, not 1"),
        ((9, (1, 8, 8), 1001), "have 2 to 1000 classes, not 1001"),
        ((9, (0, 8, 8), 2), r"cannot have the shape \(0, 8, 8\)"),
        ((9, (5, 8, 8), 2), "1 to 4 channels"),
        ((9, (1, 3, 8), 2), "sides of at least 4"),
        ((10**9, (1, 28, 28), 10), "1200000000 synthetic images of .* more than 4 GiB; take fewer"),
    ],
)
def test_a_number_out_of_its_range_is_refused(arguments: tuple, claim: str) -> None:
    with pytest.raises(DataError, match=claim):
        synthetic(*arguments)


def test_a_source_says_how_many() -> None:
    assert parse_synthetic("synthetic") == IMAGES
    assert parse_synthetic("synthetic:60000") == 60_000
    for source in ("digits", "synthetics", "data/synthetic", "synthetic.npz"):
        assert parse_synthetic(source) is None
    for source in ("synthetic:", "synthetic:many", "synthetic:-3", "synthetic:1e3", "synthetic:²"):
        with pytest.raises(DataError, match=f"{source} does not say how many .* such as synthetic:2000"):
            parse_synthetic(source)
