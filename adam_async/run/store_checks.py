"""Pure: the bounds of a store's record: of a new one, and of a placed one that a disk or a peer names."""

from collections.abc import Sequence

from adam_async.errors import ConfigError
from adam_async.run.bundle_record import MOST_COPIES
from adam_async.run.shard_table import NUM_BUCKETS, fault_of_shards, shard_sizes
from adam_async.run.store_record import (
    MOST_ARRAYS,
    STORE_PIECES,
    ArrayRecord,
    StoreRecord,
    check_arrays,
)

MAX_SHARDS = 100_000
"""Maximum number of shards of a store."""

MOST_STORE_ID = 160
"""Maximum length of a store's id and of its creator's, in bytes of UTF-8, as in messages."""

MOST_RULES = 256
"""Maximum number of rules of a store."""

KERNELS = ("auto", "numpy", "numba")
"""Kernels of the rules that a store may name."""


def check_store(store: StoreRecord) -> str:
    """Return the fault of the record of a new store without its arrays; empty if it has none."""
    for field in ("id", "creator"):
        text = getattr(store, field)
        if not text.isprintable():
            return f"its {field} {text[:80]!r} has an unprintable character"
        length = len(text.encode())
        if length > MOST_STORE_ID or (field == "id" and not length):
            return f"its {field} has {length} bytes; 1 to {MOST_STORE_ID} are allowed"
    if not 1 <= len(store.rules) <= MOST_RULES:
        return f"it has {len(store.rules)} rules; 1 to {MOST_RULES} are allowed"
    least_state = max(len(rule.state_names) for rule in store.rules)
    if store.state_arrays < least_state:
        return f"state_arrays is {store.state_arrays}, and its rules keep {least_state}"
    if store.kernels not in KERNELS:
        return f"kernels is {store.kernels[:80]!r}; known: {', '.join(KERNELS)}"
    if store.summed_weight and store.slack is None:
        return f"summed_weight is {store.summed_weight} without clocks: sums need a slack"
    if store.in_place and not store.program:
        return "in_place is for the store of a program"
    if store.in_place and store.durable:
        return "in_place changes values without pushes, and durable is about pushes: set one of them only"
    if store.in_place and store.copies > 1:
        return f"in_place allows one copy, and copies is {store.copies}: set one of them only"
    bounds = (
        ("arrays", 1, MOST_ARRAYS),
        ("pieces", 1, STORE_PIECES),
        ("nbytes", 0, 1 << 53),
        ("state_arrays", 0, 8),
        ("shard_bytes", 8, 1 << 40),
        ("servers", 0, NUM_BUCKETS),
        ("copies", 1, MOST_COPIES),
        ("min_in_sync", 0, min(store.copies, MOST_COPIES)),
        ("replicas", 1, 1 << 20),
        ("most_weight", 1, (1 << 32) - 1),
        ("summed_weight", 0, (1 << 32) - 1),
        ("first_epoch", 0, (1 << 32) - 1),
        ("first_clock", 0, 1 << 48),
    )
    for name, least, most in bounds:
        value = getattr(store, name)
        if not least <= value <= most:
            return f"{name} is {value}; {least} to {most} are allowed"
    if store.slack is not None and not 0 <= store.slack <= 1 << 20:
        return f"slack is {store.slack}; 0 to {1 << 20} are allowed"
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
