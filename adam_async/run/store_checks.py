"""Pure: bounds on a store's record: on a new one, and on a placed one that a disk or peer names."""

from collections.abc import Sequence

from adam_async.errors import ConfigError
from adam_async.model.rules import ImportedRule
from adam_async.option_types import fault_of
from adam_async.run.shard_table import fault_of_shards, shard_sizes
from adam_async.run.store_record import NUM_BUCKETS, PARAMETERS, ArrayRecord, StoreRecord, check_arrays

MAX_SHARDS = 100_000
"""Maximum number of shards in a store."""

MOST_VECTOR_NAME = 64
"""Maximum length of a vector's name, in bytes of UTF-8."""

MOST_VECTOR_TEXT = 16 << 10
"""Maximum total length of the array names in a store's vectors, in bytes."""


def check_store(store: StoreRecord) -> str:
    """Return what is wrong with a new store's record, apart from its arrays; empty if nothing is."""
    if fault := fault_of(store):
        return fault
    least_state = max(len(rule.state_names) for rule in store.rules)
    if store.state_arrays < least_state:
        return f"state_arrays is {store.state_arrays}, and its rules keep {least_state}"
    if store.summed_weight and store.slack is None:
        return f"summed_weight is {store.summed_weight} without clocks: sums need a slack"
    if store.in_place and not store.program:
        return "in_place is for the store of a program"
    if store.in_place and store.durable:
        return "in_place changes values without pushes, and durable is about pushes: set one of them only"
    if store.takes_cuts and store.durable:
        return "durable keeps each push, and disks keep a run in bsp at one clock: set one of them only"
    if store.in_place and store.copies > 1:
        return f"in_place allows one copy, and copies is {store.copies}: set one of them only"
    if store.in_place and any(isinstance(rule, ImportedRule) for rule in store.rules):
        return (
            "in_place applies rules without checks of their results, so no rule of the user: set it to False"
        )
    if store.min_in_sync > store.copies:
        return f"min_in_sync is {store.min_in_sync}, and copies {store.copies}"
    return ""


def fault_of_vectors(store: StoreRecord, arrays: Sequence[ArrayRecord]) -> str:
    """Return what is wrong with a store's vectors; empty if nothing is."""
    if not store.vectors:
        return ""
    if store.in_place:
        return "workers in place change values without the servers, so its store has no vectors"
    known, names = {each.name: each for each in arrays}, {PARAMETERS, *(each.name for each in arrays)}
    numbers: set[int] = set()
    for vector in store.vectors:
        shown = repr(vector.name[:80])
        size = len(vector.name.encode(errors="replace"))
        # A slash would give two vectors the same name in a saved file, where names end with the array's name.
        if not vector.name.isprintable() or "/" in vector.name or not 1 <= size <= MOST_VECTOR_NAME:
            return f"the name of a vector has 1 to {MOST_VECTOR_NAME} printable bytes, no slash, not {shown}"
        if vector.name in names:
            return f"the store has a vector or an array {shown}: choose another name"
        names.add(vector.name)
        for name in vector.arrays:
            if name not in known or known[name].frozen:
                return f"vector {shown}: the store has no array {name[:80]!r} that is pushed to"
        if len(set(vector.arrays)) < len(vector.arrays):
            return f"vector {shown} names an array twice"
        if not 0 < vector.number <= store.vectors_made or vector.number in numbers:
            return f"vector {shown} has number {vector.number}, and the last number is {store.vectors_made}"
        numbers.add(vector.number)
    texts = sum([len(name.encode()) for vector in store.vectors for name in vector.arrays])
    if texts > MOST_VECTOR_TEXT:
        return f"the vectors name arrays in {texts} bytes, {MOST_VECTOR_TEXT} are the most: leave out `like`"
    return ""


def check_placed_store(store: StoreRecord, arrays: Sequence[ArrayRecord]) -> None:
    """Check the record and the arrays of a placed store that a disk or a peer names.

    Raises:
        ConfigError: A field is out of bounds, or the arrays and the buckets contradict the record.
    """
    if problem := check_store(store):
        raise ConfigError(problem)
    check_arrays(arrays, rules=len(store.rules))
    shards = shard_sizes(arrays, store.shard_bytes).total()
    if shards > MAX_SHARDS:
        raise ConfigError(f"its arrays have {shards} shards; {MAX_SHARDS} are the most")
    if problem := fault_of_shards(arrays, store.shard_bytes):
        raise ConfigError(problem)
    if problem := fault_of_vectors(store, arrays):
        raise ConfigError(problem)
    if len(store.buckets) != NUM_BUCKETS:
        raise ConfigError(f"it names the servers of {len(store.buckets)} buckets instead of {NUM_BUCKETS}")
