"""The benchmark of stalls has a size for each record that is attached to a message."""

from benchmarks._largest import MOST_BYTES, largest_messages
from tests.simulation.scenarios.valid_messages import Facts, valid_messages


def test_every_attached_record_has_a_largest_size() -> None:
    attached = [each for each in valid_messages(Facts()) if each.ride is not None and not each.ride.field]
    assert {type(each.body).__name__ for each in attached} == set(MOST_BYTES)


def test_a_largest_message_is_larger_than_its_example() -> None:
    (largest,) = largest_messages(Facts(), only="PinList")
    (example,) = (each for each in valid_messages(Facts()) if type(each.body).__name__ == "PinList")
    (full,) = largest.example.tensors
    assert example.tensors[0].nbytes < full.nbytes <= MOST_BYTES["PinList"]
