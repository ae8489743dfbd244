"""An evaluation counts correctly classified images, class by class, and refuses data that do not fit."""

from dataclasses import replace

import numpy as np
import pytest

from adam_async.data_server.dataset import Dataset
from adam_async.errors import ConfigError, DataError
from adam_async.model import Network, mlp
from adam_async.model.keyed_random import Dice
from adam_async.report.evaluate import evaluate, table

SPEC = mlp((4, 3), input_shape=(1, 2, 2), name="quarters")
"""Four pixels, three classes: class k is where pixel k is the brightest."""

WEIGHTS = {"fc1.weight": np.eye(3, 4, dtype=np.float32) * 50, "fc1.bias": np.zeros(3, np.float32)}


def make_dataset(labels: list[int], shown: list[int]) -> Dataset:
    """Test images that look like classes `shown` and are labelled `labels`."""
    images = np.zeros((len(labels), 1, 2, 2), np.uint8)
    for image, pixel in zip(images, shown, strict=True):
        image.reshape(-1)[pixel] = 255
    truth = np.array(labels, np.int64)
    return Dataset(
        name="corners",
        source="made here",
        train_images=images,
        train_labels=truth,
        test_images=images,
        test_labels=truth,
        num_classes=3,
    )


async def test_each_class_is_counted() -> None:
    dataset = make_dataset([0, 0, 0, 1, 1], [0, 0, 1, 1, 2])

    found = await evaluate(Network(SPEC), WEIGHTS, dataset, threads=2)

    assert [(row.images, row.right) for row in found.classes] == [(3, 2), (2, 1), (0, 0)]
    assert found.accuracy == pytest.approx(3 / 5)
    assert found.classes[2].accuracy == 0.0
    # A right image costs nothing, a wrong one the 50 by which the wrong score leads.
    assert found.loss == pytest.approx((0 + 0 + 50 + 0 + 50) / 5, rel=1e-5)


async def test_many_batches_equal_one_prediction_of_everything() -> None:
    network = Network(SPEC)
    weights = network.initial_weights(Dice(3))
    labels = (Dice(1).permutation("labels", 1000) % 3).tolist()
    dataset = make_dataset(labels, (Dice(2).permutation("shown", 1000) % 4).tolist())

    found = await evaluate(network, weights, dataset, threads=2)

    expected = network.predict(weights, dataset.test_images)
    assert found.right == int(np.count_nonzero(expected == dataset.test_labels))
    assert sum(row.images for row in found.classes) == found.images == 1000


async def test_classes_of_the_data_are_those_of_the_model_by_their_names() -> None:
    dataset = replace(make_dataset([0, 1, 1], [0, 2, 1]), num_classes=2, class_names=("ant", "cat"))
    names = ("ant", "bee", "cat")

    found = await evaluate(Network(SPEC), WEIGHTS, dataset, threads=1, class_names=names)

    # Class 1 of the data is class 2 of the model: image 1 shows it, image 2 shows a bee.
    assert [(row.label, row.name, row.images, row.right) for row in found.classes] == [
        (0, "ant", 1, 1),
        (2, "cat", 2, 1),
    ]
    assert [row.split() for row in table(found)[2:]] == [
        ["ant", "1", "1", "100.00%"],
        ["cat", "2", "1", "50.00%"],
    ]


async def test_a_class_that_the_model_does_not_know_is_refused_by_name() -> None:
    dataset = replace(make_dataset([0, 1], [0, 1]), num_classes=2, class_names=("ant", "dog"))

    with pytest.raises(ConfigError, match="has test images of dog, and model 'quarters' knows ant, bee, cat"):
        await evaluate(Network(SPEC), WEIGHTS, dataset, threads=1, class_names=("ant", "bee", "cat"))


@pytest.mark.parametrize(
    ("model", "data", "number"),
    [
        (("0", "1", "2"), (), 1),
        ((), ("0", "2"), 2),
        ((), ("ant", "bee", "cat"), 1),
        (("ant", "bee", "cat"), (), 1),
    ],
)
async def test_names_that_are_numbers_are_class_numbers_and_others_go_by_their_order(
    model: tuple[str, ...], data: tuple[str, ...], number: int
) -> None:
    dataset = replace(make_dataset([1], [number]), num_classes=len(data) or 3, class_names=data)

    found = await evaluate(Network(SPEC), WEIGHTS, dataset, threads=1, class_names=model)

    assert (found.right, [row.label for row in found.classes if row.images]) == (1, [number])


async def test_fewer_named_classes_than_a_model_without_names_has_are_refused() -> None:
    dataset = replace(make_dataset([0, 1], [0, 1]), num_classes=2, class_names=("ant", "dog"))

    with pytest.raises(ConfigError, match="2 named classes, but the 3 classes of model 'quarters' have no"):
        await evaluate(Network(SPEC), WEIGHTS, dataset, threads=1)


async def test_an_evaluation_is_shown_as_a_table() -> None:
    found = await evaluate(Network(SPEC), WEIGHTS, make_dataset([0, 1, 2], [0, 1, 0]), threads=1)

    head, _, *rows = table(found)
    assert head.startswith("quarters on corners: accuracy 66.67% (2 of 3 test images), loss ")
    assert [row.split() for row in rows] == [
        ["0", "1", "1", "100.00%"],
        ["1", "1", "1", "100.00%"],
        ["2", "1", "0", "0.00%"],
    ]


async def test_other_image_shapes_are_refused_with_both_shapes() -> None:
    dataset = make_dataset([0], [0])
    wide = replace(dataset, train_images=np.zeros((1, 1, 2, 3), np.uint8))

    with pytest.raises(ConfigError, match=r"takes images of \(1, 2, 2\) .* corners has \(1, 2, 3\)"):
        await evaluate(Network(SPEC), WEIGHTS, wide, threads=1)


async def test_more_classes_than_the_model_knows_are_refused() -> None:
    with pytest.raises(ConfigError, match="has 3 classes, but corners has 4"):
        await evaluate(Network(SPEC), WEIGHTS, replace(make_dataset([0], [0]), num_classes=4), threads=1)


async def test_data_without_test_images_are_refused() -> None:
    with pytest.raises(DataError, match="no test images"):
        await evaluate(Network(SPEC), WEIGHTS, make_dataset([], []), threads=1)
