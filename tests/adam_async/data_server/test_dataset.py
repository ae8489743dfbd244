"""Images that stay stored: chosen as NumPy chooses, and what stands in for those that are damaged."""

import numpy as np
import pytest

from adam_async.data_server.class_names import number_classes, number_folders
from adam_async.data_server.dataset import Damage
from adam_async.data_server.sources.splits import rank_of_image, resolve, split_files
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


def test_the_first_damage_is_an_error_unless_it_is_to_be_skipped() -> None:
    with pytest.raises(
        DataError, match="a is bad; repair it, move it elsewhere, or leave it out with --damaged skip"
    ):
        Damage("error").note("a is bad")
    with pytest.raises(ValueError, match="damaged is 'ignore', expected 'skip' or 'error'"):
        Damage("ignore")  # type: ignore[arg-type]


def test_a_hundred_are_listed_and_the_others_counted() -> None:
    damage = Damage("skip")
    for i in range(130):
        damage.note(f"{i} is bad")
        assert len(damage.sentences()) == min(i + 1, 101)

    assert damage.sentences()[99:] == ("99 is bad", "30 more were left out")


def test_a_twentieth_may_be_damaged_and_no_more() -> None:
    damage = Damage("skip")
    damage.check(0, "a")
    damage.note("x is bad")
    damage.check(19, "a")
    with pytest.raises(DataError, match="a: 1 of 19 images are damaged, more than 5%; the first: x is bad"):
        damage.check(18, "a")


def test_labels_are_numbers_where_half_of_them_are() -> None:
    assert number_classes(["7", "0", "cat", ""]) == ({"7": 7, "0": 0}, ())
    assert number_classes(["7", "dog", "cat"]) == ({"7": 0, "cat": 1, "dog": 2}, ("7", "cat", "dog"))
    assert number_classes(["dog", "", "\udcff", "d" * 2000]) == ({"dog": 0}, ("dog",))
    assert number_classes([]) == ({}, ())


def test_folders_are_in_the_order_of_their_numbers_or_of_their_letters() -> None:
    assert number_folders(["10", "9"]) == {"9": 0, "10": 1}
    assert number_folders(["10", "9", "x"]) == {"10": 0, "9": 1, "x": 2}


@pytest.mark.parametrize(("images", "tests"), [(1, 0), (2, 1), (3, 1), (7, 1), (8, 2), (13, 3), (40, 8)])
def test_each_class_gives_the_same_share_of_test_images(images: int, tests: int) -> None:
    labels = ["cat"] * images + ["dog"] * 50
    splits = resolve(labels, [rank_of_image(f"{label}/{i}") for i, label in enumerate(labels)])

    assert (splits[:images].count("test"), splits[images:].count("test")) == (tests, 10)


def test_the_same_images_have_the_same_sides() -> None:
    ranks = [rank_of_image(f"cat/{i}.png") for i in range(8)]
    splits = resolve(["cat"] * 8, ranks)

    assert [i for i in range(8) if splits[i] == "test"] == [0, 7]
    assert resolve(["cat"] * 8, ranks[::-1]) == splits[::-1]
    assert rank_of_image("caf\u00e9") == rank_of_image("cafe\u0301")


@pytest.mark.parametrize("ranks", [(1, 2, 3), (5, 10, 0), (1, 1, 1)])
def test_a_class_of_several_images_has_some_to_train_and_some_to_test_with(ranks: tuple[int, ...]) -> None:
    labels = ["cat"] * 3 + ["dog"] * 3 + ["eel"]

    splits = resolve(labels, [*ranks, *ranks, 7])

    assert set(splits[:3]) == set(splits[3:6]) == {"train", "test"}
    assert splits[6] == "train"


def test_images_of_one_class_each_are_split_and_those_with_a_side_keep_it() -> None:
    assert sorted(resolve(["a", "b"], [1, 2])) == ["test", "train"]
    assert resolve(["a", "a"], ["train", "train"]) == ["train", "train"]
    assert resolve(["a"], [1]) == ["train"]


def test_files_say_by_a_word_what_they_are_for() -> None:
    assert split_files(["train-0.tar", "test-0.tar", "val-0.tar"], "a") == [
        ("train-0.tar", "train"),
        ("test-0.tar", "test"),
    ]
    assert split_files(["Training.csv", "validation.csv"], "a") == [
        ("Training.csv", "train"),
        ("validation.csv", "test"),
    ]
    assert split_files(["train.csv"], "a") == [("train.csv", None)]
    assert split_files(["trains.csv", "tests.csv"], "a") == [("trains.csv", None), ("tests.csv", None)]
    assert split_files(["mnist_train.csv", "mnist_test.csv", "X-Valid.csv"], "a") == [
        ("mnist_train.csv", "train"),
        ("mnist_test.csv", "test"),
    ]
    assert split_files(["signsTrain.csv", "signsDev.csv"], "a") == [
        ("signsTrain.csv", "train"),
        ("signsDev.csv", "test"),
    ]
    with pytest.raises(DataError, match=r"a: is other.csv for training or for testing"):
        split_files(["train.csv", "test.csv", "other.csv"], "a")
