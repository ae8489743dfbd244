"""Images are looked up exactly where they are told to be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.data_server.transforms.resample import ONE, Spline, resample

STILL = [ONE, 0, 0, 0, ONE, 0]


def looked_up(images, maps, *, controls=None, cells=1, repeat=False):
    n, _, rows, columns = images.shape
    out = np.empty_like(images)
    if controls is None:
        controls = np.zeros((n, 2, 0, 0), np.int64)
    resample(
        images,
        np.array(maps, np.int64),
        controls,
        Spline.of(rows, cells),
        Spline.of(columns, cells),
        repeat,
        out,
    )
    return out


@given(length=st.integers(1, 64), cells=st.integers(1, 16))
def test_a_spline_reads_four_points_of_the_grid_whose_weights_add_up(length, cells):
    spline = Spline.of(length, cells)

    assert spline.at.min() >= 0
    assert spline.at.max() <= cells - 1
    assert (np.diff(spline.at) >= 0).all()
    assert (spline.weights >= 0).all()
    assert (np.abs(spline.weights.sum(axis=1) - 16384) <= 2).all()


@pytest.mark.parametrize(("axis", "moved"), [(0, (0, 1)), (1, (1, 0))])
def test_a_field_that_is_even_moves_every_pixel_by_as_much(axis, moved):
    images = np.arange(30, dtype=np.uint8).reshape(1, 1, 5, 6)
    controls = np.zeros((1, 2, 5, 5), np.int64)
    controls[:, axis] = -ONE

    made = looked_up(images, [STILL], controls=controls, cells=2)

    expected = np.zeros_like(images)
    down, right = moved
    expected[:, :, down:, right:] = images[:, :, : 5 - down, : 6 - right]
    np.testing.assert_array_equal(made, expected)


def test_positions_closer_than_a_weight_can_tell_are_on_the_pixel():
    images = np.arange(30, dtype=np.uint8).reshape(1, 1, 5, 6)

    for little in (-128, 127):
        np.testing.assert_array_equal(looked_up(images, [[ONE, 0, little, 0, ONE, little]]), images)


def test_far_beyond_the_image_all_is_black_or_the_nearest_corner():
    images = np.full((1, 1, 3, 3), 5, np.uint8)
    images[0, 0, 2, 2] = 200
    far = [ONE, 0, 1 << 40, 0, ONE, 1 << 40]

    assert set(looked_up(images, [far]).ravel()) == {0}
    assert set(looked_up(images, [far], repeat=True).ravel()) == {200}


def test_many_large_images_are_worked_off_in_parts_that_do_not_mix():
    images = np.arange(5, dtype=np.uint8).reshape(5, 1, 1, 1) + np.zeros((5, 1, 300, 300), np.uint8)

    np.testing.assert_array_equal(looked_up(images, [STILL] * 5), images)
