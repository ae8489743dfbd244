"""The pieces of a store on several disks."""

import msgspec
import pytest

from adam_async.checkpoint import saved_shards
from adam_async.messages import SavedPiece, SavedStore
from adam_async.run.store_record import ArrayRecord
from tests.adam_async.cluster_maps import store_record


def saved_at(position):
    arrays = (ArrayRecord(name="a", shape=(2,), dtype="float32"),)
    record = store_record("s", arrays, buckets=("ps-0",) * 64)
    return SavedStore(
        name="name",
        id="s",
        record=msgspec.json.encode(record),
        arrays=msgspec.json.encode(arrays),
        pieces=(SavedPiece("ps-0", 1, position, 0),),
        began_ms=1,
    )


@pytest.mark.parametrize("positions", [(5, 7), (7, 5)])
def test_of_two_copies_the_one_with_the_higher_position_counts(positions):
    found = {}
    for number, position in enumerate(positions):
        saved_shards._merge(found, f"ps-{number}", saved_at(position), "name")
    assert found["s"].best == {("ps-0", 1): (7, 0, f"ps-{positions.index(7)}")}
