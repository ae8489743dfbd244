"""Pure: the bounds of a store's record: of a new one, and of a placed one that a disk or a peer names."""

from collections.abc import Sequence

from adam_async.errors import ConfigError
from adam_async.model.rules import ImportedRule
from adam_async.option_types import fault_of
from adam_async.run.shard_table import fault_of_shards, shard_sizes
from adam_async.run.store_record import (
    NUM_BUCKETS,
    ArrayRecord,
    StoreRecord,
    check_arrays,
)

MAX_SHARDS = 100_000
"""Maximum number of shards of a store."""


def check_store(store: StoreRecord) -> str:
    """Return the fault of the record of a new store without its arrays; empty if it has none."""
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
    if store.in_place and store.copies > 1:
        return f"in_place allows one copy, and copies is {store.copies}: set one of them only"
    if store.in_place and any(isinstance(rule, ImportedRule) for rule in store.rules):
        return (
            "in_place applies rules without checks of their results, so no rule of the user: set it to False"
        )
    if store.min_in_sync > store.copies:
        return f"min_in_sync is {store.min_in_sync}, and copies {store.copies}"
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
    if len(store.buckets) != NUM_BUCKETS:
        raise ConfigError(f"it names the servers of {len(store.buckets)} buckets instead of {NUM_BUCKETS}")
