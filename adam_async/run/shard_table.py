"""Pure: arrays to shards, shards to buckets, buckets to servers.

A *shard* is a range of whole rows in one array, at most ``shard_bytes`` long unless the array must not be
split. Rows are the first axis; in a layer's weights these are the outputs. The table cuts a longer row into
pieces of about equal size, so every shard is one contiguous range of the flattened array. The shard table
depends only on the arrays and ``shard_bytes``. So every party computes the same table, and messages name a
shard by its number.

A *bucket* is a set of shards that have one primary and move together. `spread` puts shards into buckets, and
buckets onto servers, by bytes: the largest first, onto the least loaded (AD-40, AD-41). Ties go to the lower
number, so the result does not depend on any hash.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from itertools import groupby, pairwise
from math import prod
from operator import attrgetter
from typing import Protocol

from adam_async.run.config import SHARD_BYTES
from adam_async.run.ids import BucketId, NodeId, ShardId
from adam_async.run.store_record import DTYPES, NUM_BUCKETS, ArrayRecord, VectorRecord

MOST_SHARD_BYTES = (64 << 20) - (64 << 10)
"""Maximum size of a shard in bytes: one message has its values, and tables with them."""


class PartOfArray(Protocol):
    """Rows of an array, from `first_row` on, such as the part of a layer's weights that one worker has."""

    @property
    def name(self) -> str:
        """Name of the array."""
        ...

    @property
    def first_row(self) -> int:
        """Number of the part's first row in the array."""
        ...

    @property
    def size(self) -> int:
        """Number of values in the part."""
        ...

    @property
    def row_size(self) -> int:
        """Number of values in one row."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """One contiguous range of a flattened array."""

    id: ShardId
    tensor: str
    start: int
    """Index of the range's first element in the flattened tensor."""
    stop: int
    """Index one past the last element of the range."""
    row_size: int
    """Number of elements in a row of the tensor; 1 for a vector."""
    bucket: BucketId
    dtype: str = "float32"
    rule: int = 0
    """Index of the array's rule in the store's rules."""
    frozen: bool = False
    """Whether no push names the shard; see `ArrayRecord.frozen`."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        """Number of bytes of the range's values."""
        return self.size * DTYPES[self.dtype]

    @property
    def whole_rows(self) -> bool:
        """Whether the range has whole rows, which a factor push needs."""
        return self.start % self.row_size == 0 and self.stop % self.row_size == 0

    @property
    def rows(self) -> slice:
        """Rows of the range, for a shard of whole rows."""
        return slice(self.start // self.row_size, self.stop // self.row_size)


@dataclass(frozen=True, slots=True)
class ShardTable:
    """Every shard of a store, ordered by array and element."""

    shards: tuple[ShardSpec, ...]
    by_tensor: dict[str, tuple[ShardSpec, ...]]

    @property
    def item_bytes(self) -> int:
        """Bytes of one value, in a table of one type such as a model's."""
        return DTYPES[self.shards[0].dtype]


def cut_tensor(shape: Sequence[int], limit: int, rows: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Cut a tensor of `shape` into ranges of at most `limit` elements: whole rows if rows fit.

    Args:
        rows: Row numbers before which a range also ends.
    """
    if rows:
        size = prod(shape[1:])
        return [
            (first * size + start, first * size + stop)
            for first, last in pairwise((0, *rows, shape[0]))
            for start, stop in cut_tensor((last - first, *shape[1:]), limit)
        ]
    size = prod(shape)
    if not size:
        return []
    row = size // shape[0] if shape else size
    if row <= limit:
        step = limit // row * row
        return [(start, min(start + step, size)) for start in range(0, size, step)]
    pieces = -(-row // limit)
    step = -(-row // pieces)
    return [
        (begin + start, begin + min(start + step, row))
        for begin in range(0, size, row)
        for start in range(0, row, step)
    ]


def _limit(array: ArrayRecord, shard_bytes: int) -> int:
    """Return the maximum number of values in a shard of an array."""
    limit = shard_bytes // array.item_bytes
    if limit < 1:
        raise ValueError(
            f"shard_bytes must hold at least one value of {array.item_bytes} bytes, not {shard_bytes}"
        )
    return limit if array.split else max(array.size, 1)


def shard_table(arrays: Iterable[ArrayRecord], *, shard_bytes: int = SHARD_BYTES) -> ShardTable:
    """Cut every array into shards and give each shard its bucket. An empty array has no shard.

    Args:
        arrays: Arrays of a store, in the store's order.
        shard_bytes: Maximum size of a shard in bytes; a shard has at least one value.

    Raises:
        ValueError: A shard would have no room for one value.
    """
    ranges = [
        (array, start, stop)
        for array in arrays
        for start, stop in cut_tensor(array.shape, _limit(array, shard_bytes), array.cuts)
    ]
    buckets = spread([(stop - start) * array.item_bytes for array, start, stop in ranges], NUM_BUCKETS)
    shards = tuple(
        ShardSpec(
            id=ShardId(index),
            tensor=array.name,
            start=start,
            stop=stop,
            row_size=array.row_size,
            bucket=BucketId(buckets[index]),
            dtype=array.dtype,
            rule=array.rule,
            frozen=array.frozen,
        )
        for index, (array, start, stop) in enumerate(ranges)
    )
    by_tensor = {name: tuple(group) for name, group in groupby(shards, key=attrgetter("tensor"))}
    return ShardTable(shards=shards, by_tensor=by_tensor)


def shard_sizes(arrays: Iterable[ArrayRecord], shard_bytes: int) -> Counter[int]:
    """Return the number of shards of each size in bytes, in time that does not grow with their number.

    Args:
        arrays: Arrays that passed `check_arrays`.
        shard_bytes: Maximum size of a shard, in bytes.

    Raises:
        ValueError: A shard could not hold one value.
    """
    found: Counter[int] = Counter()
    for array in arrays:
        limit, rows = _limit(array, shard_bytes), array.shape[0] if array.shape else 1
        row, item = array.size // max(rows, 1), array.item_bytes
        if not array.size:
            continue
        for first, last in pairwise((0, *array.cuts, rows)):
            if row <= limit:  # shards of whole rows, then the rest
                step, times, length = limit // row * row, 1, (last - first) * row
            else:  # equal pieces of each row
                step, times, length = -(-row // -(-row // limit)), last - first, row
            found[step * item] += length // step * times
            found[length % step * item] += times
    return Counter({size: count for size, count in found.items() if size and count})


def fault_of_shards(arrays: Iterable[ArrayRecord], shard_bytes: int) -> str:
    """Return the first array with a shard too large for a message, and the remedy; empty without one."""
    for array in arrays:
        largest = max(shard_sizes([array], shard_bytes)) if array.nbytes > MOST_SHARD_BYTES else 0
        if largest > MOST_SHARD_BYTES:
            remedy = (
                f"set shard_bytes to at most {MOST_SHARD_BYTES}" if array.split else "leave split=False out"
            )
            return (
                f"array {array.name[:80]!r} has a shard of {largest} bytes, and a message holds "
                f"{MOST_SHARD_BYTES}: {remedy}"
            )
    return ""


def bytes_of_buckets(sizes: Mapping[int, int]) -> tuple[int, ...]:
    """Return the bytes of the values in each bucket of a store's table.

    Args:
        sizes: Number of shards of each size in bytes, as `shard_sizes` returns it.
    """
    return _bytes_of_runs({size: [(count, 1)] for size, count in sizes.items()})


def _bytes_of_runs(runs: Mapping[int, Iterable[tuple[int, int]]]) -> tuple[int, ...]:
    """Return the bytes of each bucket as `spread` fills them, from runs of equally large shards.

    Args:
        runs: Number of shards in each run, and the number of arrays whose bytes count.
    """
    loads, total = [(0, bucket) for bucket in range(NUM_BUCKETS)], [0] * NUM_BUCKETS
    for size in sorted(runs, reverse=True):
        for count, arrays in runs[size]:
            left = count
            while left:
                steps = left
                if left >= NUM_BUCKETS:
                    most = max(loads)[0]
                    steps = sum([load + size <= most for load, _ in loads])
                if not steps:  # each round gives every bucket one shard, in the same order
                    rounds, left = divmod(left, NUM_BUCKETS)
                    loads = [(load + rounds * size, bucket) for load, bucket in loads]
                    total = [each + rounds * size * arrays for each in total]
                for _ in range(steps):
                    load, bucket = loads[0]
                    heapreplace(loads, (load + size, bucket))
                    total[bucket] += size * arrays
                left -= steps
    return tuple(total)


def bytes_of_vectors(
    vectors: Sequence[VectorRecord], arrays: Sequence[ArrayRecord], shard_bytes: int
) -> tuple[int, ...]:
    """Return the bytes of a store's vectors in each bucket; the time does not grow with the shards."""
    if not vectors:
        return ()
    named = Counter([name for vector in vectors for name in vector.arrays])
    everywhere = sum([not vector.arrays for vector in vectors])
    runs: dict[int, list[tuple[int, int]]] = {}
    for array in arrays:
        of_each = named[array.name] + everywhere * (not array.frozen)
        for size, count in shard_sizes([array], shard_bytes).items():
            runs.setdefault(size, []).append((count, of_each))
    return _bytes_of_runs(runs)


def part_table(table: ShardTable, parameters: Iterable[PartOfArray]) -> ShardTable:
    """From a table cut at part borders, return the shards of one part, at their positions in the part."""
    shards: list[ShardSpec] = []
    for parameter in parameters:
        first = parameter.first_row * parameter.row_size
        last = first + parameter.size
        shards += [
            replace(spec, start=spec.start - first, stop=spec.stop - first)
            for spec in table.by_tensor[parameter.name]
            if first <= spec.start and spec.stop <= last
        ]
    by_tensor = {name: tuple(group) for name, group in groupby(shards, key=attrgetter("tensor"))}
    return ShardTable(shards=tuple(shards), by_tensor=by_tensor)


def spread(weights: Sequence[int], bins: int) -> list[int]:
    """Return a bin for each item of these weights: by falling weight, each into the least loaded bin."""
    loads = [(0, target) for target in range(bins)]
    placed = [0] * len(weights)
    for item in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        load, target = loads[0]
        heapreplace(loads, (load + weights[item], target))
        placed[item] = target
    return placed


def assign_buckets(table: ShardTable, servers: Sequence[NodeId]) -> list[NodeId]:
    """Return the home of each bucket, evenly by bytes. The order of the live servers decides ties."""
    if not servers:
        raise ValueError("buckets need at least one server to be assigned to")
    loads = [0] * NUM_BUCKETS
    for shard in table.shards:
        loads[shard.bucket] += shard.nbytes
    return [servers[index] for index in spread(loads, len(servers))]


def holders(table: ShardTable, buckets: Sequence[str]) -> tuple[str, ...]:
    """Return the servers that have a shard of the table, sorted by name; a bucket may be empty."""
    return tuple(sorted({buckets[shard.bucket] for shard in table.shards}))
