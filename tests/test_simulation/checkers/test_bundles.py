"""The checker of copies names the first entry or value in which two copies of a bundle differ."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from adam_async.model.rules import Sgd
from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.replication.local_copy import Entry, Log
from adam_async.parameter_server.storage import own_shards
from adam_async.run.ids import BucketId, Replica, ShardId, Version
from adam_async.run.shard_table import ShardSpec
from adam_async.run.store_record import BundleRecord, StoreRecord
from tests.simulation.checkers.bundles import Bundles
from tests.simulation.scenario import Violation

ONE, TWO = ("ps-1", 1), ("ps-2", 2)

STORE = StoreRecord(
    id="store", rules=(), arrays=1, nbytes=8, state_arrays=0, pieces=1, shard_bytes=256, copies=2, slack=1
)


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
    log: Log = field(default_factory=Log)
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
        bundles.compare(copy, STORE)

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
    bundles.compare(Copy(), STORE)
    other.shards.shards[ShardId(0)].values[1] = 1

    with pytest.raises(Violation, match="equal copies: shard 0 in version 0 differs"):
        bundles.compare(other, STORE)


@pytest.mark.parametrize("change", ["number", "clock", "refused"])
def test_different_tables_at_a_position_are_found(change: str) -> None:
    bundles, other = Bundles(), Copy(me=TWO)
    bundles.compare(Copy(), STORE)
    tables = other.shards.shards[ShardId(0)].tables
    match change:
        case "number":
            tables.last_number[7, 1] = 3
        case "clock":
            tables.clocks[0] = 2
        case "refused":
            tables.refused = 1

    with pytest.raises(Violation, match=r"equal copies: .* differ after entry 1 of ps-1"):
        bundles.compare(other, STORE)


def test_a_copy_between_two_states_is_not_compared() -> None:
    bundles, other = Bundles(), Copy(me=TWO, state_position=None)
    bundles.compare(Copy(), STORE)
    other.shards.shards[ShardId(0)].version = Version(9)

    bundles.compare(other, STORE)
    assert bundles.compared == 0


def log_of(*generations: int) -> Log:
    log = Log()
    for generation in generations:
        log.append(generation, None, 0)
    return log


@pytest.mark.parametrize(("held", "is_found"), [((), True), ((2, 1), True), ((1,), False), ((1, 2), False)])
def test_an_entry_of_a_primary_that_another_member_does_not_hold_is_found(
    held: tuple[int, ...], is_found: bool
) -> None:
    bundles, primary, other = Bundles(), Copy(is_primary=True), Copy(me=TWO, log=log_of(*held))
    if not is_found:
        bundles.commits(primary, entry(1), [other])
        return
    with pytest.raises(Violation, match=r"committed: .*applied entry 1 of ps-1, and .* does not hold it"):
        bundles.commits(primary, entry(1), [other])


def test_a_member_that_has_dropped_an_applied_entry_held_it() -> None:
    Bundles().commits(Copy(is_primary=True), entry(3), [Copy(me=TWO, log=Log(start=3))])


def test_a_primary_that_applies_new_entries_without_enough_members_is_found() -> None:
    alone = BundleRecord(store="store", in_sync=(ONE,), changed=5)
    bundles, copy = Bundles(), Copy(is_primary=True, record=alone, log=log_of(1, 1))
    bundles.compare(copy, STORE)
    copy.log.commit(2)
    copy.log.applied = 2  # they were in the log, and may be committed by the members of before
    bundles.compare(copy, STORE)

    copy.log.append(1, None, 0)
    copy.log.applied = 3
    with pytest.raises(
        Violation, match=r"min_in_sync: .* applied entry 3 of ps-1 with 1 of 2 members in sync"
    ):
        bundles.compare(copy, STORE)


def test_a_replica_too_far_ahead_of_another_is_found() -> None:
    bundles, copy = Bundles(), Copy()
    tables = copy.shards.shards[ShardId(0)].tables
    tables.clocks = {Replica(0): 4, Replica(1): 1, Replica(2): 9}
    copy.shards.replicas.live = {Replica(0): 7, Replica(1): 8}  # the clock of an ended generation is void
    bundles.compare(copy, STORE)

    tables.clocks[Replica(0)] = 5
    copy.state_position = 2
    with pytest.raises(Violation, match=r"staleness: the clocks of .* with a slack of 1"):
        bundles.compare(copy, STORE)
