"""Variants are functions of (seed, epoch, image), and are what the slow reference makes."""

import hashlib
import threading
import tracemalloc
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adam_async.data_server.transforms import pipeline
from adam_async.data_server.transforms import recipe as recipes
from adam_async.data_server.transforms.recipe import (
    MOST_STEPS,
    MOST_VALUES,
    Recipe,
    RecipeBounds,
    default_steps,
)
from adam_async.data_server.transforms.steps import read_steps
from adam_async.errors import ConfigError, TransformFailed
from adam_async.model.keyed_random import Dice
from tests.adam_async.data_server.transforms.reference import variant

KERNELS = [
    "numpy",
    pytest.param("numba", marks=pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")),
]
EDGES = st.sampled_from(["black", "repeat"])
SHARES = st.floats(0, 0.5)
STEPS = st.one_of(
    st.fixed_dictionaries({"kind": st.just("shift"), "pixels": st.integers(0, 3), "edge": EDGES}),
    st.fixed_dictionaries(
        {"kind": st.just("shift"), "pixels": st.floats(0, 3), "whole": st.just(False), "edge": EDGES}
    ),
    st.fixed_dictionaries(
        {"kind": st.just("flip"), "direction": st.sampled_from(["horizontal", "vertical"]), "chance": SHARES}
    ),
    st.fixed_dictionaries({"kind": st.just("rotate"), "degrees": st.floats(0, 180), "edge": EDGES}),
    st.fixed_dictionaries({"kind": st.just("scale"), "by": SHARES, "edge": EDGES}),
    st.fixed_dictionaries({"kind": st.just("shear"), "by": SHARES, "edge": EDGES}),
    st.fixed_dictionaries(
        {"kind": st.just("elastic"), "pixels": st.floats(0, 4), "grid": st.integers(1, 4), "edge": EDGES}
    ),
    st.fixed_dictionaries({"kind": st.just("crop"), "padding": st.integers(0, 2), "edge": EDGES}),
    st.fixed_dictionaries(
        {"kind": st.just("crop"), "rows": st.just(1), "columns": st.integers(1, 3), "padding": st.just(1)}
    ),
    st.fixed_dictionaries({"kind": st.just("pad"), "pixels": st.integers(0, 2), "edge": EDGES}),
    st.fixed_dictionaries({"kind": st.just("brightness"), "by": SHARES}),
    st.fixed_dictionaries({"kind": st.just("contrast"), "by": SHARES}),
    st.fixed_dictionaries({"kind": st.just("noise"), "levels": st.integers(0, 60)}),
    st.fixed_dictionaries(
        {"kind": st.just("cutout"), "pixels": st.integers(1, 4), "level": st.integers(0, 255)}
    ),
    st.just({"kind": "normalise"}),
    st.fixed_dictionaries(
        {"kind": st.just("normalise"), "mean": st.integers(0, 255), "std": st.floats(1, 100)}
    ),
)
SHAPES = st.tuples(st.sampled_from([1, 3]), st.integers(1, 7), st.integers(1, 7))


def some_images(n, shape, seed=0):
    return Dice(seed).bits("pixels", count=n * int(np.prod(shape))).astype(np.uint8).reshape(n, *shape)


def recipe_of(steps, shape=(1, 28, 28), kernels="numpy", **more):
    return Recipe.of(steps, shape, kernels=kernels, **more)


ALL_KINDS = [
    {"kind": "shift", "pixels": 2},
    {"kind": "flip"},
    {"kind": "rotate", "degrees": 15},
    {"kind": "scale", "by": 0.2},
    {"kind": "shear", "by": 0.2},
    {"kind": "elastic", "pixels": 3},
    {"kind": "crop", "rows": 20, "columns": 21, "padding": 2},
    {"kind": "pad", "pixels": 1},
    {"kind": "brightness", "by": 0.2},
    {"kind": "contrast", "by": 0.2},
    {"kind": "noise", "levels": 10},
    {"kind": "cutout", "pixels": 5},
    {"kind": "normalise"},
]


@pytest.mark.thorough
@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(STEPS, max_size=5),
    shape=SHAPES,
    numbers=st.lists(st.integers(0, 10**9), max_size=3),
    seed=st.integers(0, 9),
    epoch=st.integers(1, 9),
)
@pytest.mark.parametrize("kernels", KERNELS)
def test_variants_are_those_of_the_slow_reference_to_the_last_bit(
    kernels, steps, shape, numbers, seed, epoch
):
    recipe = recipe_of(steps, shape, kernels)
    images = some_images(len(numbers), shape, seed)

    made = recipe.apply(images, np.array(numbers, np.int64), dice=Dice(seed), epoch=epoch)

    assert made.shape == (len(numbers), *recipe.output_shape)
    for image, number, found in zip(images, numbers, made, strict=True):
        np.testing.assert_array_equal(found, variant(steps, image, number, dice=Dice(seed), epoch=epoch))


@pytest.mark.parametrize("steps", [ALL_KINDS, default_steps((1, 28, 28)), default_steps((3, 28, 28))])
@pytest.mark.parametrize("channels", [1, 3])
def test_both_sets_of_kernels_make_equal_bytes(steps, channels):
    shape = (channels, 28, 28)
    images, numbers = some_images(300, shape), np.arange(300)
    pytest.importorskip("numba", reason="compiled kernels need numba")

    made = [
        recipe_of(steps, shape, kernels).apply(images, numbers, dice=Dice(5), epoch=3)
        for kernels in ("numpy", "numba")
    ]

    np.testing.assert_array_equal(*made)


@given(order=st.permutations(range(12)), cuts=st.sets(st.integers(1, 11)))
@settings(max_examples=20, deadline=None)
def test_neither_order_nor_company_of_an_image_changes_its_variant(order, cuts):
    images = some_images(12, (1, 28, 28))
    recipe = recipe_of(ALL_KINDS)
    whole = recipe.apply(images, np.arange(12), dice=Dice(1), epoch=1)

    for part in np.split(np.array(order), sorted(cuts)):
        made = recipe.apply(images[part], part, dice=Dice(1), epoch=1)
        np.testing.assert_array_equal(made, whole[part])


def test_variants_are_the_same_for_ever_and_on_every_machine():
    images = some_images(50, (1, 28, 28))

    made = recipe_of(ALL_KINDS).apply(images, np.arange(50), dice=Dice(1), epoch=1)

    assert hashlib.blake2b(made.tobytes(), digest_size=8).hexdigest() == "b373144bac5dc87c"


@pytest.mark.parametrize("step", ALL_KINDS[:7] + ALL_KINDS[8:12], ids=lambda step: step["kind"])
def test_another_epoch_seed_or_number_makes_other_variants_and_the_same_makes_the_same(step):
    recipe, numbers = recipe_of([step]), np.arange(20)
    images = some_images(20, (1, 28, 28))
    made = recipe.apply(images, numbers, dice=Dice(1), epoch=1)

    np.testing.assert_array_equal(recipe.apply(images, numbers, dice=Dice(1), epoch=1), made)
    assert not np.array_equal(recipe.apply(images, numbers, dice=Dice(1), epoch=2), made)
    assert not np.array_equal(recipe.apply(images, numbers, dice=Dice(2), epoch=1), made)
    assert not np.array_equal(recipe.apply(images, numbers + 1, dice=Dice(1), epoch=1), made)


def test_equal_steps_of_one_recipe_draw_apart():
    steps = [{"kind": "cutout", "pixels": 1, "level": 255}] * 2
    blank = np.zeros((50, 1, 28, 28), np.uint8)

    made = recipe_of(steps).apply(blank, np.arange(50), dice=Dice(1), epoch=1)

    assert (made > 0).sum() > 50


@pytest.mark.parametrize("direction", ["horizontal", "vertical"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_two_certain_flips_leave_an_image_as_it_was_and_one_mirrors_it(kernels, direction):
    flip = {"kind": "flip", "direction": direction, "chance": 1}
    images = some_images(5, (3, 4, 7))
    numbers = np.arange(5)
    # A crop of the whole between them, so that they are two passes.
    steps = [flip, {"kind": "crop"}, flip]

    once = recipe_of([flip], (3, 4, 7), kernels).apply(images, numbers, dice=Dice(1), epoch=1)
    twice = recipe_of(steps, (3, 4, 7), kernels).apply(images, numbers, dice=Dice(1), epoch=1)

    np.testing.assert_array_equal(once, np.flip(images, axis=3 if direction == "horizontal" else 2))
    np.testing.assert_array_equal(twice, images)


def test_a_flip_of_chance_a_half_mirrors_half_of_the_images():
    images = np.zeros((2000, 1, 1, 2), np.uint8)
    images[..., 0] = 9

    made = recipe_of([{"kind": "flip"}], (1, 1, 2)).apply(images, np.arange(2000), dice=Dice(1), epoch=1)

    assert 900 < (made[:, 0, 0, 1] == 9).sum() < 1100


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_whole_shift_copies_pixels_exactly_and_takes_every_place_equally_often(kernels):
    images = np.zeros((5000, 1, 5, 5), np.uint8)
    images[:, 0, 2, 2] = 201

    made = recipe_of([{"kind": "shift", "pixels": 2}], (1, 5, 5), kernels).apply(
        images, np.arange(5000), dice=Dice(1), epoch=1
    )

    assert set(np.unique(made)) == {0, 201}
    often = (made == 201).sum(axis=(0, 1))
    assert often.sum() == 5000
    assert often.min() > 140
    assert often.max() < 260


def test_no_steps_leave_images_as_they_are_in_new_memory():
    images = some_images(3, (1, 28, 28))

    made = recipe_of([]).apply(images, np.arange(3), dice=Dice(1), epoch=1)

    np.testing.assert_array_equal(made, images)
    assert not np.shares_memory(made, images)


@pytest.mark.parametrize("kernels", KERNELS)
def test_images_that_are_read_only_or_strided_are_taken_and_left_alone(kernels):
    wide = some_images(8, (1, 28, 28))
    before = wide.copy()
    wide.setflags(write=False)
    recipe = recipe_of(ALL_KINDS, kernels=kernels)

    made = recipe.apply(wide[::2], np.arange(4), dice=Dice(1), epoch=1)

    expected = recipe.apply(before[::2].copy(), np.arange(4), dice=Dice(1), epoch=1)
    np.testing.assert_array_equal(made, expected)
    np.testing.assert_array_equal(wide, before)


def test_threads_that_share_a_recipe_make_what_one_alone_makes():
    recipe, images = recipe_of(ALL_KINDS, kernels="auto"), some_images(64, (1, 28, 28))
    alone = recipe.apply(images, np.arange(64), dice=Dice(1), epoch=1)
    made = np.empty_like(alone)

    def make(part):
        made[part] = recipe.apply(images[part], np.arange(64)[part], dice=Dice(1), epoch=1)

    threads = [threading.Thread(target=make, args=(slice(at, at + 16),)) for at in range(0, 64, 16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    np.testing.assert_array_equal(made, alone)


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_elastic_field_is_smooth_and_stays_below_its_limit(kernels):
    column = np.arange(0, 28 * 8, 8, dtype=np.uint8)
    ramp = np.broadcast_to(column, (50, 1, 28, 28)).copy()
    steps = [{"kind": "elastic", "pixels": 3, "edge": "repeat"}]

    made = recipe_of(steps, kernels=kernels).apply(ramp, np.arange(50), dice=Dice(1), epoch=1).astype(int)

    moved = (made - column.astype(int))[..., 4:-4] / 8
    assert np.abs(moved).max() <= 3.1
    assert moved.std() > 0.3
    assert np.abs(np.diff(moved, axis=2)).max() < 1.5


def test_the_images_of_a_users_function_are_its_own_and_its_values_keyed():
    def darker(image, drawn, *, by):
        image //= by
        image[:, 0, 0] = int(drawn[1] * 256)
        return image

    images = some_images(6, (1, 28, 28))
    before = images.copy()
    steps = [{"kind": "darker", "by": 2, "draws": 2}]
    recipe = recipe_of(steps, functions={"darker": darker})

    made = recipe.apply(images, np.arange(6), dice=Dice(1), epoch=4)

    np.testing.assert_array_equal(images, before)
    np.testing.assert_array_equal(made[:, :, 1:], before[:, :, 1:] // 2)
    for number in range(6):
        drawn = Dice(1).uniform("augment", keys=(4, 0), start=4 * number, count=2, dtype=np.float64)
        assert made[number, 0, 0, 0] == int(drawn[1] * 256)


@pytest.mark.parametrize("returned", [None, np.zeros((1, 28, 28)), np.zeros((28, 28), np.uint8)])
def test_a_users_function_that_returns_no_image_is_named(returned):
    recipe = recipe_of([{"kind": "mine"}], functions={"mine": lambda image, drawn: returned})

    with pytest.raises(
        TransformFailed, match=r"step 1: the function 'mine' returned .* expected uint8 of shape"
    ):
        recipe.apply(some_images(1, (1, 28, 28)), np.arange(1), dice=Dice(1), epoch=1)


def test_a_function_may_not_take_the_name_of_a_kind():
    with pytest.raises(ConfigError, match="a function is named 'flip'"):
        recipe_of([], functions={"flip": lambda image, drawn: image})


@pytest.mark.parametrize(
    ("images", "numbers", "claim"),
    [
        (np.zeros((2, 1, 28, 28)), np.arange(2), "images are float64 .* expected uint8"),
        (np.zeros((2, 1, 28, 27), np.uint8), np.arange(2), r"\(2, 1, 28, 27\), expected .*\(2, 1, 28, 28\)"),
        (np.zeros((2, 1, 28, 28), np.uint8), np.arange(3), "3 numbers"),
        (np.zeros((2, 1, 28, 28), np.uint8), np.array([1, -1]), "not negative"),
        (np.zeros((2, 1, 28, 28), np.uint8), np.array([0.0, 1.0]), "must be whole"),
    ],
)
def test_wrong_images_and_numbers_are_refused(images, numbers, claim):
    with pytest.raises(ValueError, match=claim):
        recipe_of([{"kind": "flip"}]).apply(images, numbers, dice=Dice(1), epoch=1)


def test_an_unknown_set_of_kernels_is_refused():
    with pytest.raises(ConfigError, match="unknown kernels 'cuda'; known: auto, numpy, numba"):
        recipe_of([], kernels="cuda")


def test_without_numba_auto_is_numpy_and_asking_for_it_names_the_extra(monkeypatch):
    monkeypatch.setattr(pipeline, "find_spec", lambda name: None)

    assert recipe_of([], kernels="auto").kernels == "numpy"
    with pytest.raises(ConfigError, match=r"not installed.*pip install .*\[fast\]"):
        recipe_of([], kernels="numba")


@pytest.mark.parametrize("shape", [(1, 28, 28), (1, 8, 8), (1, 1, 1), (3, 32, 32), (3, 1, 1), (4, 5, 9)])
def test_the_default_steps_keep_the_shape(shape):
    recipe = recipe_of(default_steps(shape), shape)

    assert recipe.output_shape == recipe.image_shape == shape
    assert recipe.apply(some_images(2, shape), np.arange(2), dice=Dice(1), epoch=1).shape == (2, *shape)


def test_steps_are_read_from_toml():
    text = '[[transform]]\nkind = "shift"\npixels = 2\n[[transform]]\nkind = "mine"\nanything = [1]\n'

    assert read_steps(text, "a.toml") == [{"kind": "shift", "pixels": 2}, {"kind": "mine", "anything": [1]}]


@pytest.mark.parametrize(
    ("text", "claim"),
    [
        ("[[transform", "a.toml is not TOML"),
        ("", r"a.toml has no \[\[transform\]\] tables"),
        ("transform = 3", r"a.toml has no \[\[transform\]\] tables"),
        ("transform = [3]", "a.toml, step 1 is 3, expected a table"),
        ("[transform]\nkind = 'flip'", r"a.toml has no \[\[transform\]\] tables"),
        ("seed = 3\n[[transform]]\nkind = 'flip'", "a.toml has 'seed'"),
        ("[[transform]]\nkind = 'flip'\n[[transform]]\npixels = 3", "a.toml, step 2 has no kind"),
        ("[[transform]]\nkind = 7", "a.toml, step 1 has the kind 7"),
        ("[[transform]]\nkind = 'pad'\npixels = 'x'", r"a.toml, step 1 \(pad\): pixels = 'x', expected"),
    ],
)
def test_a_bad_file_is_refused_by_its_name_and_step(text, claim):
    with pytest.raises(ConfigError, match=claim):
        read_steps(text, "a.toml")


SHAPE = (1, 28, 28)
PAD_AND_CROP = [{"kind": "pad", "pixels": 60}, {"kind": "crop", "rows": 28, "columns": 28}]


@pytest.mark.parametrize(
    ("steps", "claim"),
    [
        ([{"kind": "pad", "pixels": 32_767}], r"step 1 \(pad\) makes images of \(1, 65562, 65562\)"),
        ([{"kind": "pad", "pixels": 1_000}] * 2, r"step 2 \(pad\) makes images of \(1, 4028, 4028\)"),
        (
            [{"kind": "crop", "padding": 32_767, "rows": 32_767, "columns": 1}, {"kind": "pad", "pixels": 1}],
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
