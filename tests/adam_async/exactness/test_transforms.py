"""Training on images that data servers transform is training on a data set that was transformed before."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from adam_async import ConfigError
from adam_async.data_server.transforms.recipe import Recipe
from adam_async.model.keyed_random import Dice
from tests.adam_async.exactness.test_partitions import IMAGES, config_of
from tests.adam_async.runs import NETWORKS, tiny_dataset, train

STEPS = [{"kind": "shift", "pixels": 2}, {"kind": "flip"}]


def transformed(dataset, config, *, epoch=1):
    """The same data set, with its images transformed as the servers of a run do in one epoch."""
    recipe = Recipe.of(STEPS, dataset.image_shape)
    numbers = np.arange(len(dataset.train_labels))
    images = recipe.apply(dataset.train_images, numbers, dice=Dice(config.seed), epoch=epoch)
    return replace(dataset, train_images=images)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("network", "options"),
    [
        ("local", {}),
        ("tcp", {"replicas": 2}),
        ("tcp", {"partitions": 2}),
        ("local", {"partitions": 2, "plan": "layers", "images_per_group": 25}),
        ("local", {"read_ahead": 1, "images_per_group": 1}),
    ],
)
async def test_a_run_trains_on_the_variants_of_its_epoch_for_any_asker(network, options):
    dataset = tiny_dataset(train=IMAGES)
    plain = config_of(**options)
    config = msgspec.structs.replace(plain, augment=True)
    expected = await train(plain, dataset=transformed(dataset, config))

    result = await train(config, NETWORKS[network](), dataset=dataset, transforms=STEPS)

    assert [epoch.images for epoch in result.epochs] == [IMAGES]
    for name, value in result.weights.items():
        assert value.tobytes() == expected.weights[name].tobytes(), name
    told = result.statistics["data-0"].transforms
    assert told.pool.finished > 0


async def test_every_epoch_has_variants_of_its_own():
    dataset = tiny_dataset(train=IMAGES)
    config = config_of(augment=True, epochs=2)
    same = await train(config_of(epochs=2), dataset=transformed(dataset, config))

    result = await train(config, dataset=dataset, transforms=STEPS)

    assert any(value.tobytes() != same.weights[name].tobytes() for name, value in result.weights.items())


async def test_without_steps_of_their_own_images_are_transformed_as_suits_them():
    dataset = tiny_dataset(train=IMAGES)
    plain = await train(config_of(), dataset=dataset)
    result = await train(config_of(augment=True), dataset=dataset)
    assert any(value.tobytes() != plain.weights[name].tobytes() for name, value in result.weights.items())


async def test_images_of_another_shape_than_those_of_the_test_are_refused():
    with pytest.raises(ConfigError, match="but test images stay as they are"):
        await train(
            config_of(augment=True),
            dataset=tiny_dataset(train=IMAGES),
            transforms=[{"kind": "crop", "rows": 6, "columns": 6}],
        )
