"""Images that stay stored: chosen as NumPy chooses, and what stands in for those that are damaged."""

import numpy as np
import pytest

from adam_async.errors import DataError
from tests.adam_async.data_server.pictures import picture, pictures, stored


def test_they_are_chosen_as_an_array_of_them_would_be() -> None:
    images = stored(9)
    array = pictures(range(9))

    assert (images.shape, images.dtype, len(images), images.nbytes) == (array.shape, array.dtype, 9, 54)
    assert np.array_equal(images[4], array[4])
    assert np.array_equal(images[-1], array[-1])
    for chosen in (slice(None), slice(2, 7, 2), np.array([5, 0, 5]), np.arange(9) > 6):
        assert np.array_equal(images[chosen], array[chosen])
    assert np.array_equal(images.take(np.array([3, 1]), axis=0), array[[3, 1]])


def test_a_damaged_image_is_an_error_that_names_it() -> None:
    with pytest.raises(DataError, match="image 3 is damaged"):
        stored(9, damaged={3}).take(np.arange(9))


def test_if_damage_is_skipped_the_next_of_its_class_takes_its_place_in_any_order_of_reads() -> None:
    damaged = {4, 6, 99}
    forth, back = (stored(100, damaged=damaged, policy="skip") for _ in range(2))
    expected = pictures([{4: 8, 6: 8, 99: 1}.get(number, number) for number in range(100)])

    assert np.array_equal(forth[:], expected)
    assert np.array_equal(back[::-1], expected[::-1])
    assert np.array_equal(forth[4], picture(8))
    assert sorted(forth.replaced) == sorted(back.replaced) == sorted(damaged)
    assert "image 4 is damaged" in forth.sentences()


def test_too_many_damaged_images_are_an_error_whatever_was_asked_for() -> None:
    images = stored(60, damaged={3, 10, 20, 40}, policy="skip")
    assert images[:20].shape[0] == 20
    with pytest.raises(DataError, match="4 of 60 images are damaged, more than 5%; the first: image 3"):
        images[:]


def test_a_class_without_any_readable_image_is_an_error() -> None:
    images = stored(80, classes=40, damaged={7, 47}, policy="skip")
    with pytest.raises(DataError, match="shelf: no image of class 7 can be read; the last: image 7 is"):
        images[7]
