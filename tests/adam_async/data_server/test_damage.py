"""The policy on damage, the numbering of classes and the words for splits."""

import pytest

from adam_async.data_server.class_names import number_classes, number_folders
from adam_async.data_server.damage import Damage
from adam_async.data_server.sources.splits import rank_of_image, resolve, split_files
from adam_async.errors import DataError


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
