"""Pure: parameters to shards, shards to buckets, buckets to servers.

A *shard* is a range of whole rows of one parameter tensor (rows are the first axis, the layer's
outputs), at most ``shard_bytes`` long; a row that is longer than that is cut in equal pieces, so
every shard is one contiguous range of the flattened tensor. The table of shards is a function of
the model alone, so every party computes the same one and messages name a shard by its number.

A *bucket* is a set of shards that move together and share one primary. Shards are spread over the
buckets, and buckets over the servers, largest first onto the least loaded, by bytes (AD-40, AD-41).
Ties go to the lower number, so the result does not depend on any hash.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import prod
from operator import attrgetter
from types import MappingProxyType

from adam_async.model.layer import ParameterSpec
from adam_async.run.ids import BucketId, NodeId, ShardId

SHARD_BYTES = 1 << 20
"""Default maximum size of a shard, in bytes. The paper cuts parameters into shards of 1 MB (AD-40)."""

NUM_BUCKETS = 64
"""Number of buckets of a cluster, fixed at its creation."""

NO_CUTS: Mapping[str, Sequence[int]] = MappingProxyType({})
"""Row cuts of a model that is not cut over several workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """One contiguous range of a flattened parameter tensor."""

    id: ShardId
    tensor: str
    start: int
    """First element of the range in the flattened tensor."""
    stop: int
    """One past the last element."""
    row_size: int
    """Number of elements of a row of the tensor; 1 for a vector."""
    bucket: BucketId

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def whole_rows(self) -> bool:
        """Whether the range holds whole rows, which a factor push needs."""
        return self.start % self.row_size == 0 and self.stop % self.row_size == 0

    @property
    def rows(self) -> slice:
        """Rows of the range, for a shard of whole rows."""
        return slice(self.start // self.row_size, self.stop // self.row_size)


@dataclass(frozen=True, slots=True)
class ShardTable:
    """Every shard of a model, in the order of its tensors and their elements."""

    shards: tuple[ShardSpec, ...]
    by_tensor: dict[str, tuple[ShardSpec, ...]]
    num_buckets: int
    item_bytes: int


def cut_tensor(shape: Sequence[int], limit: int, rows: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Cut a tensor of `shape` into ranges of at most `limit` elements, of whole rows if rows fit.

    Args:
        rows: Rows before which a range also ends.
    """
    if rows:
        size = prod(shape[1:])
        return [
            (first * size + start, first * size + stop)
            for first, last in pairwise((0, *rows, shape[0]))
            for start, stop in cut_tensor((last - first, *shape[1:]), limit)
        ]
    size = prod(shape)
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


def shard_table(
    parameters: Iterable[ParameterSpec],
    *,
    shard_bytes: int = SHARD_BYTES,
    num_buckets: int = NUM_BUCKETS,
    item_bytes: int = 4,
    cuts: Mapping[str, Sequence[int]] = NO_CUTS,
) -> ShardTable:
    """Cut every parameter into shards and give each shard its bucket.

    Args:
        shard_bytes: Maximum size of a shard, in bytes; at least one element.
        item_bytes: Size of one value in bytes (4 for float32, 8 for the float64 of proofs).
        cuts: Rows of each tensor at which a shard must begin, so that it belongs to one worker of every
            replica; see `PartitionPlan.row_cuts`.
    """
    limit = shard_bytes // item_bytes
    if limit < 1:
        raise ValueError(f"shard_bytes must hold at least one value of {item_bytes} bytes, not {shard_bytes}")
    ranges: list[tuple[str, int, int, int]] = []
    for parameter in parameters:
        row = prod(parameter.shape[1:])
        pieces = cut_tensor(parameter.shape, limit, cuts.get(parameter.name, ()))
        ranges += [(parameter.name, start, stop, row) for start, stop in pieces]
    buckets = spread([stop - start for _, start, stop, _ in ranges], num_buckets)
    shards = tuple(
        ShardSpec(
            id=ShardId(index),
            tensor=name,
            start=start,
            stop=stop,
            row_size=row,
            bucket=BucketId(buckets[index]),
        )
        for index, (name, start, stop, row) in enumerate(ranges)
    )
    by_tensor = {name: tuple(group) for name, group in groupby(shards, key=attrgetter("tensor"))}
    return ShardTable(shards=shards, by_tensor=by_tensor, num_buckets=num_buckets, item_bytes=item_bytes)


def part_table(table: ShardTable, parameters: Iterable[ParameterSpec]) -> ShardTable:
    """Return the shards of one part, from a table cut at the borders of parts; ranges are of its own rows."""
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
    return ShardTable(
        shards=tuple(shards), by_tensor=by_tensor, num_buckets=table.num_buckets, item_bytes=table.item_bytes
    )


def spread(weights: Sequence[int], bins: int) -> list[int]:
    """Return a bin for each item of these weights, largest first onto the least loaded one."""
    loads = [0] * bins
    placed = [0] * len(weights)
    for item in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        target = min(range(bins), key=lambda b: (loads[b], b))
        loads[target] += weights[item]
        placed[item] = target
    return placed


def assign_buckets(table: ShardTable, servers: Sequence[NodeId]) -> list[NodeId]:
    """Return the primary of each bucket, evenly by bytes. The order of the live servers decides ties."""
    if not servers:
        raise ValueError("buckets need at least one server to be assigned to")
    loads = [0] * table.num_buckets
    for shard in table.shards:
        loads[shard.bucket] += shard.size * table.item_bytes
    return [servers[index] for index in spread(loads, len(servers))]


def holders(table: ShardTable, buckets: Sequence[str]) -> tuple[str, ...]:
    """Return the servers with a shard of the table, in the order of their names; a bucket may be empty."""
    return tuple(sorted({buckets[shard.bucket] for shard in table.shards}))
