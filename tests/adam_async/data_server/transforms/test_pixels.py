"""Steps that change what pixels hold."""

import numpy as np
import pytest

from adam_async.data_server.transforms.recipe import Recipe
from adam_async.model.keyed_random import Dice


def changed(images, *steps):
    recipe = Recipe.of(steps, images.shape[1:], kernels="numpy")
    return recipe.apply(images, np.arange(len(images)), dice=Dice(1), epoch=1)


def ramps(n=1):
    return np.tile(np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16), (n, 1, 1, 1))


def test_brightness_adds_the_same_to_every_pixel_and_stops_at_the_ends():
    made = changed(ramps(200), {"kind": "brightness", "by": 0.2}).astype(int)

    added = made[:, 0, 8, 0] - 128
    assert -51 <= added.min() < -40
    assert 40 < added.max() <= 51
    for image, by in zip(made, added, strict=True):
        np.testing.assert_array_equal(image.ravel(), np.clip(np.arange(256) + by, 0, 255))


def test_contrast_stretches_around_the_mean():
    made = changed(ramps(100), {"kind": "contrast", "by": 0.5}).astype(int)

    widths = made[:, 0, 12, 0] - made[:, 0, 4, 0]
    assert 64 <= widths.min() < 80
    assert 175 < widths.max() <= 192
    assert (np.abs(made[:, 0, 8, 0] - 128) <= 1).all()


def test_a_normalised_image_has_the_mean_and_the_deviation_asked_for():
    images = np.stack([ramps()[0] // 4 + 30, ramps()[0] // 2])

    made = changed(images, {"kind": "normalise", "to_mean": 100, "to_std": 40})

    np.testing.assert_allclose(made.mean(axis=(1, 2, 3)), 100, atol=0.5)
    np.testing.assert_allclose(made.std(axis=(1, 2, 3)), 40, atol=0.5)


def test_an_even_image_is_normalised_to_the_mean():
    assert set(np.unique(changed(np.full((1, 3, 4, 4), 7, np.uint8), {"kind": "normalise"}))) == {128}


def test_given_means_and_deviations_are_those_of_the_channels():
    images = np.full((1, 3, 2, 2), 100, np.uint8)
    step = {"kind": "normalise", "mean": [100, 50, 200], "std": [10, 50, 100], "to_mean": 10, "to_std": 20}

    assert changed(images, step)[0, :, 0, 0].tolist() == [10, 30, 0]


def test_noise_has_its_deviation_no_mean_and_is_alike_in_no_two_places():
    images = np.full((200, 1, 15, 15), 128, np.uint8)

    made = changed(images, {"kind": "noise", "levels": 10}).astype(float) - 128

    assert abs(made.mean()) < 0.2
    assert abs(made.std() - 10) < 0.2
    assert np.abs(made).max() <= 35
    flat = made.reshape(200, -1)
    assert np.abs(np.corrcoef(flat[:, ::2].ravel()[:22000], flat[:, 1::2].ravel()[:22000])[0, 1]) < 0.03
    assert len(np.unique(flat, axis=0)) == 200


@pytest.mark.parametrize("side", [1, 4, 5])
def test_cutout_blanks_one_square_in_all_channels(side):
    images = np.full((400, 3, 9, 8), 200, np.uint8)

    made = changed(images, {"kind": "cutout", "pixels": side, "level": 7})

    hidden = made == 7
    assert (hidden | (made == 200)).all()
    assert (hidden == hidden[:, :1]).all()
    for image in hidden[:, 0]:
        rows, columns = np.flatnonzero(image.any(axis=1)), np.flatnonzero(image.any(axis=0))
        assert image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
        assert 1 <= len(rows) <= side
        assert 1 <= len(columns) <= side
    assert hidden[:, 0].sum(axis=(1, 2)).max() == side * side
    assert hidden.any(axis=(0, 1)).all()
