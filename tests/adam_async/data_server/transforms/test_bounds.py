"""A recipe has bounds: too large images, and too many random values or steps, are refused before any work."""

import tracemalloc

import numpy as np
import pytest

from adam_async.data_server.transforms import recipe as recipes
from adam_async.data_server.transforms.bounds import MOST_STEPS, MOST_VALUES, RecipeBounds
from adam_async.data_server.transforms.recipe import Recipe, default_steps
from adam_async.errors import ConfigError
from adam_async.model.keyed_random import Dice

SHAPE = (1, 28, 28)
PAD_AND_CROP = [{"kind": "pad", "pixels": 60}, {"kind": "crop", "rows": 28, "columns": 28}]


@pytest.mark.parametrize(
    ("steps", "claim"),
    [
        ([{"kind": "pad", "pixels": 32_767}], r"step 1 \(pad\) makes images of \(1, 65562, 65562\)"),
        ([{"kind": "pad", "pixels": 1_000}] * 2, r"step 2 \(pad\) makes images of \(1, 4028, 4028\)"),
        (
            [
                {"kind": "crop", "padding": 32_767, "rows": 32_767, "columns": 1},
                {"kind": "pad", "pixels": 1},
            ],
            r"step 2 \(pad\) makes images of \(1, 32769, 3\) .* 32,767 rows or columns",
        ),
        ([{"kind": "f", "draws": 1_000_000}] * 2, r"step 2 \(f\): .* draw 2,000,000 random values"),
        (
            [{"kind": "pad", "pixels": 900}, *[{"kind": "noise", "levels": 1}] * 2],
            r"step 2 \(noise\): .* draw",
        ),
        ([{"kind": "flip"}] * (MOST_STEPS + 1), "there are 65 transforms, expected at most 64"),
    ],
)
def test_a_recipe_beyond_a_bound_is_refused_before_any_memory_is_taken(steps, claim):
    tracemalloc.start()
    with pytest.raises(ConfigError, match=claim):
        Recipe.of(steps, SHAPE, kernels="numpy", functions={"f": lambda image, draws: image})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_the_default_steps_fit_images_of_every_size():
    for shape in ((1, 1, 1), SHAPE, (3, 32, 32), (3, 1024, 1024), (1, 1, 60_000)):
        bounds = RecipeBounds.of(shape)
        assert bounds.values >= MOST_VALUES
        assert Recipe.of(default_steps(shape), shape, kernels="numpy").output_shape == shape


@pytest.mark.parametrize(
    "steps",
    [
        PAD_AND_CROP,
        [{"kind": "noise", "levels": 3}],
        [{"kind": "elastic", "pixels": 3, "grid": 64}],
        [{"kind": "normalise"}, {"kind": "f", "draws": 10_000}],
    ],
    ids=["pad", "noise", "elastic", "levels"],
)
@pytest.mark.parametrize("shape", [(1, 160, 160), (3, 160, 160)])
def test_a_recipe_takes_no_more_memory_than_it_announces(steps, shape):
    if steps is PAD_AND_CROP:
        steps = [steps[0], {"kind": "crop", "rows": 160, "columns": 160}]
    recipe = Recipe.of(steps, shape, kernels="numpy", functions={"f": lambda image, draws: image})
    images = np.zeros((40, *shape), np.uint8)
    recipe.apply(images[:1], np.arange(1), dice=Dice(1), epoch=1)
    tracemalloc.start()
    recipe.apply(images, np.arange(40), dice=Dice(1), epoch=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= recipe.work_bytes + 40 * np.prod(shape)


def test_images_in_several_parts_are_those_of_one_part(monkeypatch):
    images = np.random.default_rng(1).integers(0, 256, (7, *SHAPE), dtype=np.uint8)
    steps = [*default_steps(SHAPE), *PAD_AND_CROP, {"kind": "noise", "levels": 9}]
    whole = Recipe.of(steps, SHAPE, kernels="numpy").apply(images, np.arange(7), dice=Dice(1), epoch=2)

    monkeypatch.setattr(recipes, "WORK_BYTES", 1)
    parts = Recipe.of(steps, SHAPE, kernels="numpy").apply(images, np.arange(7), dice=Dice(1), epoch=2)

    np.testing.assert_array_equal(parts, whole)
