"""Histograms of several servers are added up by number, not by text."""

from adam_async.run.staleness import add_up, add_up_by_name


def test_histograms_add_up_as_numbers() -> None:
    joined = add_up([{"2": 3, "10": 1}, {"2": 1, "0": 5}])

    assert list(joined.histogram.items()) == [("0", 5), ("2", 4), ("10", 1)]
    assert (joined.mean, joined.max, joined.pushes) == (1.8, 10, 10)


def test_without_pushes_there_is_no_staleness() -> None:
    nothing = add_up([{}, {}])

    assert (nothing.histogram, nothing.mean, nothing.max, nothing.pushes) == ({}, 0.0, 0, 0)


def test_histograms_of_the_same_name_are_joined_and_names_come_in_their_order() -> None:
    joined = add_up_by_name([{"10": {"1": 2}, "2": {"0": 1}}, {"10": {"3": 2}}])

    assert list(joined) == ["2", "10"]
    assert (joined["10"].histogram, joined["10"].mean) == ({"1": 2, "3": 2}, 2.0)
