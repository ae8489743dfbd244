"""Files in use, superfluous files, and the victims of compaction."""

from adam_async.persistence.contents import Contents, Location
from adam_async.persistence.records import EntryKey, StateKey, StateName
from adam_async.persistence.usage import Usage

OLD, NEW, LAST = (f"states-0000000{number}.segment" for number in (1, 2, 3))
LOG = "entries-00000001.segment"


def location(segment: str, nbytes: int = 100) -> Location:
    return Location(segment, 0, 50, nbytes, (nbytes - 50,))


def key(shard: int, position: int = 1) -> StateKey:
    return StateKey("a", shard, 1, position, position)


def usage_of(**files: tuple[int, dict[int, int]]) -> Usage:
    usage = Usage(Contents())
    for segment, (size, shards) in files.items():
        usage.grew(segment, size)
        for shard, nbytes in shards.items():
            usage.put(key(shard), location(segment, nbytes))
    return usage


def test_a_file_is_superfluous_once_newer_states_are_elsewhere_and_it_grows_no_more():
    usage = usage_of(**{OLD: (300, {1: 100, 2: 100}), NEW: (300, {})})
    assert usage.superfluous({NEW}, {}, {}) == []
    usage.put(key(1, 2), location(NEW))
    assert usage.superfluous({NEW}, {}, {}) == []
    usage.put(key(2, 2), location(NEW))
    assert usage.superfluous({NEW}, {}, {}) == [OLD]
    assert usage.superfluous({OLD, NEW}, {}, {}) == []
    usage.removed(OLD)
    assert usage.superfluous({NEW}, {}, {}) == []
    assert usage.live_bytes == 200


def test_a_file_of_entries_is_superfluous_once_the_states_have_them_or_their_home_is_forgotten():
    usage = Usage(Contents())
    usage.grew(LOG, 500)
    usage.put_entry(EntryKey("a", 7, 1), 1, LOG)
    usage.put_entry(EntryKey("a", 8, 1), 2, LOG)
    usage.put_entry(EntryKey("b", 3, 1), 3, LOG)
    assert usage.superfluous(set(), {"a": 8}, {}) == []
    assert usage.superfluous(set(), {"a": 7, "b": 3}, {}) == []
    assert usage.superfluous(set(), {"a": 8, "b": 3}, {}) == [LOG]
    assert usage.superfluous(set(), {"a": 8}, {"b": 2}) == []
    assert usage.superfluous(set(), {"a": 8}, {"b": 3}) == [LOG]


def test_the_files_used_least_are_compacted_first_and_only_as_many_as_needed():
    usage = usage_of(**{OLD: (1000, {1: 100, 2: 100}), NEW: (1000, {3: 50}), LAST: (500, {4: 400})})
    assert usage.state_files_bytes == 2500
    assert usage.live_bytes == 650
    assert usage.victims({LAST}, 0) == [StateName("a", shard) for shard in (3, 1, 2)]
    assert usage.victims({LAST}, 1000) == [StateName("a", 3)]
    assert usage.victims({LAST}, 1200) == []
    assert usage.victims({NEW, LAST}, 1000) == [StateName("a", 1), StateName("a", 2)]


def test_a_file_that_is_used_by_more_than_half_is_no_victim():
    usage = usage_of(**{OLD: (1000, {1: 501}), NEW: (5000, {})})
    assert usage.victims({NEW}, 0) == []


def test_forgotten_states_are_not_in_use():
    usage = usage_of(**{OLD: (300, {1: 100, 2: 100})})
    usage.put(StateKey("b", 1, 1, 1, 1), location(OLD))
    usage.forget("a")
    assert usage.states.keys() == {StateName("b", 1)}
    assert usage.live_bytes == 100
