"""Random values are functions of their purpose."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.model.keyed_random import Dice, philox_words


@given(start=st.integers(0, 300), count=st.integers(0, 100), kind=st.sampled_from(["uniform", "bits"]))
def test_a_slice_drawn_alone_equals_the_slice_of_the_whole(start, count, kind):
    draw = getattr(Dice(7), kind)
    whole = draw("x", keys=(1, "fc1"), count=400)

    np.testing.assert_array_equal(
        draw("x", keys=(1, "fc1"), start=start, count=count), whole[start : start + count]
    )


@given(rows=st.integers(0, 9), columns=st.integers(1, 9), epoch=st.integers(0, 3), start=st.integers(0, 99))
def test_filling_an_array_equals_drawing_it(rows, columns, epoch, start):
    out = np.empty((rows, columns))

    Dice(7).fill_uniform("mask", out, keys=(epoch, "drop"), start=start)

    drawn = Dice(7).uniform("mask", keys=(epoch, "drop"), start=start, count=rows * columns, dtype=np.float64)
    np.testing.assert_array_equal(out, drawn.reshape(rows, columns))


@pytest.mark.parametrize("out", [np.empty(4, np.float32), np.empty((4, 2))[:, 0]])
def test_only_float64_arrays_in_one_piece_are_filled(out):
    with pytest.raises(ValueError, match="C-contiguous float64"):
        Dice(7).fill_uniform("mask", out)


def test_equal_keys_draw_equal_values_and_any_difference_draws_others():
    base = Dice(1).bits("mask", keys=(1, 23), count=4)

    np.testing.assert_array_equal(Dice(1).bits("mask", keys=(1, 23), count=4), base)
    for other in (
        Dice(2).bits("mask", keys=(1, 23), count=4),
        Dice(1).bits("order", keys=(1, 23), count=4),
        Dice(1).bits("mask", keys=(12, 3), count=4),
        Dice(1).bits("mask", keys=("1", 23), count=4),
        Dice(1).bits("mask", keys=(1,), count=4),
    ):
        assert not np.array_equal(other, base)


def test_values_are_the_same_for_ever():
    assert Dice(0).bits("known", keys=(1, "a"), count=2).tolist() == [
        4094247431784635369,
        12118056153891292239,
    ]


def test_float32_is_float64_rounded_down_and_stays_below_one():
    wide = Dice(3).uniform("u", count=1000, dtype=np.float64)
    narrow = Dice(3).uniform("u", count=1000)

    assert narrow.dtype == np.float32
    assert np.all(narrow <= wide)
    assert np.all(wide - narrow < 2.0**-24)
    assert narrow.min() >= 0.0
    assert narrow.max() < 1.0


def test_uniform_and_normal_have_their_moments():
    uniform = Dice(5).uniform("u", count=100_000, dtype=np.float64)
    normal = Dice(5).normal("n", count=100_000, dtype=np.float64)

    assert abs(uniform.mean() - 0.5) < 0.005
    assert abs(uniform.var() - 1 / 12) < 0.002
    assert abs(normal.mean()) < 0.015
    assert abs(normal.std() - 1.0) < 0.01
    assert abs((normal**4).mean() - 3.0) < 0.15


@given(
    seeds=st.lists(st.integers(0, 2**64), min_size=1, max_size=3),
    blocks=st.lists(st.integers(0, 2**62 - 1), max_size=5),
)
def test_words_with_many_keys_at_once_are_those_of_bits(seeds, blocks):
    keys = np.array([Dice(seed).key("augment", (1, "a")) for seed in seeds], np.uint64)
    places = np.array(blocks, np.uint64)[:, np.newaxis] + np.zeros(len(seeds), np.uint64)

    words = philox_words(keys, places)

    assert words.shape == (len(blocks), len(seeds), 4)
    for row, block in enumerate(blocks):
        for column, seed in enumerate(seeds):
            alone = Dice(seed).bits("augment", keys=(1, "a"), start=4 * block, count=4)
            np.testing.assert_array_equal(words[row, column], alone)


def test_a_permutation_holds_every_number_once():
    order = Dice(1).permutation("order", 1000, keys=(3,))

    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(1000))
    assert not np.array_equal(order, np.arange(1000))


def test_a_numpy_integer_is_refused_as_a_key_because_it_would_be_another_one():
    with pytest.raises(TypeError, match="keys of dice are int or str, not int64"):
        Dice(1).uniform("anything", keys=(np.int64(3),), count=1)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="start=-1"):
        Dice(1).bits("x", start=-1, count=1)
    with pytest.raises(ValueError, match="start=-1"):
        Dice(1).fill_uniform("x", np.empty(2), start=-1)
    with pytest.raises(ValueError, match="float16"):
        Dice(1).uniform("x", count=1, dtype=np.float16)


def test_dice_show_their_seed():
    assert repr(Dice(9)) == "<Dice seed=9>"
