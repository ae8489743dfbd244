"""Steps that move pixels do so by as much as they say, and are resampled as one."""

import numpy as np
import pytest

from adam_async.data_server.transforms.geometry import Movement, joins
from adam_async.data_server.transforms.pipeline import kernels_of
from adam_async.data_server.transforms.steps import check_step

LEAST, MIDDLE, MOST = 0, 2**63, 2**64 - 1
"""Words that draw -1, 0 and almost 1."""


def moved(image, *steps, words):
    checked = [check_step(step, "step") for step in steps]
    movement = Movement(checked, image.shape, kernels_of("numpy"))
    drawn = [np.full((1, count), word, np.uint64) for count, word in zip(movement.words, words, strict=True)]
    return movement.apply(image[np.newaxis], drawn)[0]


def letter(rows=6, columns=7):
    return np.arange(1, rows * columns + 1, dtype=np.uint8).reshape(1, rows, columns)


@pytest.mark.parametrize(("word", "by"), [(LEAST, -2), (MIDDLE, 0), (MOST, 2)])
@pytest.mark.parametrize("edge", ["black", "repeat"])
def test_a_shift_goes_both_ways_by_at_most_its_pixels(word, by, edge):
    mode = {"mode": "constant"} if edge == "black" else {"mode": "edge"}
    padded = np.pad(letter()[0], 2, **mode)

    made = moved(letter(), {"kind": "shift", "pixels": 2, "edge": edge}, words=[word])

    np.testing.assert_array_equal(made[0], padded[2 - by : 8 - by, 2 - by : 9 - by])


@pytest.mark.parametrize(("degrees", "turns"), [(90, 1), (180, 2)])
def test_quarter_turns_are_exact(degrees, turns):
    square = letter(5, 5)

    made = moved(square, {"kind": "rotate", "degrees": degrees}, words=[LEAST])

    assert any(np.array_equal(made, np.rot90(square, quarter, axes=(1, 2))) for quarter in (turns, 4 - turns))
    assert not np.array_equal(made, square)


def test_a_turn_by_45_degrees_keeps_the_centre_and_brings_a_corner_onto_an_axis():
    image = np.zeros((1, 21, 21), np.uint8)
    image[0, 10, 10] = 200
    image[0, 2:6, 2:6] = 255

    made = moved(image, {"kind": "rotate", "degrees": 45}, words=[LEAST])

    assert made[0, 10, 10] == 200
    # 6 x sqrt(2) pixels from the centre, straight up or straight to a side.
    assert sum(int(made[0, r, c] > 200) for r, c in ((10, 1), (10, 2), (1, 10), (2, 10))) >= 1


def test_a_scale_of_a_half_halves_and_the_middle_word_leaves_the_image():
    image = np.zeros((1, 16, 16), np.uint8)
    image[0, 4:12, 4:12] = 255

    made = moved(image, {"kind": "scale", "by": 0.5}, words=[LEAST])

    assert (made[0, 6:10, 6:10] == 255).all()
    assert made.sum() == 255 * 16
    np.testing.assert_array_equal(moved(letter(), {"kind": "scale", "by": 0.5}, words=[MIDDLE]), letter())


def test_a_shear_moves_rows_apart_and_leaves_the_middle_one():
    image = np.zeros((1, 5, 9), np.uint8)
    image[0, :, 4] = 100

    made = moved(image, {"kind": "shear", "by": 1}, words=[LEAST])

    assert [int(np.flatnonzero(row)[0]) for row in made[0]] in ([6, 5, 4, 3, 2], [2, 3, 4, 5, 6])
    assert set(np.unique(made)) == {0, 100}


def test_an_even_elastic_field_is_a_shift():
    made = moved(letter(), {"kind": "elastic", "pixels": 1}, words=[LEAST])

    expected = np.zeros_like(letter())
    expected[:, 1:, 1:] = letter()[:, :-1, :-1]
    assert np.abs(made.astype(int) - expected).max() <= 1


def test_a_second_shift_brings_back_pixels_that_the_first_moved_out():
    shift = {"kind": "shift", "pixels": 3}

    np.testing.assert_array_equal(moved(letter(), shift, shift, words=[LEAST, MOST]), letter())


def test_two_turns_that_cancel_leave_the_image_because_it_is_resampled_once():
    turn = {"kind": "rotate", "degrees": 30}
    image = letter(20, 12)

    # The last word draws a little less than 1, far less than a weight can tell.
    np.testing.assert_array_equal(moved(image, turn, turn, words=[LEAST, MOST]), image)


def test_half_a_pixel_mixes_two_neighbours_evenly():
    image = np.array([[[10, 20, 40]]], np.uint8)

    made = moved(image, {"kind": "shift", "pixels": 0.5, "whole": False}, words=[LEAST])

    # Half a pixel up, too: half of what is there is the black beyond the image.
    assert made.tolist() == [[[8, 15, 10]]]


def test_a_crop_takes_the_first_and_the_last_place():
    crop = {"kind": "crop", "rows": 4, "columns": 5, "padding": 1}
    padded = np.pad(letter()[0], 1)

    np.testing.assert_array_equal(moved(letter(), crop, words=[LEAST])[0], padded[:4, :5])
    np.testing.assert_array_equal(moved(letter(), crop, words=[MOST])[0], padded[-4:, -5:])


def test_a_pad_draws_nothing_and_surrounds_the_image():
    made = moved(letter(), {"kind": "pad", "pixels": 2, "edge": "repeat"}, words=[LEAST])

    np.testing.assert_array_equal(made[0], np.pad(letter()[0], 2, mode="edge"))


@pytest.mark.parametrize(
    ("kinds", "allowed"),
    [
        (["shift", "flip", "rotate"], True),
        (["elastic", "shift"], True),
        (["elastic", "elastic"], False),
        (["crop", "shift"], False),
        (["shift", "crop"], False),
        (["pad", "pad"], False),
    ],
)
def test_crops_pads_and_second_elastic_steps_are_not_joined(kinds, allowed):
    options = {
        "shift": {"pixels": 1},
        "rotate": {"degrees": 1},
        "elastic": {"pixels": 1},
        "pad": {"pixels": 1},
    }
    steps = [check_step({"kind": kind, **options.get(kind, {})}, "step") for kind in kinds]

    assert joins(steps[-1], steps[:-1]) == allowed


def test_steps_that_see_different_things_beyond_the_image_are_not_joined():
    black, repeat = (
        check_step({"kind": "shift", "pixels": 1, "edge": edge}, "step") for edge in ("black", "repeat")
    )
    flip = check_step({"kind": "flip"}, "step")

    assert not joins(black, [repeat])
    assert joins(black, [flip, black])
    assert not joins(black, [repeat, flip])
