"""All arrays of a store, with its rules' state, joined from shards and cut into shards."""

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from adam_async.model.rules import Rule
from adam_async.parameter_server.shard import Shard
from adam_async.parameter_server.shard_pieces import pieces_of
from adam_async.run.ids import ShardId
from adam_async.run.shard_table import ShardSpec, ShardTable
from adam_async.run.store_record import ArrayRecord, VectorRecord, is_vector_key


class ShardSource(Protocol):
    """The shards of a store, wherever they are."""

    @property
    def table(self) -> ShardTable: ...

    def shards_of(self, specs: Sequence[ShardSpec]) -> AsyncGenerator[Sequence[Shard], None]:
        """Yield some shards, one piece's at a time; close the generator (`contextlib.aclosing`).

        Raises:
            CheckpointError: A shard is missing or damaged.
        """
        ...


VECTOR = "vector/"
"""Begin of the names of vectors in a file, such as ``vector/mean/fc1.weight``."""


def vector_name(vector: VectorRecord, array: str) -> str:
    """Return the name of a vector's values for one array."""
    return f"{VECTOR}{vector.name}/{array}"


class WholeTensors:
    """Whole tensors, and each shard's range in them.

    Args:
        table: Shards of the arrays.
        rules: The rules of the store; none for values alone.
        values: Contiguous values by array; by default new arrays, which are not filled.
        vectors: Vectors of the store to have beside the values.
    """

    def __init__(
        self,
        arrays: Sequence[ArrayRecord],
        table: ShardTable,
        rules: Sequence[Rule] = (),
        values: Mapping[str, NDArray[Any]] | None = None,
        vectors: Sequence[VectorRecord] = (),
    ) -> None:
        self.table = table
        self.arrays = tuple(arrays)
        self.rules = rules
        self.weights: dict[str, NDArray[Any]] = {
            each.name: np.empty(each.shape, each.dtype) if values is None else values[each.name]
            for each in arrays
        }
        self.state: dict[str, NDArray[Any]] = {}
        """Arrays of the rules: elementwise ones in their tensor's shape, counts with one entry per shard of
        the tensor. Then vectors, see `vector_name`."""
        self.vectors = vectors
        self._keys: dict[str, dict[str, str]] = {}
        """Names of the state arrays of each tensor's shards, with their names in `state`."""
        for each in arrays if rules else ():
            rule = rules[each.rule]
            names = (*rule.state_names, *rule.scalar_names)
            self._keys[each.name] = {name: f"{name}/{each.name}" for name in names}
            made = rule.new_state((1,), np.dtype(each.dtype))
            for name in rule.state_names:
                self.state[f"{name}/{each.name}"] = np.empty(each.shape, made[name].dtype)
            for name in rule.scalar_names:
                shards = len(table.by_tensor.get(each.name, ()))
                self.state[f"{name}/{each.name}"] = np.empty(shards, made[name].dtype)
        for each in arrays if vectors else ():
            for vector in vectors:
                if vector.covers(each.name, frozen=each.frozen):
                    name = self._keys.setdefault(each.name, {})[vector.key] = vector_name(vector, each.name)
                    self.state[name] = np.zeros(each.shape, each.dtype)
        self._place = {
            shard.id: place for shards in table.by_tensor.values() for place, shard in enumerate(shards)
        }

    def values_of(self, shard: ShardSpec) -> NDArray[Any]:
        """Return the values of a shard, a flat view."""
        values: NDArray[Any] = self.weights[shard.tensor].reshape(-1)[shard.start : shard.stop]
        return values

    def take(self, shard: Shard) -> None:
        """Copy a shard into the tensors, and its rule's arrays, if there is room."""
        spec = shard.spec
        self.values_of(spec)[:] = shard.values
        for name, part in self._state_of(spec).items():
            if name in shard.rule_state or not is_vector_key(name):  # a vector may be younger than a shard
                part[:] = shard.rule_state[name]

    def _state_of(self, spec: ShardSpec) -> dict[str, NDArray[Any]]:
        """Return the arrays of a shard's rule by name, as flat views."""
        parts = {}
        for name, key in self._keys.get(spec.tensor, {}).items():
            whole = self.state[key]
            if whole.shape == self.weights[spec.tensor].shape:
                parts[name] = whole.reshape(-1)[spec.start : spec.stop]
            else:
                parts[name] = whole[self._place[spec.id] :][:1]
        return parts

    async def shards_of(self, specs: Sequence[ShardSpec]) -> AsyncGenerator[Sequence[Shard], None]:
        """Yield some shards without versions, clocks and groups; see `ShardSource`."""
        for piece in pieces_of(specs, in_place=False)[1:]:
            yield [
                Shard(spec=spec, values=self.values_of(spec), rule_state=self._state_of(spec))
                for spec in piece
            ]
            await asyncio.sleep(0)  # the tensors may be large, and links need the loop


class RecutShards:
    """A store's shards, cut from another store's shards with the same arrays; see `ShardSource`.

    Only one piece's shards, and those that they are cut from, are in memory at a time.

    Args:
        source: The shards of the other store.
        table: The shards to cut.
    """

    def __init__(self, source: ShardSource, table: ShardTable) -> None:
        self.table = table
        self._source = source

    async def shards_of(self, specs: Sequence[ShardSpec]) -> AsyncGenerator[Sequence[Shard], None]:
        """Yield some shards without versions, clocks and groups; see `ShardSource`."""
        held: dict[ShardId, Shard] = {}
        for piece in pieces_of(specs, in_place=False)[1:]:
            origins = [self._origins(spec) for spec in piece]
            wanted = {origin.id: origin for each in origins for origin in each}
            # A shard that is larger than a piece is read once, although several pieces are cut from it.
            held = {id: shard for id, shard in held.items() if id in wanted}
            new = [origin for id, origin in wanted.items() if id not in held]
            async with aclosing(self._source.shards_of(new)) as parts:
                async for shards in parts:
                    held |= {shard.spec.id: shard for shard in shards}
            yield [
                _cut(spec, [held[origin.id] for origin in each])
                for spec, each in zip(piece, origins, strict=True)
            ]

    def _origins(self, spec: ShardSpec) -> Sequence[ShardSpec]:
        """Return the shards of the other store that have the values of a shard."""
        there = self._source.table.by_tensor[spec.tensor]
        first = bisect_right(there, spec.start, key=attrgetter("start")) - 1
        return there[first : bisect_left(there, spec.stop, key=attrgetter("start"))]


def _cut(spec: ShardSpec, origins: Sequence[Shard]) -> Shard:
    """Return a shard from the shards that have its values, in the order of their values."""

    def joined(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        parts = [
            array[max(spec.start - each.spec.start, 0) : spec.stop - each.spec.start]
            for each, array in zip(origins, arrays, strict=True)
        ]
        return np.concatenate(parts)

    state = {}
    # A vector may be younger than the state of some shards on a disk.
    for name in [each for each in origins[0].rule_state if all(each in one.rule_state for one in origins)]:
        arrays = [each.rule_state[name] for each in origins]
        # Pushes may have reached some shards only. From step 13 on a lower count makes Adam's steps shorter.
        is_count = arrays[0].dtype.kind == "i"
        state[name] = np.min(arrays, axis=0) if is_count else joined(arrays)
    return Shard(spec=spec, values=joined([each.values for each in origins]), rule_state=state)
