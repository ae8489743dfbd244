"""The checker of copies names the first entry or value in which two copies of a bundle differ."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from adam_async.model.rules import Sgd
from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.storage import own_shards
from adam_async.replication.log import Entry
from adam_async.run.bundle_record import BundleRecord
from adam_async.run.ids import BucketId, ShardId, Version
from adam_async.run.shard_table import ShardSpec
from adam_async.simulation.checkers.bundles import Bundles
from adam_async.simulation.scenario import Violation

ONE, TWO = ("ps-1", 1), ("ps-2", 2)


def shards() -> Bundle:
    spec = ShardSpec(id=ShardId(0), tensor="t", start=0, stop=2, row_size=1, bucket=BucketId(0))
    return Bundle(own_shards([spec], [Sgd()]))


@dataclass
class Copy:
    """A copy without a server."""

    me: tuple[str, int] = ONE
    home: str = "ps-1"
    record: BundleRecord = field(default_factory=lambda: BundleRecord(store="store", in_sync=(ONE, TWO)))
    is_primary: bool = False
    state_position: int | None = 1
    shards: Bundle = field(default_factory=shards)


def entry(position: int, generation: int = 1) -> Entry:
    return Entry(position, generation, None, 0)


def parts(value: int = 0):
    return [[np.full(2, value, np.uint8)]]


def test_copies_that_apply_equal_entries_to_equal_states_pass() -> None:
    bundles = Bundles()
    for copy in (Copy(), Copy(me=TWO)):
        for position in (1, 2, 3):
            bundles.applies(copy, entry(position), parts(position))
        bundles.compare(copy)

    assert (bundles.applied, bundles.compared) == (6, 1)


def test_two_entries_at_one_position_are_found() -> None:
    bundles = Bundles()
    bundles.applies(Copy(), entry(1), parts(1))

    with pytest.raises(Violation, match=r"one log: \('ps-2', 2\) applied entry 1 of ps-1 of generation 1"):
        bundles.applies(Copy(me=TWO), entry(1), parts(2))
    with pytest.raises(Violation, match="another one, of generation 1"):
        bundles.applies(Copy(me=TWO), entry(1, generation=2), parts(1))


def test_an_entry_that_is_applied_twice_is_found_unless_the_copy_begins_anew() -> None:
    bundles, copy = Bundles(), Copy()
    bundles.applies(copy, entry(1), parts())

    with pytest.raises(Violation, match="one log"):
        bundles.applies(copy, entry(1), parts())

    copy.shards = shards()
    bundles.applies(copy, entry(1), parts())


def test_a_generation_has_one_primary() -> None:
    bundles = Bundles()
    bundles.applies(Copy(is_primary=True), entry(1), parts())

    with pytest.raises(Violation, match=r"one primary: .* both acknowledged"):
        bundles.applies(Copy(me=TWO, is_primary=True), entry(1), parts())


def test_generations_never_go_back() -> None:
    bundles, copy = Bundles(), Copy(record=BundleRecord(store="store", generation=3))
    bundles.applies(copy, entry(1, generation=2), parts())
    copy.record = BundleRecord(store="store", generation=2)

    with pytest.raises(Violation, match=r"I4: .* went back from generation 3 of ps-1 to 2"):
        bundles.applies(copy, entry(2), parts())

    copy.record = BundleRecord(store="store", generation=3)
    with pytest.raises(Violation, match="I4: entry 2 of ps-1 has generation 1, and the one before it 2"):
        bundles.applies(copy, entry(2), parts())


def test_different_values_of_a_version_are_found() -> None:
    bundles, other = Bundles(), Copy(me=TWO)
    bundles.compare(Copy())
    other.shards.shards[ShardId(0)].values[1] = 1

    with pytest.raises(Violation, match="equal copies: shard 0 in version 0 differs"):
        bundles.compare(other)


@pytest.mark.parametrize("change", ["number", "clock", "refused"])
def test_different_tables_at_a_position_are_found(change: str) -> None:
    bundles, other = Bundles(), Copy(me=TWO)
    bundles.compare(Copy())
    tables = other.shards.shards[ShardId(0)].tables
    match change:
        case "number":
            tables.last_number[7, 1] = 3
        case "clock":
            tables.clocks[0] = 2
        case "refused":
            tables.refused = 1

    with pytest.raises(Violation, match=r"equal copies: .* differ after entry 1 of ps-1"):
        bundles.compare(other)


def test_a_copy_between_two_states_is_not_compared() -> None:
    bundles, other = Bundles(), Copy(me=TWO, state_position=None)
    bundles.compare(Copy())
    other.shards.shards[ShardId(0)].version = Version(9)

    bundles.compare(other)
    assert bundles.compared == 0
