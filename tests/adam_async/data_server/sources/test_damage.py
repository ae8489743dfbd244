"""The policy on damage, the numbering of classes and the words for splits."""

import pytest

from adam_async.data_server.sources.damage import Damage
from adam_async.data_server.sources.labels import number_classes, number_folders
from adam_async.data_server.sources.splits import split_files, split_of_image
from adam_async.errors import DataError


def test_the_first_damage_is_an_error_unless_it_is_to_be_skipped() -> None:
    with pytest.raises(DataError, match="a is bad; repair or remove it, or load with damaged='skip'"):
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
    assert number_classes(["dog", "", "\x1b", "d" * 300]) == ({"dog": 0}, ("dog",))
    assert number_classes([]) == ({}, ())


def test_folders_are_in_the_order_of_their_numbers_or_of_their_letters() -> None:
    assert number_folders(["10", "9"], "a") == {"9": 0, "10": 1}
    assert number_folders(["10", "9", "x"], "a") == {"10": 0, "9": 1, "x": 2}


def test_an_image_stays_on_its_side_for_good() -> None:
    assert [i for i in range(8) if split_of_image(f"cat/{i}.png") == "test"] == [4]
    tests = sum(split_of_image(str(i)) == "test" for i in range(5000))
    assert 900 < tests < 1100


def test_files_say_by_their_first_word_what_they_are_for() -> None:
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
    with pytest.raises(DataError, match=r"a: is other.csv for training or for testing"):
        split_files(["train.csv", "test.csv", "other.csv"], "a")
