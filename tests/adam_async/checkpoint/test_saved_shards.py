"""Stores on the disks of servers, as a faulty server may list them."""

import msgspec
import pytest

from adam_async.checkpoint.saved_shards import _merge
from adam_async.messages import SavedStore
from adam_async.messages.saved_shards import SavedPiece
from adam_async.run.store_record import ArrayRecord, RuleRecord, StoreRecord

ARRAYS = (ArrayRecord("w", (8,)),)


def listed(*, arrays=ARRAYS, **fields):
    record = StoreRecord(
        **{
            "id": "store-1",
            "rules": (RuleRecord(rule="sgd"),),
            "arrays": 1,
            "nbytes": 32,
            "state_arrays": 0,
            "pieces": 1,
            "shard_bytes": 64,
            "buckets": ("ps-0",) * 64,
            **fields,
        }
    )
    texts = msgspec.json.encode(record), msgspec.json.encode(arrays)
    return SavedStore("a-name", "store-1", *texts, (SavedPiece("ps-0", 1, 7, 0),), 1)


def test_a_listed_store_counts_with_its_pieces():
    found = {}
    _merge(found, "ps-0", listed(), "a-name")
    assert found["store-1"].best == {("ps-0", 1): (7, 0, "ps-0")}


@pytest.mark.parametrize(
    "options",
    [
        {"buckets": ()},
        {"buckets": ("ps-0",)},
        {"shard_bytes": 0},
        {"shard_bytes": 8, "arrays": (ArrayRecord("w", (1 << 40,)),)},
        {"arrays": (ArrayRecord("w", (-8,)),)},
        {"rules": (RuleRecord(rule="magic"),)},
    ],
    ids=str,
)
def test_a_listed_store_out_of_bounds_counts_as_absent(options):
    found = {}
    _merge(found, "ps-0", listed(**options), "a-name")
    assert found == {}
